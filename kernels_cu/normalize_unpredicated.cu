// normalize_unpredicated.cu: normalize_even.cu for small contiguous matrices that cover all threads
// of all blocks, with weights and biases, without statistics.
//
// No runtime predicates.  Parameters, except a bias beside a residual, fit one 64-byte line of the
// constant bank; the latency of the first load dominates.
// other: the residual, or without one (kResidual) the bias of layer_norm.
// Constants: those of normalize_even.cu, with kSmall.
// Launch: grid (rows / (kRowsPerBlock * kRowsPerThread)), block (kNumThreads).
#include "rows/norm_even.cuh"

static_assert(kSmall && kInRegisters && kClusterSize == 1 && !kQuantized && kResidual != kEither,
              "short rows");

KERNEL void normalize_unpredicated(const Element* x, const void* weight, const void* other, void* y,
                                   Element* sum, const float eps, const void* bias) {
    constexpr bool kHasResidual = kResidual == kAlways;
    const rows::EvenParams params{rows::kChunk, rows::kChunk, true,         false,
                                  eps,          rows::kChunk, rows::kChunk, 0};
    const rows::ColdParams cold{0, int64_t(gridDim.x) * (rows::kRowsPerBlock * kRowsPerThread),
                                rows::kChunk, 0};
    rows::normalize_rows<kHasResidual, true>(
        x, kHasResidual ? static_cast<const Element*>(other) : nullptr, weight,
        kHasResidual ? bias : other, y, sum, rows::StatisticOutputs{}, params, cold);
}
