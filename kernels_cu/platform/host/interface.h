// The interface between host kernels and runtime.cpp.  Kernels include no system headers, so this
// header includes none.
#pragma once
namespace host {

struct Dim3 { unsigned x, y, z; };
struct BlockView {
    Dim3 block_index, block_dim, grid_dim;
    int rank;  // in its cluster
};
struct ThreadView {
    Dim3 thread_index;
    int lane;
    const BlockView* block;
};

// A source location, for messages.
struct Location {
    const char* file;
    int line;
};

// One SHARED(...): a static array of every block, identified by the address of this struct.
struct SharedArray {
    unsigned size, alignment;
    Location location;
};

// An array and the box that TMA moves.  Dimensions start at the innermost.
struct TensorMap {
    unsigned long long magic, address;
    unsigned long long shape[5], strides[4];  // elements; bytes, from the second dimension on
    unsigned short box[5];
    unsigned char rank, item_bytes, swizzle_bytes;
    unsigned char unused[25];

    int box_bytes() const {
        int bytes = item_bytes;
        for (int d = 0; d < rank; ++d) bytes *= box[d];
        return bytes;
    }
};
static_assert(sizeof(TensorMap) == 128, "as on CUDA");
constexpr unsigned long long kTensorMapMagic = 0x70614d726f736e54;

enum ElementType { kHalf, kBf16, kE4m3, kE5m2, kInt8 };

// One lane's part of mma over all pairs of `counts` fragments of A and B (mma.cuh).  A fragment is
// 16 rows of A or columns of B x 32 bytes of k: the lane has row (column) lane % 16 and part
// lane / 16 of k.  accumulators: float or int.
struct Mma {
    ElementType types[2];
    int counts[2];
    const void* fragments[2];
    void* accumulators;
};
constexpr int kMaxFragments = 16;
// Position of a lane's i-th value in a 16 x 16 accumulator: mma.sync's with 32 lanes, MFMA's with
// 64.
constexpr int accumulator_row(int lanes, int lane, int i) {
    return lanes == 32 ? lane / 4 + i % 4 / 2 * 8 : lane / 16 * 4 + i;
}
constexpr int accumulator_col(int lanes, int lane, int i) {
    return lanes == 32 ? i / 4 * 8 + lane % 4 * 2 + i % 2 : lane % 16;
}

// One lane's part of `count` 8 x 8 matrices of 16-bit elements.
struct MoveMatrix {
    bool store, transposed;
    int count;
    unsigned short* row;
    unsigned* registers;
};

// One thread's part of a wgmma.  tiles: descriptors of A and B.
struct Wgmma {
    ElementType types[2];
    bool mn_major[2];
    int n, accumulate;
    unsigned long long tiles[2];
    const unsigned* a_registers;  // null: A is in shared memory
    void* d;
};

// Run by the last lane to arrive, for its warp.  payloads[i]: lane i's; null: no such lane.
using Combine = void (*)(void** payloads);

// The runtime's functions.  A kernel's module gets the table when loaded, so that two runtimes
// (with and without a sanitizer) never mix symbols.
struct Runtime {
    // Constant during a thread's life, so the compiler can merge calls.
    const ThreadView* (*thread)() __attribute__((const));
    void (*wait_for_previous_grid)(Location);
    void (*sync_block)(Location);
    void (*sync_warp)(Location);
    void (*named_barrier)(int id, int count, Location);
    void (*named_barrier_arrive)(int id, int count, Location);
    void (*exchange)(const char* primitive, void* payload, Combine, Location);
    void (*mma)(Mma*, Location);
    void (*move_matrix)(MoveMatrix*, Location);
    void (*cluster_arrive)(Location);
    void (*cluster_wait)(Location);
    void (*yield)();
    void* (*shared)(const SharedArray*);
    void* (*dynamic_shared)(unsigned size, Location);
    void* (*cluster_shared)(const void* shared, int rank, Location);
    // global: null for zeros
    void (*copy_async)(void* shared, const void* global, int bytes, Location);
    void (*copy_async_commit)();
    void (*copy_async_wait)(int groups);
    // Hopper.  The caller poisons a transfer's destination.
    void (*barrier_init)(void* barrier, int count, Location);
    void (*barrier_arrive)(void* barrier, int expected_bytes, Location);
    void (*barrier_wait)(void* barrier, int parity, Location);
    void (*store_async)(void* remote, const void* value, int bytes, void* barrier, Location);
    void (*bulk_check)(const void* shared, const void* global, int bytes, const void* barrier,
                       Location);
    void (*bulk_load)(void* shared, const void* global, int bytes, void* barrier, Location);
    void (*tma_check)(const TensorMap*, const int* at, int num_coordinates, const void* shared,
                      bool store, Location);
    void (*tma_load)(const TensorMap*, const int* at, void* shared, void* barrier, int ranks,
                     Location);
    void (*tma_store)(const TensorMap*, const int* at, const void* shared, Location);
    void (*tma_store_commit)();
    // The i-th source of the awaited stores; null after the last.
    const void* (*tma_store_source)(int groups, int i, int* bytes);
    void (*tma_store_wait)(int groups, bool read, Location);
    unsigned (*shared_address)(const void* shared);
    void (*matrix_stored)(const void* chunk);  // 16 bytes of shared memory, by this thread
    void (*fence_async_proxy)();
    void (*wgmma_fence)();
    void (*wgmma)(const Wgmma*, Location);
    void (*wgmma_commit)();
    void (*wgmma_wait)(int groups, Location);
    bool (*wgmma_under_way)(const void* d);
    // The i-th 16 bytes that this thread checks for `op` or, if `op` is null, for the wait; null
    // after the last.
    const void* (*wgmma_source)(const Wgmma* op, int groups, int i);
    void (*fail)(const char* message, Location) __attribute__((noreturn));
};

using Entry = void (*)(void* const* args);

}  // namespace host
