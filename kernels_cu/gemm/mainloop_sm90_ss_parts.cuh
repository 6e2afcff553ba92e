// The mainloop for FP32 operands in 16-bit parts (split_float32.cu), both from shared memory:
//     A @ B = scale * sum over i, j of 2^(-kShift (i + j)) A_i @ B_j.
// A k tile has kParts stages, from the last parts of A and B to the first ones.  If an operand has
// fewer parts, the first stages have only the other operand.  Tensor cores truncate, so partial
// accumulators are promoted to FP32 every 32 of k.  Each accumulates the small products first, then
// A_0 @ B_0.  The tensor cores fill one partial accumulator while the warpgroup promotes the other.
#pragma once
#include "gemm/mainloop_sm90.cuh"

namespace gemm {

template <class Parts, class Operands, class Tile, class Stages, class Schedule, class Cluster>
struct MainloopSm90SSParts : MainloopSm90<Operands, Tile, Stages, Schedule, Cluster> {
    using Base = MainloopSm90<Operands, Tile, Stages, Schedule, Cluster>;
    using Base::clear;
    using Base::kClusterSize;
    using Base::kCols;
    using Base::kMmaK;
    using Base::kMmasM;
    using Base::kMulticast;
    using Base::kStages;
    using Base::kTileK;
    using typename Base::Accumulator;
    using typename Base::ColElement;
    using typename Base::PipelineState;
    using typename Base::RowElement;
    using typename Base::SharedStorage;
    using typename Base::Source;
    using typename Base::StageCols;
    using typename Base::StageRows;
    static constexpr int kParts = Parts::kCount, kOrder = Parts::kOrder;
    static constexpr int kPartsA = Parts::kCountA, kPartsB = Parts::kCountB;
    static constexpr int kStagesPerKTile = kParts;
    static constexpr bool kScaledParts = true;
    static_assert(Base::kCooperative && !Base::kSwapAB && kMmasM == 1 && kStages % kParts == 0 &&
                      kTileK == 64 && Base::kRows == 128 && kCols == 128,
                  "a tile's blocks of scales are the split's");

    // Scales of A's block row and B's block column, one per k tile.
    struct WorkTile : Base::WorkTile { const float *scales_a, *scales_b; };

    // A k tile has two partial accumulators, each for half of its k.  Its chunks are the small
    // products of each, if there are any, then A_0 @ B_0 of each.
    static constexpr int kSmallChunks = kOrder > 0 ? 2 : 0, kChunks = kSmallChunks + 2;
    static constexpr int kChunkK = kTileK / 2;
    using Partial = float[kCols / 2];

    struct Consumer {
        SharedStorage& storage;
        const WorkTile& work;
        Accumulator& accumulator;
        PipelineState arriving;          // the next stage to wait for
        int stage;                       // the k tile's first stage
        const float *scale_a, *scale_b;  // scales of the k tile that follows next_scale's
        float scale, next_scale;

        DEVICE Consumer(SharedStorage& storage, const WorkTile& work, Accumulator& accumulator)
            : storage(storage),
              work(work),
              accumulator(accumulator),
              arriving(work.state),
              stage(work.state.stage),
              scale_a(work.scales_a),
              scale_b(work.scales_b),
              scale(0),
              next_scale(*scale_a++ * *scale_b++) {}
        DEVICE static int after(int stage) {
            return stage + kParts == kStages ? 0 : stage + kParts;
        }

