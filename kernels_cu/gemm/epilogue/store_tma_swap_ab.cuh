// StoreTma for transposed accumulators (SwapAB); a warpgroup shares its boxes.
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
    static constexpr int kSlicesOfChunk = Tile::kSlicesOfChunk, kMmasM = Tile::kMmasM;
    using Picked = typename Tile::Mainloop::ElementAccumulator[kValues];
    using Values = float[kValues];

    typename Tile::Staging* warps;
    int& box;
    const TensorMap& map;
    const Broadcast& broadcast;
    const EpilogueParams& params;
    int row, out_row, col, batch, count;
    const Residual<Tile>& residual;

    // scale_a of this lane's columns of a slice.
    struct ColumnScales {
        ColumnPair pairs[kValues / 4];

        DEVICE ColumnScales(const Broadcast& broadcast, int col) {
            if constexpr (Tile::kScales) {
#pragma unroll
                for (int i = 0; i < kValues / 4; ++i) {
                    const int at = col + wgmma_col(threadIdx.x % 32, 4 * i);
                    pairs[i] = *reinterpret_cast<const ColumnPair*>(&broadcast.rows[at]);
                }
            }
        }
        DEVICE float of(int i) const { return pairs[i / 4].values[i % 2]; }
    };
    // Scale and bias of this lane's rows from 64 * m on.
    struct RowTerms {
        float scales[2], added[2];

        DEVICE void load(const StoreTmaSwapAB& store, int m) {
            const Broadcast& broadcast = store.broadcast;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int of_row = store.row + 64 * m + Tile::row_of_half(threadIdx.x % 32, half);
                if constexpr (Tile::kScales) scales[half] = broadcast.cols[0][of_row];
                added[half] = broadcast.cols[Broadcast::kColVectors - 1][of_row];
            }
        }
    };
    // Computes the results of slice `slice`, before activation and residual.
    DEVICE void finish(const Picked& picked, const RowTerms& terms, int slice, float alpha,
                       Values& values) const {
        const ColumnScales scales(broadcast, Tile::slice_col(slice));
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            const int half = i / 2 % 2;
            float x = float(picked[i]);
            if constexpr (Tile::kScales) x = x * terms.scales[half] * scales.of(i);
            values[i] = x * alpha + terms.added[half];
        }
    }
    // Stores FP32 outputs, a slice at a time: boxes of 16 columns of accumulators and 32 rows, two
    // for the warpgroup's 64 rows.
    DEVICE void store_floats(const Accumulator& accumulator) const {
        constexpr int kBoxCols = 16, kBoxRows = 32, kBytes = kBoxCols * kSwizzleBytes;
        static_assert(2 * Tile::kSlice / kBoxCols * kBytes <= 4 * Tile::kBoxBytes, "half of it");
        const int lane = Tile::lane(), warp = threadIdx.x / 32, warpgroup = warp / 4;
        const bool stores = threadIdx.x % 128 == 0;
        const float alpha = broadcast.alpha(params);
        const typename Tile::OwnChunks own;
        RowTerms terms;
        Picked picked;
        Values values;
#pragma unroll
        for (int i = 0; i < kMmasM * kSlices; ++i) {
            const int m = i / kSlices, slice = i % kSlices, first = Tile::slice_col(slice);
            if (slice == 0) terms.load(*this, m);
            if (!own.has(slice / kSlicesOfChunk)) continue;
#pragma unroll
            for (int j = 0; j < kValues; ++j) picked[j] = accumulator[m][first / 2 + j];
            finish(picked, terms, slice, alpha, values);
            unsigned char* to = warps[4 * warpgroup].boxes[0] + box * 4 * Tile::kBoxBytes;
            if (stores) tma_store_wait_read<1>();
            named_barrier(1 + warpgroup, 128);
#pragma unroll
            for (int j = 0; j < kValues; ++j) {
                const int of_row = warp % 4 * 16 + Tile::row_of_half(lane, j / 2 % 2),
                          of_col = wgmma_col(lane, j), at = of_col % kBoxCols;
                unsigned char* four = to + (of_col / kBoxCols * 2 + of_row / kBoxRows) * kBytes +
                                      at * kSwizzleBytes + (of_row % kBoxRows / 4 ^ at % 8) * 16;
                *reinterpret_cast<float*>(four + of_row % 4 * 4) = values[j];
            }
            fence_async_proxy();
            named_barrier(1 + warpgroup, 128);
            if (stores) {
#pragma unroll
                for (int j = 0; j < 2 * Tile::kSlice / kBoxCols; ++j) {
                    tma_store(map, to + j * kBytes,
                              {out_row + 64 * m + j % 2 * kBoxRows, col + first + j / 2 * kBoxCols,
                               batch});
                }
                tma_store_commit();
            }
            box ^= 1;
        }
    }
    // kAdds: adds the residual, and loads the residual of the next box.  kActivates: applies the
    // activation, if there is one.
    template <bool kAdds, bool kActivates> DEVICE void store(const Accumulator& accumulator) const {
        const typename Tile::OwnChunks own;
        const float alpha = broadcast.alpha(params);
        Picked picked;
        Values values;
        RowTerms terms;
        const auto pick = [&](int m, int slice) {
#pragma unroll
            for (int i = 0; i < kValues; ++i)
                picked[i] = accumulator[m][Tile::slice_col(slice) / 2 + i];
        };
        const auto store_slice = [&](int m, int slice) {
            const int index = Residual<Tile>::box_of(m, slice / kSlicesOfChunk);
            if constexpr (kAdds) {
                residual.wait(count, index);
                uint32_t added[kValues / 2];
                Box::template move_slice<true>(residual.box(count, index),
                                               slice % kSlicesOfChunk * Tile::kSlice, added);
                Box::add_pairs(added, params.out_dtype, values);
            }
            Box::store_slice(warps, box, map, slice, out_row + 64 * m, col + Tile::slice_col(slice),
                             batch, params.out_dtype, values);
            if (kAdds && slice % kSlicesOfChunk == kSlicesOfChunk - 1 && residual.loads()) {
                residual.follow(count, index, out_row, col, int(broadcast.origin.words[3]));
            }
        };
        if (!kActivates || params.activation == kNoActivation) {
#pragma unroll
            for (int i = 0; i < kMmasM * kSlices; ++i) {
                const int m = i / kSlices, slice = i % kSlices;
                if (slice == 0) terms.load(*this, m);
                if (!own.has(slice / kSlicesOfChunk)) continue;
                pick(m, slice);
                finish(picked, terms, slice, alpha, values);
                store_slice(m, slice);
            }
            return;
        }
        const bool gelus = kActivates && params.activation == kGelu;
        if (!kAdds && gelus) {  // unrolled: a dynamic index costs as much as gelu
#pragma unroll
            for (int i = 0; i < kMmasM * kSlices; ++i) {
                const int m = i / kSlices, slice = i % kSlices;
                if (slice == 0) terms.load(*this, m);
                if (!own.has(slice / kSlicesOfChunk)) continue;
                pick(m, slice);
                finish(picked, terms, slice, 0.5f * alpha, values);  // the bias is also halved
#pragma unroll
                for (int j = 0; j < kValues; ++j) values[j] = gelu_of_twice(values[j]);
                store_slice(m, slice);
            }
            return;
        }
        // Rolled: the code of the activations is long.
#pragma unroll 1
        for (int i = 0; i < kMmasM * kSlices; ++i) {
            const int m = i / kSlices, slice = i % kSlices;
            if (!own.has(slice / kSlicesOfChunk)) continue;
            pick(0, 0);  // initialises `picked`: the previous tile's values would stay live
#pragma unroll
            for (int known = 1; known < kMmasM * kSlices; ++known) {
                if (known == i) pick(known / kSlices, known % kSlices);
            }
            terms.load(*this, m);
            if (kAdds && gelus) {
                finish(picked, terms, slice, 0.5f * alpha, values);
#pragma unroll
                for (int j = 0; j < kValues; ++j) values[j] = gelu_of_twice(values[j]);
            } else {
                finish(picked, terms, slice, alpha, values);
                if (kActivates) activate_all(values, params.activation);
            }
            store_slice(m, slice);
        }
    }
};

}  // namespace gemm
