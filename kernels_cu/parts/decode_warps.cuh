// What the warps of a block of decode_attention.cu do with its tiles.
//
// Of many rows every warp has some of its own.  Few rows all warps share, each with keys of its own
// (and where a tile has too few of them, with columns of V): scores, weights and sums stay in its
// registers, as in attention.cu (parts/online_softmax.cuh), and warps wait for each other once a
// tile.  What a chunk's keys give to the warps is added up where it ends, in the warps' order.
// Constants: see decode_attention.cu.
#include "parts/decode_results.cuh"
#include "parts/decode_source.cuh"
#include "parts/online_softmax.cuh"

constexpr int kNumWarps = kNumThreads / kWarpSize;
constexpr int kRowWarps = kRows >= 16 * kNumWarps ? kNumWarps : 1;
constexpr int kKeyFragments = kTileK / 16, kSteps = kDim / 16;
constexpr int kWarpsOfRows = kNumWarps / kRowWarps;
constexpr int kKeyWarps = kWarpsOfRows < kKeyFragments ? kWarpsOfRows : kKeyFragments;
constexpr int kColWarps = kWarpsOfRows / kKeyWarps;
// Of a warp.
constexpr int kFragmentsM = kRows / 16 / kRowWarps;
constexpr int kWarpKeyFragments = kKeyFragments / kKeyWarps;
constexpr int kColSteps = kSteps / kColWarps;
static_assert(kFragmentsM * 16 * kRowWarps == kRows, "warps share the rows in fragments of 16");
static_assert(kWarpKeyFragments * kKeyWarps == kKeyFragments, "warps share a tile's keys");
static_assert(kColSteps * kColWarps == kSteps, "warps share the columns of V");
constexpr bool kOwnRows = kRowWarps == kNumWarps;

// A warp's part.
DEVICE int warp_index() { return int(threadIdx.x) / kWarpSize; }
DEVICE int key_warp() { return warp_index() % kKeyWarps; }
DEVICE int first_row_of_warp() {
    return kRowWarps == 1 ? 0 : warp_index() / (kKeyWarps * kColWarps) * 16 * kFragmentsM;
}
DEVICE int first_key_of_warp() { return kKeyWarps == 1 ? 0 : key_warp() * 16 * kWarpKeyFragments; }
DEVICE int first_col_of_warp() {
    return kColWarps == 1 ? 0 : warp_index() / kKeyWarps % kColWarps * 16 * kColSteps;
}

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
    static constexpr int kM = kM_, kN = kN_, kAtOnce = kN % 2 == 0 ? 2 : 1;
    Sums sums[kN / kAtOnce][kRowsStay ? kM : kAtOnce][kRowsStay ? kAtOnce : kM];

    DEVICE Sums& at(int m, int n) {
        return kRowsStay ? sums[n / kAtOnce][m][n % kAtOnce] : sums[n / kAtOnce][n % kAtOnce][m];
    }
    // += rows * columns; load(f, n): the fragment of column n.
    template <class Load>
    DEVICE void add(const RowFragment (&rows)[kM], const Load& load) {
#pragma unroll
        for (int g = 0; g < kN / kAtOnce; ++g) {
            ColFragment cols[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) load(cols[i], kAtOnce * g + i);
            if constexpr (kRowsStay) mma(sums[g], rows, cols);
            else mma(sums[g], cols, rows);
        }
    }
};
// The sums of weighted values: the rows of this warp, and its columns.
struct WarpSums : Products<kFragmentsM, kColSteps> {
    static constexpr int kNeighbours = Layout::col(0, 1) == Layout::col(0, 0) + 1 ? 2 : 1;
    DEVICE static int row(int m, int i) {
        return first_row_of_warp() + m * 16 + Layout::row(lane_id(), i);
    }
    DEVICE static int col(int n, int i) {
        return first_col_of_warp() + n * 16 + Layout::col(lane_id(), i);
    }
};
using Scores = Products<kFragmentsM, kWarpKeyFragments>;

// The sums of a chunk or group where warps have shared its rows: four neighbours of some rows.
struct ThreadSums {
    static constexpr int kQuadsOfRow = kDim / 4;
    struct Sums {
        static constexpr int kCount = 4;
        float values[4];
    };
    static constexpr int kM = kRows * kQuadsOfRow / kNumThreads, kN = 1, kNeighbours = 4;
    static_assert(kNumThreads % kQuadsOfRow == 0, "a thread's columns are the same in all rows");
    Sums sums[kM];

