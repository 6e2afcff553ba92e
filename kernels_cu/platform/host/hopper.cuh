// Hopper's primitives on the host (semantics: cuda/hopper.cuh).
//
// The destination of a transfer is poison (0xff) until delivery (transfers.h), which is as late
// as possible.  Shared memory that a transfer or wgmma reads must not change until the wait.
#pragma once
#define GRID_CONSTANT const

namespace hopper {
DEVICE unsigned shared_address(const void* p) { return host::runtime->shared_address(p); }
}  // namespace hopper

// --- barriers in shared memory ---------------------------------------------------------------
constexpr bool kEveryThreadArrives = false;
struct alignas(8) Barrier {
    uint64_t state;

    DEVICE void init(int count, HOST_LOCATION) { init(count, 1, location); }
    DEVICE void init(int count, int, HOST_LOCATION) {
        host::overwrite(this, 8);
        host::runtime->barrier_init(this, count, location);
    }
    DEVICE void arrive(HOST_LOCATION) { arrive_expect_tx(0, location); }
    template <int kThreads>
    DEVICE void arrive_for(HOST_LOCATION) {
        if (threadIdx.x % kThreads == 0) arrive(location);
    }
    DEVICE void arrive_remote(int rank, HOST_LOCATION) {
        host::runtime->barrier_arrive(cluster_shared(this, rank, location), 0, location);
    }
    DEVICE void release_remote(int rank, HOST_LOCATION) { arrive_remote(rank, location); }
    DEVICE void arrive_expect_tx(int bytes, HOST_LOCATION) {
        host::touch(this, 8);
        host::runtime->barrier_arrive(this, bytes, location);
    }
    DEVICE void wait(int parity, HOST_LOCATION) {
        host::touch(this, 8);
        host::runtime->barrier_wait(this, parity, location);
    }
    DEVICE void wait_cluster(int parity, HOST_LOCATION) { wait(parity, location); }
};

DEVICE void fence_barrier_init() {}
DEVICE void fence_async_proxy() { host::runtime->fence_async_proxy(); }

template <class T>
DEVICE void store_async(T* shared, const T& value, Barrier& barrier, int rank, HOST_LOCATION) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "4, 8 or 16 bytes");
    T* remote = cluster_shared(shared, rank, location);
    host::check_alignment(remote, sizeof(T), location);
    host::overwrite(remote, sizeof(T));
    host::runtime->store_async(remote, &value, sizeof(T), cluster_shared(&barrier, rank, location),
                               location);
}

// --- bulk copies -----------------------------------------------------------------------------
DEVICE void bulk_load(void* shared, const void* global, int bytes, Barrier& to, HOST_LOCATION) {
    host::runtime->bulk_check(shared, global, bytes, &to, location);
    host::touch(global, bytes);
    host::overwrite(shared, bytes);
    host::runtime->bulk_load(shared, global, bytes, &to, location);
}
DEVICE void bulk_load(void* shared, const void* global, int bytes, Barrier& to, LoadPolicy,
                      HOST_LOCATION) {
    bulk_load(shared, global, bytes, to, location);
}

// --- TMA -------------------------------------------------------------------------------------
using TensorMap = host::TensorMap;
enum CacheHint { kEvictNormal, kEvictFirst, kEvictLast };

DEVICE void prefetch(const void*) {}
DEVICE void prefetch_tensor_map(const TensorMap&) {}
template <CacheHint kHint = kEvictNormal, int kRank>
DEVICE void tma_prefetch(const TensorMap&, const int (&)[kRank]) {}

template <CacheHint kHint = kEvictNormal, int kRank>
DEVICE void tma_load_multicast(void* shared, const TensorMap& map, Barrier& to,
                               const int (&at)[kRank], int ranks, HOST_LOCATION) {
    host::runtime->tma_check(&map, at, kRank, shared, false, location);
    for (int rank = 0; rank < 16; ++rank) {
        if (!(ranks >> rank & 1)) continue;
        host::overwrite(cluster_shared(shared, rank, location), map.box_bytes());
    }
    host::runtime->tma_load(&map, at, shared, &to, ranks, location);
}
template <CacheHint kHint = kEvictNormal, int kRank>
DEVICE void tma_load(void* shared, const TensorMap& map, Barrier& to, const int (&at)[kRank],
                     HOST_LOCATION) {
    tma_load_multicast<kHint>(shared, map, to, at, 1 << cluster_rank(), location);
}
template <CacheHint kHint = kEvictNormal, int kRank>
DEVICE void tma_store(const TensorMap& map, const void* shared, const int (&at)[kRank],
                      HOST_LOCATION) {
    host::runtime->tma_check(&map, at, kRank, shared, true, location);
    host::touch(shared, map.box_bytes());
    host::runtime->tma_store(&map, at, shared, location);
}
DEVICE void tma_store_commit() { host::runtime->tma_store_commit(); }
namespace hopper {
DEVICE void tma_store_wait(int groups, bool read, host::Location location) {
    int bytes;
    for (int i = 0; const void* p = host::runtime->tma_store_source(groups, i, &bytes); ++i) {
        host::touch(p, bytes);
    }
    host::runtime->tma_store_wait(groups, read, location);
}
}  // namespace hopper
template <int N>
DEVICE void tma_store_wait_read(HOST_LOCATION) {
    hopper::tma_store_wait(N, true, location);
}
template <int N>
DEVICE void tma_store_wait(HOST_LOCATION) {
    hopper::tma_store_wait(N, false, location);
}

// --- warps -----------------------------------------------------------------------------------
// Elects the last lane, so that kernels that rely on the first lane fail.
DEVICE bool elect_one(HOST_LOCATION) {
    return host::shuffle_from("elect_one", lane_id(), kWarpSize - 1, location) == lane_id();
}
template <int N>
DEVICE void increase_registers() {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "a multiple of 8 from 24 to 256");
}
template <int N>
DEVICE void decrease_registers() {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "a multiple of 8 from 24 to 256");
}

// --- 8 x 8 matrices of 16-bit elements: the inverse of load_matrix ----------------------------
template <bool kTransposed = false, int kCount>
DEVICE void store_matrix(void* row, const uint32_t (&r)[kCount], HOST_LOCATION) {
    static_assert(kCount == 1 || kCount == 2 || kCount == 4, "1, 2 or 4 matrices");
    const bool has_row = lane_id() % 32 < 8 * kCount;
    if (has_row) host::check_alignment(row, 16, location);
    if (has_row) host::overwrite(row, 16);
    if (has_row) host::runtime->matrix_stored(row);
    host::MoveMatrix mine{true, kTransposed, kCount, (uint16_t*)row, (uint32_t*)r};
    host::runtime->move_matrix(&mine, location);
}
