// Barriers of a block, a warp and a cluster.
#pragma once
#include "platform/host/schedule.h"

namespace host {
namespace {

void reset_barrier(Barrier& b, Scope scope, int expected) {
    b.scope = scope;
    b.arrived = 0;
    b.expected = expected;
}

// The first arrival sets the expected count; the others must agree.
void check_arrival(Barrier& b, int expected, const char* primitive, Location location,
                   Combine combine = nullptr) {
    if (b.arrived == 0) {
        b.expected = expected;
        b.primitive = primitive;
        b.location = location;
        b.combine = combine;
    } else if (expected != b.expected) {
        fail_at("named_barrier: its threads differ in the count", location);
    }
}

// Returns when `expected` of the fibers in [fibers, fibers + count) have arrived.  The last one
// combines their payloads, if any, and continues at once.
void arrive_and_wait(Barrier& b, Fiber* fibers, int count, int expected, const char* primitive,
                     Location location, bool one_line, bool orders_memory = true,
                     Combine combine = nullptr) {
    Fiber* self = worker->current;
    const bool is_first = b.arrived == 0;
    check_arrival(b, expected, primitive, location, combine);
    if (one_line && !is_first && !(same_location(location, b.location) && combine == b.combine)) {
        self->waiting_for = &b;
        self->primitive = primitive;
        self->location = location;
        fail_diverged(&b);
    }
    TSAN(long long* sync = &b.sync[b.phase % 2]; if (orders_memory) __tsan_release(sync));
    if (++b.arrived < expected) {
        wait_for(self, b, primitive, location);
    } else {
        // Waiting fibers check this too, but with one thread none waits.
        if (worker->launch->stopped()) abandon();
        if (combine) {
            void* payloads[128] = {};
            for (int i = 0; i < count; ++i) payloads[i] = fibers[i].payload;
            Unobserved unobserved;
            combine(payloads);
        }
        complete(b, fibers, count);
    }
    TSAN(if (orders_memory) __tsan_acquire(sync));
}

void sync_block(Location location) {
    Block& block = *worker->current->owner;
    const int count = worker->cluster.num_threads;
    arrive_and_wait(block.barriers[0], block.threads, count, count, "sync_block", location, true);
}

void sync_warp(Location location) {
    Warp& warp = *worker->current->warp;
    arrive_and_wait(warp.barrier, warp.lanes, warp.num_lanes, warp.num_lanes, "sync_warp", location,
                    true);
}

Barrier& named_barrier_of(int id, int count, Location location) {
    const Cluster& cluster = worker->cluster;
    if (id < 1 || id >= kNumBarriers) fail_at("named_barrier: the id is not in 1 to 15", location);
    if (count < 1 || count > cluster.num_threads || count % cluster.warp_size != 0) {
        fail_at("named_barrier: the count is not that of some whole warps of the block", location);
    }
    return worker->current->owner->barriers[id];
}

void named_barrier(int id, int count, Location location) {
    arrive_and_wait(named_barrier_of(id, count, location), worker->current->owner->threads,
                    worker->cluster.num_threads, count, "named_barrier", location, false);
}

void named_barrier_arrive(int id, int count, Location location) {
    Barrier& b = named_barrier_of(id, count, location);
    check_arrival(b, count, "named_barrier", location);
    TSAN(__tsan_release(&b.sync[b.phase % 2]));
    if (++b.arrived < count) return;
    complete(b, worker->current->owner->threads, worker->cluster.num_threads);
}

void exchange(const char* primitive, void* payload, Combine combine, Location location) {
    Warp& warp = *worker->current->warp;
    worker->current->payload = payload;
    // As on a GPU, an exchange does not order memory.
    arrive_and_wait(warp.barrier, warp.lanes, warp.num_lanes, warp.num_lanes, primitive, location,
                    true, false, combine);
}

void cluster_arrive(Location location) {
    Fiber* self = worker->current;
    Cluster& cluster = worker->cluster;
    Barrier& b = cluster.barrier;
    if (self->arrived_at_cluster) fail_at("cluster_arrive twice without cluster_wait", location);
    self->arrived_at_cluster = true;
    self->cluster_phase = b.phase;
    TSAN(__tsan_release(&b.sync[b.phase % 2]));
    if (++b.arrived < b.expected) return;
    complete(b, cluster.fibers, cluster.num_fibers());
}

void cluster_wait(Location location) {
    Fiber* self = worker->current;
    if (!self->arrived_at_cluster) fail_at("cluster_wait without cluster_arrive", location);
    Barrier& b = worker->cluster.barrier;
    if (b.phase == self->cluster_phase) {
        b.location = location;
        wait_for(self, b, "cluster_wait", location);
    }
    self->arrived_at_cluster = false;
    TSAN(__tsan_acquire(&b.sync[self->cluster_phase % 2]));
}

}  // namespace
}  // namespace host