    DEVICE Sums& at(int m, int) { return sums[m]; }
    DEVICE static int row(int m, int) {
        return int(threadIdx.x) / kQuadsOfRow + m * (kNumThreads / kQuadsOfRow);
    }
    DEVICE static int col(int, int i) { return int(threadIdx.x) % kQuadsOfRow * 4 + i; }
};

static_assert(sizeof(DecodeStage) % 128 == 0 && sizeof(QueryTile) % 128 == 0,
              "tiles begin at multiples of 128 bytes, as FragmentLoader wants");
struct DecodeStorage {
    union {
        DecodeStage stages[kStages];
        MergeValues values;  // after the task's tiles
    };
    union {
        QueryTile q;
        MergeSums sums;  // after the task's tiles
    };
    PartialSum totals[kKeyWarps][kRows];
    ResultStorage results;
    DecodeTask task;
};

struct Loaders {
    FragmentLoader<false, Element, kSumsSide, QueryTile> queries;
    FragmentLoader<false, Element, kColSide, KeyColumn> keys;
    FragmentLoader<true, Element, kColSide, KeyColumn> values;

    DEVICE Loaders() : queries(first_row_of_warp()), keys(first_key_of_warp()), values(0) {}
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
    // Scores become weights, and the sums of values so far follow.  first_key: of the warp.
    DEVICE void weigh(Scores& scores, ValueSums<WarpSums>& values, int first_key, float scale,
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
                for (int n = 0; n < kWarpKeyFragments; ++n) {
#pragma unroll
                    for (int i = 0; i < Layout::kCount; ++i) at(n, i) *= before;
                }
            }
            if (masked) {
#pragma unroll
                for (int n = 0; n < kWarpKeyFragments; ++n) {
#pragma unroll
                    for (int i = 0; i < Layout::kCount; ++i) {
                        const int key = first_key + n * 16 + Layout::col(lane, i);
                        if (key >= ends[m][Rows::slot(i)]) at(n, i) = -kInfinity;
                    }
                }
            }
            grown |= of[m].template look<kWarpKeyFragments>(at, positive, largest, factors[m]);
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
            of[m].template exponentiate<kWarpKeyFragments>(at, positive);
        }
    }
    // For the threads of each row; then a barrier.  totals: of the warp's keys.
    DEVICE void tell(PartialSum* totals) const {
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) {
#pragma unroll
            for (int r = 0; r < Softmax::kRows; ++r) {
                const float total = of[m].total(r);
                const int row = first_row_of_warp() + m * 16 + Rows::row(lane_id(), r);
                if (Rows::is_first(lane_id()) && first_col_of_warp() == 0)
                    totals[row] = {Softmax::shifted(of[m].origin[r]), total};
            }
        }
    }
};

// The queries of all rows as fragments: in registers where they are few.
struct Queries {
    static constexpr bool kHeld =
        !kOwnRows && kFragmentsM * kSteps * int(sizeof(RowFragment)) <= 128;
    RowFragment held[kHeld ? kSteps : 1][kFragmentsM];

    DEVICE static void load(RowFragment (&rows)[kFragmentsM], const QueryTile& q,
                            const Loaders& loaders, int step) {
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) loaders.queries.load(rows[m], q, m * 16, step * 16);
    }
    DEVICE void hold(const QueryTile& q, const Loaders& loaders) {
        if constexpr (kHeld) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) load(held[step], q, loaders, step);
        }
    }
    // The scores of this warp's keys.
    DEVICE void score(Scores& scores, const QueryTile& q, const DecodeStage& stage,
                      const Loaders& loaders) const {
        // Two sums of a single fragment, so that fewer products wait for the one before.
        constexpr int kChains = Scores::kM * Scores::kN == 1 ? 2 : 1;
        Scores sums[kChains] = {};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            Scores& sum = sums[step % kChains];
            const auto load_keys = [&](ColFragment& f, int n) {
                const int dim = step * 16;
                loaders.keys.load(f, stage.k.columns[dim / kColumnDim], n * 16, dim % kColumnDim);
            };
            if constexpr (kHeld) {
                sum.add(held[step], load_keys);
            } else {
                RowFragment rows[kFragmentsM];
                load(rows, q, loaders, step);
                sum.add(rows, load_keys);
            }
        }
        scores = sums[0];
        if constexpr (kChains > 1) {
#pragma unroll
            for (int i = 0; i < Layout::kCount; ++i)
                scores.at(0, 0).values[i] += sums[1].at(0, 0).values[i];
        }
    }
};

