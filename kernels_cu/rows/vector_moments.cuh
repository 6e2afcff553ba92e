// Mean of a thread's vectors and squares about it, in one pass: the squares of each vector about
// its own mean, plus those of the vectors' means (Chan, Golub, LeVeque, The American Statistician
// 37, 1983).  All vectors are whole.
#pragma once
#include "common/math.cuh"

namespace rows {

template <int kWidth>
struct VectorMoments {
    float mean = 0.0f, squares = 0.0f, vectors = 0.0f;

    // kUnrolled: `vectors` is a compile-time constant, in an unrolled loop.
    template <bool kUnrolled = false>
    DEVICE void take(const float (&values)[kWidth]) {
        // Two dependency chains per sum, because their latency is exposed.
        float sums[2] = {0.0f, 0.0f}, sums_of_squares[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sums[j % 2] += values[j];
        const float own = (sums[0] + sums[1]) * (1.0f / kWidth);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            const float distance = values[j] - own;
            sums_of_squares[j % 2] += distance * distance;
        }
        const float own_squares = sums_of_squares[0] + sums_of_squares[1];
        // Before the first vector the mean is 0, with weight 0.
        const float delta = own - mean, before = vectors;
        vectors += 1.0f;
        const float weight = kUnrolled ? 1.0f / vectors : reciprocal_approx(vectors);
        mean += delta * weight;
        squares += own_squares + delta * delta * (kWidth * (before * weight));
    }
    DEVICE float sum() const { return kWidth * (vectors * mean); }
    // Sum of squared deviations of all elements from another mean.
    DEVICE float squares_about(float other) const {
        const float distance = mean - other;
        return squares + kWidth * (vectors * (distance * distance));
    }
};

}  // namespace rows
