// softmax_shared.cu: y = exp(s - max s) / sum exp(s - max s) along one axis, s = scale * x, or its
// logarithm, of any strided arrays with all options.
//
// A row is read once, into shared memory (rows/load_shared.cuh), reduced, and written once.
//   mask    bytes; nonzero keeps an element.  Null: keep all.
//   dtype   of y; can differ from Element.
// The scale is applied after the subtraction, so that 3e38 does not give inf - inf.  Exponentials
// are base 2: exp(s - max s) = exp2((x - x_max) * scale * log2(e)), x_max the x of the largest
// score.
// Constants: Element; see also rows/tile.cuh.
// Launch: grid (ceil(rows / kRowsPerBlock) * chunks * kClusterSize), block (kNumThreads), dynamic
// shared memory sizeof(SharedRowStorage<Element>).
#include "rows/softmax_shared.cuh"

KERNEL void softmax_shared(const Element* x, const uint8_t* mask, void* y, MaxSum* statistics,
                           const rows::SoftmaxParams params, int64_t pass) {
    wait_for_previous_grid();
    rows::softmax_rows(x, mask, y, statistics, params, pass);
}
