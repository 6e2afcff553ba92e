// Hopper's primitives on CUDA (sm_90a): mbarriers, TMA, setmaxnreg.  host/hopper.cuh has the same
// interface; tests/platform/test_hopper_words.py and test_tensor_maps.py check both.  wgmma.cuh has
// the matrix products.
#pragma once

// `GRID_CONSTANT TensorMap map`: a kernel parameter by value that has an address.
#define GRID_CONSTANT const __grid_constant__

namespace hopper {
DEVICE uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// Address of the same variable in block `rank`.
DEVICE uint32_t cluster_address(const void* p, int rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
    return address;
}
}  // namespace hopper

// --- barriers in shared memory (mbarrier) ----------------------------------------------------
// A phase completes after `count` arrivals and all expected bytes; then the next phase begins.
// Phases have parity 0, 1, 0, ...  wait(parity) returns when the last phase of that parity is
// complete; on a fresh barrier, wait(1) returns at once.
//
// EVERY_THREAD_ARRIVES: for compute-sanitizer's racecheck, which does not see that accesses before
// sync_warp or wgmma happen before the arrival of one thread.
#ifdef EVERY_THREAD_ARRIVES
constexpr bool kEveryThreadArrives = true;
#else
constexpr bool kEveryThreadArrives = false;
#endif
struct alignas(8) Barrier {
    uint64_t state;

    // Called by one thread, before fence_barrier_init() and a block or cluster barrier.  threads:
    // threads per arrival (arrive_for).
    DEVICE void init(int count, int threads = 1) {
        if (kEveryThreadArrives) count *= threads;
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(count)
                     : "memory");
    }
    DEVICE void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
    }
    // Called by a warp or warpgroup that has synchronised since its accesses: one arrival for all.
    template <int kThreads>
    DEVICE void arrive_for() {
        if (kEveryThreadArrives || threadIdx.x % kThreads == 0) arrive();
    }
    // Arrives at the same barrier in block `rank`, which waits with wait_cluster.
    DEVICE void arrive_remote(int rank) {
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                         hopper::cluster_address(this, rank))
                     : "memory");
    }
    // arrive_remote after reads only, to let the data be overwritten.  It releases to its own block
    // only: a release to the cluster would wait for all of the thread's memory accesses.  The other
    // block can use `wait`.
    DEVICE void release_remote(int rank) {
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(
                         hopper::cluster_address(this, rank))
                     : "memory");
    }
    // Arrives, and expects `bytes` more of asynchronous copies.
    DEVICE void arrive_expect_tx(int bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                     "r"(bytes)
                     : "memory");
    }
    DEVICE void wait(int parity) {
        uint32_t done;
        do {
            asm volatile(
                "{\n.reg .pred p;\n"
                "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                "selp.b32 %0, 1, 0, p;\n}"
                : "=r"(done)
                : "r"(address()), "r"(parity)
                : "memory");
        } while (!done);
    }
    // wait that acquires the writes that other blocks of the cluster made before they arrived; it
    // invalidates L1.  Not needed for store_async.
    DEVICE void wait_cluster(int parity) {
        uint32_t done;
        do {
            asm volatile(
                "{\n.reg .pred p;\n"
                "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                "selp.b32 %0, 1, 0, p;\n}"
                : "=r"(done)
                : "r"(address()), "r"(parity)
                : "memory");
        } while (!done);
    }
    DEVICE uint32_t address() const { return hopper::shared_address(this); }
};

// After init: makes the barriers visible to the cluster and to TMA.
DEVICE void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Orders this thread's accesses to shared memory before those of the async proxy (TMA, wgmma) that
// follow the next barrier.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// st.async: stores `value` (4, 8 or 16 bytes) to *shared of block `rank`, and counts its bytes at
// `barrier` there.
template <class T>
DEVICE void store_async(T* shared, const T& value, Barrier& barrier, int rank) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "4, 8 or 16 bytes");
    const uint32_t address = hopper::cluster_address(shared, rank);
    const uint32_t remote_barrier = hopper::cluster_address(&barrier, rank);
    const auto b = bit_cast<Bytes<sizeof(T)>>(value);
    if constexpr (sizeof(T) == 4) {
        asm volatile(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                address),
            "r"(b.words[0]), "r"(remote_barrier)
            : "memory");
    } else if constexpr (sizeof(T) == 8) {
        asm volatile(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::
                "r"(address),
            "r"(b.words[0]), "r"(b.words[1]), "r"(remote_barrier)
            : "memory");
    } else {
        asm volatile(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
            "[%5];" ::"r"(address),
            "r"(b.words[0]), "r"(b.words[1]), "r"(b.words[2]), "r"(b.words[3]), "r"(remote_barrier)
            : "memory");
    }
}

