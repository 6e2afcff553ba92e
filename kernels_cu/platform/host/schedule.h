// Switches between fibers: one runs until it waits, then the schedule picks the next one.
#pragma once
#include "platform/host/transfers.h"

namespace host {
namespace {

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

}  // namespace
}  // namespace host
