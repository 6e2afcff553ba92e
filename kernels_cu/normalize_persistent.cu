// normalize_persistent.cu: layer_norm (kCentered) and rms_norm of even rows, without options, by
// persistent, warp-specialised blocks or clusters; weights and biases stay in registers.
//   sum         null without a residual.  layer_norm takes no residual here.
//   counter     0 before and after the launch.
// Other arguments: see normalize_shared.cu, also for null ones.
// Constants: Element, kCentered; see also rows/persistent.cuh.
// Launch: grid (at most the blocks that are resident at once), block (kNumThreads), dynamic shared
// memory params.stages * sizeof(StageTile), twice that with a residual.
#include "rows/norm_persistent.cuh"

KERNEL void normalize_persistent(const Element* x, const Element* residual, const void* weight,
                                 const void* bias, void* y, Element* sum, float* mean_out,
                                 float* rstd_out, float*, uint32_t* counter,
                                 const rows::NormParams params, int64_t) {
    wait_for_previous_grid();
    SHARED_STORAGE(rows::StageTile, tiles);
    Element* to = static_cast<Element*>(y);
    if constexpr (!kCentered) {
        if (residual) {
            rows::normalize_rows<true>(x, residual, weight, bias, to, sum, mean_out, rstd_out,
                                       counter, &tiles, params);
            return;
        }
    }
    rows::normalize_rows<false>(x, residual, weight, bias, to, sum, mean_out, rstd_out, counter,
                                &tiles, params);
}
