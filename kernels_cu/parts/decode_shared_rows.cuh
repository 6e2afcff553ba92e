// What a block of decode_attention.cu does for few rows: its warps share all of them.
//
// For a tile its warps share the keys to make scores, then threads share the rows to make weights
// 2^(score - exponent), then warps share V's columns to add weight * value, which leaves each sum
// in one place.  Of FP16 the weights are made 2^kShift larger: only those 2^(14 + kShift) below the
// largest are subnormal.
// Constants: see decode_attention.cu.
#include "parts/decode_results.cuh"
#include "parts/decode_source.cuh"

constexpr int kNumWarps = kNumThreads / kWarpSize;
constexpr int kFragmentsM = kRows / 16, kSteps = kDim / 16;
constexpr int kKeyFragments = kTileK / 16;
// Of a warp.  Where there are fewer than warps, the last warps make no scores.
constexpr int kWarpKeys = kKeyFragments < kNumWarps ? 1 : kKeyFragments / kNumWarps;
constexpr int kWarpCols = kSteps / kNumWarps;
static_assert(kKeyFragments < kNumWarps || kKeyFragments % kNumWarps == 0,
              "warps share a tile's keys");
static_assert(kWarpCols * kNumWarps == kSteps, "warps share the columns of V");

constexpr int kPairs = kTileK / 2 / kThreadsPerRow;  // of keys, of a thread
static_assert(kPairs * kThreadsPerRow * 2 == kTileK, "threads share a row's keys");
constexpr int kPitch = kTileK + (kRows > 16 ? 4 : 8);  // spreads rows over the banks
constexpr float kShift = kSame<Element, half> ? 14.0f : 0.0f;

using Sums = Accumulator<Element>;

struct DecodeStorage {
    StageMemory stages[kStages];
    QuerySlot slots[kQuerySlots];
    SharedTile<kRows, kTileK * 2> weights;
    alignas(16) float scores[kRows][kPitch];
    float factors[kRows];
    ResultStorage results;
    DecodeTask tasks[kTaskSlots];
};

// The queries of all rows as fragments: in registers where they are few.
struct Queries {
    static constexpr int kBytes = kFragmentsM * kSteps * int(sizeof(FragmentA<Element>));
    static constexpr bool kHeld = kBytes <= 128;
    FragmentA<Element> held[kHeld ? kSteps : 1][kFragmentsM];

    DEVICE static void load(FragmentA<Element> (&a)[kFragmentsM], const QueryTile& q, int step) {
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) load_fragment<false>(a[m], q, m * 16, step * 16);
    }
    DEVICE void hold(const QueryTile& q) {
        if constexpr (kHeld) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) load(held[step], q, step);
        }
    }
    // storage.scores = q k^T of this warp's keys.
    DEVICE void score(DecodeStorage& storage, const DecodeStage& stage, const QueryTile& q) const {
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
                load(a, q, step);
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

    DEVICE RowSoftmax() {
        row = int(threadIdx.x) / kThreadsPerRow, part = int(threadIdx.x) % kThreadsPerRow;
    }
    DEVICE void begin(const DecodeParams& params, const DecodeTask& task) {
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

// The sums of weighted values: all rows, and the columns of this warp.
struct WarpColumns {
    using Sums = Accumulator<Element>;
    static constexpr int kM = kFragmentsM, kN = kWarpCols;
    static constexpr bool kPairs = Sums::col(0, 1) == Sums::col(0, 0) + 1;
    Sums sums[kM][kN];

    DEVICE static int first_fragment() { return int(threadIdx.x) / kWarpSize * kN; }
    DEVICE Sums& at(int m, int n) { return sums[m][n]; }
    DEVICE static int row(int m, int i) { return m * 16 + Sums::row(lane_id(), i); }
    DEVICE static int col(int n, int i) {
        return (first_fragment() + n) * 16 + Sums::col(lane_id(), i);
    }
};

DEVICE void add_values(ValueSums<WarpColumns>& values, const DecodeStorage& storage,
                       const DecodeStage& stage) {
    values.each(
        [&](int m, int, int i, float& value) { value *= storage.factors[WarpColumns::row(m, i)]; });
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
            const int first = (WarpColumns::first_fragment() + n) * 16;
            load_fragment<true>(b[n], stage.v, first, step * 16);
        }
        mma(values.all.sums, a, b);
    }
}

DEVICE void attend_rows(DecodeStorage& storage, const DecodeParams& params, const KeyArrays& caches,
                        const int* seq_lens, const int* block_table, const Element* q, Element* out,
                        float* lse, void* partial_results, uint32_t* counters) {
    TileLoads loads(params, q, caches, seq_lens, block_table, storage.slots, storage.tasks);
    DecodeTask task;
    RowSoftmax softmax;
    Queries queries;
    ValueSums<WarpColumns> values;
    values.restart();
    RunResults<WarpColumns> results(params, task, storage.results, partial_results);

    int stage = 0, filled = 0, number = 0, key = 0, chunk_end = 0;
    // The first rounds only load, so that there is one place that does.
#pragma unroll 1
    for (;;) {
        const bool filling = filled < kStages - 1;
        if (!filling) {
            if constexpr (kStages > 1) copy_async_wait<kStages - 2>();
            sync_block();  // this stage is whole, and the one before it has been read by all
        }
        loads.start(storage.stages, number);
        if (filling) {
            ++filled;
            continue;
        }
        if constexpr (kStages == 1) {
            copy_async_wait<0>();
            sync_block();
        }

        StageMemory& used = storage.stages[stage];
        QuerySlot& slot = storage.slots[number % kQuerySlots];
        if (key >= task.end) {
            task = storage.tasks[number % kTaskSlots];
            if (!task.exists) break;
            loads.need_queries(task, number);
            queries.hold(slot.q);
            softmax.begin(params, task);
            results.begin();
            key = task.first;
            chunk_end = task.first + task.chunk_size;
        }
        queries.score(storage, used.tiles, slot.q);
        sync_block();
        softmax.weigh(storage, key, params.exponent_scale);
        sync_block();
        add_values(values, storage, used.tiles);
        stage = stage + 1 < kStages ? stage + 1 : 0;
        key += kTileK;
        const bool ends = key >= task.end;
        if (!ends && key < chunk_end) continue;
        results.add_chunk(softmax.total(), values, ends);
        softmax.restart();
        values.restart();
        chunk_end += task.chunk_size;
        if (!ends) continue;

        results.finish(slot.sums, used.values, counters, out, lse);
        ++number;
    }
    copy_async_wait<0>();
}
