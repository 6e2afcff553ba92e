// The host target's GPU: runs each block's threads as fibers of one worker thread, blocks on all
// CPUs.
//
// A fiber runs until it waits; then the schedule picks the next one.  If no fiber can continue, or
// a barrier's threads are at different lines, the launch ends with a message.
#include <stdio.h>
#include <stdlib.h>

#include "platform/host/pool.h"
#include "platform/host/warp_mma.h"

using namespace host;
namespace {

const ThreadView* this_thread() { return worker->current; }

const Runtime kRuntime = {
    this_thread,
    wait_for_previous_grid,
    sync_block,
    sync_warp,
    named_barrier,
    named_barrier_arrive,
    exchange,
    mma,
    move_matrix,
    cluster_arrive,
    cluster_wait,
    yield,
    shared,
    dynamic_shared,
    cluster_shared,
    copy_async,
    copy_async_commit,
    copy_async_wait,
    barrier_init,
    barrier_arrive,
    barrier_wait,
    store_async,
    bulk_check,
    bulk_load,
    tma_check,
    tma_load,
    tma_store,
    tma_store_commit,
    tma_store_source,
    tma_store_wait,
    shared_address,
    matrix_stored,
    fence_async_proxy,
    wgmma_fence,
    wgmma,
    wgmma_commit,
    wgmma_wait,
    wgmma_under_way,
    wgmma_source,
    fail_at,
};

}  // namespace

// --- called by cupykern/targets/host.py ------------------------------------------------------
#pragma GCC visibility push(default)
extern "C" {
const void* host_runtime() { return &kRuntime; }

Launch* host_create(void* entry, int num_threads, int cluster_size, int warp_size, int order,
                    unsigned long long seed, int overlaps, int shared_bytes, int grid, void** args,
                    LateArray* late, int num_late) {
    Launch* launch = static_cast<Launch*>(calloc(1, sizeof(Launch)));
    launch->entry = reinterpret_cast<Entry>(entry);
    launch->args = args;
    launch->grid = grid;
    launch->num_threads = num_threads;
    launch->cluster_size = cluster_size;
    launch->shared_bytes = unsigned(shared_bytes);
    launch->warp_size = warp_size;
    launch->order = order;
    launch->seed = seed;
    launch->overlaps = overlaps != 0;
    launch->late = late;
    launch->num_late = num_late;
    return launch;
}

// Starts the launch, if not started, and waits; returns 0 if it is unfinished after `milliseconds`.
int host_run(Launch* launch, int milliseconds) {
    Pool& pool = Pool::get();
    if (!launch->submitted) pool.submit(launch);
    return pool.wait(launch, milliseconds);
}

// Ends and frees the launch, finished or not; `error` gets its message, or "".
void host_finish(Launch* launch, char* error, int size) {
    if (launch->submitted) Pool::get().cancel(launch);
    snprintf(error, size, "%s", launch->error);
    free(launch);
}
}
#pragma GCC visibility pop
