// The mean of a thread's vectors and the squares about it, in one pass: those of each vector about
// its own mean, and of the means (Chan, Golub, LeVeque, The American Statistician 37, 1983).  All
// vectors are whole.
#include "parts/math.cuh"

namespace rows {

template <int kWidth>
struct VectorMoments {
    float mean = 0.0f, squares = 0.0f, vectors = 0.0f;

    // kUnrolled: in a loop of which the compiler knows how many have been taken.
    template <bool kUnrolled = false>
    DEVICE void take(const float (&values)[kWidth]) {
        // In two chains each: a chain's latency is what a thread waits for.
        float sums[2] = {0.0f, 0.0f}, parts[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sums[j % 2] += values[j];
        const float own = (sums[0] + sums[1]) * (1.0f / kWidth);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            const float distance = values[j] - own;
            parts[j % 2] += distance * distance;
        }
        const float part = parts[0] + parts[1];
        // Before the first one the mean is 0, and counts for nothing.
        const float step = own - mean, before = vectors;
        vectors += 1.0f;
        const float share = kUnrolled ? 1.0f / vectors : reciprocal_approx(vectors);
        mean += step * share;
        squares += part + step * step * (kWidth * (before * share));
    }
    DEVICE float sum() const { return kWidth * (vectors * mean); }
    // Of all elements about another mean.
    DEVICE float squares_about(float other) const {
        const float distance = mean - other;
        return squares + kWidth * (vectors * (distance * distance));
    }
};

}  // namespace rows
