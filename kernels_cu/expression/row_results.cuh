// Results of a formula that reduce the columns of each row.  RowResults holds an epilogue's partial
// results of one row; if the formula has none, it generates no code.
//
// An epilogue reduces slices of contiguous columns, in an order that its tiles fix, and stores one
// FP32 partial per row and slice, to an array of shape (..., m, slices) among the operands.
// merge_row_slices.cu merges the slices.
#pragma once
#include "expression/math.cuh"

// NaN propagates.
struct RowMax {
    static constexpr float kIdentity = -kInfinity;
    DEVICE static float merge(float a, float b) { return larger_of(a, b); }
};
struct RowSum {
    static constexpr float kIdentity = 0.0f;
    DEVICE static float merge(float a, float b) { return a + b; }
};

// Reduction kNumber of a formula: reduces its result kResult; partials go to operand kOperand.
template <class Reduction, int kNumber_, int kResult_, int kOperand_>
struct RowResult : Reduction {
    static constexpr int kNumber = kNumber_, kResult = kResult_, kOperand = kOperand_;
};

template <class... Rows> struct RowResults {
    static constexpr int kCount = sizeof...(Rows);
    float values[kCount > 0 ? kCount : 1] = {Rows::kIdentity...};

    // results: the formula's results in the next column.
    template <int kResults> DEVICE void add(const float (&results)[kResults]) {
        ((values[Rows::kNumber] = Rows::merge(values[Rows::kNumber], results[Rows::kResult])), ...);
    }
    // Called by all lanes of a warp: merges kLanes adjacent lanes, which have columns of one row.
    template <int kLanes> DEVICE void merge_lanes() {
#pragma unroll
        for (int bit = 1; bit < kLanes; bit *= 2) {
            ((values[Rows::kNumber] =
                  Rows::merge(values[Rows::kNumber], shuffle_xor(values[Rows::kNumber], bit))),
             ...);
        }
    }
    // operands: the matrix's operands.
    template <class Operands>
    DEVICE void store(const Operands& operands, int64_t row, int64_t slice) const {
        ((operands.template result<float>(
              Rows::kOperand)[row * operands.params.i_strides[Rows::kOperand] + slice] =
              values[Rows::kNumber]),
         ...);
    }
};

// Called by a warp with wgmma's accumulators: stores the partials of each lane's rows `row` and
// row + 8, and resets them.  A quad of lanes has a row's columns of a slice.
template <class Rows, class Operands>
DEVICE void store_quad_rows(Rows (&rows)[2], const Operands& operands, int row, int last_row,
                            int slice) {
    if constexpr (Rows::kCount > 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            rows[half].template merge_lanes<4>();
            const int at = row + half * 8;
            if (threadIdx.x % 4 == 0 && at <= last_row) rows[half].store(operands, at, slice);
            rows[half] = Rows{};
        }
    }
}
