// A worker runs the clusters of a launch, one after another.
#pragma once
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "platform/host/memory.h"
#include "platform/host/tma.h"
#include "platform/host/warpgroup_mma.h"

namespace host {
namespace {

// A fiber runs threads of kernels, one after another.
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
            }  // the remaining stores
            switch_context(self.context, worker->context);
        } else {
            switch_to_next();
        }
    }
}

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

// Sets the state that all clusters of a launch share.  Returns false if memory runs out.
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
    reset_barrier(c.previous_grid, kCluster, 0);
    hide_late_arrays(launch);
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
        f.done = f.arrived_at_cluster = f.waited_for_grid = false;
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

// Runs clusters of `launch` until all have been started.
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
    show_late_arrays(launch);
    if (!w.broken) return;
    for (int i = 0; i < w.fiber_capacity; ++i) {
        reset_context(w.cluster.fibers[i].context, fiber_main);
    }
    w.broken = false;
}

}  // namespace
}  // namespace host
