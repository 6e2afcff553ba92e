// quantize_columns.cu: as quantize_shared.cu, one scale for each column of matrices in C order: a cluster
// brings a strip of neighbouring columns into its blocks' shared memory, so that x is read once, in
// pieces of rows.  kRowsPerBlock vectors are side by side in a strip, with kThreadsPerRow threads under
// each other, which have kVectorsPerThread vectors of as many rows each, kInRegisters of them in
// registers, so that an SM holds two blocks.
//   Of matrices whose rows are whole, aligned vectors, of x and of y.
// Constants: Element, kInRegisters and those of rows/tile.cuh; "row" read as "column", lanes across them.
// Launch: grid (params.num_tiles * kClusterSize), block (kNumThreads), dynamic shared memory
// sizeof(ColumnStorage).  A tile of params is a strip.
#include "rows/quantize_columns.cuh"

KERNEL void quantize_columns(const Element* x, void* y, float* scales,
                             const rows::TileParams params) {
    rows::quantize_strip(x, y, scales, params);
}
