// normalize_even.cu: layer_norm (kCentered) and rms_norm of even rows, without options
// (rows/norm_even.cuh).
// Other arguments: see normalize_shared.cu, also for null ones.
// Constants: Element, kCentered, kResidual (common/presence.cuh), kQuantized, kRowsPerThread,
// kInRegisters, kWeightsFirst; see also rows/tile.cuh.
// Launch: grid (ceil(rows / (kRowsPerBlock * kRowsPerThread)) * blocks of a cluster), block
// (kNumThreads), clusters of at most kClusterSize blocks, dynamic shared memory
// sizeof(EvenStorage), twice that with a residual; none with kInRegisters.
#include "rows/norm_even.cuh"

// Parameters are in the order of first use, because they are fetched in 64-byte lines of the
// constant bank (rows/load_even.cuh).
KERNEL void normalize_even(const Element* x, const void* weight, const Element* residual,
                           const rows::EvenParams params, const void* bias, void* y, Element* sum,
                           float* rstd_out, float* mean_out, float* row_scale,
                           const rows::RareParams cold) {
    wait_for_previous_grid();
    rows::init_exchange_barriers();
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
