// Softmax of rows whose scores come one tile after another: the sum so far, and what the products
// so far are to be multiplied by.
//
// Exponents are score * scale - origin + kShift, in units of log2: one FMA each.  The origin of a
// row is its largest score so far, but it follows only where that has grown by more than
// kRescaleAbove, because every step multiplies all products so far.  Probabilities are up to
// 2^(kShift + kRescaleAbove): FP16 holds that, and kShift of them fewer become subnormal.  A row's
// origin depends on its own scores alone.
//
// Every step takes its scores as score(n, i): value i of the n-th fragment along the row, a float&.
#include "parts/dtype.cuh"
#include "parts/math.cuh"

// Which values of a fragment a lane has of the same row, and which lanes have others of it.
// Layout: kCount values, value i of a lane in row(lane, i), alike in every lane of `kLanes`.
template <class Layout, int kLanes = kWarpSize>
struct RowsOfLane {
    // The first value that lies in the row of value i.
    DEVICE static constexpr int first_of(int i) {
        int first = 0;
        while (Layout::row(0, first) != Layout::row(0, i)) ++first;
        return first;
    }
    // The rows of all values among the rows of the lane, 4 bits each: worked out while compiling,
    // as an unrolled loop's `slot` is a shift by a constant then; by a loop it would be found at
    // run time.
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
    // The row of value i among the rows of the lane.
    DEVICE static constexpr int slot(int i) {
        constexpr uint64_t kSlots = slots();
        return int(kSlots >> (4 * i) & 15);
    }
    DEVICE static constexpr int count() {
        int rows = 0;
        for (int i = 0; i < Layout::kCount; ++i) rows += first_of(i) == i;
        return rows;
    }
    // The row of a lane's fragment that has that number.
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

    // Of the lanes that share a row with this one; each of them gets it.
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
// FP16's largest number is 2^16.
template <class T> constexpr float kShift = kSame<T, half> ? 7.0f : 0.0f;

// The rows of a lane in one row of fragments.  T: what probabilities are rounded to.
template <class T, class Layout>
struct OnlineSoftmax {
    using Rows = RowsOfLane<Layout>;
    static constexpr int kRows = Rows::kRows;
    float origin[kRows];  // -inf: not yet
    float sum[kRows];     // of the probabilities that this lane had

    DEVICE void reset() {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            origin[r] = -kInfinity;
            sum[r] = 0.0f;
        }
    }
    // Looks at kFragments more fragments.  largest: their largest score in each row; -inf: none, or
    // none above -inf.  factors: what all products and sums so far are to be multiplied by
    // (`rescale` does the sums); the result: whether any of this lane's is not 1.  scale: positive.
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
            // False for NaN: of an infinite score, and where there is none.
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
    // Scores that have been looked at become probabilities.
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
    // What the scores of a row are taken from.
    DEVICE static float shifted(float origin) { return origin - kShift<T>; }
    // The whole sum of a row, in units of its origin: what the products are to be divided by.
    DEVICE float total(int r) const { return Rows::across_lanes(sum[r], Sum()); }
};

// What a row's statistics are in units of e.  top: the largest score; unit: what scores, as they
// were given, were multiplied by to become these units; total: as in OnlineSoftmax, origin:
// shifted.
struct RowStatistics {
    float top, sum, log_sum_exp;

    DEVICE static RowStatistics of(float top, float origin, float total, float scale, float unit) {
        if (top == -kInfinity && !(total != total)) return {-kInfinity, 0.0f, -kInfinity};
        const float row_max = top * unit;
        // exp2(origin) times the total is the sum of exponentials.
        const float row_sum = top == -kInfinity ? total : total * exp2_approx(origin - top * scale);
        return {row_max, row_sum, row_max + log_accurate(row_sum)};
    }
};
