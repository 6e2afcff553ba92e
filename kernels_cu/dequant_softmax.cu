// dequant_softmax.cu: computes FP32 logits A @ (scale_b * B) + bias.  For each row and set of
// kSetColumns columns it also stores the maximum and the sum of exp(logit - maximum), from which
// normalize_logits.cu computes the softmax.
//
// Constants: see gemm/mainloop_portable.cuh.
// Launch: see gemm.cu, dynamic shared memory sizeof(GemmStorage).
// statistics: (m, ceil(n / kSetColumns)).
#include "logits/epilogue.cuh"

KERNEL void dequant_softmax(const void* a, const void* b, const void* bias, const float* scale_b,
                            float* logits, MaxSum* statistics, ElementAccumulator* partials,
                            const LogitsParams params, int64_t pass) {
    wait_for_previous_grid();
    SHARED_STORAGE(GemmStorage, storage);
    SHARED(MaxSum, of_fragments, [kTileM][kTileN / 16]);
    const WarpCoord warp = WarpCoord::here();
    const GemmWorkTile work = work_tile_of(params.tile);
    AccumulatorTile acc{};
    accumulate_tile(storage, params.tile, work, warp, {a, nullptr, nullptr},
                    {{b, scale_b, nullptr}}, partials, pass, acc);
    if (pass == kStorePartials) return;
    const MatrixEpilogue epilogue = MatrixEpilogue::of_matrix(
        params.epilogue, logits, bias, nullptr, nullptr, scale_b, 0, 0, 0, 0, 0);
    store_logits(storage, of_fragments, warp, work, epilogue, acc, statistics);
}
