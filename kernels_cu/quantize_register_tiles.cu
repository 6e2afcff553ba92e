// quantize_register_tiles.cu: quantize_global_tiles.cu for register-resident tiles: x is read once.
//
// A thread has kVectorsPerThread vectors of a tile, or one of each of kTiles vertically adjacent
// tiles, to have as many loads in flight; one lane computes each scale.
// Rows and tiles' rows are aligned and a multiple of the vector width; the vectors of a tile's row
// divide kThreadsPerRow.
// Constants and arguments: those of quantize_global_tiles.cu; a tile of params is kTiles tiles of
// x.
// Launch: grid (ceil(params.num_tiles / kRowsPerBlock)), block (kNumThreads).
#include "rows/quantize_register_tiles.cuh"

KERNEL void quantize_register_tiles(const Element* x, void* y, float* scales,
                                    const rows::QuantizeTileParams params) {
    wait_for_previous_grid();
    rows::quantize_tiles(x, y, scales, params);
}
