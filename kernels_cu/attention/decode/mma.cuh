// A warp's work on a tile: S = Q K^T, the online softmax, O += P V.
//
// Scores, probabilities and output accumulators of the warp's rows, keys and columns
// (attention/decode/warp_layout.cuh) stay in registers, as in attention/block.cuh
// (attention/online_softmax.cuh).
// Types and constants: see decode_attention.cu.
#pragma once
#include "attention/decode/epilogue.cuh"
#include "attention/decode/load_kv.cuh"
#include "attention/decode/score.cuh"
#include "attention/online_softmax.cuh"

// Swap-AB: the queries are the B operand of the MMA.
constexpr bool kSwapAB = kIsNarrow || kAccumulatorSide != kSideA;
constexpr Side kKvSide = kSwapAB ? kSideA : kSideB;
using QpFragment = Choose<kIsNarrow, NarrowFragment<Operand>,
                          Fragment<Operand, kAccumulatorSide>>::Type;  // of Q or P
using KvFragment = Fragment<Operand, kKvSide>;                         // of K^T or V
// Rows are queries, columns are keys (of S) or columns of V (of O).
struct AccumulatorLayout {
    using Fragment = Choose<kIsNarrow, NarrowAccumulator<Operand>, Accumulator<Operand>>::Type;
    static constexpr int kCount = Fragment::kCount;
    DEVICE static constexpr int row(int lane, int i) {
        return kSwapAB ? Fragment::col(lane, i) : Fragment::row(lane, i);
    }
    DEVICE static constexpr int col(int lane, int i) {
        return kSwapAB ? Fragment::row(lane, i) : Fragment::col(lane, i);
    }
};
using Softmax = OnlineSoftmax<Operand, AccumulatorLayout>;
using Rows = Softmax::Rows;

// kM x kN accumulator fragments.  An MMA step takes at most 2 of the kN; more would need more
// registers for operands.
template <int kM_, int kN_>
struct AccumulatorTile {
    using Fragment = AccumulatorLayout::Fragment;
    static constexpr int kM = kM_, kN = kN_, kStepN = kN % 2 == 0 ? 2 : 1;
    Fragment fragments[kN / kStepN][kSwapAB ? kStepN : kM][kSwapAB ? kM : kStepN];

    DEVICE Fragment& at(int m, int n) {
        return kSwapAB ? fragments[n / kStepN][n % kStepN][m]
                       : fragments[n / kStepN][m][n % kStepN];
    }
    // Adds a b.  load(f, n) loads fragment n of b.
    template <class Load>
    DEVICE void accumulate(const QpFragment (&a)[kM], const Load& load) {
#pragma unroll
        for (int g = 0; g < kN / kStepN; ++g) {
            KvFragment b[kStepN];
#pragma unroll
            for (int i = 0; i < kStepN; ++i) load(b[i], kStepN * g + i);
            multiply(g, a, b);
        }
    }
    // The same for twice as much of k.  The second half is added to `of_high`, which can be *this.
    // load(low, high, n) loads both fragments n of b.
    template <class Load>
    DEVICE void accumulate_two(AccumulatorTile& of_high, const QpFragment (&a_low)[kM],
                               const QpFragment (&a_high)[kM], const Load& load) {
#pragma unroll
        for (int g = 0; g < kN / kStepN; ++g) {
            KvFragment low[kStepN], high[kStepN];
#pragma unroll
            for (int i = 0; i < kStepN; ++i) load(low[i], high[i], kStepN * g + i);
            multiply(g, a_low, low);
            of_high.multiply(g, a_high, high);
        }
    }
    DEVICE void multiply(int g, const QpFragment (&a)[kM], const KvFragment (&b)[kStepN]) {
        if constexpr (kSwapAB) mma(fragments[g], b, a);
        else mma(fragments[g], a, b);
    }
};
using Scores = AccumulatorTile<kWarpRowFragments, kWarpKeyFragments>;
// The columns of V of an output fragment.
struct OutputCols {
    DEVICE static constexpr int col(int lane, int i) {
        return stored_column<CacheElement, Operand, true>(AccumulatorLayout::col(lane, i));
    }
    DEVICE static constexpr bool are_adjacent(int i, int j) { return col(0, j) == col(0, i) + 1; }
    // Whether adjacent columns alternate between the halves of the values.  8-bit caches: values
    // 0, 4, 1 and 5, then 2, 6, 3 and 7.  Narrow accumulators: 0 and 2, then 1 and 3.
    DEVICE static constexpr bool alternate() {
        if constexpr (AccumulatorLayout::kCount == 8)
            return are_adjacent(0, 4) && are_adjacent(4, 1) && are_adjacent(1, 5);
        else if constexpr (kIsNarrow && AccumulatorLayout::kCount == 4) return are_adjacent(0, 2);
        else return false;
    }
};
// The warp's output accumulators, in the layout of attention/decode/epilogue.cuh.
struct WarpOutput : AccumulatorTile<kWarpRowFragments, kWarpColFragments> {
    static constexpr bool kAlternates = OutputCols::alternate();
    static constexpr int kHalf = AccumulatorLayout::kCount / 2;
    static constexpr int kContiguous = kAlternates ? kHalf : OutputCols::are_adjacent(0, 1) ? 2 : 1;
    DEVICE static constexpr int ordered(int i) { return kAlternates ? i / 2 + i % 2 * kHalf : i; }
    DEVICE static int row(int m, int i) {
        return warp_first_row() + m * kFragmentRows + AccumulatorLayout::row(lane_id(), i);
    }
    DEVICE static int col(int n, int i) {
        return warp_first_col() + n * 16 + OutputCols::col(lane_id(), i);
    }
    static constexpr int kSlots = Rows::kRows;
    DEVICE static constexpr int slot(int i) { return Rows::slot(i); }
    DEVICE static int slot_row(int m, int s) {
        return warp_first_row() + m * kFragmentRows + Rows::row(lane_id(), s);
    }
    DEVICE static bool is_row_leader() {
        return Rows::is_first(lane_id()) && warp_first_col() == 0;
    }
};

