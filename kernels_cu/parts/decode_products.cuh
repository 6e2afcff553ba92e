// What a warp of decode_attention.cu does with a tile: scores, weights, and the weighted values.
//
// Scores, weights and sums of its part (parts/decode_shape.cuh) stay in a warp's registers, as in
// attention.cu (parts/online_softmax.cuh).
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
