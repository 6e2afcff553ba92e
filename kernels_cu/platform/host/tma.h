// Hopper's asynchronous transfers: TMA, bulk copies and stores to other blocks.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "platform/host/phase_barriers.h"
#include "platform/host/previous_grid.h"

namespace host {
namespace {

void store_async(void* remote, const void* value, int bytes, void* remote_barrier,
                 Location location) {
    PhaseBarrier& barrier = find_barrier(remote_barrier, location);
    TSAN(__tsan_release(&barrier.sync[barrier.phase % 2]));
    Transfer& t = new_transfer(Transfer::kWord, static_cast<char*>(remote), bytes, location);
    t.barrier = &barrier;
    Unobserved unobserved;
    t.data = static_cast<char*>(malloc(bytes));
    memcpy(t.data, value, bytes);
}

void bulk_check(const void* shared, const void* global, int bytes, const void* barrier,
                Location location) {
    const Block& block = *worker->current->owner;
    check_access(location);
    if (uintptr_t(shared) % 16 || uintptr_t(global) % 16 || bytes % 16 || bytes < 0) {
        fail_at("bulk_load: addresses and bytes must be multiples of 16", location);
    }
    if (block_of(shared) != &block || block_of(barrier) != &block) {
        fail_at("bulk_load: not in the block's shared memory", location);
    }
    if (static_cast<const char*>(shared) + bytes >
        block.shared + kDynamicOffset + worker->cluster.dynamic_bytes) {
        fail_at("bulk_load: the copy is larger than the rest of shared memory", location);
    }
}

void bulk_load(void* shared, const void* global, int bytes, void* barrier, Location location) {
    PhaseBarrier& there = find_barrier(barrier, location);
    TSAN(__tsan_release(&there.sync[there.phase % 2]));
    Transfer& t = new_transfer(Transfer::kBulk, static_cast<char*>(shared), bytes, location);
    t.global = static_cast<const char*>(global);
    t.barrier = &there;
}

// --- TMA -------------------------------------------------------------------------------------
void tma_check(const TensorMap* map, const int* at, int num_coordinates, const void* shared,
               bool store, Location location) {
    check_access(location);
    if (map->magic != kTensorMapMagic) fail_at("TMA: not a TensorMap of the host target", location);
    if (num_coordinates != map->rank)
        fail_at("TMA: as many coordinates as the map's rank", location);
    if ((long long)at[0] * map->item_bytes % 16 != 0) {
        fail_at("TMA: the innermost coordinate must be a multiple of 16 bytes", location);
    }
    if (store && map->shape[0] * map->item_bytes % 16 != 0) {
        fail_at("tma_store: rows must be whole multiples of 16 bytes", location);
    }
    for (int i = 0; i < map->rank; ++i) {
        if (store && at[i] < 0) fail_at("tma_store: no coordinate may be negative", location);
    }
    const Block& block = *worker->current->owner;
    if (block_of(shared) != &block) fail_at("TMA: not in the block's shared memory", location);
    if (uintptr_t(shared) % (map->swizzle_bytes ? 8 * map->swizzle_bytes : 128) != 0) {
        fail_at("TMA: shared memory is not aligned to 128 bytes, or 8 times the swizzle", location);
    }
    const char* end = static_cast<const char*>(shared) + map->box_bytes();
    if (end > block.shared + kDynamicOffset + worker->cluster.dynamic_bytes) {
        fail_at("TMA: the box is larger than the rest of shared memory", location);
    }
}

void tma_load(const TensorMap* map, const int* at, void* shared, void* barrier, int ranks,
              Location location) {
    Cluster& c = worker->cluster;
    const Block& mine = *worker->current->owner;
    if (block_of(barrier) != &mine) fail_at("tma_load: not a Barrier of this block", location);
    if (ranks < 1 || ranks >> c.size != 0) fail_at("tma_load: no such rank", location);
    for (int rank = 0; rank < c.size; ++rank) {
        if (!(ranks >> rank & 1)) continue;
        const ptrdiff_t offset = c.blocks[rank].shared - mine.shared;
        PhaseBarrier& there = find_barrier(static_cast<char*>(barrier) + offset, location);
        TSAN(__tsan_release(&there.sync[there.phase % 2]));
        char* destination = static_cast<char*>(shared) + offset;
        Transfer& t = new_transfer(Transfer::kLoad, destination, map->box_bytes(), location);
        t.map = *map;
        memcpy(t.at, at, map->rank * sizeof(int));
        t.barrier = &there;
    }
}

// TMA sees a thread's shared-memory stores only after the thread's proxy fence, which precedes the
// barrier before tma_store.  Checked for store_matrix only: the runtime does not see other stores.
StoredChunk* stored_chunks(const void* shared) {
    const Worker& w = *worker;
    return w.cluster.stored + (static_cast<const char*>(shared) - w.shared) / 16;
}

void matrix_stored(const void* chunk) {
    Cluster& c = worker->cluster;
    if (!block_of(chunk)) return;
    if (!c.stored) {
        c.stored =
            static_cast<StoredChunk*>(calloc(worker->shared_capacity / 16, sizeof(StoredChunk)));
        if (!c.stored) return;
    }
    c.has_stored = true;
    const Fiber* self = worker->current;
    *stored_chunks(chunk) = {self, self->num_proxy_fences};
}

void fence_async_proxy() { ++worker->current->num_proxy_fences; }

void check_fenced(const void* shared, int bytes, Location location) {
    if (!worker->cluster.has_stored) return;
    const StoredChunk* chunks = stored_chunks(shared);
    for (int i = 0; i < bytes / 16; ++i) {
        if (chunks[i].by && chunks[i].num_proxy_fences == chunks[i].by->num_proxy_fences) {
            fail_at("tma_store reads what store_matrix has stored without fence_async_proxy",
                    location);
        }
    }
}

void tma_store(const TensorMap* map, const int* at, const void* shared, Location location) {
    Unobserved unobserved;
    const int bytes = map->box_bytes();
    check_fenced(shared, bytes, location);
    char* source = static_cast<char*>(const_cast<void*>(shared));
    Transfer& t = new_transfer(Transfer::kRead, source, bytes, location);
    t.map = *map;
    memcpy(t.at, at, map->rank * sizeof(int));
    t.group = worker->current->num_store_groups;
    t.data = static_cast<char*>(malloc(bytes));
    memcpy(t.data, shared, bytes);
}

void tma_store_commit() { ++worker->current->num_store_groups; }

// Whether `t` is a pending store of this thread outside of the last `groups` groups; read: one that
// TMA has not read yet.
bool waited_for(const Transfer& t, int groups, bool read) {
    const Fiber* self = worker->current;
    return (t.kind == Transfer::kRead || (t.kind == Transfer::kWrite && !read)) &&
           t.issuer == self && t.group < self->num_store_groups - groups;
}

const void* tma_store_source(int groups, int i, int* bytes) {
    const Cluster& c = worker->cluster;
    for (int j = 0; j < c.num_transfers; ++j) {
        const Transfer& t = c.transfers[j];
        if (!waited_for(t, groups, true) || i-- > 0) continue;
        *bytes = t.bytes;
        return t.shared;
    }
    return nullptr;
}

void tma_store_wait(int groups, bool read, Location location) {
    Cluster& c = worker->cluster;
    for (int i = 0; i < c.num_transfers; ++i) {
        if (!waited_for(c.transfers[i], groups, read)) continue;
        wait_for(worker->current, c.stores, "tma_store_wait", location);
        i = -1;
    }
}

// --- the end ---------------------------------------------------------------------------------
// Fail if transfers or expected bytes are pending when a thread, or a block's last thread, exits.
void check_thread_end(const Fiber& self) {
    const Cluster& c = worker->cluster;
    for (int i = 0; i < c.num_transfers; ++i) {
        const Transfer& t = c.transfers[i];
        if (t.kind == Transfer::kRead && t.issuer == &self) {
            fail_at("the thread left the kernel before tma_store had read all", t.location);
        }
    }
}

void check_block_end(const Block& block) {
    const Cluster& c = worker->cluster;
    for (int i = 0; i < c.num_transfers; ++i) {
        const Transfer& t = c.transfers[i];
        if (t.barrier && t.block == &block) {
            fail_at("the block left the kernel before this had arrived", t.location);
        }
    }
    for (int i = 0; i < c.num_phase_barriers; ++i) {
        const PhaseBarrier& b = c.phase_barriers[i];
        if (b.owner != &block || b.bytes == 0) continue;
        fail_at(b.bytes > 0
                    ? "at the end, fewer bytes have arrived at the Barrier than were expected"
                    : "at the end, more bytes have arrived at the Barrier than were expected",
                b.location);
    }
}

void forget_transfers(Cluster& c) {
    while (c.num_transfers > 0) free(c.transfers[--c.num_transfers].data);
    c.num_phase_barriers = 0;
    if (c.has_stored) {  // by a cluster of an earlier launch, which may have had more memory
        memset(c.stored, 0, worker->shared_capacity / 16 * sizeof(StoredChunk));
    }
    c.has_stored = false;
}

}  // namespace
}  // namespace host
