// decode_attention.cu: out = softmax(scale * q k^T) v for few queries against caches of many keys.
//
// Bound by one read of K and V.  The rows of one KV head, its query heads times the queries, share that
// read.  A sequence's keys fall into chunks whose size follows from its length alone; every chunk starts
// fresh.  The sums of kGroup neighbouring chunks are folded into their group's one after another, then
// those of all groups are added up in their order.  So a sequence's result depends neither on the rest of
// the batch nor on who computes what of it.
//
// A block takes on one chunk, or one or several whole groups, which it folds in registers.  Partial
// results go to memory as threads hold them.  Whoever is the last of a group's chunks folds them, and the
// last of a sequence's blocks adds up its groups: counters tell, which the last one sets back to 0.
//
// A block streams the tiles of neighbouring chunks through kStages buffers.  For a tile its warps share
// the keys to make scores, then threads share the rows to make weights 2^(score - exponent), then warps
// share V's columns to add weight * value, which leaves each sum in one place.
// Of FP16 the weights are made 2^kShift larger: only those 2^(14 + kShift) below the largest are
// subnormal.
// Constants: Element, kRows (of a block), kDim (at least those of q and v), kTileK (keys of a tile),
// kStages, kMaxChunks, kGroup.  Launch: grid (batch * KV heads * runs of chunks * row_blocks), block
// (kNumThreads), dynamic shared memory sizeof(DecodeStorage).  Counters are 0 at the start of a launch.
#include "parts/decode_task.cuh"
#include "parts/shared_tile.cuh"

constexpr int kNumWarps = kNumThreads / kWarpSize;
constexpr int kVectors = kDim / 8;  // of 16 bytes, in a key
constexpr int kFragmentsM = kRows / 16, kSteps = kDim / 16;
constexpr int kKeyFragments = kTileK / 16;
// Of a warp.  Where there are fewer than warps, the last warps make no scores.
constexpr int kWarpKeys = kKeyFragments < kNumWarps ? 1 : kKeyFragments / kNumWarps;
constexpr int kWarpCols = kSteps / kNumWarps;
static_assert(kKeyFragments < kNumWarps || kKeyFragments % kNumWarps == 0, "warps share a tile's keys");
static_assert(kWarpCols * kNumWarps == kSteps, "warps share the columns of V");

constexpr int kThreadsPerRow = kNumThreads / kRows;
constexpr int kPairs = kTileK / 2 / kThreadsPerRow;  // of keys, of a thread
static_assert(kPairs * kThreadsPerRow * 2 == kTileK, "threads share a row's keys");
constexpr int kPitch = kTileK + (kRows > 16 ? 4 : 8);  // spreads rows over the banks
constexpr float kShift = kSame<Element, half> ? 14.0f : 0.0f;

// Lines of a tile that a thread copies one vector of.
constexpr int kLinesAtOnce = kNumThreads / kVectors;
constexpr int kCopies = kTileK / kLinesAtOnce;
static_assert(kCopies * kLinesAtOnce == kTileK, "threads share a tile's vectors");

using Sums = Accumulator<Element>;

using KeyTile = SharedTile<kTileK, kDim * 2>;

struct DecodeStage {
    KeyTile k, v;
};

// What sums so far, and those that come to them, are multiplied by.
struct FoldFactors {
    float before, added;
};

struct DecodeStorage {
    union {
        DecodeStage stages[kStages];
        float group_weights[kMaxGroups][kRows];  // after all tiles
    };
    SharedTile<kRows, kDim * 2> q;
    SharedTile<kRows, kTileK * 2> weights;
    alignas(16) float scores[kRows][kPitch];
    float factors[kRows];
    FoldFactors folds[2][kRows];
    int is_last[2];
};

// What a block does: rows [first_row, first_row + kRows) of a KV head against keys [first, end), which
// begin with a chunk.
struct DecodeTask {
    int64_t batch, kv_head;
    int64_t place;  // of the rows among all
    int first_row, num_rows;  // num_rows: that there are from first_row on
    int num_keys, chunk_size, num_chunks, num_groups, first_chunk, first, end;
    bool idle;

