// quantize_global_tiles.cu: y = x / scale in FP8 or int8, one scale per tile of tile_rows x
// tile_cols elements.
//
// Tiles at the matrix's edges can be smaller.  kThreadsPerRow threads share a tile.  Tiles of more
// than one vector per thread are loaded twice; the second load hits a cache.
//   kVectorWidth > 1: tile_cols is a multiple of kVectorWidth; rows of x and y are contiguous and
//   aligned to vectors.
// Constants: Element; see also rows/tile.cuh.
// Launch: grid (ceil(params.num_tiles / kRowsPerBlock)), block (kNumThreads).
#include "rows/quantize_global_tiles.cuh"

KERNEL void quantize_global_tiles(const Element* x, void* y, float* scales,
                                  const rows::QuantizeTileParams params) {
    wait_for_previous_grid();
    rows::quantize_tile(x, y, scales, params);
}
