// normalize_logits.cu: y = softmax of the logits of dequant_softmax*.cu, from their per-set
// statistics.
//
// The input is FP32 logits.  If logits is null, y holds the input: 16-bit exponentials relative to
// each set's maximum.
// Launch: grid (any), block (kNumThreads).  statistics: (m, num_sets).
#include "logits/normalize.cuh"
#include "logits/scale_probabilities.cuh"

KERNEL void normalize_logits(const float* logits, const MaxSum* statistics, void* y,
                             const NormalizeParams params) {
    wait_for_previous_grid();
    SHARED(MaxSum, of_warps, [kBlockWarps]);
    const NormalizeParams& p = params;
    if (logits) normalize_rows(logits, statistics, y, p, of_warps);
    else if (p.dtype == kHalf) scale_probabilities(static_cast<half*>(y), statistics, p, of_warps);
    else scale_probabilities(static_cast<bf16*>(y), statistics, p, of_warps);
}
