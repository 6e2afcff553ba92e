// What the warps of a block of decode_attention.cu do with its tiles.
//
// Scores, weights and sums of its part (parts/decode_shape.cuh) stay in a warp's registers, as in
// attention.cu (parts/online_softmax.cuh).  What a chunk's keys give to warps that share rows is
// added up where it ends, in the warps' order.
// Constants: see decode_attention.cu.
#include "parts/decode_results.cuh"
#include "parts/decode_source.cuh"
#include "parts/online_softmax.cuh"

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
    static constexpr int kSlots = Rows::kRows;
    DEVICE static constexpr int slot(int i) { return Rows::slot(i); }
    DEVICE static int slot_row(int m, int s) {
        return first_row_of_warp() + m * 16 + Rows::row(lane_id(), s);
    }
    DEVICE static bool is_first() { return Rows::is_first(lane_id()) && first_col_of_warp() == 0; }
};
using Scores = Products<kFragmentsM, kWarpKeyFragments>;

// The sums of a chunk or group where warps have shared its rows: four neighbours of some rows.
struct ThreadSums {
    struct Sums {
        static constexpr int kCount = 4;
        float values[4];
    };
    static constexpr int kM = kRows / kRowsAtOnce, kN = 1, kNeighbours = 4, kSlots = 1;
    static_assert(kM * kRowsAtOnce == kRows, "threads share the rows");
    Sums sums[kM];

    DEVICE Sums& at(int m, int) { return sums[m]; }
    DEVICE static int row(int m, int) { return OwnQuad().row + m * kRowsAtOnce; }
    DEVICE static int col(int, int i) { return OwnQuad().col + i; }
    DEVICE static constexpr int slot(int) { return 0; }
    DEVICE static int slot_row(int m, int) { return row(m, 0); }
    DEVICE static bool is_first() { return OwnQuad().col == 0; }
    // Whether any thread has.
    DEVICE static bool has_rows(int m, int num_rows) { return m * kRowsAtOnce < num_rows; }
};

// Where warps with keys of their own leave what they have of a chunk, some rows at once.
struct WarpMemory {
    PartialSum totals[kRows][kKeyWarps];
    // Rows begin at other banks than those before.
    alignas(16) float values[kKeyWarps][kRowsAtOnce][kDim + 8];
};

// Values at once where all stages were; at least a group's.
constexpr int kRoomForValues = kStages * 4 * kTileK * kDim / 16 / kNumThreads / kGroup * kGroup;
constexpr int kMostAtOnce = kRoomForValues < kMaxGroups ? kRoomForValues : kMaxGroups;
constexpr int kValuesAtOnce = kMostAtOnce > kGroup ? kMostAtOnce : kGroup;
static_assert(sizeof(DecodeStage) % 128 == 0 && sizeof(QueryTile) % 128 == 0,
              "tiles begin at multiples of 128 bytes, as FragmentLoader wants");
