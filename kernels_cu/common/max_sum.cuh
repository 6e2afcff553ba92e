// The largest score of a set and the sum of exp2(exponent_scale * (score - max)) over it.
//
// max is -inf when the set is empty and at least -kLargestFloat when it is not, so that a set of
// -inf alone (sum 0, softmax NaN) differs from an empty one (sum 0, softmax zero) and no inf - inf
// arises from either.
#pragma once
struct MaxSum { float max, sum; };

struct MergeMaxSum {
    float exponent_scale;  // at least 0

    DEVICE float rescale(float from, float to) const {
        return from == -kInfinity ? 0.0f : exp2_approx((from - to) * exponent_scale);
    }
    DEVICE MaxSum operator()(const MaxSum& a, const MaxSum& b) const {
        const float max = maximum(a.max, b.max);
        return {max, a.sum * rescale(a.max, max) + b.sum * rescale(b.max, max)};
    }
    // All-reduce over the lanes that differ in the bits [begin, end).  Cheaper than pairwise
    // merges: one exponential for any number of lanes.
    DEVICE MaxSum across_lanes(const MaxSum& mine, int begin, int end) const {
        float max = mine.max;
#pragma unroll
        for (int bit = begin; bit < end; bit *= 2) max = maximum(max, shuffle_xor(max, bit));
        float sum = mine.sum * rescale(mine.max, max);
#pragma unroll
        for (int bit = begin; bit < end; bit *= 2) sum += shuffle_xor(sum, bit);
        return {max, sum};
    }
};
