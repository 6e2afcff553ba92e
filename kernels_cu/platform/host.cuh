// Primitives on the host: C++17 for g++ and clang, threads as fibers (host/runtime.cpp).
//
// As on a GPU with -ftz=true, FP32 subnormals are flushed; the compiler may contract a * b + c, or
// not.  Compiled with -DHOST_WARP_SIZE=32 or 64, and with -DDEVICE=inline for fast compilation:
// always-inlined functions are compiled once per call.
#pragma once
#include "platform/host/interface.h"

// --- kernels ---------------------------------------------------------------------------------
#ifndef DEVICE
#define DEVICE inline __attribute__((always_inline))
#endif
#define KERNEL static
#define CLUSTER_DIMS(n)
#define HOST_EXPORT extern "C" __attribute__((visibility("default")))
// Exports an entry that takes the arguments' addresses, and an array of the parameters' sizes (-1
// for a pointer, 0 at the end).
#define REGISTER_KERNEL(name)                                                                \
    HOST_EXPORT void host_entry(void* const* args) {                                         \
        host::Call<decltype(&name)>::call(name, args);                                       \
    }                                                                                        \
    HOST_EXPORT const int* host_parameters() { return host::Call<decltype(&name)>::kSizes; } \
    HOST_EXPORT void host_load(const host::Runtime* table) { host::runtime = table; }

extern "C" void* memcpy(void*, const void*, decltype(sizeof(0))) noexcept;

namespace host {
static const Runtime* runtime;

template <class P> constexpr int kParameterSize = sizeof(P);
template <class P> constexpr int kParameterSize<P*> = -1;

template <class... Indices> struct Call;
template <class... P> struct Call<void (*)(P...)> {
    static constexpr int kSizes[] = {kParameterSize<P>..., 0};
    template <int... i> struct Indices {};
    template <int n, int... i> struct Count : Count<n - 1, n - 1, i...> {};
    template <int... i> struct Count<0, i...> { using Type = Indices<i...>; };

    template <int... i>
    static void call(void (*kernel)(P...), void* const* args, Indices<i...>) {
        kernel(*static_cast<P*>(args[i])...);
    }
    static void call(void (*kernel)(P...), void* const* args) {
        call(kernel, args, typename Count<sizeof...(P)>::Type());
    }
};
}  // namespace host

// Source location of a primitive's call, for messages.
#define HOST_LOCATION host::Location location = {__builtin_FILE(), __builtin_LINE()}

#define threadIdx (host::runtime->thread()->thread_index)
#define blockIdx (host::runtime->thread()->block->block_index)
#define blockDim (host::runtime->thread()->block->block_dim)
#define gridDim (host::runtime->thread()->block->grid_dim)

