// What hiprtc declares before every program, by name: its built-in header is the preprocessed
// hip_runtime.h and more (ROCm/clr, hipamd/src/hiprtc).  These are the unreserved names of the
// global namespace, as that header of ROCm 6.3 has them.  Bodies and overloads do not matter here.
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __global__ __attribute__((global))
#define __constant__ __attribute__((constant))
#define __shared__ __attribute__((shared))
#define __align__(x) __attribute__((aligned(x)))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(n) __attribute__((amdgpu_flat_work_group_size(1, n)))
#define select_impl_(_1, _2, impl_, ...) impl_
#define MASK1 0x00ff00ff
#define MASK2 0xff00ff00
#define MAYBE_UNDEF
#define HW_ID 4
#define ADDRESS_SPACE_CONSTANT __attribute__((address_space(4)))
#define hipThreadIdx_x threadIdx.x

typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef long clock_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned long long ullong;

namespace __hip_internal {
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
}  // namespace __hip_internal
#if HIP_VERSION_MAJOR < 7  // later ones keep them to themselves
using __hip_internal::int32_t;
using __hip_internal::int64_t;
using __hip_internal::uint32_t;
using __hip_internal::uint64_t;
namespace std {
using ::int32_t;
using ::int64_t;
using ::uint32_t;
using ::uint64_t;
}  // namespace std
#endif

struct __half { _Float16 data; };
struct __half2 { __half x, y; };
using half = __half;
using half2 = __half2;
struct hip_bfloat16 { unsigned short data; };
struct dim3 { unsigned x, y, z; };
struct lane_mask { unsigned long long value; };
template <class T> struct Cond_t {};
template <class T> using Enable_if_t = T;
template <class T> struct texture {};
struct textureReference {};
struct surfaceReference {};
namespace hip_impl {}
namespace cooperative_groups {}

struct __hip_index { unsigned x, y, z; };
extern const __device__ __attribute__((weak)) __hip_index threadIdx, blockIdx, blockDim, gridDim;
static constexpr int warpSize = 64;

extern "C" {
__device__ void* malloc(size_t);
__device__ void free(void*);
__device__ void* memcpy(void*, const void*, size_t);
__device__ void* memset(void*, int, size_t);
__device__ int printf(const char*, ...);
__device__ void abort();
}

#define VECTOR_TYPES \
    X(char) X(uchar) X(short) X(ushort) X(int) X(uint) X(long) X(ulong) X(longlong) \
    X(ulonglong) X(float) X(double)
#define X(name)                                                                       \
    struct name##1 { float x; };                                                      \
    struct name##2 { float x, y; };                                                   \
    struct name##3 { float x, y, z; };                                                \
    struct name##4 { float x, y, z, w; };                                             \
    __device__ inline name##1 make_##name##1(float x) { return {x}; }                 \
    __device__ inline name##2 make_##name##2(float x, float y) { return {x, y}; }
VECTOR_TYPES
#undef X
#undef VECTOR_TYPES