// values += the weights, rounded to Element, times the values of this warp's keys.
DEVICE void add_values(ValueSums<WarpSums>& values, Scores& weights, const DecodeStage& stage,
                       const Loaders& loaders) {
    RowFragment rows[kWarpKeyFragments][kFragmentsM];  // half as many registers
#pragma unroll
    for (int n = 0; n < kWarpKeyFragments; ++n) {
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) {
            sums_to_fragment<Element>(rows[n][m], weights.at(m, n));
        }
    }
#pragma unroll
    for (int n = 0; n < kWarpKeyFragments; ++n) {
        values.all.add(rows[n], [&](ColFragment& f, int d) {
            const int dim = first_col_of_warp() + d * 16;
            loaders.values.load(f, stage.v.columns[dim / kColumnDim], dim % kColumnDim,
                                first_key_of_warp() + n * 16);
        });
    }
}

// What warps with keys of their own have of a chunk, added up.
struct WarpMerge {
    // As many rows as the memory of a stage has room for.
    static constexpr int kRowsAtOnce = kKeyWarps * kRows <= kTileK ? kRows : 16;
    using Memory = float[kKeyWarps][kRowsAtOnce][kDim];

    // The exponent and factors of what the warps have of a row.
    DEVICE static float weigh(const PartialSum (&totals)[kKeyWarps][kRows], int row,
                              float (&weights)[kKeyWarps]) {
        float largest = -kInfinity;
#pragma unroll
        for (int w = 0; w < kKeyWarps; ++w) largest = maximum(largest, totals[w][row].exponent);
        const float finite = largest == -kInfinity ? 0.0f : largest;
#pragma unroll
        for (int w = 0; w < kKeyWarps; ++w)
            weights[w] = exp2_approx(totals[w][row].exponent - finite);
        return largest;
    }
    // Of this thread's row.
    DEVICE static PartialSum total(const PartialSum (&totals)[kKeyWarps][kRows]) {
        const OwnRow own;
        float weights[kKeyWarps], sum = 0.0f;
        const float exponent = weigh(totals, own.row, weights);
#pragma unroll
        for (int w = 0; w < kKeyWarps; ++w)
            sum = multiply_add(totals[w][own.row].sum, weights[w], sum);
        return {exponent, sum};
    }
    // All threads; the totals are told.
    DEVICE static void run(ValueSums<ThreadSums>& all, ValueSums<WarpSums>& mine, Memory& memory,
                           const PartialSum (&totals)[kKeyWarps][kRows], int num_rows) {
#pragma unroll
        for (int first = 0; first < kRows; first += kRowsAtOnce) {
            sync_block();  // the tile, or the rows before, have been read; the totals are there
#pragma unroll
            for (int m = 0; m < kFragmentsM; ++m) {
                if (m >= first / 16 && m < (first + kRowsAtOnce) / 16)
                    store(mine, memory, m, first, num_rows);
            }
            sync_block();
#pragma unroll
            for (int m = 0; m < ThreadSums::kM; ++m) {
                const int row = ThreadSums::row(m, 0);
                float* sums = all.all.at(m, 0).values;
                if (row < first || row >= first + kRowsAtOnce) continue;
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[i] = 0.0f;
                if (row >= num_rows) continue;
                float weights[kKeyWarps];
                weigh(totals, row, weights);
#pragma unroll
                for (int w = 0; w < kKeyWarps; ++w) {
                    float four[4];
                    memcpy(four,
                           &reinterpret_cast<const Bytes<16>&>(
                               memory[w][row - first][ThreadSums::col(0, 0)]),
                           16);
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        sums[i] = multiply_add(four[i], weights[w], sums[i]);
                }
            }
        }
    }
    DEVICE static void store(ValueSums<WarpSums>& mine, Memory& memory, int m, int first,
                             int num_rows) {
        constexpr int kNeighbours = WarpSums::kNeighbours;
#pragma unroll
        for (int i = 0; i < WarpSums::Sums::kCount; i += kNeighbours) {
            const int row = WarpSums::row(m, i);
            if (row >= num_rows) continue;
#pragma unroll
            for (int n = 0; n < kColSteps; ++n) {
                Bytes<4 * kNeighbours> bytes;
                memcpy(&bytes, mine.all.at(m, n).values + i, sizeof(bytes));
                store_vector<4 * kNeighbours>(&memory[key_warp()][row - first][WarpSums::col(n, i)],
                                              bytes);
            }
        }
    }
};