    DEVICE DecodeTask(const DecodeParams& params, const int* seq_lens) {
        int index = int(blockIdx.x);
        const int row_block = params.row_blocks.take_from(index);
        const int run = params.runs.take_from(index);
        place = int64_t(index) * params.row_blocks.by + row_block;
        kv_head = params.kv_heads.take_from(index);
        batch = index;
        first_row = row_block * kRows;
        num_rows = params.num_rows - first_row;
        num_keys = params.num_keys(seq_lens, batch);
        chunk_size = params.chunk_size(num_keys);
        num_chunks = count_chunks(num_keys, chunk_size);
        num_groups = (num_chunks - 1) / kGroup + 1;
        first_chunk = run * params.chunks_per_block;
        idle = first_chunk >= num_chunks;
        const int64_t last = int64_t(first_chunk + params.chunks_per_block) * chunk_size;
        first = idle ? 0 : first_chunk * chunk_size;
        end = last < num_keys ? int(last) : num_keys;
    }
    DEVICE int64_t chunk_node(const DecodeParams& params, int chunk) const {
        return place * params.nodes + chunk;
    }
    DEVICE int64_t group_node(const DecodeParams& params, int group) const {
        return place * params.nodes + params.chunk_nodes + group;
    }
};

// Brings the tiles of keys and values, one after another.  A thread copies one vector of each of
// kCopies keys.
struct KeySource {
    const Element* k;  // contiguous: of this thread's first key in the next tile; paged: of no key
    const Element* v;
    const int* table;  // of this sequence, or null
    int64_t k_page, v_page, k_row, v_row;
    Divisor page_size;
    int last_page, end, line, vector;
    bool has_k, has_v;
    int pages[kCopies], within[kCopies];  // where the next tile's keys are

    DEVICE KeySource(const DecodeParams& params, const Element* k_cache, const Element* v_cache,
                     const int* block_table, const DecodeTask& task) {
        line = int(threadIdx.x) / kVectors, vector = int(threadIdx.x) % kVectors;
        k_page = params.k[0], v_page = params.v[0], k_row = params.k[2], v_row = params.v[2];
        k = k_cache + task.kv_head * params.k[1] + vector * 8;
        v = v_cache + task.kv_head * params.v[1] + vector * 8;
        if (!block_table) {
            k += task.batch * k_page + (task.first + line) * k_row;
            v += task.batch * v_page + (task.first + line) * v_row;
        }
        table = block_table ? block_table + task.batch * params.table_stride : nullptr;
        page_size = params.page_size, last_page = params.num_pages - 1;
        end = task.end;
        has_k = vector * 8 < params.dim, has_v = vector * 8 < params.dim_v;
        find_pages(task.first);
    }
    // One tile ahead, so that nothing waits for the table.
    DEVICE void find_pages(int first_key) {
        if (!table) return;
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            const int key = first_key + i * kLinesAtOnce + line;
            int page = key;
            within[i] = page_size.take_from(page);
            pages[i] = key < end ? table[page] : 0;
        }
    }
    DEVICE void load(DecodeStage& stage, int first_key) {
        // Lines a whole number of periods apart have the same places.
        constexpr int kPeriod = KeyTile::kPeriod;
        constexpr int kPlaces = kLinesAtOnce < kPeriod ? kPeriod / kLinesAtOnce : 1;
        static_assert(kPlaces * kLinesAtOnce % kPeriod == 0, "threads' lines repeat");
        int places[kPlaces];
#pragma unroll
        for (int i = 0; i < kPlaces; ++i) places[i] = KeyTile::place(line + i * kLinesAtOnce, vector);
        const auto copy = [&](int i, const Element* from_k, const Element* from_v) {
            const int place = places[i % kPlaces] + i / kPlaces * kPlaces * kLinesAtOnce * kVectors;
            // What is not there is zero: a weight of zero does not hide NaN.
            const bool valid = first_key + i * kLinesAtOnce + line < end;
            copy_async<16>(&stage.k.chunks[place], from_k, has_k && valid);
            copy_async<16>(&stage.v.chunks[place], from_v, has_v && valid);
        };
        if (!table) {
#pragma unroll
            for (int i = 0; i < kCopies; ++i) {
                copy(i, k, v);
                k += kLinesAtOnce * k_row, v += kLinesAtOnce * v_row;
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            const int page = pages[i] < 0 ? 0 : pages[i] < last_page ? pages[i] : last_page;
            copy(i, k + page * k_page + within[i] * k_row, v + page * v_page + within[i] * v_row);
        }
        find_pages(first_key + kTileK);
    }
};

