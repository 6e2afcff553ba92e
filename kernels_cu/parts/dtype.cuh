// The dtype of an array that may have any of several; a kernel's uniform branch picks the C++ type.
enum DType { kHalf, kBf16, kFloat, kE4m3, kE5m2, kInt8 };
