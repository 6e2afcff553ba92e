// Hopper's mbarriers and asynchronous transfers in host_runtime.cpp.
//
// A transfer is delivered when no thread can continue without it; the sticky schedule also delivers
// at random.  The same applies to the end of waits for stores or wgmma.
#pragma once

// --- barriers --------------------------------------------------------------------------------
// The kernel's 8 bytes have this magic and the barrier's index, so that overwriting is detected.
constexpr unsigned kPhaseBarrierMagic = 0xba441e40;

Block* block_of(const void* p) {
    Worker& w = *worker;
    const size_t offset = static_cast<const char*>(p) - w.shared;
    if (offset >= w.shared_bytes * w.cluster.size) return nullptr;
    return &w.cluster.blocks[offset / w.shared_bytes];
}

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

void complete_phase(PhaseBarrier& b) {
    if (b.arrived < b.expected || b.bytes != 0) return;
    b.arrived = 0;
    ++b.phase;
    wake(b, b.owner->threads, worker->cluster.num_threads);
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

// --- transfers -------------------------------------------------------------------------------
// TMA's swizzle and wgmma's: bits 4 to 6 of an address, or fewer, change with the three bits above.
inline uintptr_t swizzled(uintptr_t address, int swizzle_bytes) {
    const uintptr_t bits = swizzle_bytes == 0 ? 0 : swizzle_bytes - 16;
    return address ^ (address >> 3 & bits);
}

// Copies the box between the array and `image`, the shared memory from `shared` on.
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

void finish_wait(Warpgroup& g);

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
    if (done.kind == Transfer::kProducts) finish_wait(*done.warpgroup);
    if (done.kind == Transfer::kWrite) wake(c.stores, done.issuer, 1);
    if (!done.barrier) return;
    done.barrier->bytes -= done.bytes;
    complete_phase(*done.barrier);
}

// False: nothing is in flight.
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

// TMA sees a thread's shared-memory stores after its proxy fence, before the barrier that the store
// waits for.  Checked for store_matrix only: other stores are the compiler's.
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

// A store of this thread outside of the last `groups` groups; read: one that TMA has not read yet.
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
// Leftovers that a thread, or the last one of a block or cluster, must not have at exit.
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
    if (c.has_stored) {
        memset(c.stored, 0, worker->shared_bytes / 16 * c.size * sizeof(StoredChunk));
    }
    c.has_stored = false;
}
