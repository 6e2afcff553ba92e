// Shared memory and cp.async.
#pragma once
#include <stdlib.h>
#include <string.h>

#include "platform/host/previous_grid.h"

namespace host {
namespace {

void poison(void* p, size_t bytes) {
    Unobserved unobserved;
    memset(p, 0xff, bytes);
}

// Returns this block's array of a SHARED.
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
        fail_at("static shared memory ends at 48 KB and 64 arrays", array->location);
    }
    c.arrays[c.num_arrays] = array;
    c.offsets[c.num_arrays++] = offset;
    for (int i = 0; i < c.size; ++i) {
        ASAN(__asan_unpoison_memory_region(c.blocks[i].shared + offset, array->size));
        poison(c.blocks[i].shared + offset, array->size);
    }
    return mine + offset;
}

void* dynamic_shared(unsigned size, Location location) {
    if (size > worker->cluster.dynamic_bytes) {
        fail_at("SHARED_STORAGE is larger than the launch's dynamic shared memory", location);
    }
    return worker->current->owner->shared + kDynamicOffset;
}

void* cluster_shared(const void* pointer, int rank, Location location) {
    Cluster& c = worker->cluster;
    const size_t offset = static_cast<const char*>(pointer) - worker->current->owner->shared;
    if (rank < 0 || rank >= c.size) fail_at("cluster_shared: no such rank", location);
    if (offset >= worker->shared_bytes) fail_at("cluster_shared: not in shared memory", location);
    return c.blocks[rank].shared + offset;
}

// Poisons all shared memory of the block.
void poison_block(Block& block) {
    const Cluster& c = worker->cluster;
    for (int i = 0; i < c.num_arrays; ++i) poison(block.shared + c.offsets[i], c.arrays[i]->size);
    poison(block.shared + kDynamicOffset, c.dynamic_bytes);
}

// --- async copies ----------------------------------------------------------------------------
void copy_async(void* shared, const void* global, int bytes, Location location) {
    Fiber& f = *worker->current;
    check_access(location);
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

}  // namespace
}  // namespace host
