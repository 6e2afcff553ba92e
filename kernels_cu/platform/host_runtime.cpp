// The host's GPU: runs each block's threads as fibers of one worker thread, blocks on all CPUs.
//
// A fiber runs until it waits for others; then the schedule says who is next.  When nobody can go
// on, or a barrier's threads are at different lines, the launch ends with a message that says
// where.
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
#include <new>

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
    bool broken;  // fibers were left in the middle of a kernel
    int fiber_capacity;
    char* stacks;
    char* shared;
    size_t shared_bytes, shared_capacity;  // of a block, of all
    TSAN(long long start, end;)  // order the clusters that this worker runs, not a cluster's fibers
};

thread_local Worker* worker;

void fiber_main();

// Leaves the cluster where it stands: the worker goes on.
[[noreturn]] void abandon() {
    worker->broken = true;
    while (unobserved_depth > 0) end_unobserved();
    switch_context(worker->current->context, worker->context);
    __builtin_unreachable();
}

// What `fiber` did at `place` is wrong.
[[noreturn]] void fail_of(const Fiber& fiber, const char* message, Place place) {
    char text[512];
    snprintf(text, sizeof(text), "%s:%d: %s (block %u, thread %d)", place.file, place.line, message,
             fiber.owner->block_index.x, fiber.index);
    worker->launch->fail(text);
    abandon();
}

