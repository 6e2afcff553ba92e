// decode_merge.cu: merges the partial results of decode_attention.cu for large row tiles.
//
// A separate kernel with one block per kRowsPerPass rows: if one block merged all rows of a
// sequence, the merge would take longer than the attention itself.  The arithmetic and its order
// are the same as in decode_attention.cu.
// Constants: Element, kTileM (as in decode_attention.cu), kDim, kMaxChunks, kChunksPerGroup.
// Launch: grid (row tiles * kTileM / kRowsPerPass), block (kNumThreads), dynamic shared memory
// sizeof(MergeStorage).
#include "attention/decode/merge.cuh"

constexpr int kBatch = kMaxGroups;
struct MergeStorage {
    MergeValues<kBatch> values;
    MergeStates states;
};

KERNEL void decode_merge(const int* seq_lens, Element* out, float* lse, void* partial_results,
                         const DecodeParams params) {
    wait_for_previous_grid();
    constexpr int kPasses = kTileM / kRowsPerPass;
    SHARED_STORAGE(MergeStorage, storage);
    int row_tile = int(blockIdx.x) / kPasses;
    const int row_tile_of_head = params.row_tiles.divide(row_tile);
    // The first work tile of the row tile.
    const int index =
        row_tile * params.splits.divisor * params.row_tiles.divisor + row_tile_of_head;
    const WorkTile work(params, seq_lens, index);
    const bool of_chunks = work.stores_chunks(params);
    const int count = of_chunks ? work.num_chunks : work.num_groups;
    const int begin = int(blockIdx.x) % kPasses * kRowsPerPass;
    if (count == 1 || begin >= work.num_rows) return;
    const ThreadQuad quad;
    const bool has_row = begin + quad.row < work.num_rows;
    const int row = has_row ? begin + quad.row : 0;
    const Partials partials(params, partial_results);
    const int64_t first = of_chunks ? work.chunk_partial(params, 0) : work.group_partial(params, 0);
    const RowMerge merge = {partials, first, count, row, quad.col, has_row, storage.states};
    const MergedRow merged = of_chunks ? merge.merge_chunks<kBatch>(storage.values)
                                       : merge.merge_groups<kBatch>(storage.values);
    const RowWriter writer = {params, work, out, lse, 1.0f};
    writer.write(has_row, row, quad.col, merged.state, merged.values);
}
