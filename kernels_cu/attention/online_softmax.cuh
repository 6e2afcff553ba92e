// Online softmax of rows whose scores arrive tile by tile: the sum so far, and the factors that
// rescale the outputs so far.
//
// Exponents are score * scale - origin + kShift, base 2: one FMA each.  A row's origin is its
// largest score so far, but it moves only when that has grown by more than kRescaleAbove, because
// every move rescales all outputs.  Probabilities are at most 2^(kShift + kRescaleAbove), which
// FP16 holds; kShift makes fewer of them subnormal.  A row's origin depends on its own scores only.
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

// State of a lane's rows in one row of fragments.  T: type that probabilities are rounded to.
template <class T, class Layout>
struct OnlineSoftmax {
    using Rows = RowsOfLane<Layout>;
    static constexpr int kRows = Rows::kRows;
    float origin[kRows];  // -inf: no score yet
    float sum[kRows];     // of this lane's probabilities

    DEVICE void reset() {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            origin[r] = -kInfinity;
            sum[r] = 0.0f;
        }
    }
    // Begins a row with a score of its own, base 2; -inf: none.  owns: of the lanes that share the
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
            const float wanted = largest[r] * scale;
            factors[r] = 1.0f;
            // False for NaN, from an infinite score or no score.
            if (wanted - origin[r] > kRescaleAbove) {
                factors[r] = exp2_approx(shifted(origin[r]) - shifted(wanted));
                origin[r] = wanted;
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
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            from[r] = origin[r] == -kInfinity ? 0.0f : shifted(origin[r]);
#pragma unroll
        for (int n = 0; n < kFragments; ++n) {
#pragma unroll
            for (int i = 0; i < Layout::kCount; ++i) {
                float& x = score(n, i);
                x = exp2_approx(x * scale - from[Rows::slot(i)]);
                sum[Rows::slot(i)] += x;
            }
        }
    }
    // The finite origin of a row's exponents.
    DEVICE static float shifted(float origin) { return origin - kShift<T>; }
    // The row's total, relative to its origin: the divisor of the outputs.
    DEVICE float total(int r) const { return Rows::across_lanes(sum[r], Sum()); }
};

// A row's statistics, base e.  top: the largest score; unit: factor of scores to base e; total: of
// OnlineSoftmax; origin: shifted.
struct RowStatistics {
    float top, sum, log_sum_exp;

    DEVICE static RowStatistics of(float top, float origin, float total, float scale, float unit) {
        if (top == -kInfinity && !(total != total)) return {-kInfinity, 0.0f, -kInfinity};
        const float row_max = top * unit;
        // exp2(origin) * total is the sum of exponentials.
        const float row_sum = top == -kInfinity ? total : total * exp2_approx(origin - top * scale);
        return {row_max, row_sum, row_max + log_accurate(row_sum)};
    }
};