struct NarrowQueryLoader {
    int first;

    DEVICE explicit NarrowQueryLoader(int first) : first(first) {}
    template <class F> DEVICE void load(F& f, const QueryTile& tile, int mn, int k) const {
        load_fragment(f, tile, first + mn, k);
    }
};
struct FragmentLoaders {
    Choose<kIsNarrow, NarrowQueryLoader,
           FragmentLoader<false, Operand, kAccumulatorSide, QueryTile>>::Type queries;
    FragmentLoader<false, Operand, kKvSide, KvColumn> keys;
    FragmentLoader<true, Operand, kKvSide, KvColumn> values;

    DEVICE FragmentLoaders() : queries(warp_first_row()), keys(warp_first_key()), values(0) {}
};

// Arguments of formulas for a lane's rows; heads: indices among all query heads.
template <bool kFormula> struct RowHeads {};
template <>
struct RowHeads<true> {
    int heads[kWarpRowFragments][Softmax::kRows], batch, kv_head;
};

// The online softmax of a lane's rows, and which keys they see.
template <class Score>
struct WarpSoftmax : RowHeads<Score::kFormula> {
    using Params = typename Score::Params;
    using Arrays = typename Score::Arrays;
    static constexpr int kOptionRows = Score::kGeneral ? Softmax::kRows : 1;
    Softmax softmax[kWarpRowFragments];
    int end_keys[kWarpRowFragments][Softmax::kRows];  // keys [0, end_key) are seen
    int positions[kWarpRowFragments][kOptionRows];
    float slopes[kWarpRowFragments][kOptionRows];
    // Scales of scores, base 2.  OnlineSoftmax needs a positive scale; any other scale is applied
    // to the scores as score_scale.
    float scale, score_scale;
    bool has_outputs;  // output accumulators can be nonzero

