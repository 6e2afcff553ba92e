// The mean of a thread's vectors and the squares about it, in one pass: those of each vector about
// its own mean, and of the means (Chan, Golub, LeVeque, The American Statistician 37, 1983).  All
// vectors are whole.
#include "parts/math.cuh"

template <int kWidth>
struct VectorMoments {
    float mean = 0.0f, squares = 0.0f, vectors = 0.0f;

    DEVICE void take(const float (&values)[kWidth]) {
        float sum = 0.0f, part = 0.0f;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum += values[j];
        const float own = sum * (1.0f / kWidth);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            const float distance = values[j] - own;
            part += distance * distance;
        }
        // Before the first one the mean is 0, and counts for nothing.
        const float step = own - mean, before = vectors;
        vectors += 1.0f;
        const float share = reciprocal_approx(vectors);
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
