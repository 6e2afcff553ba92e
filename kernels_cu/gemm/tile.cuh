// A block's work tile: accumulators of its kProducts products, their reduction over split-K, and
// their staging through shared memory for an epilogue.
//
// Split-K: with fewer tiles than SMs, `splits` blocks compute ranges of k of one tile.  The pass
// kStorePartials stores each block's partial accumulators in the order of its lanes.  The pass
// kReducePartials adds a tile's partial accumulators in the order of k: bitwise reproducible.
#pragma once
#include "gemm/work_tile.cuh"
#include "gemm/mainloop_portable.cuh"

enum Pass { kSinglePass, kStorePartials, kReducePartials };

struct OperandParams {
    MatrixStrides strides, block_scales;
    struct { int64_t block, quarter, row, word; } groups;  // strides of GroupScales
    int32_t dtype, padding;
};
struct TileParams {
    BatchLayout batch;
    TileOrder order;
    int64_t m, n, k, k_per_split, splits;
    OperandParams a, b[kProducts];  // a: (m, k), b: (k, n)
    int64_t has_block_scales;       // whether the scales are block scales, applied by the mainloop
};

// One operand's arrays; null: absent.
struct OperandArrays {
    const void* data;
    const float* scales;
    const e4m3* groups;
};

constexpr int kFragments = kFragmentsM * kFragmentsN;
// A warp's 16 x 16 positions in the tile, each with a fragment of every product.
constexpr int kPositions = kFragmentsM * kColFragments;
DEVICE constexpr int position_of(int fragment) {
    return fragment / kFragmentsN * kColFragments + fragment % kFragmentsN % kColFragments;
}

// Staging of accumulators: as many positions at once as fit the stages' memory.
constexpr int kPitch = 20;  // row stride, free of bank conflicts
constexpr int kStagedPositions = kPositions / kFinishRounds;
constexpr int kPositionCols = 16;
constexpr int kRun = kPositionCols * 16 / kWarpSize;  // contiguous columns per lane

template <class Stage>
struct TileStorage {
    union {
        Stage stages[kStages];
        ElementAccumulator slices[kGridK][kGridM * kGridN][kGridK > 1 ? kFragments : 1]
                                 [AccumulatorFragment::kCount][kWarpSize];
        ElementAccumulator fragments[kNumWarps][kStagedPositions][kProducts][16][kPitch];
    };
};
using GemmStorage = TileStorage<Stage>;

// Sliced-K: adds the accumulators of the kGridK warps along k, in their order.  Each of these warps
// keeps every kGridK-th position.
DEVICE void add_slices(GemmStorage& storage, const WarpCoord& warp, AccumulatorTile& acc) {
    if constexpr (kGridK > 1) {
        const int index = warp.m * kGridN + warp.n;
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
#pragma unroll
            for (int i = 0; i < AccumulatorFragment::kCount; ++i) {
                storage.slices[warp.k][index][f][i][warp.lane] =
                    acc[f / kFragmentsN][f % kFragmentsN].values[i];
            }
        }
        sync_block();
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
            if (position_of(f) % kGridK != warp.k) continue;
#pragma unroll
            for (int i = 0; i < AccumulatorFragment::kCount; ++i) {
                ElementAccumulator sum = storage.slices[0][index][f][i][warp.lane];
#pragma unroll
                for (int k = 1; k < kGridK; ++k) sum += storage.slices[k][index][f][i][warp.lane];
                acc[f / kFragmentsN][f % kFragmentsN].values[i] = sum;
            }
        }
        sync_block();  // the fragments overwrite the slices
    }
}

// Calls f(accumulator, index) for each accumulator that this lane keeps; index: in the tile.
template <class F>
DEVICE void for_each_accumulator(const WarpCoord& warp, AccumulatorTile& acc, F f) {
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
        if (position_of(i) % kGridK != warp.k) continue;
        const int fragment = (warp.m * kGridN + warp.n) * kFragments + i;
#pragma unroll
        for (int j = 0; j < AccumulatorFragment::kCount; ++j) {
            f(acc[i / kFragmentsN][i % kFragmentsN].values[j],
              fragment * 256 + j * kWarpSize + warp.lane);
        }
    }
}

DEVICE GemmWorkTile work_tile_of(const TileParams& params, int index = blockIdx.x) {
    return GemmWorkTile::of_block(index, params.order, kTileM, kTileN);
}

// Split-K: stores this block's partial accumulators, or adds those of all splits.
DEVICE void exchange_partials(const TileParams& params, const GemmWorkTile& work,
                              const WarpCoord& warp, ElementAccumulator* partials, int64_t pass,
                              AccumulatorTile& acc) {
    constexpr int64_t kTileSize = kProducts * kTileM * kTileN;
    const int64_t split_size = params.order.num_tiles() * kTileSize;
    ElementAccumulator* mine = partials + work.split * split_size + work.tile * kTileSize;
    if (pass == kStorePartials) {
        for_each_accumulator(warp, acc,
                             [&](ElementAccumulator& sum, int index) { mine[index] = sum; });
        return;
    }
    for (int64_t split = 0; split < params.splits; ++split) {
        for_each_accumulator(warp, acc,
                             [&](ElementAccumulator& sum, int index) { sum += mine[index]; });
        mine += split_size;
    }
}

