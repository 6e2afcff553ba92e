// Runtime dtype of an array; a uniform branch of the kernel picks the C++ type.
#pragma once
enum DType { kHalf, kBf16, kFloat, kE4m3, kE5m2, kInt8, kInt32, kE2m1 };

template <class T> DEVICE constexpr int dtype_of();
template <> DEVICE constexpr int dtype_of<half>() { return kHalf; }
template <> DEVICE constexpr int dtype_of<bf16>() { return kBf16; }
template <> DEVICE constexpr int dtype_of<float>() { return kFloat; }

// Element `index` of an array of dtype kHalf, kBf16 or kFloat.
DEVICE float load_element(const void* array, int64_t index, int dtype) {
    if (dtype == kFloat) return static_cast<const float*>(array)[index];
    if (dtype == kHalf) return to_float(static_cast<const half*>(array)[index]);
    return to_float(static_cast<const bf16*>(array)[index]);
}
DEVICE int dtype_size(int dtype) {
    if (dtype == kFloat || dtype == kInt32) return 4;
    return dtype == kHalf || dtype == kBf16 ? 2 : 1;
}
// Address of element i; for kE2m1, of byte i.
DEVICE const void* element_address(const void* p, int64_t i, int dtype) {
    return static_cast<const char*>(p) + i * dtype_size(dtype);
}