// --- bulk copies -----------------------------------------------------------------------------
// Called by one thread: copies `bytes`, a multiple of 16, from `global` to `shared` (both aligned
// to 16 bytes) and counts them at `to`.
DEVICE void bulk_load(void* shared, const void* global, int bytes, Barrier& to) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(hopper::shared_address(shared)),
        "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(to.address())
        : "memory");
}
DEVICE void bulk_load(void* shared, const void* global, int bytes, Barrier& to, LoadPolicy policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(hopper::shared_address(shared)),
        "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(to.address()), "l"(policy.bits)
        : "memory");
}

// --- TMA -------------------------------------------------------------------------------------
// A tensor map: an array of 1 to 5 dimensions and the box of one TMA instruction, encoded by
// cupykern.targets.tensor_map.  Coordinates are {innermost, ..., outermost}, in elements.  Elements
// out of bounds are read as zero and not written.  The innermost coordinate must be a multiple of
// 16 bytes, and a store's coordinates nonnegative: others are illegal instructions.
struct alignas(64) TensorMap { uint64_t words[16]; };

// L2 cache hints of loads: createpolicy's constants for the whole access.
enum CacheHint : uint64_t {
    kEvictNormal = 0x1000000000000000,
    kEvictFirst = 0x12f0000000000000,
    kEvictLast = 0x14f0000000000000,
};

// Prefetches the cache line at `address` into L2.
DEVICE void prefetch(const void* address) {
    asm volatile("prefetch.L2 [%0];" ::"l"(address) : "memory");
}
DEVICE void prefetch_tensor_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// One instruction per rank: %0 shared memory, %1 tensor map, %2 cache policy, %3 barrier, %4
// multicast mask, then the coordinates.
#define TMA_AT_1 "{%5}"
#define TMA_AT_2 "{%5, %6}"
#define TMA_AT_3 "{%5, %6, %7}"
#define TMA_AT_4 "{%5, %6, %7, %8}"
#define TMA_AT_5 "{%5, %6, %7, %8, %9}"
#define TMA_VALUES_1 "r"(at[0])
#define TMA_VALUES_2 TMA_VALUES_1, "r"(at[1])
#define TMA_VALUES_3 TMA_VALUES_2, "r"(at[2])
#define TMA_VALUES_4 TMA_VALUES_3, "r"(at[3])
#define TMA_VALUES_5 TMA_VALUES_4, "r"(at[4])
#define TMA_OPERANDS(D)                                                       \
    ::"r"(address), "l"(&map), "l"(uint64_t(kHint)), "r"(barrier), "h"(mask), \
        TMA_VALUES_##D : "memory"
