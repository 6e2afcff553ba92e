// Count, mean and sum of squared deviations of a set.  The mean has two parts, mean + mean_low, so
// that a mean 1e4 times the spread loses no accuracy.  Chan, Golub, LeVeque, The American
// Statistician 37 (1983); Welford's update is the case of one element.
#pragma once
#include "common/math.cuh"

namespace rows {

struct alignas(16) Moments { float count, mean, mean_low, m2; };

// sum + rest = a + b, exactly unless it overflows (Knuth).
DEVICE void two_sum(float a, float b, float& sum, float& rest) {
    sum = a + b;
    const float from_b = sum - a;
    rest = (a - (sum - from_b)) + (b - from_b);
}

struct MergeMoments {
    DEVICE Moments operator()(const Moments& a, const Moments& b) const {
        const float count = a.count + b.count;
        if (b.count == 0.0f) return a;
        const float weight = b.count / count;
        const float distance = (b.mean - a.mean) + (b.mean_low - a.mean_low);
        Moments s;
        s.count = count;
        two_sum(a.mean, a.mean_low + distance * weight, s.mean, s.mean_low);
        s.m2 = a.m2 + b.m2 + distance * distance * (a.count * weight);
        return s;
    }
    // All-reduce over the lanes that differ in the bits [begin, end): first the means, as distances
    // from one of them, then the squares about the common mean, without a division per pair.
    DEVICE Moments across_lanes(const Moments& mine, int begin, int end) const {
        Moments s;
        // The first lane's mean: its set is only empty if all are.
        const float origin = shuffle(mine.mean, lane_id() & ~((end - 1) & ~(begin - 1)));
        const float from_origin = (mine.mean - origin) + mine.mean_low;
        float step = mine.count * from_origin;
        s.count = mine.count;
#pragma unroll
        for (int bit = begin; bit < end; bit *= 2) {
            s.count += shuffle_xor(s.count, bit);
            step += shuffle_xor(step, bit);
        }
        step /= s.count > 0.0f ? s.count : 1.0f;
        two_sum(origin, step, s.mean, s.mean_low);
        const float from_mean = from_origin - step;
        s.m2 = mine.m2 + mine.count * (from_mean * from_mean);
#pragma unroll
        for (int bit = begin; bit < end; bit *= 2) s.m2 += shuffle_xor(s.m2, bit);
        return s;
    }
};

}  // namespace rows
