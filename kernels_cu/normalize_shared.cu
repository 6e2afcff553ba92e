// normalize_shared.cu: layer_norm (kCentered: common/presence.cuh) or rms_norm of strided rows with
// all options.
//
// s = x + residual, in FP32, not rounded:
//   layer_norm  y = (s - mean) / sqrt(var + eps) * weight + bias
//   rms_norm    y = s / sqrt(mean(s^2) + eps) * weight
// A row is read once, into shared memory (rows/load_shared.cuh).  If one block has the whole row,
// the mean is computed before the squares are summed.  In a cluster or a chunked row each warp has
// its own mean, and rows/moments.cuh merges the moments.
//   weight, bias     one of three dtypes, along the row; null: none.  rms_norm has no bias.
//   sum              s rounded to Element.  mean, rstd: FP32, one per row.  Null: not stored.
//   row_scale        not null: y is FP8 or int8, and row_scale = the row's largest |y| over the
//                    format's largest value decodes it.  Not for chunked rows.
//   compensated      the rounding error of the mean is measured together with the squares and
//                    subtracted as well.
// Constants: Element, kCentered; see also rows/tile.cuh.
// Launch: grid (ceil(rows / kRowsPerBlock) * chunks * kClusterSize), block (kNumThreads), dynamic
// shared memory sizeof(SharedRowStorage<Element>), twice that with a residual.
#include "rows/norm_shared.cuh"

KERNEL void normalize_shared(const Element* x, const Element* residual, const void* weight,
                             const void* bias, void* y, Element* sum, float* mean, float* rstd,
                             float* row_scale, void* statistics, const rows::NormParams params,
                             int64_t pass) {
    wait_for_previous_grid();
    const rows::NormOutputs out{y, sum, mean, rstd, row_scale, statistics};
    rows::normalize_shared_rows(x, residual, weight, bias, out, params, pass);
}