// Starts to load the rows' queries; rows that there are not are zero.  Not unrolled: code is to be fetched
// as well.
DEVICE void load_queries(DecodeStorage& storage, const DecodeParams& params, const Element* q,
                         const DecodeTask& task) {
    const int tid = int(threadIdx.x);
    q += task.batch * params.q[0];
    const auto row_of = [&](int i, bool& valid) {
        const int row = task.first_row + i;
        valid = row < params.num_rows;
        int head = row;
        const int query = params.queries.take_from(head);
        const int64_t first_head = task.kv_head * params.heads_per_kv_head;
        return q + (valid ? (first_head + head) * params.q[1] + query * params.q[2] : 0);
    };
    bool valid;
    if (params.query_vectors) {
#pragma unroll 1
        for (int i = tid; i < kRows * kVectors; i += kNumThreads) {
            const int vector = i % kVectors;
            const Element* row = row_of(i / kVectors, valid);
            copy_async<16>(storage.q(i / kVectors, vector), row + vector * 8,
                           valid && vector * 8 < params.dim);
        }
        return;
    }
#pragma unroll 1
    for (int i = tid; i < kRows * kDim; i += kNumThreads) {
        const int col = i % kDim;
        const Element* row = row_of(i / kDim, valid);
        static_cast<Element*>(storage.q(i / kDim, col / 8))[col % 8] =
            valid && col < params.dim ? row[col * params.q[3]] : from_float<Element>(0.0f);
    }
}

// The queries of all rows as fragments: in registers where they are few.
struct Queries {
    static constexpr bool kHeld = kFragmentsM * kDim <= 128;
    FragmentA<Element> held[kHeld ? kSteps : 1][kFragmentsM];

    DEVICE static void load(FragmentA<Element> (&a)[kFragmentsM], const DecodeStorage& storage,
                            int step) {
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) load_fragment<false>(a[m], storage.q, m * 16, step * 16);
    }
    DEVICE void hold(const DecodeStorage& storage) {
        if constexpr (kHeld) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) load(held[step], storage, step);
        }
    }
    // storage.scores = q k^T of this warp's keys.
    DEVICE void score(DecodeStorage& storage, const DecodeStage& stage) const {
        const int first_fragment = int(threadIdx.x) / kWarpSize * kWarpKeys;
        if (kKeyFragments < kNumWarps && first_fragment >= kKeyFragments) return;
        Sums sums[kFragmentsM][kWarpKeys] = {};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            FragmentB<Element> b[kWarpKeys];
#pragma unroll
            for (int n = 0; n < kWarpKeys; ++n) {
                load_fragment<false>(b[n], stage.k, (first_fragment + n) * 16, step * 16);
            }
            if constexpr (kHeld) {
                mma(sums, held[step], b);
            } else {
                FragmentA<Element> a[kFragmentsM];
                load(a, storage, step);
                mma(sums, a, b);
            }
        }
        const int lane = lane_id();
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) {
#pragma unroll
            for (int n = 0; n < kWarpKeys; ++n) {
#pragma unroll
                for (int i = 0; i < Sums::kCount; ++i) {
                    const int col = (first_fragment + n) * 16 + Sums::col(lane, i);
                    storage.scores[m * 16 + Sums::row(lane, i)][col] = sums[m][n].values[i];
                }
            }
        }
    }
};

// A row's running softmax; kThreadsPerRow threads share it.
struct RowSoftmax {
    int row, part, end;  // keys [0, end) are seen
    PartialSum mine;     // the sum is over this thread's keys

