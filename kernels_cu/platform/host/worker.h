// One CPU's worker: the cluster that it runs, its ready fibers and the errors of fibers.
#pragma once
#include <stdio.h>

#include "platform/host/launch.h"
#include "platform/host/ready_list.h"
#include "platform/host/report.h"

namespace host {
namespace {

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
    size_t shared_bytes, shared_capacity;  // of one block, of all blocks
    TSAN(long long start, end;)  // order the clusters that this worker runs, not a cluster's fibers
};

thread_local Worker* worker;

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

void wake(const Barrier& barrier, Fiber* fibers, int count) {
    for (int i = 0; i < count; ++i) {
        if (fibers[i].waiting_for != &barrier) continue;
        fibers[i].waiting_for = nullptr;
        worker->ready.push(&fibers[i]);
    }
}

// All have arrived: the barrier's next phase begins, and those of `fibers` that wait for it run.
void complete(Barrier& barrier, Fiber* fibers, int count) {
    barrier.arrived = 0;
    ++barrier.phase;
    wake(barrier, fibers, count);
}

}  // namespace
}  // namespace host
