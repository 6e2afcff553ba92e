// nonfinite.cu: counts NaN, +infinity and -infinity in any strided array.  The same read also finds
// the first of them in C order and the minimum, maximum and mean of the finite elements.
//
// One pass over the array (rows/nonfinite_report.cuh): a thread adds vectors and inspects those
// whose sum is not finite one by one.  The last block to start merges the blocks' results in block
// order.
//   figures  [0, 4): NaN, +inf, -inf, the first index (kNowhere: none); [4, 7), as doubles:
//            minimum, maximum, mean (NaN without finite elements).
//   words    0 before and after, exclusive to one launch: [0] blocks that have started; then
//            kNumWords arrays of one word per block.
// Constants: Element, kVectorWidth, kBatch, kPlain, kMaxDims.
// Launch: grid (any), block (kNumThreads).
#include "rows/nonfinite_report.cuh"

KERNEL void nonfinite(const Element* x, uint64_t* figures, uint64_t* words,
                      const NonfiniteParams params) {
    wait_for_previous_grid();
    report_nonfinite(x, figures, words, params);
}
