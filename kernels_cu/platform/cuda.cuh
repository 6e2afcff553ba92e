// The vocabulary on CUDA (NVRTC, sm_80 and up): the only CUDA file that holds PTX or builtins.
// hip.cuh and host.cuh give the same words; tests/test_platform.py holds each word against numpy.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

// --- kernels ---------------------------------------------------------------------------------
// KERNEL void name(...): the module's one entry.  The variant's lines define kNumThreads,
// kMinBlocks and KERNEL_CLUSTER, which is empty or CLUSTER_DIMS(n).
#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ KERNEL_CLUSTER __launch_bounds__(kNumThreads, kMinBlocks)
#define CLUSTER_DIMS(n) __cluster_dims__(n, 1, 1)
#define REGISTER_KERNEL(name)

// --- shared memory ---------------------------------------------------------------------------
// SHARED(float, partials, [8][32]): static.  SHARED_STORAGE(Struct, s): the dynamic one, as `s`.
#define SHARED(T, name, dims) __shared__ T name dims
#define SHARED_STORAGE(Struct, name)                                \
    extern __shared__ __align__(1024) unsigned char name##_bytes[]; \
    Struct& name = *reinterpret_cast<Struct*>(name##_bytes)

using int64_t = long long;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
#include "platform/common.cuh"

constexpr int kWarpSize = 32;
// Whether one loop with a uniform branch does for several that are each for a case: where nobody has
// measured what those gain, they only take compilers longer.
constexpr bool kCompact = __CUDA_ARCH__ != 900;

// --- barriers, shuffles, votes, atomics ------------------------------------------------------
// All threads of the block, warp or barrier take part; shuffles move any 4- or 8-byte type.
DEVICE int lane_id() { return threadIdx.x % kWarpSize; }
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
// `count` threads (whole warps) meet at barrier `id`, 1 to 15; 0 is sync_block's.
DEVICE void named_barrier(int id, int count) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}
template <class T>
DEVICE T shuffle_xor(T value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}
template <class T>
DEVICE T shuffle(T value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}
// x, of which the compiler does not know that it stays the same: what a loop derives from it is
// computed there instead of being kept in registers.
DEVICE int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
// x, which all lanes have, as something of the warp: what follows from it need not lie in every
// lane.
DEVICE int uniform(int x) { return int(__reduce_or_sync(0xffffffffu, unsigned(x))); }
DEVICE bool vote_any(bool p) { return __any_sync(0xffffffffu, p); }
template <class T>
DEVICE T atomic_add(T* address, T value) {
    return atomicAdd(address, value);
}
// What this thread wrote before is there for whoever sees the sum, and what others wrote before
// theirs for this thread.
DEVICE uint32_t atomic_add_acq_rel(uint32_t* address, uint32_t value) {
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(address), "r"(value)
                 : "memory");
    return old;
}
// What others wrote before they changed this number is there for this thread.
DEVICE uint32_t load_acquire(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}
#include "platform/grid.cuh"

// --- numbers ---------------------------------------------------------------------------------
using bf16 = __nv_bfloat16;
using e4m3 = __nv_fp8_e4m3;
using e5m2 = __nv_fp8_e5m2;

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(int8_t x) { return float(x); }
DEVICE float to_float(half x) { return __half2float(x); }
DEVICE float to_float(bf16 x) { return __bfloat162float(x); }
DEVICE float to_float(e4m3 x) { return float(x); }
DEVICE float to_float(e5m2 x) { return float(x); }

// Round to nearest even.  The fp8 formats saturate, infinities too; NaN stays NaN.
// int8 saturates as well; NaN gives 0.
template <class T>
DEVICE T from_float(float x) {
    if constexpr (kSame<T, half>) {
        return __float2half_rn(x);
    } else if constexpr (kSame<T, bf16>) {
        return __float2bfloat16_rn(x);
    } else if constexpr (kSame<T, int8_t>) {
        int y;
        asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(y) : "f"(x));
        return int8_t(y);
    } else {
        return T(x);
    }
}
template <class T> struct PairOf;
template <> struct PairOf<half> { using Type = __half2; };
template <> struct PairOf<bf16> { using Type = __nv_bfloat162; };

