// quantize_register_tiles.cu: quantize_global_tiles.cu for register-resident tiles: x is read once.
//
// A thread has kVectorsPerThread vectors of a tile.  If that is one, it has one vector of each of
// kTiles vertically adjacent tiles instead, for more loads in flight.  One lane computes each
// scale.
// Rows of x and of tiles are aligned and their length is a multiple of the vector width; the number
// of vectors per tile row divides kThreadsPerRow.
// Constants and arguments: see quantize_global_tiles.cu; a tile of params is kTiles tiles of x.
// Launch: grid (ceil(params.num_tiles / kRowsPerBlock)), block (kNumThreads).
#include "rows/quantize_register_tiles.cuh"

KERNEL void quantize_register_tiles(const Element* x, void* y, float* scales,
                                    const rows::QuantizeTileParams params) {
    wait_for_previous_grid();
    rows::quantize_tiles(x, y, scales, params);
}