    // k_factor: factor of all scores.
    DEVICE void init(const Params& params, const Arrays& arrays, const WorkTile& work,
                     float k_factor) {
        scale = params.scale_log2 * (Score::kGeneral ? 1.0f : k_factor);
        score_scale = scale > 0.0f ? 1.0f : scale;
        if (score_scale != 1.0f) scale = 1.0f;
#pragma unroll
        for (int m = 0; m < kWarpRowFragments; ++m) {
#pragma unroll
            for (int r = 0; r < Softmax::kRows; ++r) {
                int head =
                    work.first_row + warp_first_row() + m * kFragmentRows + Rows::row(lane_id(), r);
                const int query = params.queries.divide(head);
                if constexpr (Score::kGeneral) {
                    const int position = params.position(work.num_keys) + query;
                    const int end = position + params.right + 1;
                    const bool cut = params.right >= 0 && end < work.num_keys;
                    positions[m][r] = position;
                    end_keys[m][r] = cut ? end : work.num_keys;
                    const bool exists = head < params.heads_per_kv_head;
                    slopes[m][r] = exists ? Score::slope(params, arrays, work, head) : 0.0f;
                    if constexpr (Score::kFormula)
                        this->heads[m][r] = work.kv_head * params.heads_per_kv_head + head;
                    continue;
                }
                end_keys[m][r] =
                    work.num_keys - (params.causal ? params.queries.divisor - 1 - query : 0);
            }
        }
        if constexpr (Score::kFormula) this->batch = work.batch, this->kv_head = work.kv_head;
        reset();
    }
    DEVICE void reset() {
#pragma unroll
        for (int m = 0; m < kWarpRowFragments; ++m) softmax[m].reset();
        has_outputs = false;
    }
    // Masks the scores, replaces them by probabilities and rescales the output accumulators.
    // first_key: first key of the warp's part of the tile.  type: the tile's type under a mask
    // formula.  scales: WarpScales of the stage.
    template <class Scales, class Stage>
    DEVICE void update(Scores& scores, OutputAccumulator<WarpOutput>& output, const Params& params,
                       const Arrays& arrays, int first_key, bool masked, int type, Scales& scales,
                       const Stage& stage) {
        const int lane = lane_id();
        float largest[kWarpRowFragments][Softmax::kRows],
            factors[kWarpRowFragments][Softmax::kRows];
        bool rescales = scales.exceeds(stage);
#pragma unroll
        for (int m = 0; m < kWarpRowFragments; ++m) {
            const auto at = [&](int n, int i) -> float& { return scores.at(m, n).values[i]; };
            if (score_scale != 1.0f) {
#pragma unroll
                for (int n = 0; n < kWarpKeyFragments; ++n) {
#pragma unroll
                    for (int i = 0; i < AccumulatorLayout::kCount; ++i) at(n, i) *= score_scale;
                }
            }
            if constexpr (Score::kGeneral) {
#pragma unroll
                for (int n = 0; n < kWarpKeyFragments; ++n) {
#pragma unroll
                    for (int i = 0; i < AccumulatorLayout::kCount; ++i) {
                        const int key = first_key + n * 16 + AccumulatorLayout::col(lane, i);
                        const int r = Rows::slot(i), position = positions[m][r];
                        float& x = at(n, i);
                        x *= scales.k_factor();
                        if constexpr (Score::kFormula) {
                            const DecodeQuery query{this->batch, this->heads[m][r], this->kv_head,
                                                    position};
                            x = Score::apply(params, arrays, x, slopes[m][r], query, key, type);
                        } else {
                            x = Score::apply(params, arrays, x, slopes[m][r], position, key);
                        }
                        if (params.left >= 0 && key < position - params.left) x = -kInfinity;
                    }
                }
            }
            if (masked) {
#pragma unroll
                for (int n = 0; n < kWarpKeyFragments; ++n) {
#pragma unroll
                    for (int i = 0; i < AccumulatorLayout::kCount; ++i) {
                        const int key = first_key + n * 16 + AccumulatorLayout::col(lane, i);
                        if (key >= end_keys[m][Rows::slot(i)]) at(n, i) = -kInfinity;
                    }
                }
            }
            Softmax::template find_row_maxima<kWarpKeyFragments>(at, largest[m]);
            // Tiles of 8-bit caches have twice as many keys, and few of them move an origin.  They
            // first vote whether any does, and only then reduce row maxima by shuffles.
            if constexpr (kScaledCache) rescales |= softmax[m].exceeds(largest[m], scale);
            else rescales |= softmax[m].rescale(largest[m], scale, factors[m]);
            rescales |= softmax[m].any_far;
        }
        if (vote_any(rescales)) {
            if constexpr (kScaledCache) {
#pragma unroll
                for (int m = 0; m < kWarpRowFragments; ++m)
                    softmax[m].rescale(largest[m], scale, factors[m]);
            }
            const float factor = scales.grow(stage);
            if (has_outputs || !kScaledCache) {
                output.for_each([&](int m, int, int i, float& value) {
                    value *= factors[m][Rows::slot(i)] * factor;
                });
            }
#pragma unroll
            for (int m = 0; m < kWarpRowFragments; ++m) {
                const auto at = [&](int n, int i) -> float& { return scores.at(m, n).values[i]; };
                softmax[m].template subtract_far<kWarpKeyFragments>(at, scale);
            }
        }
        has_outputs = true;
#pragma unroll
        for (int m = 0; m < kWarpRowFragments; ++m) {
            const auto at = [&](int n, int i) -> float& { return scores.at(m, n).values[i]; };
            softmax[m].template exponentiate<kWarpKeyFragments>(at, scale);
        }
    }
    // States of the lane's rows, over all keys of the warp since the last reset.  A state's
    // exponent is a rounded origin: sums and output accumulators of far rows are multiplied by the
    // factor that the rounding leaves.
    DEVICE RowStates<WarpOutput> states(OutputAccumulator<WarpOutput>& output) const {
        RowStates<WarpOutput> result;
        bool any_far = false;
#pragma unroll
        for (int m = 0; m < kWarpRowFragments; ++m) {
            any_far |= softmax[m].any_far;
#pragma unroll
            for (int r = 0; r < Softmax::kRows; ++r)
                result.rows[m][r] = {softmax[m].rounded_origin(r, scale), softmax[m].total(r)};
        }
        if (vote_any(any_far)) {
            float factors[kWarpRowFragments][Softmax::kRows];
#pragma unroll
            for (int m = 0; m < kWarpRowFragments; ++m) {
#pragma unroll
                for (int r = 0; r < Softmax::kRows; ++r) {
                    factors[m][r] = exp2_approx(softmax[m].rounding_of_origin(r, scale));
                    result.rows[m][r].sum *= factors[m][r];
                }
            }
            output.for_each(
                [&](int m, int, int i, float& value) { value *= factors[m][Rows::slot(i)]; });
        }
        return result;
    }
};

