// Fibers, barriers, blocks and clusters: a worker's part of the GPU.
#pragma once
#include "platform/host/fiber.h"
#include "platform/host/interface.h"

namespace host {
namespace {

struct Block;
struct Fiber;
struct Warpgroup;

enum Scope { kWarp, kWarpgroup, kBlock, kCluster, kPhase, kStores };

// A barrier.  location: the first arrival's.
struct Barrier {
    Scope scope;
    int arrived, expected;
    const char* primitive;
    Location location;
    Combine combine;
    unsigned phase;
    TSAN(long long
             sync[2];)  // per phase, so that early arrivals at the next one do not order this one
};

struct Warp {
    Barrier barrier;
    Fiber* lanes;
    int num_lanes;
    int num_ready;  // in `ready`, for the sticky schedule
    Fiber* ready[64];
};

// An mbarrier.  location: of its initialisation; arrived, expected: arrivals in this phase.
struct PhaseBarrier : Barrier {
    const void* address;
    Block* owner;
    long long bytes;  // expected and not arrived; negative: arrived and not expected
};

// A TMA transfer, asynchronous store or wgmma in flight.  A TMA store is kRead, then kWrite.
struct Transfer {
    enum Kind { kLoad, kRead, kWrite, kWord, kBulk, kProducts } kind;
    Fiber* issuer;
    Location location;
    TensorMap map;
    int at[5];
    char* shared;  // a store's source, else the destination
    Block* block;  // owner of that shared memory
    PhaseBarrier* barrier;
    int bytes;
    int group;             // of the issuer's stores
    char* data;            // copy of a store's source when issued, or store_async's value
    const char* global;    // a bulk copy's source
    Warpgroup* warpgroup;  // a wgmma's
    void (*finish)(Warpgroup&);
};

// The last store_matrix to 16 bytes of shared memory: its thread and the thread's proxy fences by
// then.
struct StoredChunk {
    const Fiber* by;
    int num_proxy_fences;
};

struct Copy {
    char* shared;
    const char* global;  // null: zeros
    int bytes;
    int group;
};

struct Fiber : ThreadView {
    Context context;
    Block* owner;
    Warp* warp;
    int index;  // in the block
    bool done;
    const Barrier* waiting_for;  // null: ready, running or done
    const char* primitive;
    Location location;
    void* payload;
    bool arrived_at_cluster;
    unsigned cluster_phase;
    int num_groups, num_copies, copy_capacity;
    Copy* copies;
    int parity;  // parity of the awaited phase
    int num_store_groups;
    int num_wgmma_groups;
    bool wgmma_fenced;
    int num_proxy_fences;
    bool waited_for_grid;
};

constexpr int kNumBarriers = 16;  // sync_block's and the named barriers

struct Block : BlockView {
    Barrier barriers[kNumBarriers];
    Fiber* threads;
    char* shared;  // static arrays; from kDynamicOffset on the dynamic struct
    bool started;
    int live;
};

constexpr int kMaxClusterSize = 16;
constexpr int kMaxThreads = 1024;
constexpr int kMaxArrays = 64;
constexpr int kMaxPhaseBarriers = 1024;    // per cluster
constexpr size_t kStaticBytes = 48 << 10;  // as on CUDA
constexpr size_t kDynamicOffset = kStaticBytes + 2 * kRedzone * kMaxArrays;

struct Cluster {
    int size, num_threads, warp_size, warps_per_block;
    Block blocks[kMaxClusterSize];
    Fiber* fibers;
    Warp* warps;
    Barrier barrier;
    Barrier previous_grid;
    int live;
    PhaseBarrier* phase_barriers;  // allocated at first use
    int num_phase_barriers;
    Transfer* transfers;
    int num_transfers, transfer_capacity;
    Barrier stores;       // waiters for stores
    StoredChunk* stored;  // of all shared memory; made by the first store_matrix
    bool has_stored;
    Warpgroup* warpgroups;  // made by the first wgmma
    // Static arrays seen so far have the same offsets in all blocks.
    const SharedArray* arrays[kMaxArrays];
    size_t offsets[kMaxArrays];
    int num_arrays;
    size_t static_bytes, dynamic_bytes;

    int num_fibers() const { return size * num_threads; }
    int num_warps() const { return size * warps_per_block; }
};

}  // namespace
}  // namespace host
