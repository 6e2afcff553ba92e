// quantize_register_tiles.cu: as quantize_global_tiles.cu, of tiles that their threads hold in registers: x is
// read once.  A thread has kVectorsPerThread vectors of a tile, or one each of kTiles tiles, one
// under the other, so that as many loads are under way at once, and one lane makes each scale.
//   Of matrices whose rows, and tiles' rows, are whole and aligned vectors; the vectors of a tile's
//   row divide kThreadsPerRow.
// Constants and arguments: those of quantize_global_tiles.cu; a "tile" of params is kTiles tiles of x.
// Launch: grid (ceil(params.num_tiles / kRowsPerBlock)), block (kNumThreads).
#include "rows/quantize_register_tiles.cuh"

KERNEL void quantize_register_tiles(const Element* x, void* y, float* scales,
                                    const rows::TileParams params) {
    rows::quantize_tiles(x, y, scales, params);
}
