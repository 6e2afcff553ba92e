// decode_merge.cu: what the blocks of decode_attention.cu have left of many rows becomes results.
//
// Its own launch, as a block that added up all rows of a sequence would take longer than all else.
// The sums, and their order, are those of decode_attention.cu.
// Constants: Element, kRows (of a block of decode_attention.cu), kDim, kMaxChunks, kGroup.
// Launch: grid (places * kRows / kRowsAtOnce), block (kNumThreads).
#include "parts/decode_merge.cuh"

KERNEL void decode_merge(const int* seq_lens, Element* out, float* lse, void* partial_results,
                         const DecodeParams params) {
    constexpr int kParts = kRows / kRowsAtOnce, kValuesAtOnce = 16;
    SHARED(Bytes<16>, values, [kValuesAtOnce][kNumThreads]);
    SHARED(Bytes<8>, sums, [kGroupsOfLane * kGroup][kNumThreads]);
    int place = int(blockIdx.x) / kParts;
    const int row_block = params.row_blocks.take_from(place);
    const int first_task = place * params.runs.by * params.row_blocks.by + row_block;
    const DecodeTask task(params, seq_lens, first_task);
    const bool of_chunks = params.chunks_per_block == 1;
    const int count = of_chunks ? task.num_chunks : task.num_groups;
    const int begin = int(blockIdx.x) % kParts * kRowsAtOnce;
    if (count == 1 || begin >= task.num_rows) return;
    const OwnQuad own;
    const bool has_row = begin + own.row < task.num_rows;
    const int row = has_row ? begin + own.row : 0;
    const Nodes nodes(params, partial_results);
    const int64_t first = of_chunks ? task.chunk_node(params, 0) : task.group_node(params, 0);
    const Merge merge = {nodes, first, count, row, own.col, has_row, sums};
    const MergedRow merged = of_chunks ? merge.add_chunks<kValuesAtOnce>(values)
                                       : merge.add_groups<kValuesAtOnce>(values);
    const RowOutput output = {params, task, out, lse};
    output.write(has_row, row, own.col, merged.total, merged.values);
}
