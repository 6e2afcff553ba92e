// wgmma on tiles located by the bits of their descriptors, as in hardware.
//
// The last of the 128 threads to call it computes the products.  Until the wait the accumulators
// are poison; at the wait the tiles must be unchanged.
#pragma once
#include <stdlib.h>
#include <string.h>

#include "platform/host/barriers.h"
#include "platform/host/warpgroup_operands.h"

namespace host {
namespace {

constexpr int kWarpgroupSize = 128;
constexpr int kMaxInFlight = 16;

// The wgmma in flight on one array of accumulators per thread.
struct InFlight {
    void* d[kWarpgroupSize];
    int n, last_group;
    Location location;
    union {
        float floats[kTileRows * kMaxN];
        int ints[kTileRows * kMaxN];
    };
};

struct ARegisters {
    const unsigned* address;
    unsigned values[4];
};

struct Issued {
    Wgmma op;
    int group;
    Location location;
    unsigned long long checksum;
    ARegisters a[kWarpgroupSize];  // if A is in registers
};

struct Warpgroup {
    Barrier barrier, waiting;
    int groups_left;  // groups that the wait leaves in flight
    Fiber* threads;
    InFlight* in_flight[kMaxInFlight];  // those in use first, then free ones
    int num_in_flight;
    Issued* issued;
    int num_issued, issued_capacity;
};

// --- run by the last thread to arrive --------------------------------------------------------
Warpgroup& warpgroup_of(const Fiber& f) {
    const Cluster& c = worker->cluster;
    const int per_block = c.num_threads / kWarpgroupSize;
    return c.warpgroups[f.owner->rank * per_block + f.index / kWarpgroupSize];
}

InFlight& find_in_flight(Warpgroup& g, void** payloads, int n, Location location) {
    const auto d_of = [&](int i) { return static_cast<const Wgmma*>(payloads[i])->d; };
    for (int j = 0; j < g.num_in_flight; ++j) {
        InFlight& f = *g.in_flight[j];
        if (f.d[0] != d_of(0)) continue;
        for (int i = 0; i < kWarpgroupSize; ++i) {
            if (f.d[i] != d_of(i) || f.n != n) {
                fail_at("wgmma: accumulators of another shape are under way", location);
            }
        }
        return f;
    }
    if (g.num_in_flight == kMaxInFlight)
        fail_at("wgmma: too many accumulators are under way", location);
    InFlight*& fresh = g.in_flight[g.num_in_flight++];
    if (!fresh) fresh = static_cast<InFlight*>(malloc(sizeof(InFlight)));
    fresh->n = n;
    for (int i = 0; i < kWarpgroupSize; ++i) {
        fresh->d[i] = d_of(i);
        const int* values = static_cast<const int*>(fresh->d[i]);
        for (int r = 0; r < n / 2; ++r) {
            memcpy(&fresh->ints[row_of(i, r) * n + col_of(i, r)], &values[r], 4);
        }
        memset(fresh->d[i], 0xff, n / 2 * 4);
    }
    return *fresh;
}

void combine_wgmma(void** payloads) {
    Warpgroup& g = warpgroup_of(*worker->current);
    const Location location = g.barrier.location;
    const Wgmma& op = *static_cast<const Wgmma*>(payloads[0]);
    for (int i = 0; i < kWarpgroupSize; ++i) {
        const Wgmma& other = *static_cast<const Wgmma*>(payloads[i]);
        const Fiber& f = g.threads[i];
        if (memcmp(other.tiles, op.tiles, sizeof(op.tiles)) != 0 ||
            other.accumulate != op.accumulate) {
            fail_at("wgmma: the threads' descriptors or `accumulate` differ", location);
        }
        if (f.num_wgmma_groups != g.threads[0].num_wgmma_groups) {
            fail_at("wgmma: some threads have committed, others not", location);
        }
        if (!f.wgmma_fenced) fail_at("wgmma without wgmma_fence since the last wait", location);
    }
    if (g.num_issued == g.issued_capacity) {
        g.issued_capacity = 2 * g.issued_capacity + 32;
        g.issued = static_cast<Issued*>(realloc(g.issued, g.issued_capacity * sizeof(Issued)));
    }
    Issued& issued = g.issued[g.num_issued++];
    alignas(16) unsigned char a[kTileRows * kTileBytes], b[kMaxN * kTileBytes];
    if (op.a_registers) {
        for (int i = 0; i < kWarpgroupSize; ++i) {
            const unsigned* registers = static_cast<const Wgmma*>(payloads[i])->a_registers;
            issued.a[i].address = registers;
            memcpy(issued.a[i].values, registers, 16);
            for (int r = 0; r < 4; ++r) {
                const int row = row_of(i, 2 * (r % 2));
                memcpy(a + row * kTileBytes + i % 4 * 4 + r / 2 * 16, &registers[r], 4);
            }
        }
    }
    const unsigned long long checksum = read_operands(*g.threads->owner, op, a, b, location);
    InFlight& f = find_in_flight(g, payloads, op.n, location);
    f.last_group = g.threads[0].num_wgmma_groups;
    f.location = location;
    if (is_int(op)) multiply_tiles(op, a, b, f.ints);
    else multiply_tiles(op, a, b, f.floats);
    issued.op = op;
    issued.group = f.last_group;
    issued.location = location;
    issued.checksum = checksum;
}

// Completes the awaited wgmma when all threads wait.
void finish_wait(Warpgroup& g) {
    const int first_left = g.threads[0].num_wgmma_groups - g.groups_left;
    for (int i = 0; i < kWarpgroupSize; ++i) {
        if (g.threads[i].num_wgmma_groups != g.threads[0].num_wgmma_groups) {
            fail_of(g.threads[i], "wgmma_wait: some threads have committed, others not",
                    g.waiting.location);
        }
        g.threads[i].wgmma_fenced = false;
    }
    int kept = 0;
    for (int i = 0; i < g.num_issued; ++i) {
        const Issued& issued = g.issued[i];
        if (issued.group >= first_left) {
            g.issued[kept++] = issued;
            continue;
        }
        unsigned char a[kTileRows * kTileBytes], b[kMaxN * kTileBytes];
        if (read_operands(*g.threads->owner, issued.op, a, b, issued.location) != issued.checksum) {
            fail_of(*g.threads, "shared memory changed while wgmma read it", issued.location);
        }
        for (int t = 0; issued.op.a_registers && t < kWarpgroupSize; ++t) {
            if (memcmp(issued.a[t].address, issued.a[t].values, 16) == 0) continue;
            fail_of(*g.threads, "A's registers changed while wgmma read them", issued.location);
        }
    }
    g.num_issued = kept;
    for (int j = g.num_in_flight; j-- > 0;) {
        InFlight* f = g.in_flight[j];
        if (f->last_group >= first_left) continue;
        for (int i = 0; i < kWarpgroupSize; ++i) {
            int* values = static_cast<int*>(f->d[i]);
            for (int r = 0; r < f->n / 2; ++r) {
                memcpy(&values[r], &f->ints[row_of(i, r) * f->n + col_of(i, r)], 4);
            }
        }
        g.in_flight[j] = g.in_flight[--g.num_in_flight];
        g.in_flight[g.num_in_flight] = f;
    }
    complete(g.waiting, g.threads, kWarpgroupSize);
}

// --- primitives ------------------------------------------------------------------------------
void reset_warpgroups(Cluster& c) {
    if (!c.warpgroups) return;
    for (int i = 0; i < kMaxClusterSize * kMaxThreads / kWarpgroupSize; ++i) {
        c.warpgroups[i].num_in_flight = c.warpgroups[i].num_issued = 0;
        reset_barrier(c.warpgroups[i].barrier, kWarpgroup, kWarpgroupSize);
        reset_barrier(c.warpgroups[i].waiting, kWarpgroup, kWarpgroupSize);
    }
}

Warpgroup& my_warpgroup(const char* message, Location location) {
    Cluster& c = worker->cluster;
    const Fiber& self = *worker->current;
    if ((self.index / kWarpgroupSize + 1) * kWarpgroupSize > c.num_threads)
        fail_at(message, location);
    if (!c.warpgroups) {
        const int count = kMaxClusterSize * kMaxThreads / kWarpgroupSize;
        c.warpgroups = static_cast<Warpgroup*>(calloc(count, sizeof(Warpgroup)));
        reset_warpgroups(c);
    }
    Warpgroup& g = warpgroup_of(self);
    g.threads = self.owner->threads + self.index / kWarpgroupSize * kWarpgroupSize;
    return g;
}

void wgmma_fence() { worker->current->wgmma_fenced = true; }
void wgmma_commit() { ++worker->current->num_wgmma_groups; }

void wgmma(const Wgmma* op, Location location) {
    Warpgroup& g = my_warpgroup("wgmma is for warpgroups of 128 threads", location);
    worker->current->payload = const_cast<Wgmma*>(op);
    arrive_and_wait(g.barrier, g.threads, kWarpgroupSize, kWarpgroupSize, "wgmma", location, true,
                    false, combine_wgmma);
}

// Orders memory, so that one thread can tell the producer that the whole warpgroup has read a tile.
void wgmma_wait(int groups, Location location) {
    Warpgroup& g = my_warpgroup("wgmma_wait is for warpgroups of 128 threads", location);
    Barrier& b = g.waiting;
    Fiber* self = worker->current;
    if (b.arrived == 0) {
        b.primitive = "wgmma_wait";
        b.location = location;
        g.groups_left = groups;
    } else if (!same_location(location, b.location)) {
        self->waiting_for = &b;
        self->primitive = "wgmma_wait";
        self->location = location;
        fail_diverged(&b);
    }
    TSAN(long long* sync = &b.sync[b.phase % 2]; __tsan_release(sync));
    if (++b.arrived == kWarpgroupSize) {
        Transfer& t = new_transfer(Transfer::kProducts, self->owner->shared, 0, location);
        t.warpgroup = &g;
        t.finish = finish_wait;
    }
    wait_for(self, b, "wgmma_wait", location);
    TSAN(__tsan_acquire(sync));
}

bool wgmma_under_way(const void* d) {
    const Fiber& self = *worker->current;
    const Warpgroup& g = warpgroup_of(self);
    for (int j = 0; j < g.num_in_flight; ++j) {
        if (g.in_flight[j]->d[self.index % kWarpgroupSize] == d) return true;
    }
    return false;
}

const void* wgmma_source(const Wgmma* op, int groups, int i) {
    const Fiber& self = *worker->current;
    const auto of_op = [&](const Wgmma& w) -> const void* {
        int unit = i * kWarpgroupSize + self.index % kWarpgroupSize;
        for (int operand = 0; operand < 2; ++operand) {
            const int units = num_units(w, operand);
            if (unit < units) return unit_address(*self.owner, w, operand, unit, {"wgmma", 0});
            unit -= units;
        }
        i -= (num_units(w, 0) + num_units(w, 1)) / kWarpgroupSize;
        return nullptr;
    };
    if (op) return of_op(*op);
    if (!worker->cluster.warpgroups) return nullptr;
    const Warpgroup& g = warpgroup_of(self);
    for (int j = 0; j < g.num_issued; ++j) {
        if (g.issued[j].group >= self.num_wgmma_groups - groups) continue;
        if (const void* p = of_op(g.issued[j].op)) return p;
    }
    return nullptr;
}

void check_wgmma_end(const Fiber& self) {
    const Cluster& c = worker->cluster;
    if (!c.warpgroups || (self.index / kWarpgroupSize + 1) * kWarpgroupSize > c.num_threads) return;
    const Warpgroup& g = warpgroup_of(self);
    if (g.num_in_flight > 0)
        fail_at("the thread left the kernel without wgmma_wait", g.in_flight[0]->location);
}

}  // namespace
}  // namespace host
