// What a host kernel and host_runtime.cpp share.  Kernels include no system header, nor does this.
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

// A line of a kernel, for messages.
struct Location {
    const char* file;
    int line;
};

// One SHARED(...): a static array of every block.  Its own address tells it from all others.
struct SharedArray {
    unsigned size, alignment;
    Location location;
};

// An array and the box of it that TMA moves; dimensions from the innermost on.  The layout is that
// of cupykern/targets/tensor_map.py.
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

// One lane's part of the products of all pairs of `counts` fragments of A and of B (mma_host.cuh).
// A fragment is 16 rows of A or columns of B by 32 bytes of k: the lane has row (column) lane % 16,
// and the lane / 16-th of as many parts of k as there are such lanes.  sums: float or int.
struct Mma {
    ElementType types[2];
    int counts[2];
    const void* fragments[2];
    void* accumulators;
};
constexpr int kMaxFragments = 16;
// Where a lane's i-th of the 16 x 16 sums stands: as mma.sync has it in a warp of 32, as MFMA has
// it in one of 64.
constexpr int accumulator_row(int lanes, int lane, int i) {
    return lanes == 32 ? lane / 4 + i % 4 / 2 * 8 : lane / 16 * 4 + i;
}
constexpr int accumulator_col(int lanes, int lane, int i) {
    return lanes == 32 ? i / 4 * 8 + lane % 4 * 2 + i % 2 : lane % 16;
}

// One lane's part of `count` matrices of 8 x 8 numbers of 16 bits.
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

// What the last lane to arrive does for its warp.  payloads[i]: what lane i left; null: no such
// lane.
using Combine = void (*)(void** payloads);

// The runtime's functions.  A kernel's module gets the table when it is loaded, so that two
// runtimes (with and without a sanitizer) never mix up their symbols.
struct Runtime {
    // The same for the whole life of a thread, so calls may be merged.
    const ThreadView* (*thread)() __attribute__((const));
    void (*sync_block)(Location);
    void (*sync_warp)(Location);
    void (*named_barrier)(int id, int count, Location);
    void (*exchange)(const char* word, void* payload, Combine, Location);
    void (*mma)(Mma*, Location);
    void (*move_matrix)(MoveMatrix*, Location);
    void (*cluster_arrive)(Location);
    void (*cluster_wait)(Location);
    void (*yield)();
    void* (*shared)(const SharedArray*);
    void* (*dynamic_shared)(unsigned size, Location);
    void* (*cluster_shared)(const void* shared, int rank, Location);
    void (*copy_async)(void* shared, const void* global, int bytes);  // global null: zeros
    void (*copy_async_commit)();
    void (*copy_async_wait)(int groups);
    // Hopper.  A transfer's destination is poisoned by the caller.
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
    // The i-th source that the wait is for; null: no more.
    const void* (*tma_store_source)(int groups, int i, int* bytes);
    void (*tma_store_wait)(int groups, bool read, Location);
    unsigned (*shared_address)(const void* shared);
    void (*matrix_stored)(const void* line);  // 16 bytes of shared memory, by this thread itself
    void (*fence_async_proxy)();
    void (*wgmma_fence)();
    void (*wgmma)(const Wgmma*, Location);
    void (*wgmma_commit)();
    void (*wgmma_wait)(int groups, Location);
    bool (*wgmma_under_way)(const void* d);
    // The i-th 16 bytes that this thread answers for, of `op` or (null) of what the wait is for.
    const void* (*wgmma_source)(const Wgmma* op, int groups, int i);
    void (*fail)(const char* message, Location) __attribute__((noreturn));
};

using Entry = void (*)(void* const* args);

}  // namespace host