        // Issues chunk kChunk of the k tile whose stages begin with `first`.
        template <int kChunk> DEVICE void issue(int first, Partial& partial) {
            if constexpr (kChunk == 0) {
#pragma unroll
                for (int i = 0; i < kParts; ++i) {
                    storage.pipeline.consumer_wait(arriving);
                    arriving.advance();
                }
            }
            constexpr bool kSmall = kChunk < kSmallChunks;
            constexpr int kBegin = kChunk % 2 * kChunkK;
            const uint64_t rows = advance(StageRows::descriptor(storage.rows[0], work.row, 0),
                                          first * StageRows::kBytes);
            const uint64_t cols =
                advance(StageCols::descriptor(storage.cols[0], 0, 0), first * StageCols::kBytes);
            bool accumulate = kChunk >= 2;
            wgmma_fence(partial);
#pragma unroll
            for (int order = kSmall ? kOrder : 0; order >= int(kSmall); --order) {
#pragma unroll
                for (int i = 0; i < kParts; ++i) {
                    const int j = order - i;
                    if (i >= kPartsA || j < 0 || j >= kPartsB) continue;
                    const int of_a = (kParts - 1 - i) * StageRows::kBytes;
                    const int of_b = (kParts - 1 - j) * StageCols::kBytes;
#pragma unroll
                    for (int k = kBegin; k < kBegin + kChunkK; k += kMmaK) {
                        wgmma<RowElement, ColElement, StageRows::kMajor, StageCols::kMajor>(
                            partial, advance(rows, of_a + StageRows::step(k)),
                            advance(cols, of_b + StageCols::step(k)), accumulate);
                        accumulate = true;
                    }
                }
            }
            wgmma_commit();
        }
        // Releases the stages of a finished chunk, and scales or promotes its products.
        template <int kChunk> DEVICE void finish(Partial& partial) {
            if constexpr (kChunk == 1) {
#pragma unroll
                for (int i = 0; i < kParts - 1; ++i) storage.pipeline.consumer_release(stage + i);
            }
            if constexpr (kChunk == kChunks - 1)
                storage.pipeline.consumer_release(stage + kParts - 1);
            if constexpr (kChunk < kSmallChunks && Parts::kShift > 0) {
#pragma unroll
                for (int i = 0; i < kCols / 2; ++i) partial[i] *= Parts::kUnit;
            }
            if constexpr (kChunk >= kSmallChunks) {
#pragma unroll
                for (int i = 0; i < kCols / 2; ++i) accumulator[0][i] += scale * partial[i];
            }
        }
        // Issues the next chunk into `other`, then finishes chunk kChunk, issued into `partial`.
        template <int kChunk, bool kLast> DEVICE void step(Partial& partial, Partial& other) {
            constexpr bool kEnd = kChunk + 1 == kChunks;
            if constexpr (!kEnd) issue<kChunk + 1>(stage, other);
            else if constexpr (!kLast) issue<0>(arriving.stage, other);
            wgmma_wait<kEnd && kLast ? 0 : 1>(partial);
            finish<kChunk>(partial);
            if constexpr (!kEnd) step<kChunk + 1, kLast>(other, partial);
        }
        DEVICE void run() {
            Partial even, odd;
            issue<0>(stage, even);
#pragma unroll 1
            for (int left = work.num_k_tiles - 1; left > 0; --left) {
                scale = next_scale;
                next_scale = *scale_a++ * *scale_b++;
                step<0, false>(even, odd);
                stage = after(stage);
            }
            scale = next_scale;
            if (work.num_k_tiles > 0) {
                step<0, true>(even, odd);
            } else {  // unreachable: ptxas needs a wait on every path
                wgmma_wait<0>(even);
                accumulator[0][0] += even[0];
            }
        }
    };

    DEVICE static void mma(SharedStorage& storage, const WorkTile& work, Accumulator& accumulator) {
        clear(accumulator);
        Consumer(storage, work, accumulator).run();
    }

    // Base::load for each part, from the last to the first.  Parts are adjacent in the maps' batch.
    template <bool kRowEdge, bool kColEdge>
    DEVICE static void load(SharedStorage& storage, PipelineState& state, const Source& rows,
                            const Source& cols, int first, int num_k_tiles, int) {
        const int row_bytes = StageRows::bytes(rows.left), col_bytes = StageCols::bytes(cols.left);
#pragma unroll 1
        for (int i = 0; i < kParts * num_k_tiles; ++i) {
            const int k_tile = i / kParts, part = kParts - 1 - (i - k_tile * kParts);
            const int k = (first + k_tile) * kTileK;
            Barrier& full = storage.pipeline.full[state.stage];
            storage.pipeline.producer_acquire(state);
            const bool of_a = kPartsA == kParts || part < kPartsA;
            const bool of_b = kPartsB == kParts || part < kPartsB;
            full.arrive_expect_tx((of_a ? row_bytes : 0) + (of_b ? col_bytes : 0));
            if (of_a) {
                Base::template load_rows<kRowEdge>(storage.rows[state.stage], full, k, rows, part);
            }
            if (of_b) {
                Base::template load_cols<kColEdge>(storage.cols[state.stage], full, k, cols, part);
            }
            state.advance();
        }
    }
};

}  // namespace gemm
