// quantize_global_tiles.cu: as quantize_shared.cu, one scale for each tile of tile_rows x tile_cols elements;
// those at the matrix's ends may be smaller.  kThreadsPerRow threads share a tile; what is more than a
// vector each they read twice from global memory, the second time from a cache.
//   kVectorWidth > 1: tile_cols is a multiple of it; neighbours along a row of x, and of y, are
//     neighbours in memory, aligned to it.
// Constants: Element and those of rows/tile.cuh, "row" read as "tile".
// Launch: grid (ceil(tiles / kRowsPerBlock)), block (kNumThreads).
#include "rows/quantize_global_tiles.cuh"

KERNEL void quantize_global_tiles(const Element* x, void* y, float* scales,
                                  const rows::TileParams params) {
    rows::quantize_tile(x, y, scales, params);
}
