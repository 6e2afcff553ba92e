// Asynchronous transfers in flight: TMA, stores to other blocks, wgmma.
//
// A transfer is delivered when no thread can continue without it; the sticky schedule also delivers
// at random.  The same applies to the end of waits for stores or wgmma.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "platform/host/worker.h"

namespace host {
namespace {

Block* block_of(const void* p) {
    Worker& w = *worker;
    const size_t offset = static_cast<const char*>(p) - w.shared;
    if (offset >= w.shared_bytes * w.cluster.size) return nullptr;
    return &w.cluster.blocks[offset / w.shared_bytes];
}

void complete_phase(PhaseBarrier& b) {
    if (b.arrived < b.expected || b.bytes != 0) return;
    complete(b, b.owner->threads, worker->cluster.num_threads);
}

// The swizzle of TMA and wgmma: bits 4 to 6 of an address (or fewer) are XORed with bits 7 to 9.
uintptr_t swizzled(uintptr_t address, int swizzle_bytes) {
    const uintptr_t bits = swizzle_bytes == 0 ? 0 : swizzle_bytes - 16;
    return address ^ (address >> 3 & bits);
}

// Copies the box between the array and `image`: shared memory from t.shared on, or a copy of it.
void copy_box(const Transfer& t, char* image, bool load) {
    const TensorMap& map = t.map;
    const int row_bytes = map.box[0] * map.item_bytes;
    const long long columns = (long long)map.shape[0];
    const long long first = t.at[0] < 0 ? -(long long)t.at[0] : 0;
    const long long last = columns - t.at[0] < map.box[0] ? columns - t.at[0] : map.box[0];
    char data[2048];
    for (int row = 0; row * row_bytes < t.bytes; ++row) {
        // Modulo 2^64, as in TMA: out-of-bounds coordinates do not overflow.
        uint64_t address = map.address + uint64_t((t.at[0] + first) * map.item_bytes);
        bool inside = first < last;
        int rest = row;
        for (int d = 1; d < map.rank; ++d) {
            const long long i = t.at[d] + (long long)(rest % map.box[d]);
            rest /= map.box[d];
            inside = inside && i >= 0 && i < (long long)map.shape[d];
            address += uint64_t(i) * map.strides[d - 1];
        }
        char* global = reinterpret_cast<char*>(address);
        const size_t bytes = inside ? (last - first) * map.item_bytes : 0;
        if (load) {
            memset(data, 0, row_bytes);
            memcpy(data + first * map.item_bytes * inside, global, bytes);
        }
        for (int i = 0; i < row_bytes; i += 16) {
            const uintptr_t address = uintptr_t(t.shared) + row * row_bytes + i;
            char* there = image + (swizzled(address, map.swizzle_bytes) - uintptr_t(t.shared));
            memcpy(load ? there : data + i, load ? data + i : there, 16);
        }
        if (!load) memcpy(global, data + first * map.item_bytes * inside, bytes);
    }
}

void remove_transfer(int i) {
    Cluster& c = worker->cluster;
    free(c.transfers[i].data);
    --c.num_transfers;
    memmove(&c.transfers[i], &c.transfers[i + 1], (c.num_transfers - i) * sizeof(Transfer));
}

void deliver(int i) {
    Cluster& c = worker->cluster;
    Transfer& t = c.transfers[i];
    Unobserved unobserved;
    if (t.kind == Transfer::kRead) {
        if (memcmp(t.data, t.shared, t.bytes) != 0) {
            fail_of(*t.issuer, "shared memory changed while tma_store read it", t.location);
        }
        t.kind = Transfer::kWrite;
        wake(c.stores, t.issuer, 1);
        return;
    }
    if (t.kind == Transfer::kWrite) copy_box(t, t.data, false);
    if (t.kind == Transfer::kLoad) copy_box(t, t.shared, true);
    if (t.kind == Transfer::kWord) memcpy(t.shared, t.data, t.bytes);
    if (t.kind == Transfer::kBulk) memcpy(t.shared, t.global, t.bytes);
    const Transfer done = t;
    remove_transfer(i);
    if (done.kind == Transfer::kProducts) done.finish(*done.warpgroup);
    if (done.kind == Transfer::kWrite) wake(c.stores, done.issuer, 1);
    if (!done.barrier) return;
    done.barrier->bytes -= done.bytes;
    complete_phase(*done.barrier);
}

// Returns false if nothing is in flight.
bool deliver_one() {
    Worker& w = *worker;
    const int count = w.cluster.num_transfers;
    if (count == 0) return false;
    const Order order = w.ready.order();
    deliver(order == kFifo   ? 0
            : order == kLifo ? count - 1
                             : int(w.ready.random() % unsigned(count)));
    return true;
}

void deliver_at_random() {
    Worker& w = *worker;
    if (w.ready.order() == kSticky && w.ready.random() % 8 == 0) deliver_one();
}

Transfer& new_transfer(Transfer::Kind kind, char* shared, int bytes, Location location) {
    Unobserved unobserved;  // the list belongs to the runtime
    Cluster& c = worker->cluster;
    if (c.num_transfers == c.transfer_capacity) {
        c.transfer_capacity = 2 * c.transfer_capacity + 16;
        c.transfers =
            static_cast<Transfer*>(realloc(c.transfers, c.transfer_capacity * sizeof(Transfer)));
    }
    Transfer& t = c.transfers[c.num_transfers++];
    t = {};
    t.kind = kind;
    t.issuer = worker->current;
    t.location = location;
    t.shared = shared;
    t.block = block_of(shared);
    t.bytes = bytes;
    return t;
}

}  // namespace
}  // namespace host