    DEVICE RowSoftmax(const DecodeParams& params, const DecodeTask& task) {
        row = int(threadIdx.x) / kThreadsPerRow, part = int(threadIdx.x) % kThreadsPerRow;
        int head = task.first_row + row;
        const int query = params.queries.take_from(head);
        end = task.num_keys - (params.causal ? params.queries.by - 1 - query : 0);
        restart();
    }
    DEVICE void restart() { mine = {-kInfinity, 0.0f}; }
    // storage.weights, and the factor of what was added before, for the tile from first_key on.
    DEVICE void weigh(DecodeStorage& storage, int first_key, float exponent_scale) {
        float score[kPairs][2];
        float largest = -kInfinity;
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            const int key = 2 * (j * kThreadsPerRow + part);
            const auto& pair = reinterpret_cast<const Bytes<8>&>(storage.scores[row][key]);
            memcpy(score[j], &pair, 8);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const bool seen = first_key + key + e < end;
                largest = maximum(largest, seen ? score[j][e] * exponent_scale : -kInfinity);
            }
        }
#pragma unroll
        for (int mask = 1; mask < kThreadsPerRow; mask *= 2) {
            largest = maximum(largest, shuffle_xor(largest, mask));
        }
        const float exponent = maximum(mine.exponent, largest - kShift);
        const float finite = exponent == -kInfinity ? 0.0f : exponent;
        const float factor = exp2_approx(mine.exponent - finite);
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            const int pair = j * kThreadsPerRow + part;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const bool seen = first_key + 2 * pair + e < end;
                score[j][e] = seen ? exp2_approx(score[j][e] * exponent_scale - finite) : 0.0f;
                sum += score[j][e];
            }
            static_cast<uint32_t*>(storage.weights(row, pair / 4))[pair % 4] =
                pack<Element>(score[j][0], score[j][1]);
        }
        mine = {exponent, mine.sum * factor + sum};
        if (part == 0) storage.factors[row] = factor;
    }
    // Over all threads of the row.
    DEVICE PartialSum total() const {
        float sum = mine.sum;
#pragma unroll
        for (int mask = 1; mask < kThreadsPerRow; mask *= 2) sum += shuffle_xor(sum, mask);
        return {mine.exponent, sum};
    }
};

// The rows' sums of weighted values, of this warp's columns.
struct ValueSums {
    static constexpr int kVectorsOfAccumulator = Sums::kCount / 4;
    static constexpr int kVectorsOfThread = kFragmentsM * kWarpCols * kVectorsOfAccumulator;
    Sums sums[kFragmentsM][kWarpCols];

    DEVICE static int first_fragment() { return int(threadIdx.x) / kWarpSize * kWarpCols; }
    DEVICE void restart() {
        each([](int, int, float& value) { value = 0.0f; });
    }
    DEVICE void add(const DecodeStorage& storage, const DecodeStage& stage) {
        each([&](int row, int, float& value) { value *= storage.factors[row]; });
#pragma unroll
        for (int step = 0; step < kKeyFragments; ++step) {
            FragmentA<Element> a[kFragmentsM];
            FragmentB<Element> b[kWarpCols];
#pragma unroll
            for (int m = 0; m < kFragmentsM; ++m) {
                load_fragment<false>(a[m], storage.weights, m * 16, step * 16);
            }
#pragma unroll
            for (int n = 0; n < kWarpCols; ++n) {
                load_fragment<true>(b[n], stage.v, (first_fragment() + n) * 16, step * 16);
            }
            mma(sums, a, b);
        }
    }
    // f(row, col, sum) for each sum of this lane.
    template <class F>
    DEVICE void each(F f) {
        const int lane = lane_id();
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) {
#pragma unroll
            for (int n = 0; n < kWarpCols; ++n) {
#pragma unroll
                for (int i = 0; i < Sums::kCount; ++i) {
                    f(m * 16 + Sums::row(lane, i), (first_fragment() + n) * 16 + Sums::col(lane, i),
                      sums[m][n].values[i]);
                }
            }
        }
    }
    // f(place among the vectors of this thread, four sums) for those of rows that there are.
    template <class F>
    DEVICE void each_vector(int num_rows, F f) {
        const int lane = lane_id();
#pragma unroll
        for (int v = 0; v < kVectorsOfThread; ++v) {
            const int fragment = v / kVectorsOfAccumulator, m = fragment / kWarpCols;
            const int first = v % kVectorsOfAccumulator * 4;
            bool any = false;
#pragma unroll
            for (int i = first; i < first + 4; ++i) any |= m * 16 + Sums::row(lane, i) < num_rows;
            if (any) f(v, sums[m][fragment % kWarpCols].values + first);
        }
    }
};

