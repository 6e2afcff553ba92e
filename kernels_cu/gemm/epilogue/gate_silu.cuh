// The parameters of a dual GEMM on Hopper, and its default gate: silu(d1) * d2, under a policy
// (gemm/epilogue/gate.cuh).
#pragma once
#include "gemm/epilogue/linear_combination.cuh"
#include "gemm/epilogue/gate.cuh"
#include "gemm/mainloop_sm90.cuh"
#include "gemm/work_tile.cuh"

namespace gemm {

struct GatedParams {
    BatchLayout batch;
    TileOrder order;
    int64_t num_k_tiles;
    MatrixStrides block_scales_a, block_scales_b[2];  // of scale_a, scale_b1 and scale_b2, by block
    EpilogueParams epilogues[2];  // one per product; epilogues[0] has the output
    int64_t tma_stores, policy;
    int64_t num_groups;                                       // scale groups of NVFP4 along k
    struct { int64_t block, quarter, row, word; } groups[2];  // strides of GroupScales

    DEVICE int64_t columns() const { return epilogues[0].n; }
};

// Tensor maps as in MatmulArguments; the boxes of both matrices B have half a tile's columns, the
// boxes of the output 16 x GatedEpilogue::kBoxCols elements.
struct DualArguments {
    const TensorMap &a_map, &a_edge, &b1_map, &b1_edge, &b2_map, &b2_edge, &out_map;
    void* out;
    const float* scale_a;
    const float* scale_b1;
    const float* scale_b2;
    const e4m3* groups_b1;
    const e4m3* groups_b2;
    const GatedParams& params;

    DEVICE int a_batch(const GemmWorkTile& tile) const {
        return int(params.batch.offset(kA, tile.batch));
    }
    DEVICE int b1_batch(const GemmWorkTile& tile) const {
        return int(params.batch.offset(kB, tile.batch));
    }
    DEVICE int b2_batch(const GemmWorkTile& tile) const {
        return int(params.batch.offset(kB2, tile.batch));
    }
    DEVICE BlockScales block_scales(const GemmWorkTile& tile, int first_k_tile) const {
        const auto first = [&](const float* scales, Operand operand, int64_t offset) {
            return scales ? scales + params.batch.offset(operand, tile.batch) + offset : nullptr;
        };
        const MatrixStrides &a = params.block_scales_a, &b1 = params.block_scales_b[0],
                            &b2 = params.block_scales_b[1];
        const int64_t block = tile.col / kScaleBlock;
        return {first(scale_a, kScaleA, tile.row * a.row + first_k_tile * a.col),
                {first(scale_b1, kScaleB, block * b1.col + first_k_tile * b1.row),
                 first(scale_b2, kScaleB2, block * b2.col + first_k_tile * b2.row)},
                a.row,
                a.col,
                {b1.row, b2.row},
                int(m() - 1 - tile.row)};
    }
    DEVICE int64_t m() const { return params.epilogues[0].m; }
    DEVICE int64_t n() const { return params.columns(); }
};

// An element of the output.  inside: whether it is in the work tile.
struct Element {
    int row, col;
    bool inside;
};

struct SiluGate {
    using Arguments = DualArguments;
    using Narrow = void;
    using Rows = RowResults<>;
    int policy;

    DEVICE static SiluGate of(const DualArguments& arguments, const GemmWorkTile&) {
        return {int(arguments.params.policy)};
    }
    // Whether GatedEpilogue::store_scaled computes this gate.
    DEVICE bool silu_in_fp32() const { return policy == kAllFp32; }
    // values: d1, replaced by the gated results; others: d2.  at(i): the Element of value i.
    template <int kCount, class At>
    DEVICE void apply(float (&values)[kCount], float (&others)[kCount], At, Rows (&)[2]) const {
        gate_all(values, others, policy);
    }
    DEVICE void store_rows(Rows (&)[2], int, int) const {}
};

}  // namespace gemm
