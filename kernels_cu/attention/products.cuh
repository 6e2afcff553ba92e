// A warp's two GEMMs in attention, S = Q K^T and O += P V, and their shared memory.  Constants: see
// attention/block.cuh.
#pragma once
#include "attention/work_tile.cuh"
#include "attention/online_softmax.cuh"
#include "common/shared_tile.cuh"

constexpr int kNumWarps = kNumThreads / kWarpSize;
constexpr int kWarpRows = kTileM / kNumWarps;
constexpr int kRowFragments = kWarpRows / 16, kKeyFragments = kTileN / 16,
              kDimFragments = kHeadDim / 16;
static_assert(kRowFragments * 16 * kNumWarps == kTileM && kKeyFragments * 16 == kTileN,
              "warps share a tile in fragments of 16 x 16");
static_assert(kWarpRows <= 64 && 64 % kWarpRows == 0 && (!kMasked || 64 % kTileN == 0),
              "a warp's part of a tile lies in one block of a mask");
static_assert(!kHalfScores || kHasHalfAccumulator, "FP16 accumulators");

// Whether queries are the rows of the accumulators: true on targets where an accumulator repacks to
// an A operand.
constexpr bool kQueriesInA = kAccumulatorSide == kSideA;
// Unmasked tiles have a separate loop, unless registers are short.
constexpr bool kTwoLoops = !kMasked && (kHeadDim < 256 || kQueriesInA);
using RowFragment = Fragment<Element, kAccumulatorSide>;
constexpr Side kColSide = kQueriesInA ? kSideB : kSideA;
using ColFragment = Fragment<Element, kColSide>;
using FloatAccumulator = Accumulator<Element>;
struct Layout {
    static constexpr int kCount = FloatAccumulator::kCount;
    DEVICE static constexpr int row(int lane, int i) {
        return kQueriesInA ? FloatAccumulator::row(lane, i) : FloatAccumulator::col(lane, i);
    }
    DEVICE static constexpr int col(int lane, int i) {
        return kQueriesInA ? FloatAccumulator::col(lane, i) : FloatAccumulator::row(lane, i);
    }
};
// kRows x kCols accumulator fragments.  kGroup columns of fragments are multiplied at once; more
// would need more registers for operands.
template <class AccumulatorFragment, int kRows, int kCols>
struct TiledAccumulator {
    static constexpr int kGroup = kHeadDim == 64 && kCols % 2 == 0 ? 2 : 1,
                         kGroups = kCols / kGroup;
    AccumulatorFragment acc[kGroups][kQueriesInA ? kRows : kGroup][kQueriesInA ? kGroup : kRows];

    DEVICE AccumulatorFragment& at(int row, int col) {
        auto& group = acc[col / kGroup];
        return kQueriesInA ? group[row][col % kGroup] : group[col % kGroup][row];
    }
    // acc += rows * columns; load(f, col) loads the fragment of column col.
    template <class Load>
    DEVICE void add(const RowFragment (&rows)[kRows], const Load& load) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            ColFragment cols[kGroup];
#pragma unroll
            for (int i = 0; i < kGroup; ++i) load(cols[i], g * kGroup + i);
            if constexpr (kQueriesInA) mma(acc[g], rows, cols);
            else mma(acc[g], cols, rows);
        }
    }
};
using Scores = TiledAccumulator<FloatAccumulator, kRowFragments, kKeyFragments>;
using Outputs = TiledAccumulator<FloatAccumulator, kRowFragments, kDimFragments>;
using Softmax = OnlineSoftmax<Element, Layout>;
using Rows = Softmax::Rows;

using QueryTile = SharedTile<kTileM, int(sizeof(Element)) * kHeadDim>;
using KeyTile = SharedTile<kTileN, int(sizeof(Element)) * kHeadDim>;
struct AttentionStorage {
    QueryTile queries;  // at the end the warps' outputs
    KeyTile keys, values;
    float row_maxima[kTileM];  // each row's largest score so far, for statistics
};

struct Loaders {
    FragmentLoader<false, Element, kAccumulatorSide, QueryTile> queries;
    FragmentLoader<false, Element, kColSide, KeyTile> keys;
    FragmentLoader<true, Element, kColSide, KeyTile> values;

    DEVICE explicit Loaders(int warp_row) : queries(warp_row), keys(0), values(0) {}
    DEVICE void forget() {
        queries.forget();
        keys.forget();
        values.forget();
    }
};

template <class AccumulatorFragment>
DEVICE void multiply_keys(
    const AttentionStorage& storage, const Loaders& loaders,
    TiledAccumulator<AccumulatorFragment, kRowFragments, kKeyFragments>& acc) {
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
        // Addresses of k steps 64 apart differ by a constant, so these are adjacent in the loop.
        constexpr int kSharing = kHeadDim / 64;
        const int k = step / kSharing * 16 + step % kSharing * 64;
        RowFragment rows[kRowFragments];
#pragma unroll
        for (int m = 0; m < kRowFragments; ++m) {
            loaders.queries.load(rows[m], storage.queries, 16 * m, k);
        }
        acc.add(rows,
                [&](ColFragment& f, int n) { loaders.keys.load(f, storage.keys, 16 * n, k); });
    }
}
DEVICE void score(const AttentionStorage& storage, const Loaders& loaders, Scores& scores) {
    if constexpr (kHalfScores) {
        TiledAccumulator<HalfAccumulator, kRowFragments, kKeyFragments> acc{};
        multiply_keys(storage, loaders, acc);
#pragma unroll
        for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
            for (int n = 0; n < kKeyFragments; ++n) {
#pragma unroll
                for (int i = 0; i < Layout::kCount; ++i) {
                    scores.at(m, n).values[i] = acc.at(m, n).value(i);
                }
            }
        }
    } else {
        scores = {};
        multiply_keys(storage, loaders, scores);
    }
}

// outputs += P V, with P rounded to Element.
DEVICE void multiply_values(Scores& probabilities, const KeyTile& values, const Loaders& loaders,
                            Outputs& outputs) {
    RowFragment rows[kKeyFragments][kRowFragments];  // half the registers of the scores
#pragma unroll
    for (int n = 0; n < kKeyFragments; ++n) {
#pragma unroll
        for (int m = 0; m < kRowFragments; ++m) {
            accumulator_to_fragment<Element>(rows[n][m], probabilities.at(m, n));
        }
    }
#pragma unroll
    for (int n = 0; n < kKeyFragments; ++n) {
        // Limits how far the compiler hoists loads, to save registers.
        if (!kHalfScores && n % 2 == 0) sync_warp();
        outputs.add(rows[n],
                    [&](ColFragment& f, int d) { loaders.values.load(f, values, 16 * d, 16 * n); });
    }
}