// The query operand: in registers for the whole work tile if it is small, otherwise loaded from
// shared memory for each tile.  Score options with converted queries' units leave no registers for
// it.
template <class Score> struct QueryOperand {
    static constexpr bool kInRegisters =
        !kWarpOwnsRows && kWarpRowFragments * kDimFragments * int(sizeof(QpFragment)) <= 128 &&
        !(Score::kGeneral && !kSame<Element, Operand>);
    QpFragment registers[kInRegisters ? kDimFragments : 1][kWarpRowFragments];

    DEVICE static void load(QpFragment (&a)[kWarpRowFragments], const QueryTile& q,
                            const FragmentLoaders& loaders, int step) {
#pragma unroll
        for (int m = 0; m < kWarpRowFragments; ++m)
            loaders.queries.load(a[m], q, m * kFragmentRows, step * 16);
    }
    DEVICE void load_registers(const QueryTile& q, const FragmentLoaders& loaders) {
        if constexpr (kInRegisters) {
            if constexpr (kScaledCache) {
#pragma unroll
                for (int step = 0; step < kDimFragments; step += 2)
                    load_two(registers[step], registers[step + 1], q, step);
            } else {
#pragma unroll
                for (int step = 0; step < kDimFragments; ++step)
                    load(registers[step], q, loaders, step);
            }
        }
    }
    // With few fragments each has two accumulators, so that an MMA waits less for the previous one.
    static constexpr int kChains = Scores::kM * Scores::kN <= (kIsNarrow ? 2 : 1) ? 2 : 1;
    // Loads queries in the order of dims of 8-bit keys.
    DEVICE static void load_two(QpFragment (&low)[kWarpRowFragments],
                                QpFragment (&high)[kWarpRowFragments], const QueryTile& q,
                                int step) {
#pragma unroll
        for (int m = 0; m < kWarpRowFragments; ++m)
            load_mixed_input<Operand, false, LaneOrder::kFours>(
                low[m], high[m], q, warp_first_row() + m * kFragmentRows, step * 16);
    }
    DEVICE void multiply_8bit_keys(Scores& scores, const QueryTile& q, const KvStage& stage) const {
        Scores chains[kChains] = {};
        // With more unrolling, D = 256 would spill.
        constexpr int kUnroll = kInRegisters ? kDimFragments / 2 : 2;
#pragma unroll kUnroll
        for (int step = 0; step < kDimFragments; step += 2) {
            const auto load_keys = [&](KvFragment& low, KvFragment& high, int n) {
                load_mixed_input<CacheElement, false, LaneOrder::kFours>(
                    low, high, stage.k.columns[0], warp_first_key() + n * 16, step * 16);
            };
            if constexpr (kInRegisters) {
                chains[0].accumulate_two(chains[kChains - 1], registers[step], registers[step + 1],
                                         load_keys);
            } else {
                QpFragment low[kWarpRowFragments], high[kWarpRowFragments];
                load_two(low, high, q, step);
                chains[0].accumulate_two(chains[kChains - 1], low, high, load_keys);
            }
        }
        add_chains(scores, chains);
    }
    // S = Q K^T for the warp's keys.
    DEVICE void multiply_keys(Scores& scores, const QueryTile& q, const KvStage& stage,
                              const FragmentLoaders& loaders) const {
        Scores chains[kChains] = {};
        // With more unrolling, AMD's compiler loads the keys of all steps first and runs out of
        // registers.
        constexpr int kUnroll = kNumThreads > 128 && kDimFragments > 8 ? 4 : kDimFragments;
#pragma unroll kUnroll
        for (int step = 0; step < kDimFragments; ++step) {
            Scores& chain = chains[step % kChains];
            const auto load_keys = [&](KvFragment& f, int n) {
                const int dim = step * 16;
                loaders.keys.load(f, stage.k.columns[dim / kColumnDim], n * 16, dim % kColumnDim);
            };
            if constexpr (kInRegisters) {
                chain.accumulate(registers[step], load_keys);
            } else {
                QpFragment a[kWarpRowFragments];
                load(a, q, loaders, step);
                chain.accumulate(a, load_keys);
            }
        }
        add_chains(scores, chains);
    }
    DEVICE static void add_chains(Scores& scores, Scores (&chains)[kChains]) {
        scores = chains[0];
        if constexpr (kChains > 1) {
#pragma unroll
            for (int n = 0; n < Scores::kN; ++n) {
#pragma unroll
                for (int i = 0; i < AccumulatorLayout::kCount; ++i)
                    scores.at(0, n).values[i] += chains[1].at(0, n).values[i];
            }
        }
    }
};