// Where partial results lie: of every node first its values, as the threads hold them, then its rows' sums.
struct Nodes {
    Bytes<16>* values;
    PartialSum* sums;

    DEVICE Nodes(const DecodeParams& params, void* memory)
        : values(static_cast<Bytes<16>*>(memory)),
          sums(reinterpret_cast<PartialSum*>(values + params.num_nodes * (kRows * kDim / 4))) {}
    DEVICE Bytes<16>* vector(int64_t node, int v) const {
        return values + (node * ValueSums::kVectorsOfThread + v) * kNumThreads + threadIdx.x;
    }
    DEVICE PartialSum* sum(int64_t node, int row) const { return sums + node * kRows + row; }

    DEVICE void store(int64_t node, const RowSoftmax& softmax, const PartialSum& total,
                      ValueSums& mine, int num_rows) const {
        mine.each_vector(num_rows, [&](int v, float* four) {
            Bytes<16> bytes;
            memcpy(&bytes, four, 16);
            store_vector<16>(vector(node, v), bytes);
        });
        if (softmax.part == 0 && softmax.row < num_rows) *sum(node, softmax.row) = total;
    }
    DEVICE void load(int64_t node, ValueSums& into, int num_rows) const {
        into.each_vector(num_rows, [&](int v, float* four) {
            const Bytes<16> bytes = load_vector<16>(vector(node, v));
            memcpy(four, &bytes, 16);
        });
    }
};

// The sums of a group's chunks so far.
struct GroupSums {
    PartialSum total;  // of the row that this thread has in RowSoftmax
    ValueSums values;
    int turn;

    DEVICE void restart() {
        total = {-kInfinity, 0.0f};
        values.restart();
        turn = 0;
    }
    // The chunk's sums are left as they are.
    DEVICE void fold(DecodeStorage& storage, const RowSoftmax& softmax, const PartialSum& chunk,
                     ValueSums& added) {
        const float exponent = maximum(total.exponent, chunk.exponent);
        const float finite = exponent == -kInfinity ? 0.0f : exponent;
        const FoldFactors factors = {exp2_approx(total.exponent - finite),
                                     exp2_approx(chunk.exponent - finite)};
        total = {exponent, multiply_add(total.sum, factors.before, chunk.sum * factors.added)};
        turn ^= 1;  // the other buffer may still be read
        if (softmax.part == 0) storage.folds[turn][softmax.row] = factors;
        sync_block();
        const int lane = lane_id();
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) {
#pragma unroll
            for (int i = 0; i < Sums::kCount; ++i) {
                const FoldFactors& row = storage.folds[turn][m * 16 + Sums::row(lane, i)];
#pragma unroll
                for (int n = 0; n < kWarpCols; ++n) {
                    float& sum = values.sums[m][n].values[i];
                    sum = multiply_add(sum, row.before, added.sums[m][n].values[i] * row.added);
                }
            }
        }
    }
};

// Whether this is the last of `count` blocks; then what all of them have stored is there to be read.
DEVICE bool is_last(int& told, uint32_t* counter, int count) {
    sync_block();  // what this block's threads have stored is there
    if (threadIdx.x == 0) {
        const bool last = atomic_add_acq_rel(counter, 1) == uint32_t(count - 1);
        if (last) *counter = 0;
        told = last;
    }
    sync_block();
    return told;
}

