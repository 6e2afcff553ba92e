// wgmma as host_runtime.cpp runs it: from the bits of the descriptors, as the hardware reads them.
//
// The product is computed when the last of the 128 threads has called it.  Until the wait the
// accumulators are poison; at the wait the tiles must still hold what they held.

constexpr int kWarpgroupSize = 128;
constexpr int kTileRows = 64;
constexpr int kTileBytes = 32;  // along K
constexpr int kMaxN = 256;
constexpr int kMaxInFlight = 16;

// What is under way for one array of accumulators of each thread.
struct InFlight {
    void* d[kWarpgroupSize];
    int n, last_group;
    Place place;
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
    Place place;
    unsigned long long checksum;
    ARegisters a[kWarpgroupSize];  // where A is in registers
};

struct Warpgroup {
    Barrier barrier, waiting;
    int groups_left;  // that they wait for: all but so many
    Fiber* threads;
    InFlight* in_flight[kMaxInFlight];  // allocated ones first come those in use
    int num_in_flight;
    Issued* issued;
    int num_issued, issued_capacity;
};

bool is_int(const Wgmma& op) { return op.types[0] == kInt8; }
int item_bytes(NumberType type) { return type == kHalf || type == kBf16 ? 2 : 1; }
int row_of(int thread, int i) { return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8; }
int col_of(int thread, int i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

// --- operands --------------------------------------------------------------------------------
int num_units(const Wgmma& op, int operand) {
    if (operand == 0) return op.a_registers ? 0 : 2 * kTileRows;
    return 2 * op.n;
}

// Where 16 bytes of a tile are.  K-major: half `unit % 2` of row `unit / 2`; MN-major: 8 rows from
// 8 * (unit / 16) on, at `unit % 16` along K.
const unsigned char* unit_address(const Block& block, const Wgmma& op, int operand, int unit,
                                  Place place) {
    const unsigned long long tile = op.tiles[operand];
    const unsigned leading = unsigned(tile >> 16 & 0x3fff) << 4;
    const unsigned stride = unsigned(tile >> 32 & 0x3fff) << 4;
    const int swizzle_modes[] = {0, 128, 64, 32};
    const unsigned span = swizzle_modes[tile >> 62];
    if (tile >> 49 & 7) fail_at("wgmma: descriptors have base offset 0", place);
    unsigned address = unsigned(tile & 0x3fff) << 4;
    if (!op.mn_major[operand]) {
        const unsigned row = unit / 2, half = unit % 2;
        address += span == 0 ? row % 8 * 16 + row / 8 * stride + half * leading
                             : row % 8 * span + row / 8 * stride + half * 16;
    } else {
        const unsigned line = unit / 16, k = unit % 16;
        address += span == 0 ? line * stride + k % 8 * 16 + k / 8 * leading
                             : line % (span / 16) * 16 + line / (span / 16) * leading +
                                   k % 8 * span + k / 8 * stride;
    }
    address = unsigned(swizzled(address, span)) & 0x3ffff;
    const Cluster& c = worker->cluster;
    if (address + 16 > c.dynamic_bytes) {
        fail_at("wgmma: a tile reaches past the dynamic shared memory", place);
    }
    const char* dynamic = block.shared + kDynamicOffset;
    return reinterpret_cast<const unsigned char*>(dynamic + address);
}

unsigned shared_address(const void* p) {
    const char* dynamic = worker->current->owner->shared + kDynamicOffset;
    const size_t offset = static_cast<const char*>(p) - dynamic;
    if (offset >= worker->cluster.dynamic_bytes) {
        fail_at("wgmma's tiles are in the block's SHARED_STORAGE", {"matrix_descriptor", 0});
    }
    return unsigned(offset);
}

// `image`: the operand's rows, kTileBytes each.  Returns a checksum of the bytes.
unsigned long long read_operand(const Block& block, const Wgmma& op, int operand,
                                unsigned char* image, Place place) {
    unsigned long long checksum = 0;
    for (int unit = 0; unit < num_units(op, operand); ++unit) {
        const unsigned char* from = unit_address(block, op, operand, unit, place);
        unsigned long long words[2];
        memcpy(words, from, 16);
        checksum = (checksum ^ words[0]) * 0x9e3779b97f4a7c15;
        checksum = (checksum ^ checksum >> 29 ^ words[1]) * 0xbf58476d1ce4e5b9;
        if (!op.mn_major[operand]) {
            memcpy(image + unit * 16, from, 16);
        } else {
            for (int i = 0; i < 8; ++i) {
                memcpy(image + (unit / 16 * 8 + i) * kTileBytes + unit % 16 * 2, from + 2 * i, 2);
            }
        }
    }
    return checksum;
}

unsigned long long read_operands(const Block& block, const Wgmma& op, unsigned char* a,
                                 unsigned char* b, Place place) {
    const unsigned long long checksum = read_operand(block, op, 0, a, place);
    return checksum * 3 + read_operand(block, op, 1, b, place);
}

template <class T>
T decode(NumberType type, const unsigned char* p) {
    uint16_t code;
    memcpy(&code, p, item_bytes(type));
    if (type == kHalf) return T(to_float(half{code}));
    if (type == kBf16) return T(to_float(bf16{code}));
    if (type == kE4m3) return T(to_float(e4m3{uint8_t(code)}));
    if (type == kE5m2) return T(to_float(e5m2{uint8_t(code)}));
    return T(int8_t(code));
}

// --- products --------------------------------------------------------------------------------
// d (64 x n) += a (64 x k) b (k x n)
template <class T>
void multiply(T* d, const T* a, const T* b, int n, int k) {
    typedef T Vector __attribute__((vector_size(32), aligned(4), may_alias));
    for (int row = 0; row < kTileRows; ++row) {
        for (int col = 0; col < n; col += 8) {
            Vector& sum = *reinterpret_cast<Vector*>(d + row * n + col);
            Vector s = sum;
            for (int i = 0; i < k; ++i) {
                s += a[row * k + i] * *reinterpret_cast<const Vector*>(b + i * n + col);
            }
            sum = s;
        }
    }
}

// The same of FP8 as Hopper adds: the products and the sum are aligned to the largest of them, 2^e
// to 2^(e + 1), and what is below 2^(e - 13) is cut (arXiv 2511.10909).
void multiply_fp8(float* d, const float* a, const float* b, int n, int k) {
    typedef float Vector __attribute__((vector_size(32), aligned(4), may_alias));
    typedef int Ints __attribute__((vector_size(32), aligned(4), may_alias));
    constexpr int kBits = 13, kBias = 127, kExponent = 0x7f800000;
    for (int row = 0; row < kTileRows; ++row) {
        for (int col = 0; col < n; col += 8) {
            Vector& sum = *reinterpret_cast<Vector*>(d + row * n + col);
            Vector terms[kTileBytes + 1], plain = sum;
            terms[k] = sum;
            Ints largest = (Ints)sum & kExponent;
            for (int i = 0; i < k; ++i) {
                terms[i] = a[row * k + i] * *reinterpret_cast<const Vector*>(b + i * n + col);
                plain += terms[i];
                const Ints exponent = (Ints)terms[i] & kExponent;
                largest = exponent > largest ? exponent : largest;
            }
            const Vector inverse_unit = (Vector)(((2 * kBias + kBits) << 23) - largest);
            const Vector unit = (Vector)(largest - (kBits << 23));
            Ints units = {};
            for (int i = 0; i <= k; ++i)
                units += __builtin_convertvector(terms[i] * inverse_unit, Ints);
            const Ints usual =
                (largest > kBits << 23) & (largest < kExponent);  // else 0, NaN or infinite
            sum = usual ? __builtin_convertvector(units, Vector) * unit : plain;
        }
    }
}

template <class T>
void multiply_tiles(const Wgmma& op, const unsigned char* a_image, const unsigned char* b_image,
                    T* d) {
    // Too large for a fiber's stack; none is switched to meanwhile.
    static thread_local T a[kTileRows * kTileBytes], b[kTileBytes * kMaxN];
    const int k = kTileBytes / item_bytes(op.types[0]), size = item_bytes(op.types[0]);
    for (int i = 0; i < kTileRows * k; ++i) a[i] = decode<T>(op.types[0], a_image + i * size);
    for (int col = 0; col < op.n; ++col) {
        for (int i = 0; i < k; ++i) {
            b[i * op.n + col] = decode<T>(op.types[1], b_image + (col * k + i) * size);
        }
    }
    if (!op.accumulate) memset(d, 0, kTileRows * op.n * sizeof(T));
    if constexpr (kSame<T, float>) {
        if (item_bytes(op.types[0]) == 1) return multiply_fp8(d, a, b, op.n, k);
    }
    multiply(d, a, b, op.n, k);
}

// --- what the last thread to arrive does -----------------------------------------------------
Warpgroup& warpgroup_of(const Fiber& f) {
    const Cluster& c = worker->cluster;
    const int per_block = c.num_threads / kWarpgroupSize;
    return c.warpgroups[f.owner->rank * per_block + f.index / kWarpgroupSize];
}

InFlight& find_in_flight(Warpgroup& g, void** payloads, int n, Place place) {
    const auto d_of = [&](int i) { return static_cast<const Wgmma*>(payloads[i])->d; };
    for (int j = 0; j < g.num_in_flight; ++j) {
        InFlight& f = *g.in_flight[j];
        if (f.d[0] != d_of(0)) continue;
        for (int i = 0; i < kWarpgroupSize; ++i) {
            if (f.d[i] != d_of(i) || f.n != n) {
                fail_at("wgmma: accumulators of another shape are under way", place);
            }
        }
        return f;
    }
    if (g.num_in_flight == kMaxInFlight)
        fail_at("wgmma: too many accumulators are under way", place);
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
    const Place place = g.barrier.place;
    const Wgmma& op = *static_cast<const Wgmma*>(payloads[0]);
    for (int i = 0; i < kWarpgroupSize; ++i) {
        const Wgmma& other = *static_cast<const Wgmma*>(payloads[i]);
        const Fiber& f = g.threads[i];
        if (memcmp(other.tiles, op.tiles, sizeof(op.tiles)) != 0 ||
            other.accumulate != op.accumulate) {
            fail_at("wgmma: the threads' descriptors or `accumulate` differ", place);
        }
        if (f.num_wgmma_groups != g.threads[0].num_wgmma_groups) {
            fail_at("wgmma: some threads have committed, others not", place);
        }
        if (!f.wgmma_fenced) fail_at("wgmma without wgmma_fence since the last wait", place);
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
    const unsigned long long checksum = read_operands(*g.threads->owner, op, a, b, place);
    InFlight& f = find_in_flight(g, payloads, op.n, place);
    f.last_group = g.threads[0].num_wgmma_groups;
    f.place = place;
    if (is_int(op)) multiply_tiles(op, a, b, f.ints);
    else multiply_tiles(op, a, b, f.floats);
    issued.op = op;
    issued.group = f.last_group;
    issued.place = place;
    issued.checksum = checksum;
}

// All threads wait; what they wait for is over now.
void finish_wait(Warpgroup& g) {
    const int first_left = g.threads[0].num_wgmma_groups - g.groups_left;
    for (int i = 0; i < kWarpgroupSize; ++i) {
        if (g.threads[i].num_wgmma_groups != g.threads[0].num_wgmma_groups) {
            fail_of(g.threads[i], "wgmma_wait: some threads have committed, others not",
                    g.waiting.place);
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
        if (read_operands(*g.threads->owner, issued.op, a, b, issued.place) != issued.checksum) {
            fail_of(*g.threads, "shared memory changed while wgmma read it", issued.place);
        }
        for (int t = 0; issued.op.a_registers && t < kWarpgroupSize; ++t) {
            if (memcmp(issued.a[t].address, issued.a[t].values, 16) == 0) continue;
            fail_of(*g.threads, "A's registers changed while wgmma read them", issued.place);
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
    g.waiting.arrived = 0;
    ++g.waiting.phase;
    wake(g.waiting, g.threads, kWarpgroupSize);
}

// --- the words -------------------------------------------------------------------------------
void reset_warpgroups(Cluster& c) {
    if (!c.warpgroups) return;
    for (int i = 0; i < kMaxClusterSize * kMaxThreads / kWarpgroupSize; ++i) {
        c.warpgroups[i].num_in_flight = c.warpgroups[i].num_issued = 0;
        reset_barrier(c.warpgroups[i].barrier, kWarpgroup, kWarpgroupSize);
        reset_barrier(c.warpgroups[i].waiting, kWarpgroup, kWarpgroupSize);
    }
}

Warpgroup& my_warpgroup(const char* message, Place place) {
    Cluster& c = worker->cluster;
    const Fiber& self = *worker->current;
    if ((self.index / kWarpgroupSize + 1) * kWarpgroupSize > c.num_threads) fail_at(message, place);
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

void wgmma(const Wgmma* op, Place place) {
    Warpgroup& g = my_warpgroup("wgmma is for warpgroups of 128 threads", place);
    worker->current->payload = const_cast<Wgmma*>(op);
    meet(g.barrier, g.threads, kWarpgroupSize, kWarpgroupSize, "wgmma", place, true, false,
         combine_wgmma);
}

// Orders memory, so that one thread can tell the producer that the whole warpgroup has read a tile.
void wgmma_wait(int groups, Place place) {
    Warpgroup& g = my_warpgroup("wgmma_wait is for warpgroups of 128 threads", place);
    Barrier& b = g.waiting;
    Fiber* self = worker->current;
    if (b.arrived == 0) {
        b.word = "wgmma_wait";
        b.place = place;
        g.groups_left = groups;
    } else if (!same_place(place, b.place)) {
        self->waiting_for = &b;
        self->word = "wgmma_wait";
        self->place = place;
        fail_diverged(&b);
    }
    TSAN(long long* sync = &b.sync[b.phase % 2]; __tsan_release(sync));
    if (++b.arrived == kWarpgroupSize) {
        new_transfer(Transfer::kProducts, self->owner->shared, 0, place).warpgroup = &g;
    }
    wait_for(self, b, "wgmma_wait", place);
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
        fail_at("the thread left the kernel without wgmma_wait", g.in_flight[0]->place);
}
