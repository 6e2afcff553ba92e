// The gate of dual_gemm_silu: silu(x) * y, in FP32 or partly in FP16.
//
// Kernels that store runs of contiguous columns take a Gate with `store`: SiluRuns, or
// ExpressionRuns (expression/apply.cuh).
#pragma once
#include "expression/row_results.cuh"
#include "gemm/epilogue/linear_combination.cuh"

enum Policy { kAllFp32, kHybrid, kAllFp16 };

// FP16 operations are FP32 operations on FP16 values, followed by this rounding.  Sums, products
// and quotients are correctly rounded this way.
DEVICE float round_to_half(float x) { return to_float(from_float<half>(x)); }

// Policies: all in FP32; SiLU in FP32 and its product with y in FP16 (hybrid); all in FP16.
DEVICE float gate(float x, float y, int policy) {
    if (policy == kAllFp32) return activate(x, kSilu) * y;
    if (policy == kHybrid)
        return round_to_half(round_to_half(activate(x, kSilu)) * round_to_half(y));
    const float x_half = round_to_half(x);
    const float power = round_to_half(exp2_approx(round_to_half(-kLog2E * x_half)));
    const float sigmoid_half = round_to_half(1.0f / round_to_half(1.0f + power));
    return round_to_half(round_to_half(x_half * sigmoid_half) * round_to_half(y));
}
// Branches once per fragment; kCompact loops to save code size.
template <int kCount>
DEVICE void gate_all(float (&values)[kCount], float (&factors)[kCount], int policy) {
    if constexpr (kCompact) {
#pragma unroll 1
        for (int i = 0; i < kCount; ++i) {
            const float y = gate(values[0], factors[0], policy);
#pragma unroll
            for (int j = 1; j < kCount; ++j) {
                values[j - 1] = values[j];
                factors[j - 1] = factors[j];
            }
            values[kCount - 1] = y;
        }
    } else {
#pragma unroll
        for (int known = kAllFp32; known <= kAllFp16; ++known) {
            if (policy != known) continue;
#pragma unroll
            for (int i = 0; i < kCount; ++i) values[i] = gate(values[i], factors[i], known);
        }
    }
}

struct SiluRuns {
    using Rows = RowResults<>;
    int policy;

    // values, others: a run of each product, scaled.
    template <int kRun>
    DEVICE Rows store(const MatrixEpilogue& out, int64_t row, int64_t col, int count,
                      float (&values)[kRun], float (&others)[kRun]) const {
        gate_all(values, others, policy);
        out.write(row, col, count, values);
        return {};
    }
    template <int kSlice, int kRun>
    DEVICE void store_rows(const MatrixEpilogue&, Rows, int64_t, int64_t) const {}
};