#define FUNCTIONS \
    X(abs) X(acos) X(acosf) X(acosh) X(acoshf) X(asin) X(asinf) X(asinh) X(asinhf) X(atan) \
    X(atan2) X(atan2f) X(atanf) X(atanh) X(atanhf) X(atomicAdd) X(atomicAddNoRet) \
    X(atomicAdd_system) X(atomicAnd) X(atomicAnd_system) X(atomicCAS) X(atomicCAS_system) \
    X(atomicDec) X(atomicExch) X(atomicExch_system) X(atomicInc) X(atomicMax) \
    X(atomicMax_system) X(atomicMin) X(atomicMin_system) X(atomicOr) X(atomicOr_system) \
    X(atomicSub) X(atomicSub_system) X(atomicXor) X(atomicXor_system) X(cbrt) X(cbrtf) X(ceil) \
    X(ceilf) X(clock64) X(copysign) X(copysignf) X(cos) X(cosf) X(cosh) X(coshf) X(cospi) \
    X(cospif) X(cyl_bessel_i0) X(cyl_bessel_i0f) X(cyl_bessel_i1) X(cyl_bessel_i1f) X(erf) \
    X(erfc) X(erfcf) X(erfcinv) X(erfcinvf) X(erfcx) X(erfcxf) X(erff) X(erfinv) X(erfinvf) \
    X(exp) X(exp10) X(exp10f) X(exp2) X(exp2f) X(expf) X(expm1) X(expm1f) X(fabs) X(fabsf) \
    X(fdim) X(fdimf) X(fdividef) X(floor) X(floorf) X(fma) X(fmaf) X(fmax) X(fmaxf) X(fmin) \
    X(fminf) X(fmod) X(fmodf) X(frexp) X(frexpf) X(h2ceil) X(h2cos) X(h2exp) X(h2exp10) \
    X(h2exp2) X(h2floor) X(h2log) X(h2log10) X(h2log2) X(h2rcp) X(h2rint) X(h2rsqrt) X(h2sin) \
    X(h2sqrt) X(h2trunc) X(hceil) X(hcos) X(hexp) X(hexp10) X(hexp2) X(hfloor) X(hlog) \
    X(hlog10) X(hlog2) X(hrcp) X(hrint) X(hrsqrt) X(hsin) X(hsqrt) X(htrunc) X(hypot) \
    X(hypotf) X(ilogb) X(ilogbf) X(isfinite) X(isgreater) X(isgreaterequal) X(isinf) X(isless) \
    X(islessequal) X(islessgreater) X(isnan) X(isnormal) X(isunordered) X(j0) X(j0f) X(j1) \
    X(j1f) X(jn) X(jnf) X(labs) X(ldexp) X(ldexpf) X(lgamma) X(lgammaf) X(llabs) X(llrint) \
    X(llrintf) X(llround) X(llroundf) X(log) X(log10) X(log10f) X(log1p) X(log1pf) X(log2) \
    X(log2f) X(logb) X(logbf) X(logf) X(lrint) X(lrintf) X(lround) X(lroundf) X(max) X(min) \
    X(modf) X(modff) X(nan) X(nanf) X(nearbyint) X(nearbyintf) X(nextafter) X(nextafterf) \
    X(norm) X(norm3d) X(norm3df) X(norm4d) X(norm4df) X(normcdf) X(normcdff) X(normcdfinv) \
    X(normcdfinvf) X(normf) X(pow) X(powf) X(powi) X(powif) X(rcbrt) X(rcbrtf) X(remainder) \
    X(remainderf) X(remquo) X(remquof) X(rhypot) X(rhypotf) X(rint) X(rintf) X(rnorm) \
    X(rnorm3d) X(rnorm3df) X(rnorm4d) X(rnorm4df) X(rnormf) X(round) X(roundf) X(rsqrt) \
    X(rsqrtf) X(safeAtomicAdd) X(safeAtomicMax) X(safeAtomicMin) X(scalbln) X(scalblnf) \
    X(scalbn) X(scalbnf) X(signbit) X(sin) X(sincos) X(sincosf) X(sincospi) X(sincospif) \
    X(sinf) X(sinh) X(sinhf) X(sinpi) X(sinpif) X(sqrt) X(sqrtf) X(surf1DLayeredread) \
    X(surf1DLayeredwrite) X(surf1Dread) X(surf1Dwrite) X(surf2DLayeredread) \
    X(surf2DLayeredwrite) X(surf2Dread) X(surf2Dwrite) X(surf3Dread) X(surf3Dwrite) \
    X(surfCubemapLayeredread) X(surfCubemapLayeredwrite) X(surfCubemapread) \
    X(surfCubemapwrite) X(tan) X(tanf) X(tanh) X(tanhf) X(tex1D) X(tex1DGrad) X(tex1DLayered) \
    X(tex1DLayeredGrad) X(tex1DLayeredLod) X(tex1DLod) X(tex1Dfetch) X(tex2D) X(tex2DGrad) \
    X(tex2DLayered) X(tex2DLayeredGrad) X(tex2DLayeredLod) X(tex2DLod) X(tex2Dgather) X(tex3D) \
    X(tex3DGrad) X(tex3DLod) X(texCubemap) X(texCubemapGrad) X(texCubemapLayered) \
    X(texCubemapLayeredGrad) X(texCubemapLayeredLod) X(texCubemapLod) X(tgamma) X(tgammaf) \
    X(trunc) X(truncf) X(unsafeAtomicAdd) X(unsafeAtomicMax) X(unsafeAtomicMin) \
    X(wall_clock64) X(y0) X(y0f) X(y1) X(y1f) X(yn) X(ynf)
#define X(name)                                                     \
    __device__ inline float name(float x) { return x; }             \
    __device__ inline double name(double x) { return x; }           \
    __device__ inline float name(float x, float) { return x; }      \
    __device__ inline int name(int x) { return x; }                 \
    __device__ inline int name(int* p, int x) { return *p + x; }
FUNCTIONS
#undef X
#undef FUNCTIONS
