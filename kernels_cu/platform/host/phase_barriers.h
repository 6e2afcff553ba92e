// Hopper's mbarriers.
#pragma once
#include <stdlib.h>
#include <string.h>

#include "platform/host/schedule.h"

namespace host {
namespace {

// The kernel's 8 bytes hold this number and the barrier's index, so that overwriting is detected.
constexpr unsigned kPhaseBarrierMagic = 0xba441e40;

PhaseBarrier& find_barrier(const void* address, Location location) {
    Cluster& c = worker->cluster;
    const Block* block = block_of(address);
    if (!block) fail_at("a Barrier must be in shared memory", location);
    if (block->started && block->live == 0)
        fail_at("the Barrier's block has left the kernel", location);
    unsigned words[2];
    memcpy(words, address, sizeof(words));
    if (words[1] == kPhaseBarrierMagic && words[0] < unsigned(c.num_phase_barriers) &&
        c.phase_barriers[words[0]].address == address) {
        return c.phase_barriers[words[0]];
    }
    fail_at("the Barrier is not initialised, or overwritten", location);
}

void barrier_init(void* address, int count, Location location) {
    Cluster& c = worker->cluster;
    Block* block = block_of(address);
    if (block != worker->current->owner) {
        fail_at("a Barrier is initialised in its own block's shared memory", location);
    }
    if (count < 1 || count >= 1 << 20) fail_at("a Barrier counts 1 to 1048575 arrivals", location);
    for (int i = 0; i < c.num_phase_barriers; ++i) {
        if (c.phase_barriers[i].address == address)
            fail_at("a Barrier is initialised twice", location);
    }
    if (!c.phase_barriers) {
        c.phase_barriers =
            static_cast<PhaseBarrier*>(calloc(kMaxPhaseBarriers, sizeof(PhaseBarrier)));
    }
    if (!c.phase_barriers || c.num_phase_barriers == kMaxPhaseBarriers) {
        fail_at("too many Barriers", location);
    }
    const unsigned words[2] = {unsigned(c.num_phase_barriers), kPhaseBarrierMagic};
    memcpy(address, words, sizeof(words));
    PhaseBarrier& b = c.phase_barriers[c.num_phase_barriers++];
    b.scope = kPhase;
    b.arrived = 0;
    b.expected = count;
    b.phase = 0;
    b.primitive = "Barrier";
    b.location = location;
    b.address = address;
    b.owner = block;
    b.bytes = 0;
}

void barrier_arrive(void* address, int expected_bytes, Location location) {
    PhaseBarrier& b = find_barrier(address, location);
    if (b.arrived == b.expected) {
        fail_at("more threads arrive at the Barrier in one phase than it counts", location);
    }
    TSAN(__tsan_release(&b.sync[b.phase % 2]));
    b.bytes += expected_bytes;
    ++b.arrived;
    complete_phase(b);
}

void barrier_wait(void* address, int parity, Location location) {
    Fiber* self = worker->current;
    PhaseBarrier& b = find_barrier(address, location);
    if (b.owner != self->owner) fail_at("only its own block can wait at a Barrier", location);
    if (parity != 0 && parity != 1) fail_at("a Barrier's parity is 0 or 1", location);
    // A thread so late that another phase has completed waits for one more, as on a GPU.
    while (int(b.phase % 2) == parity) {
        self->parity = parity;
        wait_for(self, b, "Barrier::wait", location);
    }
    TSAN(__tsan_acquire(&b.sync[parity]));
}

}  // namespace
}  // namespace host