// The totals are told.
template <class Results>
DEVICE void end_chunk(Results& results, ValueSums<WarpSums>& values, DecodeStorage& storage,
                      DecodeStage& used, bool is_last) {
    if constexpr (kOwnRows) {
        sync_block();
        results.add_chunk(storage.totals[0][OwnRow().row], values, is_last);
    } else {
        static_assert(sizeof(WarpMerge::Memory) <= sizeof(DecodeStage), "sums fit in");
        auto& memory = reinterpret_cast<WarpMerge::Memory&>(used);  // once its tile has been read
        ValueSums<ThreadSums> all;
        WarpMerge::run(all, values, memory, storage.totals, results.task.num_rows);
        results.add_chunk(WarpMerge::total(storage.totals), all, is_last);
    }
}

// All tiles of the block's task.
template <class Results>
DEVICE void attend_task(DecodeStorage& storage, const DecodeParams& params, const DecodeTask& task,
                        TileLoads& loads, const Element* q, Results& results) {
    WarpSoftmax softmax;
    Loaders loaders;
    Queries queries;
    ValueSums<WarpSums> values;
    values.restart();

    int stage = 0, filled = 0, key = task.first, chunk_end = 0;
    // The first rounds only load, so that there is one place that does: of few rows after the
    // scores, whose keys would else wait behind the copies.
    constexpr bool kCopiesFirst = kOwnRows || kStages == 1;
    const auto start_loads = [&] {
        loads.start(storage.stages, loads.key == task.first,
                    [&] { load_queries(storage.q, params, q, task); });
    };
#pragma unroll 1
    for (;;) {
        const bool filling = filled < kStages - 1;
        if (!filling) {
            if constexpr (kStages > 1) copy_async_wait<kStages - 2>();
            sync_block();  // this stage is whole, and the one before it has been read by all
        }
        if constexpr (kCopiesFirst) {
            start_loads();
            if (filling) {
                ++filled;
                continue;
            }
        }
        if constexpr (kStages == 1) {
            copy_async_wait<0>();
            sync_block();
        }
        DecodeStage& used = storage.stages[stage];
        const bool computes = kCopiesFirst || !filling;
        if (computes && chunk_end == 0) {
            queries.hold(storage.q, loaders);
            softmax.begin(params, storage.task);
            chunk_end = task.first + storage.task.chunk_size;
        }
        Scores scores;
        if (computes) queries.score(scores, storage.q, used, loaders);
        if constexpr (!kCopiesFirst) {
            start_loads();
            if (filling) {
                ++filled;
                continue;
            }
        }
        // Of the tiles before, every query sees all keys.
        const int all_see = storage.task.num_keys - (params.causal ? params.queries.by - 1 : 0);
        softmax.weigh(scores, values, key + first_key_of_warp(), params.exponent_scale,
                      key + kTileK > all_see);
        add_values(values, scores, used, loaders);
        stage = stage + 1 < kStages ? stage + 1 : 0;
        key += kTileK;
        const bool ends = key >= loads.end;
        if (!ends && key < chunk_end) continue;
        softmax.tell(storage.totals[key_warp()]);
        end_chunk(results, values, storage, used, ends);
        if (ends) return;
        softmax.restart();
        values.restart();
        chunk_end += storage.task.chunk_size;
    }
}

DEVICE void attend_rows(DecodeStorage& storage, const DecodeParams& params, const KeyArrays& caches,
                        const int* seq_lens, const int* block_table, const Element* q, Element* out,
                        float* lse, void* partial_results, uint32_t* counters) {
    const DecodeTask task(params, seq_lens, int(blockIdx.x));
    if (threadIdx.x == 0) storage.task = task;
    RunResults<Choose<kOwnRows, WarpSums, ThreadSums>::Type> results(params, storage.task,
                                                                     storage.results,
                                                                     partial_results);
    if (task.exists) {
        results.begin(task.first_chunk);
        TileLoads loads(params, task, caches, block_table);
        attend_task(storage, params, task, loads, q, results);
        results.finish(storage.sums, storage.values, counters, out, lse);
    }
    if constexpr (kClusterSize > 1) {
        const bool has_group = task.exists && task.num_groups > 1;
        results.add_in_cluster(has_group, storage.sums, storage.values, out, lse);
    }
}
