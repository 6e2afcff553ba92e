// The dtype of an array that may have any of several; a kernel's uniform branch picks the C++ type.
enum DType { kHalf, kBf16, kFloat, kE4m3, kE5m2, kInt8, kInt32 };

DEVICE int dtype_size(int dtype) {
    if (dtype == kFloat || dtype == kInt32) return 4;
    return dtype == kHalf || dtype == kBf16 ? 2 : 1;
}
// The address of element i.
DEVICE const void* element_address(const void* p, int64_t i, int dtype) {
    return static_cast<const char*>(p) + i * dtype_size(dtype);
}
