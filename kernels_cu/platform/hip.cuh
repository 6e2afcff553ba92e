// Primitives on AMD GPUs: gfx9 (wave64), gfx11 and gfx12 (wave32).  They use only clang's
// attributes and builtins, so that hiprtc and an offline clang without headers or a device library
// compile the same string.
#pragma once

#define DEVICE __attribute__((device)) __attribute__((always_inline)) inline
#define KERNEL                                        \
    extern "C" __attribute__((global)) KERNEL_CLUSTER \
        __attribute__((amdgpu_flat_work_group_size(1, kNumThreads)))
#define REGISTER_KERNEL(name)
#define memcpy __builtin_memcpy

#define SHARED(T, name, dims) __attribute__((shared)) T name dims
#define SHARED_STORAGE(Struct, name)                                                            \
    extern __attribute__((shared)) __attribute__((aligned(1024))) unsigned char name##_bytes[]; \
    Struct& name = *reinterpret_cast<Struct*>(name##_bytes)

// The types of the header that hiprtc includes before every program.
using int64_t = long long;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
#include "platform/common.cuh"

#if defined(__GFX9__)
constexpr int kWarpSize = 64;
#else
constexpr int kWarpSize = 32;
#endif
constexpr bool kCompact = true;  // see cuda.cuh

namespace hip {
struct Index { unsigned x, y, z; };
DEVICE Index thread_index() {
    return {__builtin_amdgcn_workitem_id_x(), __builtin_amdgcn_workitem_id_y(),
            __builtin_amdgcn_workitem_id_z()};
}
DEVICE Index block_index() {
    return {__builtin_amdgcn_workgroup_id_x(), __builtin_amdgcn_workgroup_id_y(),
            __builtin_amdgcn_workgroup_id_z()};
}
DEVICE Index block_dim() {
    return {__builtin_amdgcn_workgroup_size_x(), __builtin_amdgcn_workgroup_size_y(),
            __builtin_amdgcn_workgroup_size_z()};
}
DEVICE Index grid_dim() {
    const Index block = block_dim();
    return {__builtin_amdgcn_grid_size_x() / block.x, __builtin_amdgcn_grid_size_y() / block.y,
            __builtin_amdgcn_grid_size_z() / block.z};
}
}  // namespace hip
#define threadIdx (hip::thread_index())
#define blockIdx (hip::block_index())
#define blockDim (hip::block_dim())
#define gridDim (hip::grid_dim())

// --- launches that overlap: none ------------------------------------------------------------
DEVICE void wait_for_previous_grid() {}

// --- barriers, shuffles, votes, atomics ------------------------------------------------------
DEVICE int lane_id() { return int(threadIdx.x) % kWarpSize; }
DEVICE void sync_block() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// sync_block that returns whether any thread's `value` is true.
DEVICE bool sync_block_or(bool value) {
    SHARED(uint32_t, any, [1]);
    if (threadIdx.x == 0) any[0] = 0;
    sync_block();
    if (value) any[0] = 1;
    sync_block();
    const bool result = any[0] != 0;
    sync_block();
    return result;
}
DEVICE void sync_warp() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
template <class T = void>
DEVICE void named_barrier(int, int) {
    static_assert(kAlwaysFalse<T>, "AMD GPUs have no named barriers");
}
DEVICE int opaque(int x) {
    asm volatile("" : "+v"(x));
    return x;
}
template <class T>
DEVICE T shuffle(T value, int lane) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
    int words[sizeof(T) / 4];
    memcpy(words, &value, sizeof(T));
#pragma unroll
    for (int& word : words) {
        word = __builtin_amdgcn_ds_bpermute((lane & (kWarpSize - 1)) * 4, word);
    }
    memcpy(&value, words, sizeof(T));
    return value;
}
template <class T>
DEVICE T shuffle_xor(T value, int mask) {
    return shuffle(value, lane_id() ^ mask);
}
// Returns x, which must be uniform over the warp: derived values can use scalar registers.
DEVICE int uniform(int x) { return __builtin_amdgcn_readfirstlane(x); }
DEVICE bool vote_any(bool p) {
    if constexpr (kWarpSize == 64) {
        return __builtin_amdgcn_ballot_w64(p) != 0;
    } else {
        return __builtin_amdgcn_ballot_w32(p) != 0;
    }
}
// All-reduce over the warp.
DEVICE uint32_t maximum_of_warp(uint32_t x) {
#pragma unroll
    for (int bit = 1; bit < kWarpSize; bit *= 2) {
        const uint32_t other = shuffle_xor(x, bit);
        x = other > x ? other : x;
    }
    return x;
}
DEVICE double sum_of_warp(double x) {
#pragma unroll
    for (int bit = 1; bit < kWarpSize; bit *= 2) x += shuffle_xor(x, bit);
    return x;
}
template <class T>
DEVICE T atomic_add(T* address, T value) {
    return __hip_atomic_fetch_add(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <class T>
DEVICE void atomic_min(T* address, T value) {
    __hip_atomic_fetch_min(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
// Release and acquire: a thread that acquires the sum sees this thread's earlier writes, and this
// thread sees the writes before earlier additions.
DEVICE uint32_t atomic_add_acq_rel(uint32_t* address, uint32_t value) {
    return __hip_atomic_fetch_add(address, value, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
}
DEVICE uint64_t atomic_add_acq_rel(uint64_t* address, uint64_t value) {
    return __hip_atomic_fetch_add(address, value, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
}
// Compare-and-swap; returns whether *address was `expected`.
DEVICE bool compare_and_swap(uint64_t* address, uint64_t expected, uint64_t desired) {
    return __hip_atomic_compare_exchange_strong(address, &expected, desired, __ATOMIC_RELAXED,
                                                __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
// Acquire: this thread sees the writes that others made before they released the value.
DEVICE uint32_t load_acquire(const uint32_t* address) {
    return __hip_atomic_load(address, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT);
}
DEVICE uint64_t load_acquire(const uint64_t* address) {
    return __hip_atomic_load(address, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT);
}
// Relaxed, for one word that another block writes; does not order other accesses.
DEVICE uint64_t load_relaxed(const uint64_t* address) {
    return __hip_atomic_load(address, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
DEVICE void store_relaxed(uint64_t* address, uint64_t value) {
    __hip_atomic_store(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
DEVICE int count_bits(uint32_t x) { return __builtin_popcount(x); }
// Backs off between two polls of a value that another block changes.
DEVICE void yield() { __builtin_amdgcn_s_sleep(1); }
constexpr int kMostPolls = 4096;
#include "platform/grid.cuh"

// --- elements -----------------------------------------------------------------------------
#define half half_number  // the `half` of hiprtc's header is another type
#include "platform/formats.cuh"
// All gfx targets convert FP16 by instructions (subnormals are kept, NaN stays NaN).  FP8 is
// decoded as FP16: an e5m2 code is the upper byte of an FP16 code; an e4m3 code in FP16's fields is
// 2^-8 times its value.
template <> DEVICE float formats::Half::decode(uint32_t code) {
    return bit_cast<_Float16>(uint16_t(code));
}
template <> DEVICE uint32_t formats::Half::encode(float x) {
    return bit_cast<uint16_t>(_Float16(x));
}
template <> DEVICE float formats::E5m2::decode(uint32_t code) { return Half::decode(code << 8); }
template <> DEVICE float formats::E4m3::decode(uint32_t code) {
    const uint32_t magnitude = code & 0x7f;
    const float x = 256.0f * Half::decode((code & 0x80) << 8 | magnitude << 7);
    return magnitude == 0x7f ? bit_cast<float>(0x7fc00000u) : x;
}
#include "platform/numbers.cuh"

// The larger of two; ignores a NaN if the other is a number.
DEVICE float maximum(float a, float b) { return __builtin_fmaxf(a, b); }
// a * b + c with one rounding, independent of the compiler's contraction.
DEVICE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// Element-wise maximum of two pairs of 16-bit elements (see pack and maximum).
template <class T>
DEVICE uint32_t maximum_pair(uint32_t a, uint32_t b) {
    const float low = maximum(to_float(T{uint16_t(a)}), to_float(T{uint16_t(b)}));
    const float high = maximum(to_float(T{uint16_t(a >> 16)}), to_float(T{uint16_t(b >> 16)}));
    return pack<T>(low, high);
}
DEVICE float reciprocal_square_root(float x) { return __builtin_amdgcn_rsqf(x); }
// 1 / x within 1 ulp (CDNA3 ISA, v_rcp_f32); subnormals are zero.
DEVICE float reciprocal_approx(float x) { return __builtin_amdgcn_rcpf(x); }
// 2^x within 1 ulp (CDNA3 ISA, v_exp_f32); subnormals are zero.
DEVICE float exp2_approx(float x) { return __builtin_amdgcn_exp2f(x); }

// --- global memory ---------------------------------------------------------------------------
namespace hip {
template <int N> struct Word;
template <> struct Word<1> { using Type = uint8_t; };
template <> struct Word<2> { using Type = uint16_t; };
template <> struct Word<4> { using Type = uint32_t; };
template <> struct Word<8> { typedef uint32_t Type __attribute__((ext_vector_type(2))); };
template <> struct Word<16> { typedef uint32_t Type __attribute__((ext_vector_type(4))); };
}  // namespace hip

struct LoadPolicy {};  // ignored: load_vector is always nontemporal
DEVICE LoadPolicy load_policy(bool) { return {}; }
struct StorePolicy {};
DEVICE StorePolicy store_policy(bool) { return {}; }
template <int N>
DEVICE Bytes<N> load_vector(const void* p) {
    using Word = typename hip::Word<N>::Type;
    return bit_cast<Bytes<N>>(__builtin_nontemporal_load(static_cast<const Word*>(p)));
}
template <int N>
DEVICE Bytes<N> load_vector(const void* p, LoadPolicy) {
    return load_vector<N>(p);
}
constexpr bool kReadOnlyLoadsMove = true;
template <int N>
DEVICE Bytes<N> load_vector_read_only(const void* p) {
    return *static_cast<const Bytes<N>*>(p);
}
template <int N>
DEVICE void store_vector(void* p, const Bytes<N>& b) {
    using Word = typename hip::Word<N>::Type;
    __builtin_nontemporal_store(bit_cast<Word>(b), static_cast<Word*>(p));
}
template <int N>
DEVICE void store_vector(void* p, const Bytes<N>& b, StorePolicy) {
    store_vector<N>(p, b);
}

// --- async copies, global -> shared ----------------------------------------------------------
// Plain loads and stores: each store waits for its load, so commit and wait do nothing.
template <int N, int kL2Prefetch = 0>
DEVICE void copy_async(void* shared, const void* global, bool valid = true) {
    static_assert(N == 4 || N == 8 || N == 16, "async copies move 4, 8 or 16 bytes");
    Bytes<N> b{};
    if (valid) b = load_vector<N>(global);
    *static_cast<Bytes<N>*>(shared) = b;
}
template <int N>
DEVICE void copy_async(void* shared, const void* global, LoadPolicy) {
    copy_async<N>(shared, global);
}
// Copies the first `bytes` (0 to 16) of 16 bytes and zero-fills the rest, which is not read.
template <int kL2Prefetch = 0>
DEVICE void copy_async_part(void* shared, const void* global, int bytes) {
    Bytes<16> b{};
    if (bytes == 16) {
        b = load_vector<16>(global);
    } else {
        uint8_t part[16] = {};
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            if (i < bytes) part[i] = static_cast<const uint8_t*>(global)[i];
        }
        memcpy(&b, part, 16);
    }
    *static_cast<Bytes<16>*>(shared) = b;
}
DEVICE void copy_async_commit() {}
template <int N>
DEVICE void copy_async_wait() {}

// --- clusters --------------------------------------------------------------------------------
template <class T = void>
DEVICE int cluster_rank() {
    static_assert(kAlwaysFalse<T>, "AMD GPUs have no clusters");
    return 0;
}
template <class T = void>
DEVICE void cluster_arrive() {
    static_assert(kAlwaysFalse<T>, "AMD GPUs have no clusters");
}
template <class T = void>
DEVICE void cluster_arrive_relaxed() {
    static_assert(kAlwaysFalse<T>, "AMD GPUs have no clusters");
}
template <class T = void>
DEVICE void cluster_wait() {
    static_assert(kAlwaysFalse<T>, "AMD GPUs have no clusters");
}
template <class T>
DEVICE T* cluster_shared(T* shared, int) {
    static_assert(kAlwaysFalse<T>, "AMD GPUs have no clusters");
    return shared;
}
struct Barrier {
    template <class T = void>
    DEVICE void init(int) {
        static_assert(kAlwaysFalse<T>, "AMD GPUs have no barriers in shared memory");
    }
    template <class T = void>
    DEVICE void arrive_expect_tx(int) {
        static_assert(kAlwaysFalse<T>, "AMD GPUs have no barriers in shared memory");
    }
    template <class T = void>
    DEVICE void wait(int) {
        static_assert(kAlwaysFalse<T>, "AMD GPUs have no barriers in shared memory");
    }
};
template <class T = void>
DEVICE void fence_barrier_init() {
    static_assert(kAlwaysFalse<T>, "AMD GPUs have no barriers in shared memory");
}
template <class T>
DEVICE void store_async(T*, const T&, Barrier&, int) {
    static_assert(kAlwaysFalse<T>, "AMD GPUs have no clusters");
}

// --- matrices --------------------------------------------------------------------------------
#include "platform/hip/mma.cuh"
