// quantize_shared.cu: y = x / scale in FP8 or int8, one scale per row: the row's largest |x| over
// the format's largest value (rows/quantize.cuh).
//
// A row runs along any axis, or is the whole tensor.  Unless chunked, it is read once, into shared
// memory (rows/load_shared.cuh).
// Constants: Element; see also rows/tile.cuh.
// Launch: grid (ceil(rows / kRowsPerBlock) * chunks * kClusterSize), block (kNumThreads), dynamic
// shared memory sizeof(SharedRowStorage<Element>).
#include "rows/quantize_shared.cuh"

KERNEL void quantize_shared(const Element* x, void* y, float* scales, float* statistics,
                            const rows::QuantizeRowParams params, int64_t pass) {
    wait_for_previous_grid();
    rows::quantize_rows(x, y, scales, statistics, params, pass);
}
