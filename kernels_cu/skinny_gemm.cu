// skinny_gemm.cu: skinny GEMM, m <= 16: out = activation(alpha * (scale_a * (scale_b * (A @ B))) +
// bias) + residual, bound by the read of B.
//
// A block computes kTileN columns; its warps split k, kDepth each of every kWarps * kDepth.  Each
// warp streams its share of A and B through its own cp.async pipeline of kStages stages, without
// block barriers in the mainloop.  The loads of the epilogue overlap the pipeline's prologue.  The
// code is short: with one wave of blocks, every instruction cache miss shows.
// The product is computed with swap-AB, because the second operand of mma.sync may have 8 columns:
// m <= 8 costs 8 rows, not 16.
// FP32 is multiplied by FMA (gemm/skinny_fma.cuh), since tensor cores round it.
// Constants: ElementA, ElementB; Compute, the type of the multiplication; kRows, 8 or 16 (FP32: 4
// or 16), the largest m; kTileN, kDepth, kStages; kMnMajorB: B is MN-major, otherwise K-major as A.
// Rows are aligned to 16 bytes and are whole 16-byte chunks.  kMisaligned: misaligned rows of
// 16-bit elements and any length; only the operands themselves are aligned.
// Launch: grid (kPhases * ceil(n / (kPhases * kTileN))), block (kNumThreads), dynamic shared memory
// sizeof(SkinnyGemmStorage).
#include "gemm/skinny.cuh"

KERNEL void skinny_gemm(const ElementA* a, const ElementB* b, void* out, const void* bias,
                        const void* residual, const float* scale_a, const float* scale_b,
                        const e4m3* groups_b, const SkinnyGemmParams params) {
    wait_for_previous_grid();
    SHARED_STORAGE(SkinnyGemmStorage, storage);
    const int warp = int(threadIdx.x) / kWarpSize;
    auto& own = storage.warps[warp];
    const int phase = int(blockIdx.x % kPhases);
    const int64_t first_col = int64_t(blockIdx.x / kPhases) * kTileN;
    EpilogueParams epilogue_params = params.epilogue;
    int64_t b_row = params.b_row;
    int before = 0;  // elements of a row's first chunk that precede the row
    const ElementB* first_b = b;
    if constexpr (kPhases > 1) {
        first_b += phase * b_row;
        before = int(uintptr_t(first_b) % 16 / sizeof(ElementB));
        b_row *= kPhases;
        epilogue_params.n = (epilogue_params.n - phase + kPhases - 1) / kPhases;
        if (first_col >= epilogue_params.n) return;
        epilogue_params.out.col *= kPhases;
        epilogue_params.bias.col *= kPhases;
        epilogue_params.residual.col *= kPhases;
        epilogue_params.scale_b_stride *= kPhases;
    }
    const int first_k = warp * kDepth, last_k = params.k + before;
    const int rows = int(epilogue_params.m), cols = clamp_to(epilogue_params.n - first_col, kTileN);
    constexpr int kStride = kWarps * kDepth;
    const ElementA* own_a = a + first_k - before;
    const ElementB* own_b =
        first_b - before +
        (kMnMajorB ? first_col + first_k * b_row : first_col * b_row + first_k / kPerElement);
    CopierOf<ElementA, TileA> of_a(a, own_a, params.a_row, kStride);
    CopierOf<ElementB, CodesB> of_b(b, own_b, b_row,
                                    kMnMajorB ? kStride * b_row : kStride / kPerElement);
    const RowPhases phases_a = RowPhases::of(own_a, params.a_row),
                    phases_b = RowPhases::of(own_b, b_row);
    const auto& groups = params.groups;
    ScalesOf<kScaled> copy_scales({groups_b, groups.block, groups.quarter, groups.row, groups.word},
                                  first_col, first_k, kStride);
    int to_load = last_k - first_k, next_stage = 0;
    const auto load_next = [&] {
        if (to_load > 0) {
            SkinnyStage& stage = own.stages[next_stage];
            of_b.start(TileOf<kScaled>::codes(stage.b), kMnMajorB ? to_load : cols,
                       kMnMajorB ? cols : to_load / kPerElement);
            copy_scales.start(stage.b, cols, to_load);
            of_a.start(stage.a, rows, to_load);
        }
        copy_async_commit();
        to_load -= kStride;
        next_stage = next_stage + 1 < kStages ? next_stage + 1 : 0;
    };
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) load_next();
    const EpilogueParams& whole = params.epilogue;
    const MatrixEpilogue epilogue = MatrixEpilogue::of_matrix(
        epilogue_params, out, bias, residual, scale_a, scale_b, phase * whole.out.col,
        phase * whole.bias.col, phase * whole.residual.col, 0, phase * whole.scale_b_stride);
    FinishedRun runs[kOwnRuns];
#pragma unroll
    for (int i = 0; i < kOwnRuns; ++i) {
        runs[i].prepare(epilogue, int(threadIdx.x) + i * kNumThreads, first_col);
    }
    WarpProduct product;
    int stage = 0;
#pragma unroll 1
    for (int k = first_k; k < last_k; k += kStride) {
        copy_async_wait<kStages - 2>();
        sync_warp();  // this stage has arrived, and all lanes have read the one before it
        load_next();
        if constexpr (kPhases > 1) {
            if (k == 0 && before > 0) {
                clear_heads(own.stages[stage], phases_a, before);
                sync_warp();
            }
        }
        product.multiply(own.stages[stage], phases_a, phases_b);
        stage = stage + 1 < kStages ? stage + 1 : 0;
    }
    copy_async_wait<0>();
    sync_warp();  // the accumulators overwrite the stages
    product.store(own.acc);
    sync_block();
#pragma unroll
    for (int i = 0; i < kOwnRuns; ++i) {
        if (runs[i].count == 0) continue;
        ElementAccumulator totals[kRun] = {};
#pragma unroll
        for (int from = 0; from < kWarps; ++from) {
#pragma unroll
            for (int j = 0; j < kRun; ++j) {
                totals[j] += storage.warps[from].acc[runs[i].row][runs[i].tile_col + j];
            }
        }
        if constexpr (kScaled) {
#pragma unroll
            for (ElementAccumulator& total : totals) total *= 1.0f / kScaledUnit<Compute>;
        }
        runs[i].store(epilogue, totals);
    }
}
