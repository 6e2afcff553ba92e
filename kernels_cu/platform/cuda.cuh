// Primitives on CUDA (NVRTC, sm_80 and up).  hip.cuh and host.cuh have the same interface;
// tests/platform/test_platform.py, test_numbers.py and test_fragments.py check each primitive
// against numpy.
#pragma once

// --- kernels ---------------------------------------------------------------------------------
// KERNEL void name(...): the module's only entry.  The variant's first lines define kNumThreads,
// kMinBlocks and KERNEL_CLUSTER, which is empty or CLUSTER_DIMS(n).
#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ KERNEL_CLUSTER __launch_bounds__(kNumThreads, kMinBlocks)
#define CLUSTER_DIMS(n) __cluster_dims__(n, 1, 1)
#define REGISTER_KERNEL(name)

// --- shared memory ---------------------------------------------------------------------------
// SHARED(float, partials, [8][32]): a static array.  SHARED_STORAGE(Struct, s): the dynamic shared
// memory as a Struct, `s`.
#define SHARED(T, name, dims) __shared__ T name dims
#define SHARED_STORAGE(Struct, name)                                \
    extern __shared__ __align__(1024) unsigned char name##_bytes[]; \
    Struct& name = *reinterpret_cast<Struct*>(name##_bytes)

using int64_t = long long;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
#include "platform/common.cuh"

constexpr int kWarpSize = 32;
// Whether one loop with a uniform branch replaces several specialised loops.  The specialised loops
// are for sm_90, where their gain is measured; elsewhere they would only cost compile time.
constexpr bool kCompact = __CUDA_ARCH__ != 900;

// --- launches that overlap ------------------------------------------------------------------
// Programmatic dependent launch.  Every thread of a kernel calls this once, before its first access
// to global memory and before any return.  It waits until the stream's previous kernel has ended
// and its writes are visible.  Then it lets the next kernel's blocks start where there is room;
// they run up to their own wait.  The trigger follows the wait: when a block runs, all kernels
// before the previous one have therefore ended.  No effect in a launch without the attribute
// (targets/launches.py) or before sm_90.
DEVICE void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// --- barriers, shuffles, votes, atomics ------------------------------------------------------
// All threads of the block, warp or barrier must take part.  Shuffles move any 4- or 8-byte type.
DEVICE int lane_id() { return threadIdx.x % kWarpSize; }
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
// sync_block that returns whether any thread's `value` is true.
DEVICE bool sync_block_or(bool value) { return __syncthreads_or(value) != 0; }
// Waits at named barrier `id` (1 to 15) for `count` threads (whole warps).  sync_block uses
// barrier 0.
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
// Returns x, opaque to the compiler, which then recomputes values that a loop derives from it
// instead of keeping them in registers.
DEVICE int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
// Returns x, which must be uniform over the warp: derived values can use uniform registers.
DEVICE int uniform(int x) { return int(__reduce_or_sync(0xffffffffu, unsigned(x))); }
DEVICE bool vote_any(bool p) { return __any_sync(0xffffffffu, p); }
// All-reduce over the warp.
DEVICE uint32_t maximum_of_warp(uint32_t x) { return __reduce_max_sync(0xffffffffu, x); }
// Sum over the warp by two matrix products with ones, in a third of the time of five shuffles and
// additions.
DEVICE double sum_of_warp(double x) {
    const auto multiply = [](double a, double b, double& low, double& high) {
        asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%4, %4};"
            : "=d"(low), "=d"(high)
            : "d"(a), "d"(b), "d"(0.0));
    };
    double low, high;
    multiply(1.0, x, low, high);  // low: sum of lanes 4 c to 4 c + 3, c = 2 (lane % 4); high: c + 1
    multiply(low + high, 1.0, low, high);
    return low;
}
template <class T>
DEVICE T atomic_add(T* address, T value) {
    return atomicAdd(address, value);
}
template <class T>
DEVICE void atomic_min(T* address, T value) {
    atomicMin(address, value);
}
// Release and acquire: a thread that acquires the sum sees this thread's earlier writes, and this
// thread sees the writes before earlier additions.
DEVICE uint32_t atomic_add_acq_rel(uint32_t* address, uint32_t value) {
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(address), "r"(value)
                 : "memory");
    return old;
}
DEVICE uint64_t atomic_add_acq_rel(uint64_t* address, uint64_t value) {
    uint64_t old;
    asm volatile("atom.acq_rel.gpu.add.u64 %0, [%1], %2;"
                 : "=l"(old)
                 : "l"(address), "l"(value)
                 : "memory");
    return old;
}
// Compare-and-swap; returns whether *address was `expected`.
DEVICE bool compare_and_swap(uint64_t* address, uint64_t expected, uint64_t desired) {
    return atomicCAS(address, expected, desired) == expected;
}
// Acquire: this thread sees the writes that others made before they released the value.
DEVICE uint32_t load_acquire(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}
DEVICE uint64_t load_acquire(const uint64_t* address) {
    uint64_t value;
    asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}
