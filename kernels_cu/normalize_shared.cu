// normalize_shared.cu: layer_norm (kCentered: parts/presence.cuh) or rms_norm of rows, s = x + residual
// (FP32, not rounded):
//   layer_norm  y = (s - mean) / sqrt(var + eps) * weight + bias
//   rms_norm    y = s / sqrt(mean(s^2) + eps) * weight
// A row is read once into shared memory (rows/load_shared.cuh), where its squares are summed, in
// layer_norm about the mean.  Within a block that is known before; in a cluster, or a row of
// several chunks, each warp takes the mean of its own part, and rows/moments.cuh merges them.
//   weight, bias     of any of the three types, along the row; null: none.  rms_norm has no bias.
//   sum              s rounded to Element.  mean, rstd: FP32, one for each row.  Null: not wanted.
//   row_scale        not null: y is FP8 or int8, the row's largest |y| over the format's largest
//                    number the scale that decodes it.  For rows that are not chunked.
//   compensated      the rest that a mean leaves is measured along with the squares, and both parts
//                    of the mean are subtracted.
// Constants: Element, kCentered and those of rows/tile.cuh.
// Launch: grid (ceil(rows / kRowsPerBlock) * chunks * kClusterSize), block (kNumThreads), dynamic
// shared memory sizeof(SharedRowStorage<Element>), twice that with a residual.
#include "rows/norm_shared.cuh"

KERNEL void normalize_shared(const Element* x, const Element* residual, const void* weight,
                             const void* bias, void* y, Element* sum, float* mean, float* rstd,
                             float* row_scale, void* statistics, const rows::NormParams params,
                             int64_t pass) {
    const rows::NormOutputs out{y, sum, mean, rstd, row_scale, statistics};
    rows::normalize_shared_rows(x, residual, weight, bias, out, params, pass);
}
