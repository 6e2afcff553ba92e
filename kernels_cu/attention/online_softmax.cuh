// Online softmax of rows whose scores arrive tile by tile: the sum so far, and the factors that
// rescale the outputs so far.
//
// Exponents are (score - origin) * scale + kShift, base 2: one FMA of score and scale each, from
// the rounded origin * scale - kShift.  A row's origin is its largest score so far, but it moves
// only when that has grown by more than kRescaleAbove, because every move rescales all outputs.
// Probabilities are at most 2^(kShift + kRescaleAbove), which FP16 holds; kShift makes fewer of
// them subnormal.  A row's origin depends on its own scores only.
//
// Rounding origin * scale makes the same factor of all exponentials in a row.  Beyond kFar FP16
// might not hold it: there the origin is subtracted before the FMA.
//
// Functions take scores as score(n, i): value i of the n-th fragment along the row, a float&.
#pragma once
#include "common/dtype.cuh"
#include "common/math.cuh"

// Maps a lane's values in a fragment to rows, and finds the lanes that share a row.  Layout: kCount
// values, value i of a lane in row(lane, i); the mapping is the same in every lane.
template <class Layout, int kLanes = kWarpSize>
struct RowsOfLane {
    // The first value in the row of value i.
    DEVICE static constexpr int first_of(int i) {
        int first = 0;
        while (Layout::row(0, first) != Layout::row(0, i)) ++first;
        return first;
    }
    // Row slots of all values, 4 bits each: a compile-time constant, so that `slot` is a shift in
    // an unrolled loop.
    DEVICE static constexpr uint64_t slots() {
        uint64_t packed = 0;
        for (int i = 0; i < Layout::kCount; ++i) {
            uint64_t rows = 0;
            for (int j = 0; j < first_of(i); ++j) rows += first_of(j) == j;
            packed |= rows << (4 * i);
        }
        return packed;
    }
    static_assert(Layout::kCount <= 16, "4 bits each");
    // Row slot of value i.
    DEVICE static constexpr int slot(int i) {
        constexpr uint64_t kSlots = slots();
        return int(kSlots >> (4 * i) & 15);
    }
    DEVICE static constexpr int count() {
        int rows = 0;
        for (int i = 0; i < Layout::kCount; ++i) rows += first_of(i) == i;
        return rows;
    }
    // Row of a slot.
    DEVICE static int row(int lane, int slot_) {
        int i = 0;
#pragma unroll
        for (int j = Layout::kCount - 1; j >= 0; --j) {
            if (slot(j) == slot_) i = j;
        }
        return Layout::row(lane, i);
    }
    DEVICE static constexpr bool shares(int bit) {
        for (int i = 0; i < Layout::kCount; ++i) {
            if (Layout::row(bit, i) != Layout::row(0, i)) return false;
        }
        return true;
    }
    static constexpr int kRows = count();
    // Whether this lane is the first of those that share its rows.
    DEVICE static bool is_first(int lane) {
        bool first = true;
#pragma unroll
        for (int bit = 1; bit < kLanes; bit *= 2) {
            if (shares(bit) && (lane & bit)) first = false;
        }
        return first;
    }

    // All-reduce over the lanes that share a row.
    template <class Combine>
    DEVICE static float across_lanes(float x, Combine combine) {
#pragma unroll
        for (int bit = 1; bit < kLanes; bit *= 2) {
            if (shares(bit)) x = combine(x, shuffle_xor(x, bit));
        }
        return x;
    }
};

constexpr float kRescaleAbove = 8.0f;
// FP16's range ends at 2^16.
template <class T> constexpr float kShift = kSame<T, half> ? 7.0f : 0.0f;
constexpr float kFar = 0x1p20f;  // its rounding is at most a factor of 2^(1/32)

// State of a lane's rows in one row of fragments.  T: type that probabilities are rounded to.
template <class T, class Layout>
struct OnlineSoftmax {
    using Rows = RowsOfLane<Layout>;
    static constexpr int kRows = Rows::kRows;
    float origin[kRows];  // a score; -inf: no score yet
    float sum[kRows];     // of this lane's probabilities

