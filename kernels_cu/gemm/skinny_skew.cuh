// The columns of one skew of a skinny GEMM (gemm/skinny.cuh: kSkews): their place in B, their
// operands and their epilogue.
#pragma once
#include "gemm/skinny.cuh"

// The arrays of an epilogue.
struct EpilogueArrays {
    void* out;
    const void *bias, *residual;
    const float *scale_a, *scale_b;
};

// Every kSkews-th column of the product, from `skew` on.
struct SkewColumns {
    int skew;
    const ElementB* first;
    int64_t row;     // row stride
    int before = 0;  // elements of a row's first chunk that precede the row

    DEVICE SkewColumns(const ElementB* b, int64_t b_row, int skew)
        : skew(skew), first(b), row(b_row) {
        if constexpr (kSkews > 1) {
            first += skew * row;
            before = int(uintptr_t(first) % 16 / sizeof(ElementB));
            row *= kSkews;
        }
    }
    // How many of the product's n columns are of this skew.
    DEVICE int64_t count(int64_t n) const {
        return kSkews > 1 ? (n - skew + kSkews - 1) / kSkews : n;
    }
    // Makes the strides of columns those from one of these columns to the next.
    DEVICE void step(EpilogueParams& own) const {
        if constexpr (kSkews > 1) {
            own.out.col *= kSkews;
            own.bias.col *= kSkews;
            own.residual.col *= kSkews;
            own.scale_b_stride *= kSkews;
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
                RowSkews::of(own_a, params.a_row),
                RowSkews::of(own_b, row)};
    }
    // whole: of all columns.
    DEVICE MatrixEpilogue epilogue(const EpilogueParams& own, const EpilogueParams& whole,
                                   const EpilogueArrays& x) const {
        return MatrixEpilogue::of_matrix(
            own, x.out, x.bias, x.residual, SkinnyScales::of_epilogue(x.scale_a),
            SkinnyScales::of_epilogue(x.scale_b), skew * whole.out.col, skew * whole.bias.col,
            skew * whole.residual.col, 0, skew * whole.scale_b_stride);
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
