// normalize_even.cu: layer_norm (kCentered) and rms_norm of even rows, without options
// (rows/norm_even.cuh).
// The other arguments are those of normalize_shared.cu, where they are not null there either.
// Constants: Element, kCentered, kQuantized, kRowsPerThread, kInRegisters, kWeightsFirst, kResidual
// (whether there is one, parts/presence.cuh), kSmall (false) and those of rows/tile.cuh.
// Launch: grid (ceil(rows / (kRowsPerBlock * kRowsPerThread)) * kClusterSize), block (kNumThreads),
// dynamic shared memory sizeof(EvenStorage), twice that with a residual; none with kInRegisters.
#include "rows/norm_even.cuh"

// Arguments in the order of their first use (rows/load_even.cuh).
KERNEL void normalize_even(const Element* x, const void* weight, const Element* residual,
                           const rows::EvenParams params, const void* bias, void* y, Element* sum,
                           float* rstd_out, float* mean_out, float* row_scale,
                           const rows::ColdParams cold) {
    rows::announce_to_cluster();
    const rows::StatisticOutputs outputs{mean_out, rstd_out, row_scale};
    if constexpr (kResidual != kEither) {
        constexpr bool kHasResidual = kResidual == kAlways;
        rows::normalize_any_rows<kHasResidual>(x, residual, weight, bias, y, sum, outputs, params,
                                               cold);
    } else if (residual) {
        rows::normalize_any_rows<true>(x, residual, weight, bias, y, sum, outputs, params, cold);
    } else {
        rows::normalize_any_rows<false>(x, residual, weight, bias, y, sum, outputs, params, cold);
    }
}
