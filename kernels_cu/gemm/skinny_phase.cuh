// The columns of one phase of a skinny GEMM (gemm/skinny.cuh: kPhases): their place in B, their
// operands and their epilogue.
#pragma once
#include "gemm/skinny.cuh"

// The arrays of an epilogue.
struct EpilogueArrays {
    void* out;
    const void *bias, *residual;
    const float *scale_a, *scale_b;
};

// Every kPhases-th column of the product, from `phase` on.
struct PhaseColumns {
    int phase;
    const ElementB* first;
    int64_t row;     // row stride
    int before = 0;  // elements of a row's first chunk that precede the row

    DEVICE PhaseColumns(const ElementB* b, int64_t b_row, int phase)
        : phase(phase), first(b), row(b_row) {
        if constexpr (kPhases > 1) {
            first += phase * row;
            before = int(uintptr_t(first) % 16 / sizeof(ElementB));
            row *= kPhases;
        }
    }
    // How many of the product's n columns are of this phase.
    DEVICE int64_t count(int64_t n) const {
        return kPhases > 1 ? (n - phase + kPhases - 1) / kPhases : n;
    }
    // Makes the strides of columns those from one of these columns to the next.
    DEVICE void step(EpilogueParams& own) const {
        if constexpr (kPhases > 1) {
            own.out.col *= kPhases;
            own.bias.col *= kPhases;
            own.residual.col *= kPhases;
            own.scale_b_stride *= kPhases;
        }
    }
    // own_a, own_b: the block's operands at the warp's first k.
    DEVICE SkinnyOperands operands(const SkinnyGemmParams& params, const EpilogueParams& own,
                                   const ElementA* own_a, const ElementB* own_b, int64_t first_col,
                                   int first_k) const {
        return {int(own.m),
                clamp_to(own.n - first_col, kTileN),
                first_k,
                params.k + before,
                before,
                RowPhases::of(own_a, params.a_row),
                RowPhases::of(own_b, row)};
    }
    // whole: of all columns.
    DEVICE MatrixEpilogue epilogue(const EpilogueParams& own, const EpilogueParams& whole,
                                   const EpilogueArrays& x) const {
        return MatrixEpilogue::of_matrix(
            own, x.out, x.bias, x.residual, SkinnyScales::of_epilogue(x.scale_a),
            SkinnyScales::of_epilogue(x.scale_b), phase * whole.out.col, phase * whole.bias.col,
            phase * whole.residual.col, 0, phase * whole.scale_b_stride);
    }
};

// The runs that a thread finishes.
struct OwnRuns {
    FinishedRun runs[kOwnRuns];

    DEVICE void prepare(const MatrixEpilogue& epilogue, int64_t first_col) {
#pragma unroll
        for (int i = 0; i < kOwnRuns; ++i) {
            runs[i].prepare(epilogue, int(threadIdx.x) + i * kNumThreads, first_col);
        }
    }
    DEVICE void store(const SkinnyGemmStorage& storage, const MatrixEpilogue& epilogue) const {
#pragma unroll
        for (int i = 0; i < kOwnRuns; ++i) {
            if (runs[i].count == 0) continue;
            ElementAccumulator totals[kRun] = {};
            storage.add(runs[i].row, runs[i].tile_col, totals);
            runs[i].store(epilogue, totals);
        }
    }
};