__attribute__((noreturn)) void fail_at(const char* message, Place place) {
    fail_of(*worker->current, message, place);
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

void wait_for(Fiber* self, const Barrier& barrier, const char* word, Place place) {
    self->waiting_for = &barrier;
    self->word = word;
    self->place = place;
    switch_to_next();
}

void wake(const Barrier& barrier, Fiber* fibers, int count) {
    for (int i = 0; i < count; ++i) {
        if (fibers[i].waiting_for != &barrier) continue;
        fibers[i].waiting_for = nullptr;
        worker->ready.push(&fibers[i]);
    }
}

// --- barriers --------------------------------------------------------------------------------
// Returns when `expected` of the fibers in [fibers, fibers + count) are here.  The last to arrive
// combines their payloads, if they exchange any, and goes on at once.
void meet(Barrier& b, Fiber* fibers, int count, int expected, const char* word, Place place,
          bool one_line, bool orders_memory = true, Combine combine = nullptr) {
    Fiber* self = worker->current;
    if (b.arrived == 0) {
        b.expected = expected;
        b.word = word;
        b.place = place;
        b.combine = combine;
    } else if (expected != b.expected) {
        fail_at("named_barrier: its threads differ in the count", place);
    } else if (one_line && !(same_place(place, b.place) && combine == b.combine)) {
        self->waiting_for = &b;
        self->word = word;
        self->place = place;
        fail_diverged(&b);
    }
    TSAN(long long* sync = &b.sync[b.phase % 2]; if (orders_memory) __tsan_release(sync));
    if (++b.arrived < expected) {
        wait_for(self, b, word, place);
    } else {
        // Who waits asks this too, but where one thread is all of them, nobody waits.
        if (worker->launch->stopped()) abandon();
        if (combine) {
            void* payloads[128] = {};
            for (int i = 0; i < count; ++i) payloads[i] = fibers[i].payload;
            Unobserved unobserved;
            combine(payloads);
        }
        b.arrived = 0;
        ++b.phase;
        wake(b, fibers, count);
    }
    TSAN(if (orders_memory) __tsan_acquire(sync));
}

void sync_block(Place place) {
    Block& block = *worker->current->owner;
    const int count = worker->cluster.num_threads;
    meet(block.barriers[0], block.threads, count, count, "sync_block", place, true);
}

void sync_warp(Place place) {
    Warp& warp = *worker->current->warp;
    meet(warp.barrier, warp.lanes, warp.num_lanes, warp.num_lanes, "sync_warp", place, true);
}

void named_barrier(int id, int count, Place place) {
    Cluster& cluster = worker->cluster;
    if (id < 1 || id >= kNumBarriers) fail_at("named_barrier: the id is not in 1 to 15", place);
    if (count < 1 || count > cluster.num_threads || count % cluster.warp_size != 0) {
        fail_at("named_barrier: the count is not that of some whole warps of the block", place);
    }
    Block& block = *worker->current->owner;
    meet(block.barriers[id], block.threads, cluster.num_threads, count, "named_barrier", place,
         false);
}

void exchange(const char* word, void* payload, Combine combine, Place place) {
    Warp& warp = *worker->current->warp;
    worker->current->payload = payload;
    // Like a GPU's, an exchange orders no memory.
    meet(warp.barrier, warp.lanes, warp.num_lanes, warp.num_lanes, word, place, true, false,
         combine);
}

void cluster_arrive(Place place) {
    Fiber* self = worker->current;
    Cluster& cluster = worker->cluster;
    Barrier& b = cluster.barrier;
    if (self->arrived_at_cluster) fail_at("cluster_arrive twice without cluster_wait", place);
    self->arrived_at_cluster = true;
    self->cluster_phase = b.phase;
    TSAN(__tsan_release(&b.sync[b.phase % 2]));
    if (++b.arrived < b.expected) return;
    b.arrived = 0;
    ++b.phase;
    wake(b, cluster.fibers, cluster.num_fibers());
}

void wait_for_cluster(const char* word, Place place) {
    Fiber* self = worker->current;
    Barrier& b = worker->cluster.barrier;
    if (b.phase == self->cluster_phase) {
        b.place = place;
        wait_for(self, b, word, place);
    }
    self->arrived_at_cluster = false;
    TSAN(__tsan_acquire(&b.sync[self->cluster_phase % 2]));
}

void cluster_wait(Place place) {
    if (!worker->current->arrived_at_cluster) {
        fail_at("cluster_wait without cluster_arrive", place);
    }
    wait_for_cluster("cluster_wait", place);
}

// The blocks of a cooperative launch are one cluster.
void sync_grid(Place place) {
    if (worker->cluster.size != worker->launch->grid) {
        fail_at("sync_grid: the launch is not a cooperative one", place);
    }
    cluster_arrive(place);
    wait_for_cluster("sync_grid", place);
}

// --- shared memory ---------------------------------------------------------------------------
void poison(void* p, size_t bytes) {
    Unobserved unobserved;
    memset(p, 0xff, bytes);
}

// The variable of a SHARED, the same for all threads of the block.
void* shared(const SharedArray* array) {
    Cluster& c = worker->cluster;
    char* mine = worker->current->owner->shared;
    for (int i = 0; i < c.num_arrays; ++i) {
        if (c.arrays[i] == array) return mine + c.offsets[i];
    }
    const size_t alignment = array->alignment > 16 ? array->alignment : 16;
    const size_t offset = (c.static_bytes + kRedzone + alignment - 1) / alignment * alignment;
    c.static_bytes = offset + array->size + kRedzone;
    if (c.num_arrays == kMaxArrays || c.static_bytes > kDynamicOffset) {
        fail_at("static shared memory ends at 48 KB and 64 arrays", array->place);
    }
    c.arrays[c.num_arrays] = array;
    c.offsets[c.num_arrays++] = offset;
    for (int i = 0; i < c.size; ++i) {
        ASAN(__asan_unpoison_memory_region(c.blocks[i].shared + offset, array->size));
        poison(c.blocks[i].shared + offset, array->size);
    }
    return mine + offset;
}

void* dynamic_shared(unsigned size, Place place) {
    if (size > worker->cluster.dynamic_bytes) {
        fail_at("SHARED_STORAGE is larger than the launch's dynamic shared memory", place);
    }
    return worker->current->owner->shared + kDynamicOffset;
}

void* cluster_shared(const void* pointer, int rank, Place place) {
    Cluster& c = worker->cluster;
    const size_t offset = static_cast<const char*>(pointer) - worker->current->owner->shared;
    if (rank < 0 || rank >= c.size) fail_at("cluster_shared: no such rank", place);
    if (offset >= worker->shared_bytes) fail_at("cluster_shared: not in shared memory", place);
    return c.blocks[rank].shared + offset;
}

// Every byte that the block's kernel may use.
void poison_block(Block& block) {
    const Cluster& c = worker->cluster;
    for (int i = 0; i < c.num_arrays; ++i) poison(block.shared + c.offsets[i], c.arrays[i]->size);
    poison(block.shared + kDynamicOffset, c.dynamic_bytes);
}

// --- async copies ----------------------------------------------------------------------------
void copy_async(void* shared, const void* global, int bytes) {
    Fiber& f = *worker->current;
    memset(shared, 0xff, bytes);
    if (f.num_copies == f.copy_capacity) {
        f.copy_capacity = 2 * f.copy_capacity + 8;
        f.copies = static_cast<Copy*>(realloc(f.copies, f.copy_capacity * sizeof(Copy)));
    }
    f.copies[f.num_copies++] = {static_cast<char*>(shared), static_cast<const char*>(global), bytes,
                                f.num_groups};
}

void copy_async_commit() { ++worker->current->num_groups; }

void copy_async_wait(int groups) {
    Fiber& f = *worker->current;
    int kept = 0;
    for (int i = 0; i < f.num_copies; ++i) {
        const Copy& copy = f.copies[i];
        if (copy.group >= f.num_groups - groups) {
            f.copies[kept++] = copy;
        } else if (copy.global) {
            memcpy(copy.shared, copy.global, copy.bytes);
        } else {
            memset(copy.shared, 0, copy.bytes);
        }
    }
    f.num_copies = kept;
}

void reset_barrier(Barrier& b, Scope scope, int expected) {
    b.scope = scope;
    b.arrived = 0;
    b.expected = expected;
}

#include "platform/host_hopper.h"
#include "platform/host_wgmma.h"

// --- fibers ----------------------------------------------------------------------------------
const ThreadView* this_thread() { return worker->current; }

const Runtime kRuntime = {
    this_thread,
    sync_block,
    sync_warp,
    named_barrier,
    exchange,
    cluster_arrive,
    cluster_wait,
    sync_grid,
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

// A fiber's life: one thread of the kernel after the other.
void fiber_main() {
    enter_context();
    for (;;) {
        TSAN(__tsan_acquire(&worker->start));
        Block& block = *worker->current->owner;
        if (!block.started) {  // what others have written here before is lost
            block.started = true;
            poison_block(block);
        }
        worker->launch->entry(worker->launch->args);

        Fiber& self = *worker->current;
        TSAN(__tsan_release(&worker->end));
        if (stack_overflowed(self.context)) {
            fail_at("the thread's stack overflowed", {"host_runtime", 0});
        }
        check_thread_end(self);
        check_wgmma_end(self);
        self.done = true;
        // The shared memory of a block that has left is nobody's.
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

// --- clusters --------------------------------------------------------------------------------
bool allocate(Worker& w, const Launch& launch) {
    Cluster& c = w.cluster;
    const int num_fibers = launch.cluster_size * launch.num_threads;
    if (num_fibers > w.fiber_capacity) {
        if (w.stacks) munmap(w.stacks, w.fiber_capacity * kStackStride);
        for (int i = 0; i < w.fiber_capacity; ++i) {
            TSAN(__tsan_destroy_fiber(c.fibers[i].context.tsan_fiber));
            free(c.fibers[i].copies);
        }
        free(c.fibers);
        free(c.warps);
        w.fiber_capacity = num_fibers;
        w.stacks = allocate_stacks(num_fibers);
        c.fibers = static_cast<Fiber*>(calloc(num_fibers, sizeof(Fiber)));
        c.warps = static_cast<Warp*>(calloc(num_fibers, sizeof(Warp)));
        if (!w.stacks || !c.fibers || !c.warps) return false;
        for (int i = 0; i < num_fibers; ++i) {
            Context& context = c.fibers[i].context;
            context.bottom = w.stacks + i * kStackStride;
            context.size = kStackBytes;
            reset_context(context, fiber_main);
        }
    }
    w.shared_bytes = (kDynamicOffset + launch.shared_bytes + kRedzone + 1023) / 1024 * 1024;
    const size_t bytes = w.shared_bytes * launch.cluster_size;
    if (bytes > w.shared_capacity) {
        ASAN(__asan_unpoison_memory_region(w.shared, w.shared_capacity));
        free(w.shared);
        free(c.stored);
        c.stored = nullptr;
        c.has_stored = false;
        w.shared_capacity = bytes;
        w.shared = static_cast<char*>(aligned_alloc(1024, bytes));
        if (!w.shared) return false;
    }
    ASAN(__asan_poison_memory_region(w.shared, w.shared_capacity));
    return true;
}

// Everything that is the same for all clusters of a launch.
bool prepare(Worker& w, const Launch& launch) {
    if (!allocate(w, launch)) return false;
    Cluster& c = w.cluster;
    c.size = launch.cluster_size;
    c.num_threads = launch.num_threads;
    c.warp_size = launch.warp_size;
    c.warps_per_block = (launch.num_threads + launch.warp_size - 1) / launch.warp_size;
    c.num_arrays = 0;
    c.static_bytes = 0;
    c.dynamic_bytes = launch.shared_bytes;
    for (int rank = 0; rank < c.size; ++rank) {
        Block& block = c.blocks[rank];
        block.block_dim = {unsigned(c.num_threads), 1, 1};
        block.grid_dim = {unsigned(launch.grid), 1, 1};
        block.rank = rank;
        block.threads = c.fibers + rank * c.num_threads;
        block.shared = w.shared + rank * w.shared_bytes;
        ASAN(__asan_unpoison_memory_region(block.shared + kDynamicOffset, c.dynamic_bytes));
        for (int i = 0; i < c.num_threads; ++i) {
            Fiber& f = block.threads[i];
            f.thread_index = {unsigned(i), 0, 0};
            f.lane = i % c.warp_size;
            f.block = f.owner = &block;
            f.warp = &c.warps[rank * c.warps_per_block + i / c.warp_size];
            f.index = i;
            if (f.lane == 0) f.warp->lanes = &f;
            f.warp->num_lanes = f.lane + 1;
        }
    }
    return true;
}

void run_cluster(Worker& w, int index) {
    Launch& launch = *w.launch;
    Cluster& c = w.cluster;
    w.ready.reset(Order(launch.order), launch.seed + index, &c);
    forget_transfers(c);
    reset_barrier(c.stores, kStores, 0);
    reset_warpgroups(c);
    reset_barrier(c.barrier, kCluster, c.num_fibers());
    for (int i = 0; i < c.num_warps(); ++i) reset_barrier(c.warps[i].barrier, kWarp, 0);
    for (int rank = 0; rank < c.size; ++rank) {
        Block& block = c.blocks[rank];
        block.block_index = {unsigned(index * c.size + rank), 0, 0};
        block.started = false;
        block.live = c.num_threads;
        for (Barrier& b : block.barriers) reset_barrier(b, kBlock, 0);
    }
    for (int i = 0; i < c.num_fibers(); ++i) {
        Fiber& f = c.fibers[i];
        f.done = f.arrived_at_cluster = false;
        f.waiting_for = nullptr;
        f.num_groups = f.num_copies = f.num_store_groups = f.num_wgmma_groups = 0;
        f.wgmma_fenced = false;
        f.num_proxy_fences = 0;
        w.ready.push(&f);
    }
    c.live = c.num_fibers();
    w.current = w.ready.pop();
    TSAN(__tsan_release(&w.start));
    switch_context(w.context, w.current->context);
    TSAN(__tsan_acquire(&w.end));
}

Worker* new_worker() {
    Worker* w = static_cast<Worker*>(calloc(1, sizeof(Worker)));
    TSAN(w->context.tsan_fiber = __tsan_get_current_fiber());
    pthread_attr_t attributes;
    pthread_getattr_np(pthread_self(), &attributes);
    void* bottom;
    pthread_attr_getstack(&attributes, &bottom, &w->context.size);
    w->context.bottom = static_cast<char*>(bottom);
    pthread_attr_destroy(&attributes);
    return w;
}

// Works on `launch` until none of its clusters is left to start.
void run_clusters(Launch& launch) {
    if (!worker) worker = new_worker();
    Worker& w = *worker;
    w.launch = &launch;
    if (!prepare(w, launch)) launch.fail("out of memory");
    const int num_clusters = launch.num_clusters();
    while (!launch.stopped()) {
        const int i = __atomic_fetch_add(&launch.next_cluster, 1, __ATOMIC_RELAXED);
        if (i >= num_clusters) break;
        run_cluster(w, launch.order == kLifo ? num_clusters - 1 - i : i);
    }
    if (!w.broken) return;
    for (int i = 0; i < w.fiber_capacity; ++i) {
        reset_context(w.cluster.fibers[i].context, fiber_main);
    }
    w.broken = false;
}

}  // namespace

// --- what cupykern/targets/host.py calls -----------------------------------------------------
#pragma GCC visibility push(default)
extern "C" {
const void* host_runtime() { return &kRuntime; }

Launch* host_create(void* entry, int num_threads, int cluster_size, int warp_size, int order,
                    unsigned long long seed, int shared_bytes, int grid, void** args) {
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
    return launch;
}

// Starts the launch, if it has not started, and waits; 0: not finished after `milliseconds`.
int host_run(Launch* launch, int milliseconds) {
    Pool& pool = Pool::get();
    if (!launch->submitted) pool.submit(launch);
    return pool.wait(launch, milliseconds);
}

// Ends the launch, finished or not, and forgets it; `error` gets its message, or "".
void host_finish(Launch* launch, char* error, int size) {
    if (launch->submitted) Pool::get().cancel(launch);
    snprintf(error, size, "%s", launch->error);
    free(launch);
}
}
#pragma GCC visibility pop
