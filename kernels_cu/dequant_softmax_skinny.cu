// dequant_softmax_skinny.cu: dequant_softmax.cu for m <= 16 on Hopper, bound by the read of B.
//
// Warp-specialised and persistent: one producer warp loads tiles of A and B by TMA through a
// pipeline of kStages stages; each consumer warp multiplies kWarpCols columns by mma.sync.
// Column sets per block differ by at most one, so that all blocks finish together.  A block's last
// tile can be narrower.
// Constants: ElementA (16-bit), ElementB (8-bit), kTileN, kStages.
// Launch: grid (any), block (kNumThreads = kTileN + 32), dynamic shared memory
// sizeof(SkinnyLogitsStorage).
// Tensor maps without batch, K-major: A in boxes of `rows` (8 or 16) rows x 64 elements, B in boxes
// of kColumns columns x 128 elements.  statistics: (m, gridDim.x), one per block.
#include "logits/kernel_skinny.cuh"

KERNEL void dequant_softmax_skinny(GRID_CONSTANT TensorMap a_map, GRID_CONSTANT TensorMap b_map,
                                   const void* bias, const float* scale_b, float* logits,
                                   MaxSum* statistics, const SkinnyLogitsParams params) {
    SHARED_STORAGE(SkinnyLogitsStorage, storage);
    const int warp = threadIdx.x / 32;
    prefetch_maps(params, warp, kWarps, a_map, b_map);
    if (threadIdx.x == 0) {
        storage.pipeline.init();
        fence_barrier_init();
    }
    sync_block();
    wait_for_previous_grid();
    // The block's column sets, kTileSets to a tile.
    const int64_t num_sets = (params.epilogue.n + kColumns - 1) / kColumns;
    const int first_set = int(blockIdx.x * num_sets / gridDim.x),
              last_set = int((blockIdx.x + 1) * num_sets / gridDim.x);
    pipeline::PipelineState<kStages> state;
    if (warp == kWarps) {
        if (elect_one()) load_stages(storage, params, a_map, b_map, first_set, last_set, state);
        sync_warp();
    } else {
        const MatrixEpilogue epilogue = MatrixEpilogue::of_matrix(
            params.epilogue, logits, bias, nullptr, nullptr, scale_b, 0, 0, 0, 0, 0);
        consume_stages(storage, params, epilogue, warp, first_set, last_set, state);
    }
    sync_block();
    store_statistics(storage, int(params.epilogue.m), statistics);
}
