// quantize_nvfp4.cu: x = code * scale * global_scale for a batch of matrices, codes in e2m1, an
// e4m3 scale for every 16 elements of a row (NVIDIA's recipe for NVFP4).
//   global_scale = max |x| over finite x / (6 * 448), or 1 if that is not a normal number;
//   scale = max |x| of the group / (6 * global_scale), NaN for a group with a NaN or an infinity;
//   code = x / global_scale / scale; all three rounded to nearest even.
// Two passes with a grid barrier between them: the largest |x|, then codes and scales
// (rows/quantize_nvfp4_passes.cuh).
// Constants: Element; kAtOnce: groups that a thread loads at once; kCachedGroups, a multiple of it.
// Launch: grid (any), block (kNumThreads), dynamic shared memory sizeof(CachedGroups).  Fewer than
// 2^32 rows in all, including padding.
#include "rows/quantize_nvfp4_passes.cuh"

KERNEL void quantize_nvfp4(const Element* x, uint8_t* codes, e4m3* scales, float* global_scale,
                           GridBarrier* barrier, const QuantizeNvfp4Params params) {
    wait_for_previous_grid();
    quantize_matrices(x, codes, scales, global_scale, barrier, params);
}
