// quantize_shared.cu: y = x / scale in FP8 or int8, one scale for each row: the row's largest |x| over
// the format's largest number (rows/quantize.cuh).  A row lies along any axis, or is a whole tensor;
// it is read once, into shared memory (rows/load_shared.cuh), unless it is chunked.
// Constants: Element and those of rows/tile.cuh.
// Launch: grid (ceil(rows / kRowsPerBlock) * chunks * kClusterSize), block (kNumThreads), dynamic
// shared memory sizeof(SharedRowStorage<Element>).
#include "rows/quantize_shared.cuh"

KERNEL void quantize_shared(const Element* x, void* y, float* scales, float* statistics,
                            const rows::QuantizeParams params, int64_t pass) {
    rows::quantize_rows(x, y, scales, statistics, params, pass);
}
