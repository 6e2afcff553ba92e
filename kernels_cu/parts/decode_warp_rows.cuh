// What a block of decode_attention.cu does for many rows: every warp has rows of its own.
//
// Arithmetic weighs as much as the read of K and V, so scores, weights and sums stay in registers,
// as in attention.cu (parts/online_softmax.cuh).
// Constants: see decode_attention.cu.
#include "parts/decode_results.cuh"
#include "parts/decode_source.cuh"
#include "parts/online_softmax.cuh"

constexpr int kNumWarps = kNumThreads / kWarpSize;
constexpr int kFragmentsM = kRows / 16 / kNumWarps;  // of a warp
constexpr int kSteps = kDim / 16, kKeyFragments = kTileK / 16;
static_assert(kFragmentsM * 16 * kNumWarps == kRows, "warps share the rows in fragments of 16");

// Queries by keys, or by the values' elements: whichever way round the platform multiplies them.
constexpr bool kRowsStay = kSumsSide == kSideA;
constexpr Side kColSide = kRowsStay ? kSideB : kSideA;
using RowFragment = Fragment<Element, kSumsSide>;
using ColFragment = Fragment<Element, kColSide>;
struct Layout {
    using Sums = Accumulator<Element>;
    static constexpr int kCount = Sums::kCount;
    DEVICE static constexpr int row(int lane, int i) {
        return kRowsStay ? Sums::row(lane, i) : Sums::col(lane, i);
    }
    DEVICE static constexpr int col(int lane, int i) {
        return kRowsStay ? Sums::col(lane, i) : Sums::row(lane, i);
    }
};
using Softmax = OnlineSoftmax<Element, Layout>;
using Rows = Softmax::Rows;

// kM x kN accumulators, pairs of which are multiplied at once: more take more registers for
// operands.
template <int kM_, int kN_>
struct Products {
    using Sums = Accumulator<Element>;
    static constexpr int kM = kM_, kN = kN_;
    static_assert(kN % 2 == 0, "pairs of columns");
    Sums sums[kN / 2][kRowsStay ? kM : 2][kRowsStay ? 2 : kM];

    DEVICE Sums& at(int m, int n) {
        return kRowsStay ? sums[n / 2][m][n % 2] : sums[n / 2][n % 2][m];
    }
    // += rows * columns; load(f, n): the fragment of column n.
    template <class Load>
    DEVICE void add(const RowFragment (&rows)[kM], const Load& load) {
#pragma unroll
        for (int g = 0; g < kN / 2; ++g) {
            ColFragment cols[2];
            load(cols[0], 2 * g);
            load(cols[1], 2 * g + 1);
            if constexpr (kRowsStay) mma(sums[g], rows, cols);
            else mma(sums[g], cols, rows);
        }
    }
};
DEVICE int first_row_of_warp() { return int(threadIdx.x) / kWarpSize * 16 * kFragmentsM; }
// The sums of weighted values: the rows of this warp, and all columns.
struct WarpRows : Products<kFragmentsM, kSteps> {
    static constexpr bool kPairs = Layout::col(0, 1) == Layout::col(0, 0) + 1;
    DEVICE static int row(int m, int i) {
        return first_row_of_warp() + m * 16 + Layout::row(lane_id(), i);
    }
    DEVICE static int col(int n, int i) { return n * 16 + Layout::col(lane_id(), i); }
};
using Scores = Products<kFragmentsM, kKeyFragments>;

static_assert(sizeof(StageMemory) % 128 == 0 && sizeof(QuerySlot) % 128 == 0,
              "tiles begin at multiples of 128 bytes, as FragmentLoader wants");
struct DecodeStorage {
    StageMemory stages[kStages];
    QuerySlot slots[kQuerySlots];
    PartialSum totals[kRows];
    ResultStorage results;
    DecodeTask tasks[kTaskSlots];
};

struct Loaders {
    FragmentLoader<false, Element, kSumsSide, QueryTile> queries;
    FragmentLoader<false, Element, kColSide, KeyColumn> keys;
    FragmentLoader<true, Element, kColSide, KeyColumn> values;

    DEVICE Loaders() : queries(first_row_of_warp()), keys(0), values(0) {}
};

// What the rows of a lane see, and their softmax.
struct WarpSoftmax {
    Softmax of[kFragmentsM];
    int ends[kFragmentsM][Softmax::kRows];  // keys [0, end) are seen

