// Operands of score and mask formulas: numbers, and arrays that the formula indexes.
#pragma once
#include "expression/interval.cuh"
#include "expression/operand.cuh"

constexpr int kMaxIndices = 4;

// Strides in elements and sizes of arrays.
struct OperandParams {
    int64_t strides[kMaxOperands][kMaxIndices];
    int32_t sizes[kMaxOperands][kMaxIndices];
    float numbers[kMaxOperands];  // operands that are not arrays
};
struct OperandArrays { const void* arrays[kMaxOperands]; };

struct FormulaOperands {
    const OperandParams& params;
    const OperandArrays& arrays;

    DEVICE float number(int k) const { return params.numbers[k]; }
    // Clamps indices to the array: a tile's queries and keys past the end load elements, too.
    template <class T, class... Indices>
    DEVICE float load(int k, Indices... indices) const {
        int64_t offset = 0;
        int d = 0;
        ((offset += at(k, d, indices), ++d), ...);
        return operand_to_float(static_cast<const T*>(arrays.arrays[k])[offset]);
    }
    // Loads the element if every index is a single number; otherwise any real is possible.
    template <class T, class... Indices>
    DEVICE Interval<float> over(int k, Indices... indices) const {
        const bool known = (true && ... && (indices.lo == indices.hi));
        if (!known) return any_real();
        const float x = load<T>(k, indices.lo...);
        return x == x ? point(x) : any_real();
    }

  private:
    template <class T>
    DEVICE int64_t at(int k, int d, T index) const {
        const T last = T(params.sizes[k][d]) - 1, below = index < last ? index : last;
        return int64_t(below > 0 ? below : 0) * params.strides[k][d];
    }
};