// The sums of the chunks [first, first + count) of one group, by the last block to finish one of them.
DEVICE void fold_chunks(DecodeStorage& storage, const RowSoftmax& softmax, const DecodeParams& params,
                        const DecodeTask& task, const Nodes& nodes, int first, int count,
                        GroupSums& group) {
    constexpr int kAtOnce = kFragmentsM > 1 ? 1 : 2;
    group.restart();
#pragma unroll 1
    for (int chunk = 0; chunk < count; chunk += kAtOnce) {
        ValueSums values[kAtOnce];
        PartialSum totals[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            values[i].restart();
            totals[i] = {-kInfinity, 0.0f};
            if (chunk + i >= count) continue;
            const int64_t node = task.chunk_node(params, first + chunk + i);
            nodes.load(node, values[i], task.num_rows);
            if (softmax.row < task.num_rows) totals[i] = *nodes.sum(node, softmax.row);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (chunk + i < count) group.fold(storage, softmax, totals[i], values[i]);
        }
    }
}

// The sums of all groups of a sequence, by the last block to finish one of them.
DEVICE void add_groups(DecodeStorage& storage, const RowSoftmax& softmax, const DecodeParams& params,
                       const DecodeTask& task, const Nodes& nodes, GroupSums& total) {
    constexpr int kAtOnce = kFragmentsM * kDim > 128 ? 1 : 4;
    const bool has_row = softmax.row < task.num_rows;
    const auto sum_of = [&](int group) {
        return *nodes.sum(task.group_node(params, group), softmax.row);
    };
    float largest = -kInfinity;
    for (int i = softmax.part; has_row && i < task.num_groups; i += kThreadsPerRow) {
        largest = maximum(largest, sum_of(i).exponent);
    }
    largest = MergeFloats<Max>().across_lanes(largest, 1, kThreadsPerRow);
    const float finite = largest == -kInfinity ? 0.0f : largest;
    float sum = 0.0f;
    for (int i = softmax.part; i < task.num_groups; i += kThreadsPerRow) {
        const PartialSum group = has_row ? sum_of(i) : PartialSum{-kInfinity, 0.0f};
        const float weight = exp2_approx(group.exponent - finite);
        sum = multiply_add(group.sum, weight, sum);
        storage.group_weights[i][softmax.row] = weight;
    }
    total.total = {largest, MergeFloats<Sum>().across_lanes(sum, 1, kThreadsPerRow)};
    sync_block();

    total.values.restart();
    const int lane = lane_id();
#pragma unroll 1
    for (int first = 0; first < task.num_groups; first += kAtOnce) {
        ValueSums values[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            values[i].restart();
            if (first + i < task.num_groups) {
                nodes.load(task.group_node(params, first + i), values[i], task.num_rows);
            }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (first + i >= task.num_groups) continue;
#pragma unroll
            for (int m = 0; m < kFragmentsM; ++m) {
#pragma unroll
                for (int j = 0; j < Sums::kCount; ++j) {
                    const float weight =
                        storage.group_weights[first + i][m * 16 + Sums::row(lane, j)];
#pragma unroll
                    for (int n = 0; n < kWarpCols; ++n) {
                        float& value = total.values.sums[m][n].values[j];
                        value = multiply_add(values[i].sums[m][n].values[j], weight, value);
                    }
                }
            }
        }
    }
}

// The results of rows all of whose sums are here.
DEVICE void write_rows(DecodeStorage& storage, const RowSoftmax& softmax, const DecodeParams& params,
                       const DecodeTask& task, GroupSums& sums, Element* out, float* lse) {
    if (softmax.part == 0) {
        storage.factors[softmax.row] = normalizer(sums.total.sum);
        if (lse && softmax.row < task.num_rows) {
            const int row = task.first_row + softmax.row;
            lse[OutputRow(params, task.batch, task.kv_head, row).lse] = log_sum_exp(sums.total);
        }
    }
    sync_block();
    const int lane = lane_id();
#pragma unroll
    for (int m = 0; m < kFragmentsM; ++m) {
        int64_t places[Sums::kCount];  // the same for the sums of one row: worked out once
#pragma unroll
        for (int i = 0; i < Sums::kCount; ++i) {
            const int row = task.first_row + m * 16 + Sums::row(lane, i);
            places[i] = OutputRow(params, task.batch, task.kv_head, row).out;
        }
#pragma unroll
        for (int i = 0; i < Sums::kCount; ++i) {
            const int row = m * 16 + Sums::row(lane, i);
            if (row >= task.num_rows) continue;
            const float factor = storage.factors[row];
#pragma unroll
            for (int n = 0; n < kWarpCols; ++n) {
                const int col = (ValueSums::first_fragment() + n) * 16 + Sums::col(lane, i);
                if (col >= params.dim_v) continue;
                out[places[i] + col * params.out[3]] =
                    from_float<Element>(sums.values.sums[m][n].values[i] * factor);
            }
        }
    }
}