// Computes the tile's accumulators `acc`.  The pass kStorePartials stores partial ones instead.
DEVICE void accumulate_tile(GemmStorage& storage, const TileParams& params,
                            const GemmWorkTile& work, const WarpCoord& warp, const OperandArrays& a,
                            const OperandArrays (&b)[kProducts], ElementAccumulator* partials,
                            int64_t pass, AccumulatorTile& acc) {
    constexpr Operand kBs[] = {kB, kB2}, kScalesB[] = {kScaleB, kScaleB2};
    constexpr Operand kGroupsBs[] = {kGroupsB, kGroupsB2};
    const auto offset = [&](Operand operand) { return params.batch.offset(operand, work.batch); };
    const auto groups = [&](const OperandArrays& arrays, const OperandParams& p, Operand operand) {
        return GroupScales{arrays.groups + offset(operand), p.groups.block, p.groups.quarter,
                           p.groups.row, p.groups.word};
    };
    if (pass != kReducePartials) {
        const int64_t first_k = work.split * params.k_per_split,
                      last_k = first_k + params.k_per_split;
        OperandSource a_source{
            element_address(a.data, offset(kA) + work.row * params.a.strides.row, params.a.dtype),
            params.a.strides.row,
            params.a.strides.col,
            params.m - work.row,
            params.a.dtype,
            work.row,
            GroupScales{}};
        if constexpr (kScaled<ElementA>) a_source.groups = groups(a, params.a, kGroupsA);
        OperandSource b_sources[kProducts];
        BlockScales scales{};
        const bool by_block = kPromoteK > 0 && params.has_block_scales;
        if (by_block) {
            const MatrixStrides& strides = params.a.block_scales;
            scales.a = a.scales ? a.scales + offset(kScaleA) + work.row * strides.row : nullptr;
            scales.a_strides = strides;
            scales.rows = params.m - work.row;
            scales.cols = params.n - work.col;
            scales.first_col = work.col;
        }
#pragma unroll
        for (int i = 0; i < kProducts; ++i) {
            const OperandParams& p = params.b[i];
            b_sources[i] = {
                element_address(b[i].data, offset(kBs[i]) + work.col * p.strides.col, p.dtype),
                p.strides.col,
                p.strides.row,
                params.n - work.col,
                p.dtype,
                work.col,
                GroupScales{}};
            if constexpr (kScaled<ElementB>) b_sources[i].groups = groups(b[i], p, kGroupsBs[i]);
            if (by_block) {
                scales.b[i] = b[i].scales ? b[i].scales + offset(kScalesB[i]) : nullptr;
                scales.b_strides[i] = p.block_scales;
            }
        }
        multiply(storage.stages, a_source, b_sources, scales, first_k,
                 last_k < params.k ? last_k : params.k, warp, acc);
        add_slices(storage, warp, acc);
    }
    if (pass != kSinglePass) exchange_partials(params, work, warp, partials, pass, acc);
}

// Calls f(row, col, runs) for the runs of kRun contiguous columns that this lane stores; `runs` has
// one run per product.  The accumulators pass through shared memory.
template <class Stage, class F>
DEVICE void for_each_run(TileStorage<Stage>& storage, const WarpCoord& warp,
                         const AccumulatorTile& acc, F f) {
    constexpr int kRuns = kPositionCols / kRun;
    auto& fragments = storage.fragments[int(threadIdx.x) / kWarpSize];
#pragma unroll
    for (int first = 0; first < kPositions; first += kStagedPositions) {
        sync_warp();  // the staging has been read
#pragma unroll
        for (int p = 0; p < kStagedPositions; ++p) {
            const int m = (first + p) / kColFragments, n = (first + p) % kColFragments;
#pragma unroll
            for (int product = 0; product < kProducts; ++product) {
                const AccumulatorFragment& fragment = acc[m][product * kColFragments + n];
#pragma unroll
                for (int i = 0; i < AccumulatorFragment::kCount; ++i) {
                    const int col = stored_column<ElementB, ComputeB, OperandB::kMnMajor>(
                        AccumulatorFragment::col(warp.lane, i));
                    fragments[p][product][AccumulatorFragment::row(warp.lane, i)][col] =
                        fragment.values[i];
                }
            }
        }
        sync_warp();
        const int row = warp.lane / kRuns, col = warp.lane % kRuns * kRun;
#pragma unroll 1
        for (int p = 0; p < kStagedPositions; ++p) {
            const int number = first + p;
            if (number % kGridK != warp.k) continue;
            ElementAccumulator runs[kProducts][kRun];
#pragma unroll
            for (int product = 0; product < kProducts; ++product) {
#pragma unroll
                for (int i = 0; i < kRun; ++i)
                    runs[product][i] = fragments[p][product][row][col + i];
            }
            f(warp.row(number / kColFragments) + row, warp.col(number % kColFragments) + col, runs);
        }
    }
}