// Two numbers in one register, `low` in the lower half; e4m3 and e5m2: in the lower 16 bits.
template <class T>
DEVICE uint32_t pack(float low, float high) {
    static_assert(sizeof(T) <= 2 && !kSame<T, int8_t>, "pack makes two numbers of 8 or 16 bits");
    if constexpr (sizeof(T) == 1) {
        constexpr auto kFormat = kSame<T, e4m3> ? __NV_E4M3 : __NV_E5M2;
        return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, kFormat);
    } else if constexpr (kSame<T, half>) {
        return bit_cast<uint32_t>(__floats2half2_rn(low, high));
    } else {
        return bit_cast<uint32_t>(__floats2bfloat162_rn(low, high));
    }
}

// The two numbers of a pack; e4m3 and e5m2: of the lower 16 bits.
template <class T>
DEVICE void unpack(uint32_t pair, float& low, float& high) {
    if constexpr (kSame<T, bf16>) {
        low = bit_cast<float>(pair << 16);
        high = bit_cast<float>(pair & 0xffff0000u);
    } else {
        __half2 halves;
        if constexpr (kSame<T, half>) {
            halves = bit_cast<__half2>(pair);
        } else {
            constexpr auto kFormat = kSame<T, e4m3> ? __NV_E4M3 : __NV_E5M2;
            halves = __half2(__nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(pair), kFormat));
        }
        low = __low2float(halves);
        high = __high2float(halves);
    }
}

// Two 16-bit integers in each of a and b: the larger or smaller ones.
DEVICE uint32_t max_unsigned_pair(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
DEVICE uint32_t min_unsigned_pair(uint32_t a, uint32_t b) { return __vminu2(a, b); }
DEVICE uint32_t max_signed_pair(uint32_t a, uint32_t b) { return __vmaxs2(a, b); }
// Four bytes out of a's (0 to 3) and b's (4 to 7), by the hexadecimal digits of `select`, the last
// one first.
DEVICE uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t select) {
    return __byte_perm(a, b, select);
}

// The larger of two; a NaN is ignored if the other is a number.
DEVICE float maximum(float a, float b) { return fmaxf(a, b); }
// a * b + c, rounded once: whatever a compiler makes of sums of products elsewhere.
DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// The same for two pairs of 16-bit numbers (see pack).
template <class T>
DEVICE uint32_t maximum_pair(uint32_t a, uint32_t b) {
    using Pair = typename PairOf<T>::Type;
    return bit_cast<uint32_t>(__hmax2(bit_cast<Pair>(a), bit_cast<Pair>(b)));
}
// Within 2 ulps of 1 / sqrt(x).
DEVICE float reciprocal_square_root(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// 1 / x within 1 ulp (PTX ISA, rcp.approx.ftz.f32); subnormals are zero.
DEVICE float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// 2^x within 2 ulp over the whole range (PTX ISA, ex2.approx.ftz.f32); subnormals are zero.
DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// --- global memory ---------------------------------------------------------------------------
// How soon L2 gives up what loads bring.  evict_last: after all else.  A kernel that reads much once
// and writes as much is faster by it, though it never reads again: what it writes then leaves L2 soon
// and in order.  Where most of it all fits into L2 it is slower.
struct LoadPolicy { uint64_t bits; };
DEVICE LoadPolicy load_policy(bool evict_last) {
    uint64_t last, normal;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
    return {evict_last ? last : normal};
}
// Before all else: of what nobody reads again.
DEVICE LoadPolicy load_policy_once() {
    uint64_t first;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
    return {first};
}
// The same of stores.  evict_last: of 64 MB and more that a kernel writes, L2 then still holds more
// when it ends, which memory need not take before that.
struct StorePolicy { uint64_t bits; };
// What createpolicy makes: constants need fewer registers.
DEVICE StorePolicy store_policy(bool evict_last) {
    return {evict_last ? 0x14f0000000000000ull : 0x1000000000000000ull};
}
// N bytes in one access, aligned to N.  No other cache hints: stores that leave no trace in L1 or L2
// made rows slower, and loads that are evicted first as well.
template <int N>
DEVICE Bytes<N> load_vector(const void* p) {
    return *static_cast<const Bytes<N>*>(p);
}
template <int N>
DEVICE Bytes<N> load_vector(const void* p, LoadPolicy policy) {
    static_assert(N == 16, "policies are for loads of 16 bytes");
    Bytes<N> b;
    asm volatile("ld.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(b.words[0]), "=r"(b.words[1]), "=r"(b.words[2]), "=r"(b.words[3])
                 : "l"(p), "l"(policy.bits));
    return b;
}
// Of memory that nothing writes to while the kernel runs: may be moved before stores.
template <int N>
DEVICE Bytes<N> load_vector_read_only(const void* p) {
    if constexpr (N == 16) {
        return bit_cast<Bytes<16>>(__ldg(static_cast<const uint4*>(p)));
    } else if constexpr (N == 8) {
        return bit_cast<Bytes<8>>(__ldg(static_cast<const uint2*>(p)));
    } else {
        return load_vector<N>(p);
    }
}
template <int N>
DEVICE void store_vector(void* p, const Bytes<N>& b) {
    *static_cast<Bytes<N>*>(p) = b;
}
template <int N>
DEVICE void store_vector(void* p, const Bytes<N>& b, StorePolicy policy) {
    static_assert(N == 16, "policies are for stores of 16 bytes");
    asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(p),
                 "r"(b.words[0]), "r"(b.words[1]), "r"(b.words[2]), "r"(b.words[3]),
                 "l"(policy.bits)
                 : "memory");
}

