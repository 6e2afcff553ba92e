// The skinny GEMM for logits around a consumer warp's work: the producer's loads, and the merge of
// the warps' statistics.
#pragma once
#include "logits/skinny.cuh"

constexpr int kTileSets = kTileN / kColumns;  // column sets of a tile

// Loads the stages of A and B for the column sets [first_set, last_set), by one thread.
DEVICE void load_stages(SkinnyLogitsStorage& storage, const SkinnyLogitsParams& params,
                        const TensorMap& a_map, const TensorMap& b_map, int first_set, int last_set,
                        pipeline::PipelineState<kStages>& state) {
    const int num_k_tiles = int(params.num_k_tiles);
    for (int set = first_set; set < last_set; set += kTileSets) {
        const int sets = last_set - set < kTileSets ? last_set - set : kTileSets;
#pragma unroll 1
        for (int i = 0; i < num_k_tiles; ++i, state.advance()) {
            SkinnyLogitsStage& stage = storage.stages[state.stage];
            Barrier& full = storage.pipeline.full[state.stage];
            storage.pipeline.producer_acquire(state);
            full.arrive_expect_tx((sets * kColumns + 2 * params.rows) * kSwizzleBytes);
            for (int j = 0; j < sets; ++j) {
                tma_load(stage.cols.bytes + j * kColumns * kSwizzleBytes, b_map, full,
                         {i * kDepth, (set + j) * kColumns, 0});
            }
            tma_load(stage.rows[0].bytes, a_map, full, {i * kDepth, 0, 0});
            tma_load(stage.rows[1].bytes, a_map, full, {i * kDepth + 64, 0, 0});
        }
    }
}

// Merges the statistics of the warps, in their order.
DEVICE void store_statistics(const SkinnyLogitsStorage& storage, int m, MaxSum* statistics) {
    const MergeMaxSum merge{kLog2E};
    if (threadIdx.x < m) {
        MaxSum total = storage.of_warps[0][threadIdx.x];
#pragma unroll
        for (int i = 1; i < kWarps; ++i) total = merge(total, storage.of_warps[i][threadIdx.x]);
        statistics[threadIdx.x * gridDim.x + blockIdx.x] = total;
    }
}