#define TMA_LOAD(D)                                                                      \
    asm volatile("cp.async.bulk.tensor." #D                                              \
                 "d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint " \
                 "[%0], [%1, " TMA_AT_##D "], [%3], %2;" TMA_OPERANDS(D))
#define TMA_LOAD_MULTICAST(D)                                                               \
    asm volatile("cp.async.bulk.tensor." #D                                                 \
                 "d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster" \
                 ".L2::cache_hint [%0], [%1, " TMA_AT_##D "], [%3], %4, %2;" TMA_OPERANDS(D))
#define TMA_STORE(D)                                               \
    asm volatile("cp.async.bulk.tensor." #D                        \
                 "d.global.shared::cta.bulk_group.L2::cache_hint " \
                 "[%1, " TMA_AT_##D "], [%0], %2;" TMA_OPERANDS(D))
#define TMA_PREFETCH(D)                                                                            \
    asm volatile("cp.async.bulk.prefetch.tensor." #D "d.L2.global.L2::cache_hint [%1, " TMA_AT_##D \
                 "], %2;" TMA_OPERANDS(D))
#define TMA_BY_RANK(INSTRUCTION)                     \
    static_assert(kRank <= 5, "1 to 5 coordinates"); \
    if constexpr (kRank == 1) INSTRUCTION(1);        \
    if constexpr (kRank == 2) INSTRUCTION(2);        \
    if constexpr (kRank == 3) INSTRUCTION(3);        \
    if constexpr (kRank == 4) INSTRUCTION(4);        \
    if constexpr (kRank == 5) INSTRUCTION(5)

// Called by one thread: TMA load of the box at `at` to `shared` (aligned to 128 bytes; to 1024 with
// the 128-byte swizzle), counted at `to`.
template <CacheHint kHint = kEvictNormal, int kRank>
DEVICE void tma_load(void* shared, const TensorMap& map, Barrier& to, const int (&at)[kRank]) {
    const uint32_t address = hopper::shared_address(shared), barrier = to.address();
    const uint16_t mask = 0;
    TMA_BY_RANK(TMA_LOAD);
}
// tma_load multicast to the blocks whose rank's bit is set in `ranks`, to the same offset and
// barrier in each.
template <CacheHint kHint = kEvictNormal, int kRank>
DEVICE void tma_load_multicast(void* shared, const TensorMap& map, Barrier& to,
                               const int (&at)[kRank], int ranks) {
    const uint32_t address = hopper::shared_address(shared), barrier = to.address();
    const uint16_t mask = uint16_t(ranks);
    TMA_BY_RANK(TMA_LOAD_MULTICAST);
}
// Called by one thread: L2 prefetch of the box at `at`.
template <CacheHint kHint = kEvictNormal, int kRank>
DEVICE void tma_prefetch(const TensorMap& map, const int (&at)[kRank]) {
    const uint32_t address = 0, barrier = 0;
    const uint16_t mask = 0;
    TMA_BY_RANK(TMA_PREFETCH);
}
// Called by one thread, which then commits and waits: TMA store of the box from `shared` to `at`.
template <CacheHint kHint = kEvictNormal, int kRank>
DEVICE void tma_store(const TensorMap& map, const void* shared, const int (&at)[kRank]) {
    const uint32_t address = hopper::shared_address(shared), barrier = 0;
    const uint16_t mask = 0;
    TMA_BY_RANK(TMA_STORE);
}
DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until TMA has read the shared memory of all but this thread's last N committed groups.
// Required for all groups before the thread exits.
template <int N>
DEVICE void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
// Waits until the writes of all but the last N groups are complete.
template <int N>
DEVICE void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// --- warps -----------------------------------------------------------------------------------
// True in one lane of a converged warp, always the same one.
DEVICE bool elect_one() {
    uint32_t elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}"
                 : "=r"(elected));
    return elected != 0;
}
// setmaxnreg, by all warps of a warpgroup: N registers per thread, from the block's pool.
template <int N>
DEVICE void increase_registers() {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "a multiple of 8 from 24 to 256");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
DEVICE void decrease_registers() {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "a multiple of 8 from 24 to 256");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// --- 8 x 8 matrices of 16-bit elements: the inverse of load_matrix ----------------------------
template <bool kTransposed = false, int kCount>
DEVICE void store_matrix(void* row, const uint32_t (&r)[kCount]) {
    const uint32_t address = hopper::shared_address(row);
#define STORE_MATRIX(count, registers, ...)                              \
    if constexpr (kTransposed) {                                         \
        asm volatile("stmatrix.sync.aligned.m8n8." count                 \
                     ".trans.shared.b16 [%0], " registers::"r"(address), \
                     __VA_ARGS__                                         \
                     : "memory");                                        \
    } else {                                                             \
        asm volatile("stmatrix.sync.aligned.m8n8." count                 \
                     ".shared.b16 [%0], " registers::"r"(address),       \
                     __VA_ARGS__                                         \
                     : "memory");                                        \
    }
    static_assert(kCount == 1 || kCount == 2 || kCount == 4, "1, 2 or 4 matrices");
    if constexpr (kCount == 1) {
        STORE_MATRIX("x1", "{%1};", "r"(r[0]))
    } else if constexpr (kCount == 2) {
        STORE_MATRIX("x2", "{%1, %2};", "r"(r[0]), "r"(r[1]))
    } else {
        STORE_MATRIX("x4", "{%1, %2, %3, %4};", "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]))
    }
}
