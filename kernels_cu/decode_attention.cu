// decode_attention.cu: out = softmax(scale * q k^T) v for few queries against caches of many keys.
//
// Bound by one read of K and V.  The rows of one KV head, its query heads times the queries, share that
// read.  A sequence's keys fall into chunks whose size follows from its length alone; every chunk starts
// fresh and leaves unnormalised sums in FP32, which decode_merge.cu adds up in an order that the number
// of chunks fixes.  So a sequence's result does not depend on the rest of the batch, nor on how many
// chunks a block takes on.  A sequence of one chunk is finished here.
//
// A block streams the tiles of neighbouring chunks through kStages buffers.  For a tile its warps share
// the keys to make scores, then threads share the rows to make weights 2^(score - exponent), then warps
// share V's columns to add weight * value, which leaves each sum in one place.
// Of FP16 the weights are made 2^kShift larger: only those 2^(14 + kShift) below the largest are
// subnormal.
// Constants: Element, kRows (of a block), kDim (at least those of q and v), kTileK (keys of a tile),
// kStages, kMaxChunks.  Launch: grid (batch * KV heads * runs of chunks * row_blocks), block (kNumThreads),
// dynamic shared memory sizeof(DecodeStorage).
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

struct DecodeStorage {
    DecodeStage stages[kStages];
    SharedTile<kRows, kDim * 2> q;
    SharedTile<kRows, kTileK * 2> weights;
    alignas(16) float scores[kRows][kPitch];
    float factors[kRows];
};

// What a block does: rows [first_row, first_row + kRows) of a KV head against keys [first, end), which
// begin with a chunk.
struct DecodeTask {
    int64_t batch, kv_head;
    int first_row, num_keys, chunk_size, num_chunks, first_chunk, first, end;
    bool idle;

    DEVICE DecodeTask(const DecodeParams& params, const int* seq_lens) {
        int index = int(blockIdx.x);
        first_row = index % params.row_blocks * kRows;
        index /= params.row_blocks;
        const int runs = (params.max_chunks - 1) / params.chunks_per_block + 1;
        first_chunk = index % runs * params.chunks_per_block;
        index /= runs;
        kv_head = index % params.num_kv_heads;
        batch = index / params.num_kv_heads;
        num_keys = params.num_keys(seq_lens, batch);
        chunk_size = params.chunk_size(num_keys);
        num_chunks = count_chunks(num_keys, chunk_size);
        idle = first_chunk >= num_chunks;
        const int64_t last = int64_t(first_chunk + params.chunks_per_block) * chunk_size;
        first = idle ? 0 : first_chunk * chunk_size;
        end = last < num_keys ? int(last) : num_keys;
    }
};

// Brings the tiles of keys and values, one after another.  A thread copies one vector of each of
// kCopies keys.
struct KeySource {
    const Element* k;  // contiguous: of this thread's first key in the next tile; paged: of no key
    const Element* v;
    const int* table;  // of this sequence, or null
    int64_t k_page, v_page, k_row, v_row;
    int page_size, last_page, end, line, vector;
    uint32_t page_reciprocal;
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
        page_reciprocal = 0xffffffffu / uint32_t(page_size);
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
            // The page's number is at most 1 too small: 2^32 times the reciprocal lacks less than 1.
            int page = int(uint64_t(uint32_t(key)) * page_reciprocal >> 32);
            within[i] = key - page * page_size;
            if (within[i] >= page_size) ++page, within[i] -= page_size;
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
        valid = row < params.num_rows();
        const int64_t head = task.kv_head * params.heads_per_kv_head + row / params.num_queries;
        return q + (valid ? head * params.q[1] + row % params.num_queries * params.q[2] : 0);
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
        const int query = (task.first_row + row) % params.num_queries;
        end = task.num_keys - (params.causal ? params.num_queries - 1 - query : 0);
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
    Sums sums[kFragmentsM][kWarpCols];
    int first_fragment;

    DEVICE ValueSums() { first_fragment = int(threadIdx.x) / kWarpSize * kWarpCols; }
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
                load_fragment<true>(b[n], stage.v, (first_fragment + n) * 16, step * 16);
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
                    f(m * 16 + Sums::row(lane, i), (first_fragment + n) * 16 + Sums::col(lane, i),
                      sums[m][n].values[i]);
                }
            }
        }
    }
};

// The results of rows all of whose keys lie in one chunk.
DEVICE void write_rows(const DecodeParams& params, const DecodeTask& task, const Partials& partials,
                       int64_t first, int num_rows, Element* out, float* lse) {
    const int count = (num_rows < kRows ? num_rows : kRows) * kDim;
#pragma unroll 1
    for (int i = int(threadIdx.x); i < count; i += kNumThreads) {
        const int row = i / kDim, col = i % kDim;
        if (col >= params.dim_v) continue;
        const PartialSum total = partials.sums[first + row];
        const OutputRow place(params, task.batch, task.kv_head, task.first_row + row);
        const float value = partials.values[first * kDim + i];
        out[place.out + col * params.out[3]] = from_float<Element>(value * normalizer(total.sum));
        if (lse && col == 0) lse[place.lse] = log_sum_exp(total);
    }
}

KERNEL void decode_attention(const Element* q, const Element* k_cache, const Element* v_cache,
                             const int* seq_lens, const int* block_table, Element* out, float* lse,
                             float* partial_memory, const DecodeParams params) {
    SHARED_STORAGE(DecodeStorage, storage);
    const DecodeTask task(params, seq_lens);
    if (task.idle) return;

    KeySource source(params, k_cache, v_cache, block_table, task);
    load_queries(storage, params, q, task);
    Queries queries;
    RowSoftmax softmax(params, task);
    ValueSums values;
    values.restart();

    const Partials partials(params, partial_memory);
    const int num_rows = params.num_rows() - task.first_row;
    const auto finish_chunk = [&](int chunk) {
        const PartialSum total = softmax.total();
        const int64_t first =
            partials.first(task.batch * params.num_kv_heads + task.kv_head, chunk) + task.first_row;
        float* chunk_values = partials.values + first * kDim;
        values.each([&](int row, int col, float& value) {
            if (row < num_rows) chunk_values[row * kDim + col] = value;
        });
        if (softmax.part == 0 && softmax.row < num_rows) partials.sums[first + softmax.row] = total;
        if (task.num_chunks == 1) {
            sync_block();  // the partial results are there
            write_rows(params, task, partials, first, num_rows, out, lse);
        }
        softmax.restart();
        values.restart();
    };

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
        const bool is_last = key + kTileK >= task.end;
        if (is_last || key + kTileK >= chunk_end) {
            finish_chunk(chunk++);
            chunk_end += task.chunk_size;
        }
        if (is_last) break;
    }
    copy_async_wait<0>();
}
