// normalize_plain.cu: layer_norm (kCentered) and rms_norm as in normalize.cu, of rows of whole,
// aligned vectors, without options (parts/normalized_rows.cuh).
// The other arguments are those of normalize.cu, where they are not null there either.
// Constants: Element, kCentered, kQuantized, kRowsPerThread, kInRegisters, kWeightsFirst, kSums (whether
// there is a residual, parts/presence.cuh: none of what the other kind needs is in the code) and those of
// parts/row.cuh.
// Launch: grid (ceil(rows / (kRowsPerBlock * kRowsPerThread)) * kClusterSize), block (kNumThreads),
// dynamic shared memory sizeof(Storage), twice that with a residual; none with kInRegisters.
constexpr bool kFilled = false;
#include "parts/normalized_rows.cuh"

template <bool kHasResidual>
DEVICE void normalize_any_rows(const Element* x, const Element* residual, const void* weight,
                               const void* bias, void* y, Element* sum, const RowNumbers& numbers,
                               const PlainParams& params, const RareParams& rare) {
    if (params.whole) {
        normalize_rows<kHasResidual, true>(x, residual, weight, bias, y, sum, numbers, params,
                                           rare);
    } else {
        normalize_rows<kHasResidual, false>(x, residual, weight, bias, y, sum, numbers, params,
                                            rare);
    }
}

// In the order in which they are asked for (parts/held_rows.cuh).
KERNEL void normalize_plain(const Element* x, const void* weight, const Element* residual,
                            const PlainParams params, const void* bias, void* y, Element* sum,
                            float* rstd_out, float* mean_out, float* row_scale,
                            const RareParams rare) {
    announce_to_cluster();
    const RowNumbers numbers{mean_out, rstd_out, row_scale};
    if constexpr (kSums != kEither) {
        constexpr bool kHasResidual = kSums == kAlways;
        normalize_any_rows<kHasResidual>(x, residual, weight, bias, y, sum, numbers, params, rare);
    } else if (residual) {
        normalize_any_rows<true>(x, residual, weight, bias, y, sum, numbers, params, rare);
    } else {
        normalize_any_rows<false>(x, residual, weight, bias, y, sum, numbers, params, rare);
    }
}