    DEVICE void reset() {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            origin[r] = -kInfinity;
            sum[r] = 0.0f;
        }
    }
    // Begins a row with a score of its own; -inf: none.  owns: of the lanes that share the
    // row's sum, this one counts it.
    DEVICE void begin(float score, bool owns) {
        const float own = owns && score != -kInfinity ? exp2_approx(kShift<T>) : 0.0f;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            origin[r] = score;
            sum[r] = own;
        }
    }
    // Updates the origins with kFragments fragments.  largest: each row's largest score; -inf:
    // none.  factors: rescale outputs and sums so far (`rescale` does the sums); returns whether
    // one of this lane's is not 1.  scale: positive.
    template <int kFragments, class Score>
    DEVICE bool look(const Score& score, float scale, float (&largest)[kRows],
                     float (&factors)[kRows]) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) largest[r] = -kInfinity;
#pragma unroll
        for (int n = 0; n < kFragments; ++n) {
#pragma unroll
            for (int i = 0; i < Layout::kCount; ++i) {
                float& x = largest[Rows::slot(i)];
                x = maximum(x, score(n, i));
            }
        }
        bool any = false;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            largest[r] = Rows::across_lanes(largest[r], Max());
            factors[r] = 1.0f;
            // False for NaN, from an infinite score or no score.
            if ((largest[r] - origin[r]) * scale > kRescaleAbove) {
                factors[r] = exp2_approx(shifted(origin[r], scale) - shifted(largest[r], scale));
                origin[r] = largest[r];
                any = true;
            }
        }
        return any;
    }
    DEVICE void rescale(const float (&factors)[kRows]) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) sum[r] *= factors[r];
    }
    // Replaces scores by probabilities, after `look`.
    template <int kFragments, class Score>
    DEVICE void exponentiate(const Score& score, float scale) {
        float from[kRows];
        bool any_far = false;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            from[r] = origin[r] == -kInfinity ? 0.0f : shifted(origin[r], scale);
            any_far |= is_far(from[r]);
        }
        if (any_far) {
#pragma unroll
            for (int n = 0; n < kFragments; ++n) {
#pragma unroll
                for (int i = 0; i < Layout::kCount; ++i) {
                    const int r = Rows::slot(i);
                    if (is_far(from[r])) score(n, i) -= origin[r];
                }
            }
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                if (is_far(from[r])) from[r] = -kShift<T>;
            }
        }
#pragma unroll
        for (int n = 0; n < kFragments; ++n) {
#pragma unroll
            for (int i = 0; i < Layout::kCount; ++i) {
                float& x = score(n, i);
                x = exp2_approx(multiply_add(x, scale, -from[Rows::slot(i)]));
                sum[Rows::slot(i)] += x;
            }
        }
    }
    // What exponents of a row are relative to.  One FMA would take a register for kShift.
    DEVICE static float shifted(float origin, float scale) {
        return multiply_add(origin, scale, 0.0f) - kShift<T>;
    }
    DEVICE static bool is_far(float shifted) { return magnitude(shifted) > kFar; }
    // That of a score, as `exponentiate` computes it.
    DEVICE float exponent(int r, float score, float scale) const {
        const float from = shifted(origin[r], scale);
        return is_far(from) ? multiply_add(score - origin[r], scale, kShift<T>)
                            : multiply_add(score, scale, -from);
    }
    // The row's total, relative to its origin: the divisor of the outputs.
    DEVICE float total(int r) const { return Rows::across_lanes(sum[r], Sum()); }
};

// A row's statistics, base e.  top: the largest score; exponent: its own; total: of OnlineSoftmax;
// unit: factor of scores to base e.
struct RowStatistics {
    float top, sum, log_sum_exp;

    DEVICE static RowStatistics of(float top, float exponent, float total, float unit) {
        if (top == -kInfinity && !(total != total)) return {-kInfinity, 0.0f, -kInfinity};
        const float row_max = top * unit;
        const float row_sum = top == -kInfinity ? total : total * exp2_approx(-exponent);
        return {row_max, row_sum, row_max + log_accurate(row_sum)};
    }
};