// Relaxed, for one word that another block writes; does not order other accesses.
DEVICE uint64_t load_relaxed(const uint64_t* address) {
    uint64_t value;
    asm volatile("ld.relaxed.gpu.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}
DEVICE void store_relaxed(uint64_t* address, uint64_t value) {
    asm volatile("st.relaxed.gpu.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
DEVICE int count_bits(uint32_t x) { return __popc(x); }
// Back-off between two polls of a value that another block changes: none on CUDA.
DEVICE void yield() {}
constexpr int kMostPolls = 4096;  // of a GridBarrier, about 0.7 us each
#include "platform/grid.cuh"

// --- elements -----------------------------------------------------------------------------
#include "platform/cuda/numbers.cuh"

// Element-wise maximum or minimum of two 16-bit integers in each of a and b.
DEVICE uint32_t max_unsigned_pair(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
DEVICE uint32_t min_unsigned_pair(uint32_t a, uint32_t b) { return __vminu2(a, b); }
DEVICE uint32_t max_signed_pair(uint32_t a, uint32_t b) { return __vmaxs2(a, b); }
// Picks bytes of a (0 to 3) and b (4 to 7).  Each hexadecimal digit of `select` is a byte's index;
// the last digit gives the result's lowest byte.
DEVICE uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t select) {
    return __byte_perm(a, b, select);
}

// The larger of two; ignores a NaN if the other is a number.
DEVICE float maximum(float a, float b) { return fmaxf(a, b); }
// a * b + c with one rounding, independent of the compiler's contraction.
DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
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
// L2 eviction policy of loads.  evict_last is faster for a kernel that reads a large array once and
// writes as much, although it never rereads the data: its writes then leave L2 early and in order.
// It is slower where most of the data fits in L2.
struct LoadPolicy { uint64_t bits; };
DEVICE LoadPolicy load_policy(bool evict_last) {
    uint64_t last, normal;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
    return {evict_last ? last : normal};
}
// L2 eviction policy of stores.  evict_last is for a kernel's last results, about 48 MB: L2 can
// still hold them at the kernel's end, so that they need not reach DRAM before it.
struct StorePolicy { uint64_t bits; };
// The constants that createpolicy returns: constants take fewer registers.
DEVICE StorePolicy store_policy(bool evict_last) {
    return {evict_last ? 0x14f0000000000000ull : 0x1000000000000000ull};
}
// One access of N bytes, aligned to N.  There are no other cache hints: no-allocate stores and
// evict_first loads made row kernels slower.
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
// Loads memory that the kernel does not write.  Before sm_90 the load may move above stores.  From
// sm_90 on launches overlap: the previous kernel can still write the memory while this one runs.
// ld.global.nc does not allow that, and may move above the wait.  A volatile asm stays behind the
// wait; without a memory clobber it does not order other accesses.
constexpr bool kReadOnlyLoadsMove = __CUDA_ARCH__ < 900;
template <int N>
DEVICE Bytes<N> load_vector_read_only(const void* p) {
    if constexpr (!kReadOnlyLoadsMove && N == 16) {
        Bytes<16> b;
        asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(b.words[0]), "=r"(b.words[1]), "=r"(b.words[2]), "=r"(b.words[3])
                     : "l"(p));
        return b;
    } else if constexpr (!kReadOnlyLoadsMove && N == 8) {
        Bytes<8> b;
        asm volatile("ld.global.v2.b32 {%0, %1}, [%2];"
                     : "=r"(b.words[0]), "=r"(b.words[1])
                     : "l"(p));
        return b;
    } else if constexpr (N == 16) {
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
// Copies 4, 8 or 16 bytes, aligned to their size; if not `valid`, zero-fills the destination.
// kL2Prefetch: 128 if this or another block will read the surrounding bytes; else 0.
template <int N, int kL2Prefetch = 0>
DEVICE void copy_async(void* shared, const void* global, bool valid = true) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    const int bytes = valid ? N : 0;
    static_assert(kL2Prefetch == 0 || (kL2Prefetch == 128 && N == 16), "none, or 128 bytes");
    if constexpr (kL2Prefetch == 128) {
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
// Copies the first `bytes` (0 to 16) of 16 bytes and zero-fills the rest, which is not read.
template <int kL2Prefetch = 0>
DEVICE void copy_async_part(void* shared, const void* global, int bytes) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    static_assert(kL2Prefetch == 0 || kL2Prefetch == 128, "none, or 128 bytes");
    if constexpr (kL2Prefetch == 128) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address),
                     "l"(global), "r"(bytes)
                     : "memory");
    } else {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global),
                     "r"(bytes)
                     : "memory");
    }
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's committed groups are in flight.
template <int N>
DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// --- clusters (sm_90a, sm_100a) --------------------------------------------------------------
DEVICE int cluster_rank() {
    uint32_t rank;
    // Volatile: read again at each use, instead of kept in a register.
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return int(rank);
}
DEVICE void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Relaxed arrival: other blocks may not see this thread's earlier writes, except barriers after
// fence_barrier_init.  It does not wait for memory, which would take hundreds of cycles.
DEVICE void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// Acquires, and invalidates all of L1.
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Address of the same shared variable in block `rank`.
template <class T>
DEVICE T* cluster_shared(T* shared, int rank) {
    T* remote;
    asm("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(shared), "r"(rank));
    return remote;
}

// --- matrices --------------------------------------------------------------------------------
#include "platform/cuda/mma.cuh"

// Older architectures parse these primitives, but assemble only those that a kernel calls.
#include "platform/cuda/hopper.cuh"
