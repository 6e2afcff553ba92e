// maximum_or_nan(a, b): the larger of two; NaN if either is NaN.  A separate header, for the few
// kernels that need it.
#pragma once

#if defined(__CUDA_ARCH__)
DEVICE float maximum_or_nan(float a, float b) {
    float y;
    asm("max.ftz.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
#else
DEVICE float maximum_or_nan(float a, float b) { return a >= b || a != a ? a : b; }
#endif