struct DecodeStorage {
    union {
        DecodeStage stages[kStages];
        Choose<kMergesLater, char, MergeValues<kValuesAtOnce>>::Type values;  // after the tiles
    };
    QueryTile q;
    union {
        Choose<kOwnRows, char, WarpMemory>::Type warps;
        Choose<kMergesLater, char, MergeSums>::Type sums;  // after the last chunk
    };
    Choose<kPairs, PairMemory, char>::Type pair;
    int is_last;
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
    // What the lane's rows have.
    DEVICE RowSums<WarpSums> totals() const {
        RowSums<WarpSums> sums;
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) {
#pragma unroll
            for (int r = 0; r < Softmax::kRows; ++r)
                sums.of[m][r] = {Softmax::shifted(of[m].origin[r]), of[m].total(r)};
        }
        return sums;
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
        // AMD's compiler asks for the keys of all steps first, and has no registers left then.
        constexpr int kAtOnce = kNumThreads > 128 && kSteps > 8 ? 4 : kSteps;
#pragma unroll kAtOnce
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
    // All threads.
    template <class Results>
    DEVICE static void run(Results& results, const RowSums<WarpSums>& my_sums,
                           ValueSums<WarpSums>& mine, WarpMemory& memory, int num_rows) {
        if constexpr (kOwnKeys) sync_block();  // what lies there has been read since
        if (WarpSums::is_first()) {
#pragma unroll
            for (int m = 0; m < kFragmentsM; ++m) {
#pragma unroll
                for (int s = 0; s < WarpSums::kSlots; ++s)
                    memory.totals[WarpSums::slot_row(m, s)][key_warp()] = my_sums.of[m][s];
            }
        }
#pragma unroll
        for (int m = 0; m < ThreadSums::kM; ++m) {
            if (!ThreadSums::has_rows(m, num_rows)) break;
            if (m > 0) sync_block();  // the rows before have been read
            store(mine, memory, m * kRowsAtOnce, num_rows);
            sync_block();
            PartialSum total[1];
            float values[4];
            add(total[0], values, memory, ThreadSums::row(m, 0), num_rows);
            results.fold(m, total, [&](int, int i) { return values[i]; });
        }
    }
    // A row of all warps.
    DEVICE static void add(PartialSum& total, float (&values)[4], const WarpMemory& memory, int row,
                           int num_rows) {
        total = {-kInfinity, 0.0f};
#pragma unroll
        for (int j = 0; j < 4; ++j) values[j] = 0.0f;
        if (row >= num_rows) return;
        PartialSum warps[kKeyWarps];
#pragma unroll
        for (int w = 0; w < kKeyWarps; ++w) {
            warps[w] = memory.totals[row][w];
            total.exponent = maximum(total.exponent, warps[w].exponent);
        }
        const float finite = total.exponent == -kInfinity ? 0.0f : total.exponent;
        const OwnQuad own;
#pragma unroll
        for (int w = 0; w < kKeyWarps; ++w) {
            const float weight = exp2_approx(warps[w].exponent - finite);
            total.sum = multiply_add(warps[w].sum, weight, total.sum);
            float four[4];
            memcpy(four, &reinterpret_cast<const Bytes<16>&>(memory.values[w][own.row][own.col]),
                   16);
#pragma unroll
            for (int j = 0; j < 4; ++j) values[j] = multiply_add(four[j], weight, values[j]);
        }
    }
    // This warp's, of the rows from `first` on.
    DEVICE static void store(ValueSums<WarpSums>& mine, WarpMemory& memory, int first,
                             int num_rows) {
        constexpr int kNeighbours = WarpSums::kNeighbours;
        const int end = first + kRowsAtOnce < num_rows ? first + kRowsAtOnce : num_rows;
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) {
            if (m * 16 >= first + kRowsAtOnce || m * 16 + 16 <= first) continue;
#pragma unroll
            for (int i = 0; i < WarpSums::Sums::kCount; i += kNeighbours) {
                const int row = WarpSums::row(m, i);
                if (row < first || row >= end) continue;
                float* to = memory.values[key_warp()][row - first];
#pragma unroll
                for (int n = 0; n < kColSteps; ++n) {
                    Bytes<4 * kNeighbours> bytes;
                    memcpy(&bytes, mine.all.at(m, n).values + i, sizeof(bytes));
                    store_vector<4 * kNeighbours>(to + WarpSums::col(n, i), bytes);
                }
            }
        }
    }
};

template <class Results, class Storage>
DEVICE void end_chunk(Results& results, const WarpSoftmax& softmax, ValueSums<WarpSums>& values,
                      Storage& storage, bool is_last) {
    const RowSums<WarpSums> sums = softmax.totals();
    if constexpr (kOwnRows) {
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m)
            results.fold(m, sums.of[m],
                         [&](int n, int i) { return values.all.at(m, n).values[i]; });
    } else {
        WarpMerge::run(results, sums, values, storage.warps, storage.task.num_rows);
    }
    results.end_chunk(is_last);
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
    // The first rounds only load, so that there is one place that does.
#pragma unroll 1
    for (;;) {
        if (filled < kStages) {
            ++filled;
        } else {
            copy_async_wait<kStages - 1>();
            sync_tile();  // this stage is whole
            if (chunk_end == 0) {
                if constexpr (kOwnKeys) sync_block();  // the queries
                queries.hold(storage.q, loaders);
                softmax.begin(params, storage.task);
                chunk_end = task.first + storage.task.chunk_size;
            }
            const DecodeStage& used = storage.stages[stage];
            Scores scores;
            queries.score(scores, storage.q, used, loaders);
            // Of the tiles before, every query sees all keys.
            const int all_see = storage.task.num_keys - (params.causal ? params.queries.by - 1 : 0);
            softmax.weigh(scores, values, key + first_key_of_warp(), params.exponent_scale,
                          key + kTileK > all_see);
            add_values(values, scores, used, loaders);
            stage = stage + 1 < kStages ? stage + 1 : 0;
            key += kTileK;
            const bool ends = key >= loads.end;
            if (ends || key >= chunk_end) {
                end_chunk(results, softmax, values, storage, ends);
                if (ends) return;
                softmax.restart();
                values.restart();
                chunk_end += storage.task.chunk_size;
            }
            sync_tile();  // the stage has been read
        }
        loads.start(storage.stages, loads.key == task.first,
                    [&] { load_queries(storage.q, params, q, task); });
    }
}

DEVICE void attend_rows(DecodeStorage& storage, const DecodeParams& params, const KeyArrays& caches,
                        const int* seq_lens, const int* block_table, const Element* q, Element* out,
                        float* lse, void* partial_results, uint32_t* counters) {
    const DecodeTask task(params, seq_lens, int(blockIdx.x));
    if constexpr (kPairs) cluster_arrive_relaxed();
    if (!task.exists) return;
    if (threadIdx.x == 0) storage.task = task;
    RunResults<Choose<kOwnRows, WarpSums, ThreadSums>::Type> results(params, storage.task,
                                                                     partial_results);
    results.begin(task.first_chunk);
    TileLoads loads(params, task, caches, block_table);
    attend_task(storage, params, task, loads, q, results);
    results.finish(storage.values, storage.sums, storage.pair, storage.is_last, counters, out, lse);
}
