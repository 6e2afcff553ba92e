// What a host kernel and host_runtime.cpp share.  Kernels include no system header, nor does this.
namespace host {

struct Dim3 {
    unsigned x, y, z;
};
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
struct Place {
    const char* file;
    int line;
};

// One SHARED(...): a static array of every block.  Its own address tells it from all others.
struct SharedArray {
    unsigned size, alignment;
    Place place;
};

// What the last lane to arrive does for its warp.  payloads[i]: what lane i left; null: no such lane.
using Combine = void (*)(void** payloads);

// The runtime's functions.  A kernel's module gets the table when it is loaded, so that two runtimes
// (with and without a sanitizer) never mix up their symbols.
struct Runtime {
    // The same for the whole life of a thread, so calls may be merged.
    const ThreadView* (*thread)() __attribute__((const));
    void (*sync_block)(Place);
    void (*sync_warp)(Place);
    void (*named_barrier)(int id, int count, Place);
    void (*exchange)(const char* word, void* payload, Combine, Place);
    void (*cluster_arrive)(Place);
    void (*cluster_wait)(Place);
    void* (*shared)(const SharedArray*);
    void* (*dynamic_shared)(unsigned size, Place);
    void* (*cluster_shared)(const void* shared, int rank, Place);
    void (*copy_async)(void* shared, const void* global, int bytes);  // global null: zeros
    void (*copy_async_commit)();
    void (*copy_async_wait)(int groups);
    void (*fail)(const char* message, Place) __attribute__((noreturn));
};

using Entry = void (*)(void* const* args);

}  // namespace host