// --- async copies, global -> shared ----------------------------------------------------------
// 4, 8 or 16 bytes, aligned to their size; where `valid` is false the destination becomes zero.
// kLine: 128 where what lies around the 16 bytes will be asked for, by this block or another; else 0.
template <int N, int kLine = 0>
DEVICE void copy_async(void* shared, const void* global, bool valid = true) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    const int bytes = valid ? N : 0;
    static_assert(kLine == 0 || (kLine == 128 && N == 16), "lines of L2");
    if constexpr (kLine == 128) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address),
                     "l"(global), "r"(bytes)
                     : "memory");
    } else if constexpr (N == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global),
                     "r"(bytes)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(global),
                     "n"(N), "r"(bytes)
                     : "memory");
    }
}
template <int N>
DEVICE void copy_async(void* shared, const void* global, LoadPolicy policy) {
    static_assert(N == 16, "policies are for loads of 16 bytes");
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(address),
                 "l"(global), "l"(policy.bits)
                 : "memory");
}
template <int N>
DEVICE void copy_async(void* shared, const void* global, bool valid, LoadPolicy policy) {
    static_assert(N == 16, "policies are for loads of 16 bytes");
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(address),
                 "l"(global), "r"(valid ? N : 0), "l"(policy.bits)
                 : "memory");
}
// The first `bytes` of 16, 0 to 16; the others become zero, and are not read.
DEVICE void copy_async_part(void* shared, const void* global, int bytes) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global),
                 "r"(bytes)
                 : "memory");
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's committed groups are under way.
template <int N>
DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// --- clusters (sm_90a, sm_100a) --------------------------------------------------------------
DEVICE int cluster_rank() {
    uint32_t rank;
    // Volatile: read again where it is used, instead of kept in a register.
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return int(rank);
}
DEVICE void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Of nothing but the arrival (and of barriers, after fence_barrier_init): what this thread has
// written before others may not see.  Memory is not waited for, which takes hundreds of cycles.
DEVICE void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// All of L1 is empty then.
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// The same shared variable in the block of rank `rank`.
template <class T>
DEVICE T* cluster_shared(T* shared, int rank) {
    T* remote;
    asm("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(shared), "r"(rank));
    return remote;
}

// --- matrices --------------------------------------------------------------------------------
#include "platform/mma_cuda.cuh"

// Older architectures have them in name only: what a kernel does not call is not assembled.
#include "platform/hopper_cuda.cuh"
