// Online softmax of rows whose scores arrive tile by tile: the sum so far, and the factors that
// rescale the outputs so far.
//
// Exponents are (score - origin) * scale + kShift, base 2: one FMA each, which subtracts the
// rounded origin * scale - kShift from score * scale.  A row's origin is its row maximum as of the
// last rescale.  It moves only when the maximum has grown by more than kRescaleAbove, because every
// move rescales all outputs.  Probabilities are at most 2^(kShift + kRescaleAbove), which FP16
// represents; kShift makes fewer of them subnormal.  A row's origin depends only on the row's own
// scores.
//
// Rounding origin * scale multiplies all exponentials of a row by the same factor.  Beyond kFar
// this factor can exceed FP16's range; there the origin is subtracted before the FMA.
//
// Functions take scores as score(n, i): value i of the n-th fragment along the row, a float&.
#pragma once
#include "common/clamp.cuh"
#include "common/dtype.cuh"

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

constexpr float kRescaleAbove = 8.0f;  // difference of exponents, base 2
// FP16's range ends at 2^16; probabilities reach 2^(kShift + kRescaleAbove) = 2^15.
template <class T> constexpr float kShift = kSame<T, half> ? 7.0f : 0.0f;
constexpr float kFar = 0x1p23f;  // |origin * scale| whose rounding is a factor of at most 2^(1/2)

// State of a lane's rows in one row of fragments.  T: type that probabilities are rounded to.
// scale: the positive factor of scores, base 2.
template <class T, class Layout>
struct OnlineSoftmax {
    using Rows = RowsOfLane<Layout>;
    static constexpr int kRows = Rows::kRows;
    float origin[kRows];  // a score; -inf: no score yet
    float from[kRows];    // what exponents are relative to; finite
    float sum[kRows];     // of this lane's probabilities
    bool any_far;         // whether an origin is subtracted first

    DEVICE void reset() {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            origin[r] = -kInfinity;
            from[r] = -kShift<T>;
            sum[r] = 0.0f;
        }
        any_far = false;
    }
    // Begins all rows with a score that belongs to no key; -inf: none; +inf: rows become NaN.
    // owns: of the lanes that share a row's sum, this one adds the score.
    DEVICE void begin(float score, float scale, bool owns) {
        reset();
        if (score == -kInfinity) return;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            set_origin(r, score, scale);
            sum[r] = owns ? exp2_approx(kShift<T>) + (score - score) : 0.0f;
        }
        any_far = is_far(score, scale);
    }
    // A step: `find_row_maxima`.  If any_far or `exceeds` is true in any lane: `rescale` and
    // `subtract_far`, and the caller multiplies the outputs so far by `factors`.  Then
    // `exponentiate`.  largest: this lane's largest score of each row; -inf: none.
    template <int kFragments, class Score>
    DEVICE static void find_row_maxima(const Score& score, float (&largest)[kRows]) {
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
    }
    // Whether one of the scores moves an origin.
    DEVICE bool exceeds(const float (&scores)[kRows], float scale) const {
        bool any = false;
#pragma unroll
        for (int r = 0; r < kRows; ++r) any |= exceeds(r, scores[r], scale);
        return any;
    }
    // False if the difference is NaN, because scores are infinite or there is none.
    DEVICE bool exceeds(int r, float score, float scale) const {
        return (score - origin[r]) * scale > kRescaleAbove;
    }
    // Moves origins and rescales sums; returns whether one of this lane's factors is not 1.
    DEVICE bool rescale(const float (&largest)[kRows], float scale, float (&factors)[kRows]) {
        bool any = false;
        any_far = false;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const float top = Rows::across_lanes(largest[r], Max());
            factors[r] = 1.0f;
            if (exceeds(r, top, scale)) {
                // Near origins are rounded, far ones exact.
                const bool exact = is_far(origin[r], scale) || is_far(top, scale);
                factors[r] = exp2_approx(exact ? (origin[r] - top) * scale
                                               : shifted(origin[r], scale) - shifted(top, scale));
                set_origin(r, top, scale);
                any = true;
            }
            sum[r] *= factors[r];
            any_far |= origin[r] != -kInfinity && is_far(origin[r], scale);
        }
        return any;
    }
    template <int kFragments, class Score>
    DEVICE void subtract_far(const Score& score, float scale) const {
        if (!any_far) return;
#pragma unroll
        for (int n = 0; n < kFragments; ++n) {
#pragma unroll
            for (int i = 0; i < Layout::kCount; ++i) {
                const float first = origin[Rows::slot(i)];
                if (first != -kInfinity && is_far(first, scale)) score(n, i) -= first;
            }
        }
    }
    // Replaces scores by probabilities.
    template <int kFragments, class Score>
    DEVICE void exponentiate(const Score& score, float scale) {
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
    DEVICE void set_origin(int r, float score, float scale) {
        const float near = shifted(score, scale);
        origin[r] = score;
        from[r] = is_far(score, scale) ? -kShift<T> : near;
    }
    // One FMA would take a register for kShift.
    DEVICE static float shifted(float origin, float scale) {
        return multiply_add(origin, scale, 0.0f) - kShift<T>;
    }
    // True for infinities.
    DEVICE static bool is_far(float origin, float scale) {
        return magnitude(origin * scale) > kFar;
    }
    // The exponent of a score, as `exponentiate` computes it.
    DEVICE float exponent(int r, float score, float scale) const {
        if (is_far(origin[r], scale)) score -= origin[r];
        return multiply_add(score, scale, -from[r]);
    }
    // A row's origin for comparing states: base 2, rounded, finite; -inf: no score yet.
    DEVICE float rounded_origin(int r, float scale) const {
        const float x = shifted(origin[r], scale);
        return origin[r] == -kInfinity ? x : clamp_magnitude(x, kLargestFloat);
    }
    // Base-2 logarithm of the factor that makes sums and outputs of a far row relative to
    // rounded_origin: finite, and exact unless scores are coarser.
    DEVICE float rounding_of_origin(int r, float scale) const {
        if (origin[r] == -kInfinity || !is_far(origin[r], scale)) return 0.0f;
        const float exact = multiply_add(origin[r], scale, -rounded_origin(r, scale));
        return clamp_magnitude(exact - kShift<T>, 64.0f);
    }
    // The row's total, relative to its origin: the divisor of the outputs.
    DEVICE float total(int r) const { return Rows::across_lanes(sum[r], Sum()); }
};

// A row's statistics, base e.  top: the largest score; exponent: top's exponent; total:
// OnlineSoftmax::total; unit: factor that converts scores to base e.
struct RowStatistics {
    float top, sum, log_sum_exp;

    DEVICE static RowStatistics of(float top, float exponent, float total, float unit) {
        if (top == -kInfinity && !(total != total)) return {-kInfinity, 0.0f, -kInfinity};
        const float row_max = top * unit;
        const float row_sum = top == -kInfinity ? total : total * exp2_approx(-exponent);
        return {row_max, row_sum, row_max + log_accurate(row_sum)};
    }
};
