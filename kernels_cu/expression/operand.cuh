// Operands of formulas: arrays, by what they vary along, and numbers.
#pragma once

constexpr int kMaxOperands = 8;

// An operand of an epilogue's formula: an array of T; kRows, kCols: whether it varies along the
// rows and columns of the product.
template <class T, bool kRows_, bool kCols_> struct ArrayOperand {
    using Element = T;
    static constexpr bool kIsArray = true, kRows = kRows_, kCols = kCols_;
};
struct NumberOperand {
    using Element = float;
    static constexpr bool kIsArray = false, kRows = false, kCols = false;
};

template <int k, class... Types> struct TypeAt;
template <int k, class First, class... Rest> struct TypeAt<k, First, Rest...> {
    using Type = typename TypeAt<k - 1, Rest...>::Type;
};
template <class First, class... Rest> struct TypeAt<0, First, Rest...> { using Type = First; };

// A formula's operands, in order.
template <class... Operands> struct OperandList {
    template <int k> using At = typename TypeAt<k, Operands...>::Type;

    // The first operand that is a matrix of 16 bits; -1: none.
    DEVICE static constexpr int first_short_matrix() {
        int found = -1, k = 0;
        ((found = found < 0 && Operands::kRows && Operands::kCols &&
                          sizeof(typename Operands::Element) == 2
                      ? k
                      : found,
          ++k),
         ...);
        return found;
    }
};

DEVICE float operand_to_float(int32_t x) { return float(x); }
DEVICE float operand_to_float(int64_t x) { return float(x); }
DEVICE float operand_to_float(uint8_t x) { return float(x); }  // bool
template <class T> DEVICE float operand_to_float(T x) { return to_float(x); }