struct ConvertedQueries : QueryUnits {
    DEVICE void convert(QueryTile& tile) {
        QueryUnits::convert(tile);
        sync_block();
    }
    DEVICE void scale(Scores& scores) const {
#pragma unroll
        for (int m = 0; m < kWarpRowFragments; ++m) {
            float units[Softmax::kRows];  // loaded for each tile, to save registers
#pragma unroll
            for (int r = 0; r < Softmax::kRows; ++r)
                units[r] = rows[warp_first_row() + m * kFragmentRows + Rows::row(lane_id(), r)];
#pragma unroll
            for (int n = 0; n < kWarpKeyFragments; ++n) {
#pragma unroll
                for (int i = 0; i < AccumulatorLayout::kCount; ++i)
                    scores.at(m, n).values[i] *= units[Rows::slot(i)];
            }
        }
    }
};
struct PlainQueries {
    DEVICE void convert(QueryTile&) {}
    DEVICE void scale(Scores&) const {}
};
using QueryConversion = Choose<kSame<Element, Operand>, PlainQueries, ConvertedQueries>::Type;

// O += P V for the warp's keys; the probabilities are rounded to Operand.
DEVICE void multiply_values(OutputAccumulator<WarpOutput>& output, Scores& probabilities,
                            const KvStage& stage, const FragmentLoaders& loaders) {
    QpFragment p[kWarpKeyFragments][kWarpRowFragments];  // half the registers of the FP32 tile
#pragma unroll
    for (int n = 0; n < kWarpKeyFragments; ++n) {
#pragma unroll
        for (int m = 0; m < kWarpRowFragments; ++m) {
            accumulator_to_fragment(p[n][m], probabilities.at(m, n));
        }
    }
    if constexpr (kScaledCache) {
#pragma unroll
        for (int n = 0; n < kWarpKeyFragments; n += 2) {
            output.tile.accumulate_two(
                output.tile, p[n], p[n + 1], [&](KvFragment& low, KvFragment& high, int d) {
                    load_mixed_input<CacheElement, true, LaneOrder::kPairs>(
                        low, high, stage.v.columns[0], warp_first_col() + d * 16,
                        warp_first_key() + n * 16);
                });
        }
    } else {
#pragma unroll
        for (int n = 0; n < kWarpKeyFragments; ++n) {
            output.tile.accumulate(p[n], [&](KvFragment& f, int d) {
                const int dim = warp_first_col() + d * 16;
                loaders.values.load(f, stage.v.columns[dim / kColumnDim], dim % kColumnDim,
                                    warp_first_key() + n * 16);
            });
        }
    }
}