    DEVICE void begin(const DecodeParams& params, const DecodeTask& task) {
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) {
#pragma unroll
            for (int r = 0; r < Softmax::kRows; ++r) {
                int head = task.first_row + first_row_of_warp() + m * 16 + Rows::row(lane_id(), r);
                const int query = params.queries.take_from(head);
                ends[m][r] = task.num_keys - (params.causal ? params.queries.by - 1 - query : 0);
            }
        }
        restart();
    }
    DEVICE void restart() {
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) of[m].reset();
    }
    // Scores become weights, and the sums of values so far follow.
    DEVICE void weigh(Scores& scores, ValueSums<WarpRows>& values, int first_key, float scale,
                      bool masked) {
        const int lane = lane_id();
        const float positive = scale > 0.0f ? scale : 1.0f;
        const float before = scale > 0.0f ? 1.0f : scale;
        float largest[Softmax::kRows], factors[kFragmentsM][Softmax::kRows];
        bool grown = false;
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) {
            const auto at = [&](int n, int i) -> float& { return scores.at(m, n).values[i]; };
            if (before != 1.0f) {
#pragma unroll
                for (int n = 0; n < kKeyFragments; ++n) {
#pragma unroll
                    for (int i = 0; i < Layout::kCount; ++i) at(n, i) *= before;
                }
            }
            if (masked) {
#pragma unroll
                for (int n = 0; n < kKeyFragments; ++n) {
#pragma unroll
                    for (int i = 0; i < Layout::kCount; ++i) {
                        const int key = first_key + n * 16 + Layout::col(lane, i);
                        if (key >= ends[m][Rows::slot(i)]) at(n, i) = -kInfinity;
                    }
                }
            }
            grown |= of[m].template look<kKeyFragments>(at, positive, largest, factors[m]);
        }
        if (vote_any(grown)) {
#pragma unroll
            for (int m = 0; m < kFragmentsM; ++m) of[m].rescale(factors[m]);
            values.each(
                [&](int m, int, int i, float& value) { value *= factors[m][Rows::slot(i)]; });
        }
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) {
            const auto at = [&](int n, int i) -> float& { return scores.at(m, n).values[i]; };
            of[m].template exponentiate<kKeyFragments>(at, positive);
        }
    }
    // For the threads of each row; then a barrier.
    DEVICE void tell(PartialSum* totals) const {
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) {
#pragma unroll
            for (int r = 0; r < Softmax::kRows; ++r) {
                const float total = of[m].total(r);
                const int row = first_row_of_warp() + m * 16 + Rows::row(lane_id(), r);
                if (Rows::is_first(lane_id()))
                    totals[row] = {Softmax::shifted(of[m].origin[r]), total};
            }
        }
    }
};

DEVICE void score(Scores& scores, const QueryTile& q, const DecodeStage& stage,
                  const Loaders& loaders) {
    scores = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        RowFragment rows[kFragmentsM];
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) {
            loaders.queries.load(rows[m], q, m * 16, step * 16);
        }
        scores.add(rows, [&](ColFragment& f, int n) {
            const int dim = step * 16;
            loaders.keys.load(f, stage.k.columns[dim / kColumnDim], n * 16, dim % kColumnDim);
        });
    }
}

// values += the weights, rounded to Element, times the tile's values.
DEVICE void add_values(ValueSums<WarpRows>& values, Scores& weights, const DecodeStage& stage,
                       const Loaders& loaders) {
    RowFragment rows[kKeyFragments][kFragmentsM];  // half as many registers
#pragma unroll
    for (int n = 0; n < kKeyFragments; ++n) {
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) {
            sums_to_fragment<Element>(rows[n][m], weights.at(m, n));
        }
    }
#pragma unroll
    for (int n = 0; n < kKeyFragments; ++n) {
        values.all.add(rows[n], [&](ColFragment& f, int d) {
            const int dim = d * 16;
            loaders.values.load(f, stage.v.columns[dim / kColumnDim], dim % kColumnDim, n * 16);
        });
    }
}

DEVICE void attend_rows(DecodeStorage& storage, const DecodeParams& params, const KeyArrays& caches,
                        const int* seq_lens, const int* block_table, const Element* q, Element* out,
                        float* lse, void* partial_results, uint32_t* counters) {
    TileLoads loads(params, q, caches, seq_lens, block_table, storage.slots, storage.tasks);
    DecodeTask task;
    WarpSoftmax softmax;
    Loaders loaders;
    ValueSums<WarpRows> values;
    values.restart();
    RunResults<WarpRows> results(params, task, storage.results, partial_results);

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
            softmax.begin(params, task);
            results.begin();
            key = task.first;
            chunk_end = task.first + task.chunk_size;
        }
        // Of the tiles before, every query sees all keys.
        const int all_see = task.num_keys - (params.causal ? params.queries.by - 1 : 0);
        {
            Scores scores;
            score(scores, slot.q, used.tiles, loaders);
            softmax.weigh(scores, values, key, params.exponent_scale, key + kTileK > all_see);
            add_values(values, scores, used.tiles, loaders);
        }
        stage = stage + 1 < kStages ? stage + 1 : 0;
        key += kTileK;
        const bool ends = key >= task.end;
        if (!ends && key < chunk_end) continue;
        softmax.tell(storage.totals);
        sync_block();
        results.add_chunk(storage.totals[OwnRow().row], values, ends);
        softmax.restart();
        values.restart();
        chunk_end += task.chunk_size;
        if (!ends) continue;

        results.finish(slot.sums, used.values, counters, out, lse);
        ++number;
    }
    copy_async_wait<0>();
}
