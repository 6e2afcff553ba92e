// StoreTma for transposed accumulators (SwapAB), in boxes of a warpgroup.
#pragma once
#include "gemm/epilogue/broadcast.cuh"
#include "gemm/epilogue/residual.cuh"
#include "gemm/epilogue/store_box.cuh"
#include "gemm/epilogue/linear_combination.cuh"

namespace gemm {

// row: the warp's first row in the tile; (out_row, col): its first accumulator in the output.
template <class Tile> struct StoreTmaSwapAB {
    using Accumulator = typename Tile::Accumulator;
    using Box = StoreBox<Tile>;
    using Broadcast = TileBroadcast<Tile>;
    static constexpr int kValues = Tile::kValues, kSlices = Tile::kSlices;
    static constexpr int kSlicesOfChunk = Tile::kSlicesOfChunk;
    static constexpr bool kActivates = sizeof(typename Tile::Mainloop::ElementA) == 2;
    using Picked = typename Tile::Mainloop::ElementAccumulator[kValues];
    using Values = float[kValues];

    typename Tile::Staging* warps;
    int& box;
    const TensorMap& map;
    const Broadcast& broadcast;
    const EpilogueParams& params;
    int row, out_row, col, batch, count;
    const Residual<Tile>& residual;

    // A slice's results before activation and residual.
    DEVICE void finish(const Picked& picked, float alpha, Values& values) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int of_row = row + Tile::row_of_half(lane, half);
            const float added = broadcast.cols[Broadcast::kColVectors - 1][of_row];
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                if (i / 2 % 2 != half) continue;
                float x = float(picked[i]);
                if constexpr (Tile::kScales) x = x * broadcast.cols[0][of_row] * broadcast.rows[0];
                values[i] = x * alpha + added;
            }
        }
    }
    // kTmaResidual: adds the residual and loads the next box's.
    template <bool kTmaResidual> DEVICE void store(const Accumulator& accumulator) const {
        const typename Tile::OwnChunks own;
        Picked picked;
        Values values;
        const auto pick = [&](int slice) {
#pragma unroll
            for (int i = 0; i < kValues; ++i)
                picked[i] = accumulator[0][Tile::slice_col(slice) / 2 + i];
        };
        const auto store_slice = [&](int slice) {
            const int index = Residual<Tile>::box_of(0, slice / kSlicesOfChunk);
            if constexpr (kTmaResidual) {
                residual.wait(count, index);
                uint32_t added[kValues / 2];
                Box::template move_slice<true>(residual.box(count, index), slice % kSlicesOfChunk,
                                               added);
                Box::add_pairs(added, params.out_dtype, values);
            }
            Box::store_slice(warps, box, map, slice, out_row, col + Tile::slice_col(slice), batch,
                             params.out_dtype, values);
            if (kTmaResidual && slice % kSlicesOfChunk == kSlicesOfChunk - 1 && residual.loads()) {
                residual.follow(count, index, out_row, col, int(broadcast.origin.words[3]));
            }
        };
        if (!kTmaResidual && (!kActivates || params.activation == kNoActivation)) {
#pragma unroll
            for (int slice = 0; slice < kSlices; ++slice) {
                if (!own.has(slice / kSlicesOfChunk)) continue;
                pick(slice);
                finish(picked, params.alpha, values);
                store_slice(slice);
            }
            return;
        }
        const bool gelus = kActivates && params.activation == kGelu;
        if (!kTmaResidual && gelus) {  // unrolled: a dynamic index costs as much as gelu
#pragma unroll
            for (int slice = 0; slice < kSlices; ++slice) {
                if (!own.has(slice / kSlicesOfChunk)) continue;
                pick(slice);
                finish(picked, 0.5f * params.alpha, values);  // the bias is halved too
#pragma unroll
                for (int i = 0; i < kValues; ++i) values[i] = gelu_of_twice(values[i]);
                store_slice(slice);
            }
            return;
        }
        // Rolled: the code of the activations is long.
#pragma unroll 1
        for (int slice = 0; slice < kSlices; ++slice) {
            if (!own.has(slice / kSlicesOfChunk)) continue;
            pick(0);  // initialises `picked`: the previous tile's values would hold registers
#pragma unroll
            for (int known = 1; known < kSlices; ++known) {
                if (known == slice) pick(known);
            }
            if (kTmaResidual && gelus) {
                finish(picked, 0.5f * params.alpha, values);
#pragma unroll
                for (int i = 0; i < kValues; ++i) values[i] = gelu_of_twice(values[i]);
            } else {
                finish(picked, params.alpha, values);
                if (kActivates) activate_all(values, params.activation);
            }
            store_slice(slice);
        }
    }
};

}  // namespace gemm
