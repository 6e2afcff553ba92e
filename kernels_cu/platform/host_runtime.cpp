// The host target's GPU: runs each block's threads as fibers of one worker thread, blocks on all
// CPUs.
//
// A fiber runs until it waits; then the schedule picks the next one.  If no fiber can continue, or
// a barrier's threads are at different lines, the launch ends with a message.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "platform/host_runtime.h"
#define DEVICE inline
#include "platform/common.cuh"
#include "platform/numbers.cuh"
using namespace host;
namespace {
#include "platform/host_fiber.h"
#include "platform/host_block.h"
#include "platform/host_report.h"
#include "platform/host_pool.h"

// --- one CPU's worker ------------------------------------------------------------------------
struct Worker {
    Context context;
    Fiber* current;
    Launch* launch;
    Cluster cluster;
    ReadyList ready;
    bool broken;  // fibers were abandoned inside a kernel
    int fiber_capacity;
    char* stacks;
    char* shared;
    size_t shared_bytes, shared_capacity;  // of a block, of all
    TSAN(long long start, end;)  // order the clusters that this worker runs, not a cluster's fibers
};

thread_local Worker* worker;

void fiber_main();

// Abandons the cluster; the worker continues.
[[noreturn]] void abandon() {
    worker->broken = true;
    while (unobserved_depth > 0) end_unobserved();
    switch_context(worker->current->context, worker->context);
    __builtin_unreachable();
}

// Reports an error of `fiber` at `location`.
[[noreturn]] void fail_of(const Fiber& fiber, const char* message, Location location) {
    char text[512];
    snprintf(text, sizeof(text), "%s:%d: %s (block %u, thread %d)", location.file, location.line,
             message, fiber.owner->block_index.x, fiber.index);
    worker->launch->fail(text);
    abandon();
}

__attribute__((noreturn)) void fail_at(const char* message, Location location) {
    fail_of(*worker->current, message, location);
}

[[noreturn]] void fail_diverged(const Barrier* barrier) {
    char text[sizeof(Launch::error)];
    describe_divergence(Text(text, sizeof(text)), worker->cluster, *barrier);
    worker->launch->fail(text);
    abandon();
}

[[noreturn]] void fail_stalled() {
    const Cluster& c = worker->cluster;
    if (!waits_at_phase(c)) fail_diverged(narrowest_barrier(c));
    char text[sizeof(Launch::error)];
    describe_stall(Text(text, sizeof(text)), c);
    worker->launch->fail(text);
    abandon();
}

bool deliver_one();
void deliver_at_random();

void switch_to_next() {
    Worker& w = *worker;
    if (w.launch->stopped()) abandon();
    if (w.cluster.num_transfers > 0) deliver_at_random();
    Fiber* next = w.ready.pop();
    while (!next) {
        if (!deliver_one()) fail_stalled();
        next = w.ready.pop();
    }
    Fiber* self = w.current;
    w.current = next;
    if (next != self) switch_context(self->context, next->context);
}

void wait_for(Fiber* self, const Barrier& barrier, const char* primitive, Location location) {
    self->waiting_for = &barrier;
    self->primitive = primitive;
    self->location = location;
    switch_to_next();
}

// Yields; returns when the schedule picks this fiber.
void yield() {
    worker->ready.push(worker->current);
    switch_to_next();
}

void wake(const Barrier& barrier, Fiber* fibers, int count) {
    for (int i = 0; i < count; ++i) {
        if (fibers[i].waiting_for != &barrier) continue;
        fibers[i].waiting_for = nullptr;
        worker->ready.push(&fibers[i]);
    }
}

#include "platform/host_barriers.h"
#include "platform/host_previous_grid.h"
#include "platform/host_memory.h"
#include "platform/host_mma.h"
#include "platform/host_hopper.h"
#include "platform/host_wgmma.h"

// --- fibers ----------------------------------------------------------------------------------
const ThreadView* this_thread() { return worker->current; }

const Runtime kRuntime = {
    this_thread,
    wait_for_previous_grid,
    sync_block,
    sync_warp,
    named_barrier,
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

// A fiber runs one thread of the kernel after the other.
void fiber_main() {
    enter_context();
    for (;;) {
        TSAN(__tsan_acquire(&worker->start));
        Block& block = *worker->current->owner;
        if (!block.started) {  // discards earlier contents
            block.started = true;
            poison_block(block);
        }
        worker->launch->entry(worker->launch->args);

        Fiber& self = *worker->current;
        TSAN(__tsan_release(&worker->end));
        if (stack_overflowed(self.context)) {
            fail_at("the thread's stack overflowed", {"host_runtime", 0});
        }
        check_waited_for_grid("the thread ended without wait_for_previous_grid",
                              {"host_runtime", 0});
        check_thread_end(self);
        check_wgmma_end(self);
        self.done = true;
        // The shared memory of an exited block is invalid.
        if (--self.owner->live == 0) {
            check_block_end(*self.owner);
            poison_block(*self.owner);
        }
        if (--worker->cluster.live == 0) {
            while (deliver_one()) {
            }  // stores
            switch_context(self.context, worker->context);
        } else {
            switch_to_next();
        }
    }
}

#include "platform/host_cluster.h"

}  // namespace

// --- what cupykern/targets/host.py calls -----------------------------------------------------
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

// Starts the launch, if not started, and waits; 0: not finished after `milliseconds`.
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
