// The largest score of a set and the sum of exp2(exponent_scale * (score - max)) over it.
//
// max is -inf when the set is empty and at least -kLargestFloat when it is not, so that a set of
// -inf alone (sum 0, softmax NaN) differs from an empty one (sum 0, softmax zero) and no inf - inf
// arises from either.
struct MaxSum {
    float max, sum;
};

struct MergeMaxSum {
    float exponent_scale;  // at least 0

    // Symmetric, so that every lane of a butterfly gets the same bits.
    DEVICE MaxSum operator()(const MaxSum& a, const MaxSum& b) const {
        const bool a_first = a.max >= b.max;
        const float max = a_first ? a.max : b.max;
        const float lower = a_first ? b.max : a.max;
        const float large = a_first ? a.sum : b.sum;
        const float small = a_first ? b.sum : a.sum;
        const float factor = lower == -kInfinity ? 0.0f : exp2_approx((lower - max) * exponent_scale);
        return {max, large + small * factor};
    }
};