KERNEL void decode_attention(const Element* q, const Element* k_cache, const Element* v_cache,
                             const int* seq_lens, const int* block_table, Element* out, float* lse,
                             void* partial_results, uint32_t* counters, const DecodeParams params) {
    SHARED_STORAGE(DecodeStorage, storage);
    const DecodeTask task(params, seq_lens);
    if (task.idle) return;

    KeySource source(params, k_cache, v_cache, block_table, task);
    RowSoftmax softmax(params, task);
    Queries queries;
    ValueSums values;
    GroupSums group;
    values.restart();
    group.restart();
    const Nodes nodes(params, partial_results);

    int next_stage = 0, stage = 0;
    int chunk = task.first_chunk, chunk_end = task.first + task.chunk_size;
    // The first rounds of the loop only load, so that there is one place that does.
#pragma unroll 1
    for (int key = task.first - (kStages - 1) * kTileK;; key += kTileK) {
        if (key >= task.first) {
            if constexpr (kStages > 1) copy_async_wait<kStages - 2>();
            sync_block();  // this stage is whole, and the one before it has been read by all
        }
        const int next_key = key + (kStages - 1) * kTileK;
        // Where there is no key, one tile of zeros.
        if (next_key == task.first || next_key < task.end) {
            source.load(storage.stages[next_stage], next_key);
        }
        if (next_key == task.first) load_queries(storage, params, q, task);
        copy_async_commit();
        next_stage = next_stage + 1 < kStages ? next_stage + 1 : 0;
        if (key < task.first) continue;
        if constexpr (kStages == 1) {
            copy_async_wait<0>();
            sync_block();
        }

        const DecodeStage& tile = storage.stages[stage];
        if (key == task.first) queries.hold(storage);
        queries.score(storage, tile);
        sync_block();
        softmax.weigh(storage, key, params.exponent_scale);
        sync_block();
        values.add(storage, tile);
        stage = stage + 1 < kStages ? stage + 1 : 0;
        const bool is_last_tile = key + kTileK >= task.end;
        if (is_last_tile || key + kTileK >= chunk_end) {
            group.fold(storage, softmax, softmax.total(), values);
            softmax.restart();
            values.restart();
            const bool ends_group = chunk % kGroup == kGroup - 1 || is_last_tile;
            if (ends_group && params.chunks_per_block > 1 && task.num_groups > 1) {
                nodes.store(task.group_node(params, chunk / kGroup), softmax, group.total,
                            group.values, task.num_rows);
                group.restart();
            }
            ++chunk;
            chunk_end += task.chunk_size;
        }
        if (is_last_tile) break;
    }
    copy_async_wait<0>();

    uint32_t* mine = counters + task.place * params.counters;
    int blocks = task.num_groups;  // that leave groups of this sequence
    if (params.chunks_per_block > 1) {
        blocks = (task.num_chunks - 1) / params.chunks_per_block + 1;
    } else {
        const int index = task.first_chunk / kGroup, first = index * kGroup;
        const int count = first + kGroup < task.num_chunks ? kGroup : task.num_chunks - first;
        if (count > 1) {
            nodes.store(task.chunk_node(params, task.first_chunk), softmax, group.total,
                        group.values, task.num_rows);
            if (!is_last(storage.is_last[0], mine + 1 + index, count)) return;
            fold_chunks(storage, softmax, params, task, nodes, first, count, group);
        }
        if (task.num_groups > 1) {
            nodes.store(task.group_node(params, index), softmax, group.total, group.values,
                        task.num_rows);
        }
    }
    if (task.num_groups > 1) {
        if (!is_last(storage.is_last[1], mine, blocks)) return;
        add_groups(storage, softmax, params, task, nodes, group);
    }
    write_rows(storage, softmax, params, task, group, out, lse);
}
