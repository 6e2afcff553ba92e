// quantize_columns.cu: y = x / scale in FP8 or int8, one scale per column of matrices in C order.
//
// A cluster loads a strip of adjacent columns into shared memory, so that x is read once.  A strip
// is kRowsPerBlock vectors wide.  kThreadsPerRow threads share a column of vectors; each has
// kVectorsPerThread rows of it, kInRegisters of them in registers, so that two blocks fit an SM.
// Rows of x and y are aligned and their length is a multiple of the vector width.
// Constants: Element, kInRegisters; see also rows/tile.cuh.
// Launch: grid (params.num_tiles * params.blocks), block (kNumThreads), clusters of params.blocks
// blocks, at most kClusterSize, dynamic shared memory sizeof(ColumnStorage).
#include "rows/quantize_columns.cuh"

KERNEL void quantize_columns(const Element* x, void* y, float* scales,
                             const rows::QuantizeTileParams params) {
    wait_for_previous_grid();
    rows::quantize_strip(x, y, scales, params);
}
