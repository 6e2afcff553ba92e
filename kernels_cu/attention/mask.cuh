// Which keys a query keeps, that is, attends to: those within the sequence, within causality, and
// kept by the mask.
#pragma once
#include "common/dtype.cuh"

enum MaskKind { kNoMask, kBoolMask, kBiasMask, kBlockMask };
enum BlockType { kMaskedBlock, kCausalBlock, kFullBlock, kPartialBlock };

struct MaskParams {
    int64_t strides[4];  // of a mask array: batch, head, query, key; in elements
    int64_t block_stride_b, block_stride_h;  // of a block mask: batch, head; in block rows
    int32_t kind, dtype;
    int32_t q_shift, kv_shift,
        kv_blocks;          // blocks of (1 << q_shift) queries x (1 << kv_shift) keys
    int32_t causal_offset;  // causal blocks keep j <= i + causal_offset
};

struct MaskArrays {
    const void* mask;  // bool or bias; with a block mask the partial tiles
    const int32_t* kv_num_blocks;
    const int32_t* kv_indices;
    const uint8_t* block_types;
    const int32_t* partial_indices;
};

// The mask of one head of one batch element.
struct HeadMask {
    const MaskParams& params;
    const MaskArrays& arrays;
    int64_t offset, first_row;  // offset: of element (0, 0); first_row: the head's first block row

    DEVICE static HeadMask of(const MaskParams& params, const MaskArrays& arrays, int batch,
                              int head) {
        return {params, arrays, batch * params.strides[0] + head * params.strides[1],
                batch * params.block_stride_b + head * params.block_stride_h};
    }
    // Index of a block in arrays with one element per block.
    DEVICE int64_t block(int q_block, int kv_block) const {
        return (first_row + q_block) * params.kv_blocks + kv_block;
    }
    // Type of the block of (row, col).
    DEVICE int block_type(int row, int col) const {
        return arrays.block_types[block(row >> params.q_shift, col >> params.kv_shift)];
    }
    // `row` keeps only keys below this; a limit in causal blocks only.
    DEVICE int block_limit(int row, int type) const {
        return type == kCausalBlock ? row + params.causal_offset + 1 : 0x7fffffff;
    }
    // Index of the partial tile that contains (row, col).
    DEVICE int partial_index(int row, int col) const {
        return arrays.partial_indices[block(row >> params.q_shift, col >> params.kv_shift)];
    }
    // The element (row, col) of partial tile `index`.
    DEVICE const uint8_t* partial(int64_t index, int row, int col) const {
        const int in_row = row & ((1 << params.q_shift) - 1),
                  in_col = col & ((1 << params.kv_shift) - 1);
        return static_cast<const uint8_t*>(arrays.mask) +
               (((index << params.q_shift) + in_row) << params.kv_shift) + in_col;
    }
    DEVICE const uint8_t* partial(int row, int col) const {
        return partial(partial_index(row, col), row, col);
    }
    // A score after an array mask: -inf, unchanged, or plus its bias.  A bias of -inf masks any
    // score.
    DEVICE float of_array(float score, int row, int col) const {
        const int64_t i = offset + row * params.strides[2] + col * params.strides[3];
        if (params.kind == kBoolMask) {
            return static_cast<const uint8_t*>(arrays.mask)[i] != 0 ? score : -kInfinity;
        }
        const float bias = load_element(arrays.mask, i, params.dtype);
        return bias == -kInfinity ? bias : score + bias;
    }
};