// --- shared memory ---------------------------------------------------------------------------
#define SHARED(T, name, dims)                                             \
    using name##_type = T dims;                                           \
    static constexpr host::SharedArray name##_array = {                   \
        sizeof(name##_type), alignof(name##_type), {__FILE__, __LINE__}}; \
    name##_type& name = *static_cast<name##_type*>(host::runtime->shared(&name##_array))
#define SHARED_STORAGE(Struct, name) \
    Struct& name =                   \
        *static_cast<Struct*>(host::runtime->dynamic_shared(sizeof(Struct), {__FILE__, __LINE__}))

using int64_t = long long;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
#include "platform/common.cuh"

constexpr int kWarpSize = HOST_WARP_SIZE;
constexpr bool kCompact =
    kWarpSize == 64;  // see cuda.cuh: warp size 32 as on Hopper, 64 as elsewhere

// --- launches that overlap ------------------------------------------------------------------
DEVICE void wait_for_previous_grid(HOST_LOCATION) {
    host::runtime->wait_for_previous_grid(location);
}

// --- barriers, shuffles, votes, atomics ------------------------------------------------------
DEVICE int lane_id() { return host::runtime->thread()->lane; }
DEVICE void sync_block(HOST_LOCATION) { host::runtime->sync_block(location); }
// sync_block that returns whether any thread's `value` is true.
DEVICE bool sync_block_or(bool value, HOST_LOCATION) {
    SHARED(uint32_t, any, [1]);
    if (threadIdx.x == 0) any[0] = 0;
    host::runtime->sync_block(location);
    if (value) any[0] = 1;
    host::runtime->sync_block(location);
    const bool result = any[0] != 0;
    host::runtime->sync_block(location);
    return result;
}
DEVICE void sync_warp(HOST_LOCATION) { host::runtime->sync_warp(location); }
DEVICE void named_barrier(int id, int count, HOST_LOCATION) {
    host::runtime->named_barrier(id, count, location);
}

namespace host {
template <class T> struct Shuffle {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
    T value, result;
    int source;

    static void combine(void** payloads) {
        for (int i = 0; i < kWarpSize; ++i) {
            Shuffle* mine = static_cast<Shuffle*>(payloads[i]);
            if (!mine) continue;
            const Shuffle* from = static_cast<const Shuffle*>(payloads[mine->source]);
            // A missing lane's value is undefined: NaN reveals its use.
            if (from) mine->result = from->value;
            else __builtin_memset(&mine->result, 0xff, sizeof(T));
        }
    }
};
template <class T> DEVICE T shuffle_from(const char* primitive, T value, int source,
                                         Location location) {
    Shuffle<T> payload{value, value, source & (kWarpSize - 1)};
    runtime->exchange(primitive, &payload, Shuffle<T>::combine, location);
    return payload.result;
}
static void combine_any(void** payloads) {
    bool any = false;
    for (int i = 0; i < kWarpSize; ++i) any |= payloads[i] && *static_cast<bool*>(payloads[i]);
    for (int i = 0; i < kWarpSize; ++i) {
        if (payloads[i]) *static_cast<bool*>(payloads[i]) = any;
    }
}
}  // namespace host

template <class T>
DEVICE T shuffle_xor(T value, int mask, HOST_LOCATION) {
    return host::shuffle_from("shuffle_xor", value, lane_id() ^ mask, location);
}
template <class T>
DEVICE T shuffle(T value, int lane, HOST_LOCATION) {
    return host::shuffle_from("shuffle", value, lane, location);
}
DEVICE int opaque(int x) { return x; }
DEVICE int uniform(int x, HOST_LOCATION) {
    return host::shuffle_from("uniform", x, 0, location);  // nonuniform values give wrong results
}
DEVICE bool vote_any(bool p, HOST_LOCATION) {
    host::runtime->exchange("vote_any", &p, host::combine_any, location);
    return p;
}
// All-reduce over the warp.
DEVICE uint32_t maximum_of_warp(uint32_t x, HOST_LOCATION) {
    for (int bit = 1; bit < kWarpSize; bit *= 2) {
        const uint32_t other = shuffle_xor(x, bit, location);
        x = other > x ? other : x;
    }
    return x;
}
DEVICE double sum_of_warp(double x, HOST_LOCATION) {
    for (int bit = 1; bit < kWarpSize; bit *= 2) x += shuffle_xor(x, bit, location);
    return x;
}
template <class T>
DEVICE T atomic_add(T* address, T value) {
    T old, sum;
    __atomic_load(address, &old, __ATOMIC_RELAXED);
    do {
        sum = old + value;
    } while (
        !__atomic_compare_exchange(address, &old, &sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}
template <class T>
DEVICE void atomic_min(T* address, T value) {
    T old = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (value < old && !__atomic_compare_exchange_n(address, &old, value, true, __ATOMIC_RELAXED,
                                                       __ATOMIC_RELAXED)) {
    }
}
// Compare-and-swap; returns whether *address was `expected`.
DEVICE bool compare_and_swap(uint64_t* address, uint64_t expected, uint64_t desired) {
    return __atomic_compare_exchange_n(address, &expected, desired, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE);
}
// Release and acquire: a thread that acquires the sum sees this thread's earlier writes, and this
// thread sees the writes before earlier additions.
DEVICE uint32_t atomic_add_acq_rel(uint32_t* address, uint32_t value) {
    return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}
DEVICE uint64_t atomic_add_acq_rel(uint64_t* address, uint64_t value) {
    return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}
DEVICE uint32_t load_acquire(const uint32_t* address) {
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
DEVICE uint64_t load_acquire(const uint64_t* address) {
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
// Relaxed, for one word that another block writes; does not order other accesses.
DEVICE uint64_t load_relaxed(const uint64_t* address) {
    return __atomic_load_n(address, __ATOMIC_RELAXED);
}
DEVICE void store_relaxed(uint64_t* address, uint64_t value) {
    __atomic_store_n(address, value, __ATOMIC_RELAXED);
}
DEVICE int count_bits(uint32_t x) { return __builtin_popcount(x); }
// Called between two polls of a value that another block changes: the schedule picks the next
// fiber.
DEVICE void yield() { host::runtime->yield(); }
constexpr int kMostPolls = 3;  // blocks leave under some schedules and stay under others
#include "platform/grid.cuh"

#include "platform/numbers.cuh"

// The larger of two; ignores a NaN if the other is a number.
DEVICE float maximum(float a, float b) { return a > b || b != b ? a : b; }
// a * b + c with one rounding, independent of the compiler's contraction.
DEVICE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// Element-wise maximum of two pairs of 16-bit elements (see pack and maximum).
template <class T>
DEVICE uint32_t maximum_pair(uint32_t a, uint32_t b) {
    const auto larger = [](uint32_t x, uint32_t y) {
        return maximum(to_float(T{uint16_t(x)}), to_float(T{uint16_t(y)}));
    };
    return pack<T>(larger(a, b), larger(a >> 16, b >> 16));
}
DEVICE float reciprocal_square_root(float x) { return 1.0f / __builtin_sqrtf(x); }
DEVICE float reciprocal_approx(float x) { return 1.0f / x; }
// 2^x; subnormals are zero.
DEVICE float exp2_approx(float x) { return __builtin_exp2f(x); }

// --- global memory ---------------------------------------------------------------------------
namespace host {
// A GPU faults on misaligned accesses.
DEVICE void check_alignment(const void* p, int size, Location location) {
    if (uintptr_t(p) % size != 0) runtime->fail("an access is not aligned to its size", location);
}

// Accesses in the kernel's own code, so that sanitizers see them and name the kernel's line.
DEVICE void overwrite(void* p, int bytes) {
    for (int i = 0; i < bytes; i += 4) {
        *reinterpret_cast<volatile uint32_t*>(static_cast<char*>(p) + i) = 0xffffffffu;
    }
}
DEVICE void touch(const void* p, int bytes) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    for (int i = 0; i < bytes; i += 4) {
        (void)*reinterpret_cast<const volatile uint32_t*>(static_cast<const char*>(p) + i);
    }
#endif
}
}  // namespace host

template <int N>
DEVICE Bytes<N> load_vector(const void* p, HOST_LOCATION) {
    host::check_alignment(p, N, location);
    return *static_cast<const Bytes<N>*>(p);
}
struct LoadPolicy {};  // no effect
DEVICE LoadPolicy load_policy(bool) { return {}; }
struct StorePolicy {};
DEVICE StorePolicy store_policy(bool) { return {}; }
template <int N>
DEVICE Bytes<N> load_vector(const void* p, LoadPolicy, HOST_LOCATION) {
    static_assert(N == 16, "policies are for loads of 16 bytes");
    return load_vector<N>(p, location);
}
constexpr bool kReadOnlyLoadsMove = kCompact;  // false as on Hopper, true as elsewhere
template <int N>
DEVICE Bytes<N> load_vector_read_only(const void* p, HOST_LOCATION) {
    return load_vector<N>(p, location);
}
template <int N>
DEVICE void store_vector(void* p, const Bytes<N>& b, HOST_LOCATION) {
    host::check_alignment(p, N, location);
    *static_cast<Bytes<N>*>(p) = b;
}
template <int N>
DEVICE void store_vector(void* p, const Bytes<N>& b, StorePolicy, HOST_LOCATION) {
    static_assert(N == 16, "policies are for stores of 16 bytes");
    store_vector<N>(p, b, location);
}

// --- async copies, global -> shared ----------------------------------------------------------
// The destination is poison (0xff) until the wait, which writes the data.
template <int N, int kL2Prefetch = 0>
DEVICE void copy_async(void* shared, const void* global, bool valid = true, HOST_LOCATION) {
    static_assert(N == 4 || N == 8 || N == 16, "async copies move 4, 8 or 16 bytes");
    host::check_alignment(shared, N, location);
    host::check_alignment(global, N, location);
    // Touched inline, so that a sanitizer names this line.
    if (valid) (void)*static_cast<const volatile char*>(global);
    if (valid) (void)*(static_cast<const volatile char*>(global) + N - 1);
    host::runtime->copy_async(shared, valid ? global : nullptr, N, location);
}
template <int N>
DEVICE void copy_async(void* shared, const void* global, LoadPolicy, HOST_LOCATION) {
    static_assert(N == 16, "policies are for loads of 16 bytes");
    copy_async<N>(shared, global, true, location);
}
// Copies the first `bytes` (0 to 16) of 16 bytes and zero-fills the rest, which is not read.
template <int kL2Prefetch = 0>
DEVICE void copy_async_part(void* shared, const void* global, int bytes, HOST_LOCATION) {
    // Checked for 0 bytes too: a GPU issues the instruction with this address.
    host::check_alignment(shared, 16, location);
    host::check_alignment(global, 16, location);
    if (bytes > 0) {
        // Touched inline, so that a sanitizer names this line.
        (void)*static_cast<const volatile char*>(global);
        (void)*(static_cast<const volatile char*>(global) + bytes - 1);
        host::runtime->copy_async(shared, global, bytes, location);
    }
    if (bytes < 16)
        host::runtime->copy_async(static_cast<char*>(shared) + bytes, nullptr, 16 - bytes,
                                  location);
}
DEVICE void copy_async_commit() { host::runtime->copy_async_commit(); }
template <int N>
DEVICE void copy_async_wait() {
    host::runtime->copy_async_wait(N);
}

// --- clusters --------------------------------------------------------------------------------
DEVICE int cluster_rank() { return host::runtime->thread()->block->rank; }
DEVICE void cluster_arrive(HOST_LOCATION) { host::runtime->cluster_arrive(location); }
DEVICE void cluster_arrive_relaxed(HOST_LOCATION) { host::runtime->cluster_arrive(location); }
DEVICE void cluster_wait(HOST_LOCATION) { host::runtime->cluster_wait(location); }
template <class T>
DEVICE T* cluster_shared(T* shared, int rank, HOST_LOCATION) {
    return static_cast<T*>(host::runtime->cluster_shared(shared, rank, location));
}

// --- matrices --------------------------------------------------------------------------------
#include "platform/host/mma.cuh"

#include "platform/host/hopper.cuh"
