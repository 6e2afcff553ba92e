// Interval arithmetic for users' formulas: bounds of a formula's values over a tile.
// cupykern/expression/cpp_attention.py generates the calls; cupykern/expression/interval.py is the
// same in Python.
//
// An interval contains every value that the formula has.  Each operation widens real intervals by
// more than its rounding, because the compiler may fuse operations differently in the formula and
// in the interval.  A real with infinite bounds may be NaN.  Integers do not overflow: where they
// could, the generated code has any_integer() in place of the operation.
#pragma once
#include "expression/math.cuh"

// For bool: lo is whether the value is certainly true, hi whether it can be true.
template <class T>
struct Interval {
    T lo, hi;
};

template <class T> DEVICE Interval<T> point(T x) { return {x, x}; }
DEVICE Interval<float> any_real() { return {-kInfinity, kInfinity}; }
DEVICE Interval<int64_t> any_integer() { return {-0x7fffffffffffffffll - 1, 0x7fffffffffffffffll}; }

template <class To, class T>
DEVICE Interval<To> converted(Interval<T> x) {
    return {To(x.lo), To(x.hi)};
}
template <class T> DEVICE T least(T a, T b) { return a < b ? a : b; }
template <class T> DEVICE T most(T a, T b) { return a < b ? b : a; }

// Whether x can be NaN: both of its bounds are infinite, or NaN.
DEVICE bool is_wild(Interval<float> x) { return !(x.lo > -kInfinity || x.hi < kInfinity); }
template <class T> DEVICE bool is_wild(Interval<T>) { return false; }
// Infinite bounds if `wild` or if a bound is NaN.
DEVICE Interval<float> checked(Interval<float> x, bool wild) {
    return wild || x.lo != x.lo || x.hi != x.hi ? any_real() : x;
}
// Wider by more than the rounding of an operation: 2^-20 of a bound, and 2^-120, above subnormals.
DEVICE Interval<float> widened(Interval<float> x, bool wild) {
    return checked({x.lo - (magnitude(x.lo) * 0x1p-20f + 0x1p-120f),
                    x.hi + (magnitude(x.hi) * 0x1p-20f + 0x1p-120f)},
                   wild);
}
template <class T> DEVICE Interval<T> widened(Interval<T> x, bool) { return x; }
template <class T> DEVICE Interval<T> checked(Interval<T> x, bool) { return x; }

// The interval of an operation whose extremes are at the corners of the argument intervals; NaN if
// one is.
template <class T>
DEVICE Interval<T> corners(T a, T b, T c, T d) {
    if (a != a || b != b || c != c || d != d) return {a + b + c + d, a + b + c + d};
    return {least(least(a, b), least(c, d)), most(most(a, b), most(c, d))};
}
template <class T>
DEVICE Interval<T> over_add(Interval<T> a, Interval<T> b) {
    return widened(Interval<T>{a.lo + b.lo, a.hi + b.hi}, is_wild(a) || is_wild(b));
}
template <class T>
DEVICE Interval<T> over_subtract(Interval<T> a, Interval<T> b) {
    return widened(Interval<T>{a.lo - b.hi, a.hi - b.lo}, is_wild(a) || is_wild(b));
}
template <class T>
DEVICE Interval<T> over_multiply(Interval<T> a, Interval<T> b) {
    return widened(corners(a.lo * b.lo, a.lo * b.hi, a.hi * b.lo, a.hi * b.hi),
                   is_wild(a) || is_wild(b));
}
DEVICE Interval<float> over_divide(Interval<float> a, Interval<float> b) {
    if (!(b.lo > 0.0f || b.hi < 0.0f)) return any_real();
    return widened(corners(a.lo / b.lo, a.lo / b.hi, a.hi / b.lo, a.hi / b.hi),
                   is_wild(a) || is_wild(b));
}
template <class T> DEVICE Interval<T> over_negative(Interval<T> a) { return {-a.hi, -a.lo}; }
template <class T>
DEVICE Interval<T> over_abs(Interval<T> a) {
    const Interval<T> found{a.lo > T(0) ? a.lo : a.hi < T(0) ? -a.hi : T(0), most(-a.lo, a.hi)};
    return checked(found, is_wild(a));
}
template <class T>
DEVICE Interval<T> over_minimum(Interval<T> a, Interval<T> b) {
    return checked(Interval<T>{least(a.lo, b.lo), least(a.hi, b.hi)}, is_wild(a) || is_wild(b));
}
template <class T>
DEVICE Interval<T> over_maximum(Interval<T> a, Interval<T> b) {
    return checked(Interval<T>{most(a.lo, b.lo), most(a.hi, b.hi)}, is_wild(a) || is_wild(b));
}
DEVICE Interval<float> over_floor(Interval<float> a) {
    return checked({whole_below(a.lo), whole_below(a.hi)}, is_wild(a));
}
template <class T>
DEVICE Interval<float> over_real(Interval<T> a) {
    return widened(Interval<float>{float(a.lo), float(a.hi)}, false);
}
template <class T>
DEVICE Interval<T> over_floor_divide(Interval<T> a, Interval<T> by) {
    const T first = floor_divide(a.lo, by.lo), second = floor_divide(a.hi, by.lo);
    return {least(first, second), most(first, second)};
}
template <class T>
DEVICE Interval<T> over_modulo(Interval<T> a, Interval<T> by) {
    const T d = by.lo;
    if (floor_divide(a.lo, d) == floor_divide(a.hi, d))
        return {floor_modulo(a.lo, d), floor_modulo(a.hi, d)};
    return d > 0 ? Interval<T>{0, d - 1} : Interval<T>{d + 1, 0};
}
template <class T>
DEVICE Interval<T> over_where(Interval<bool> condition, Interval<T> a, Interval<T> b) {
    if (condition.lo) return a;
    if (!condition.hi) return b;
    return {least(a.lo, b.lo), most(a.hi, b.hi)};
}

// NaN compares as false, and differs from any number.
template <class T>
DEVICE Interval<bool> over_less(Interval<T> a, Interval<T> b) {
    const bool wild = is_wild(a) || is_wild(b);
    return {!wild && a.hi < b.lo, wild || !(a.lo >= b.hi)};
}
template <class T>
DEVICE Interval<bool> over_less_equal(Interval<T> a, Interval<T> b) {
    const bool wild = is_wild(a) || is_wild(b);
    return {!wild && a.hi <= b.lo, wild || !(a.lo > b.hi)};
}
template <class T>
DEVICE Interval<bool> over_equal(Interval<T> a, Interval<T> b) {
    const bool wild = is_wild(a) || is_wild(b);
    const bool same = a.lo == a.hi && b.lo == b.hi && a.lo == b.lo;
    return {!wild && same, wild || !(a.hi < b.lo || b.hi < a.lo)};
}
DEVICE Interval<bool> over_not(Interval<bool> a) { return {!a.hi, !a.lo}; }
template <class T>
DEVICE Interval<bool> over_not_equal(Interval<T> a, Interval<T> b) {
    return over_not(over_equal(a, b));
}
DEVICE Interval<bool> over_and(Interval<bool> a, Interval<bool> b) {
    return {a.lo && b.lo, a.hi && b.hi};
}
DEVICE Interval<bool> over_or(Interval<bool> a, Interval<bool> b) {
    return {a.lo || b.lo, a.hi || b.hi};
}
DEVICE Interval<bool> over_isnan(Interval<float> a) { return {false, is_wild(a)}; }
