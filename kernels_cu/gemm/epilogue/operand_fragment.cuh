// A formula's operands at a lane's accumulators of a slice, in registers: all are loaded before the
// formula is computed, so that the loads are in flight together.
#pragma once
#include "gemm/epilogue/tile.cuh"
#include "expression/apply.cuh"

namespace gemm {

// The fragment of an array operand.
template <class Tile, class Operand> struct OperandFragment {
    using T = typename Operand::Element;
    static constexpr bool kSwapAB = Tile::kSwapAB;
    static constexpr int kValues = Tile::kValues;
    // Whether the operand varies along the accumulators' rows and columns.
    static constexpr bool kAlongRows = kSwapAB ? Operand::kCols : Operand::kRows,
                          kAlongCols = kSwapAB ? Operand::kRows : Operand::kCols;
    // Accumulators of adjacent columns share a pair; where the operand does not vary along columns,
    // the pair is of the lane's two rows.
    static constexpr int kPairs = !kAlongCols ? 1 : kAlongRows ? kValues / 2 : kValues / 4;
    Vector<T, 2> pairs[kPairs];

    // The first accumulator that element `e` of pair `p` is for.
    DEVICE static constexpr int accumulator_of(int p, int e) {
        if (kAlongCols) return (kAlongRows ? 2 : 4) * p + e;
        return kAlongRows ? 2 * e : 0;
    }
    DEVICE float value(int v) const {
        const int p = !kAlongCols  ? 0
                      : kAlongRows ? v / 2
                                   : v / 4,
                  e = kAlongCols ? v % 2 : v / 2 % 2;
        if constexpr (sizeof(T) == 2) return pairs[p][e];  // unpacks words
        else return operand_to_float(pairs[p].element(e));
    }
    // k: the operand's number.  (row, col): the slice's first accumulator; m, n: the output's size.
    DEVICE void load(const ExpressionOperands& found, int k, int row, int col, int m, int n) {
        const T* const first = found.template array<T>(k);
        const int lane = Tile::lane();
        const int64_t by_i = Operand::kRows ? found.params.i_strides[k] : 0,
                      by_j = Operand::kCols ? found.params.j_strides[k] : 0;
        // Clamped: operands have no elements outside of the output.
        const auto address = [&](int v) {
            const int at_row = row + Tile::row_of_half(lane, v / 2 % 2),
                      at_col = col + wgmma_col(lane, v);
            const int i = kSwapAB ? at_col : at_row, j = kSwapAB ? at_row : at_col;
            return first + (i < m ? i : m - 1) * by_i + (j < n ? j : n - 1) * by_j;
        };
        if constexpr (kAlongCols && !kSwapAB) {
            constexpr uint64_t kBytes = 2 * sizeof(T);
            const bool aligned = (uint64_t(first) | uint64_t(by_i) * sizeof(T)) % kBytes == 0;
            if (aligned && by_j == 1 && col + Tile::kSlice <= n) {
#pragma unroll
                for (int p = 0; p < kPairs; ++p) pairs[p].load(address(accumulator_of(p, 0)));
                return;
            }
        }
#pragma unroll
        for (int p = 0; p < kPairs; ++p) {
            const T two[2] = {*address(accumulator_of(p, 0)), *address(accumulator_of(p, 1))};
            pairs[p].from_elements(two);
        }
    }
};

// The fragments of operands kFirst, kFirst + 1, ... of a formula.
template <class Tile, int kFirst, class... Operands> struct OperandFragments {
    static constexpr int kWords = 0;  // 32-bit registers
    DEVICE void load(const ExpressionOperands&, int, int, int, int, int) {}
};
template <class Tile, int kFirst, class First, class... Rest>
struct OperandFragments<Tile, kFirst, First, Rest...> {
    OperandFragment<Tile, First> first;
    OperandFragments<Tile, kFirst + 1, Rest...> rest;
    static constexpr int kWords = int(sizeof(first)) / 4 + decltype(rest)::kWords;

    // without: the number of an operand that is not loaded.
    DEVICE void load(const ExpressionOperands& found, int row, int col, int m, int n, int without) {
        if (kFirst != without) first.load(found, kFirst, row, col, m, n);
        rest.load(found, row, col, m, n, without);
    }
    // The 16-bit matrix k, in words of two adjacent columns.
    template <int k> DEVICE void set(const uint32_t (&words)[Tile::kValues / 2]) {
        if constexpr (k == kFirst) {
#pragma unroll
            for (int i = 0; i < Tile::kValues / 2; ++i) first.pairs[i].bytes[0].words[0] = words[i];
        } else {
            rest.template set<k>(words);
        }
    }
    template <int k> DEVICE float value(const ExpressionOperands& found, int v) const {
        if constexpr (k == kFirst) return first.value(v);
        else return rest.template value<k>(found, v);
    }
};
template <class Tile, int kFirst, class... Rest>
struct OperandFragments<Tile, kFirst, NumberOperand, Rest...> {
    OperandFragments<Tile, kFirst + 1, Rest...> rest;
    static constexpr int kWords = decltype(rest)::kWords;

    DEVICE void load(const ExpressionOperands& found, int row, int col, int m, int n, int without) {
        rest.load(found, row, col, m, n, without);
    }
    template <int k> DEVICE void set(const uint32_t (&words)[Tile::kValues / 2]) {
        rest.template set<k>(words);
    }
    template <int k> DEVICE float value(const ExpressionOperands& found, int v) const {
        if constexpr (k == kFirst) return found.params.numbers[k];
        else return rest.template value<k>(found, v);
    }
};

template <class Tile, class List> struct FragmentsOfList;
template <class Tile, class... Operands> struct FragmentsOfList<Tile, OperandList<Operands...>> {
    using Type = OperandFragments<Tile, 0, Operands...>;
};

// The operands of accumulator v, for Expression::of.
template <class Fragments> struct FragmentElement {
    const Fragments& fragments;
    const ExpressionOperands& operands;
    int v;

    template <int k> DEVICE float get() const { return fragments.template value<k>(operands, v); }
};

}  // namespace gemm
