// dual_gemm.cu: out = silu(A @ B1) * (A @ B2) for a batch of matrices, in one pass over A: a block
// computes the same tile of both products (parts/mainloop.cuh), which meet in the epilogue.
//
// Policies: in FP32 with one rounding at the end; SiLU in FP32 and its product with the other one in FP16;
// everything from the sums on in FP16.
// Constants: those of parts/mainloop.cuh but kProducts.
// Launch: as gemm.cu's.
constexpr int kProducts = 2;
#include "parts/epilogue.cuh"
#include "parts/gemm_tile.cuh"

enum Policy { kAllFp32, kHybrid, kAllFp16 };

struct DualParams {
    TileParams tile;
    EpilogueParams epilogues[2];  // of each product; the output is the first one's
    int64_t policy;
};

// An FP16 operation: the FP32 one on FP16 numbers, rounded, which is the correctly rounded one for sums,
// products and quotients.
DEVICE float round_to_half(float x) { return to_float(from_float<half>(x)); }

// silu(x) * y
DEVICE float gate(float x, float y, int policy) {
    if (policy == kAllFp32) return activate(x, kSilu) * y;
    if (policy == kHybrid) return round_to_half(round_to_half(activate(x, kSilu)) * round_to_half(y));
    const float x_half = round_to_half(x);
    const float power = round_to_half(exp2_approx(round_to_half(-kLog2E * x_half)));
    const float sigmoid_half = round_to_half(1.0f / round_to_half(1.0f + power));
    return round_to_half(round_to_half(x_half * sigmoid_half) * round_to_half(y));
}

KERNEL void dual_gemm(const void* a, const void* b1, const void* b2, void* out, const float* scale_a,
                      const float* scale_b1, const float* scale_b2, const e4m3* groups_a,
                      const e4m3* groups_b1, const e4m3* groups_b2, SumType* partials,
                      const DualParams params, int64_t pass) {
    SHARED_STORAGE(GemmStorage, storage);
    const WarpPlace warp = WarpPlace::here();
    const GemmTask task = task_of(params.tile);
    AllSums acc{};
    sum_tile(storage, params.tile, task, warp, {a, scale_a, groups_a},
             {{b1, scale_b1, groups_b1}, {b2, scale_b2, groups_b2}}, partials, pass, acc);
    if (pass == kPartial) return;
    const bool by_block = params.tile.has_block_scales != 0;
    const auto offset = [&](Operand operand) {
        return params.tile.batch.offset(operand, task.batch);
    };
    const auto epilogue = [&](int product, const float* scale_b, Operand operand) {
        return Epilogue::of_matrix(params.epilogues[product], out, nullptr, nullptr,
                                   by_block ? nullptr : scale_a, by_block ? nullptr : scale_b,
                                   offset(kOut), 0, 0, offset(kScaleA), offset(operand));
    };
    const Epilogue first = epilogue(0, scale_b1, kScaleB), second = epilogue(1, scale_b2, kScaleB2);
    const int policy = int(params.policy);
    for_each_run(storage, warp, acc, [&](int row, int col, const SumType(&runs)[2][kRun]) {
        const int64_t at_row = task.row + row, at_col = task.col + col;
        const int64_t cols = params.tile.n - at_col;
        if (at_row >= params.tile.m || cols <= 0) return;
        const int count = cols < kRun ? int(cols) : kRun;
        float values[kRun], factors[kRun];
        first.scale(at_row, at_col, count, runs[0], values);
        second.scale(at_row, at_col, count, runs[1], factors);
#pragma unroll
        for (int i = 0; i < kRun; ++i) values[i] = gate(values[i], factors[i], policy);
        first.write(at_row, at_col, count, values);
    });
}
