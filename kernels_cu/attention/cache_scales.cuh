// Scales of 8-bit caches of keys and values: one per cache, one per KV head, or one per token and
// KV head.
//
// A head's key scale multiplies all scores, its value scale the results.  Key scales of tokens
// multiply the scores of their keys, value scales of tokens the probabilities.
#pragma once
#include "common/math.cuh"

struct CacheScaleParams {
    int64_t k_strides[3], v_strides[3];  // of the batch or page, the KV head and the key
    float k_number, v_number;            // the scales if there are no arrays
    int32_t k_per_token, v_per_token;
};

// Scales of the keys or values of a block's KV head.
struct CacheScales {
    const float* tokens;  // scales of tokens, in batch element or page 0; otherwise null
    int64_t page_stride, stride;
    float factor;  // of all tokens

    DEVICE CacheScales() : tokens(nullptr), page_stride(0), stride(0), factor(1.0f) {}
    DEVICE CacheScales(const float* scales, const int64_t (&strides)[3], float number,
                       bool per_token, int kv_head)
        : tokens(nullptr), page_stride(strides[0]), stride(strides[2]), factor(number) {
        if (!scales) return;
        scales += kv_head * strides[1];
        if (per_token) tokens = scales;
        else factor = *scales;
    }
};
struct KvScales {
    CacheScales k, v;

    KvScales() = default;
    DEVICE KvScales(const CacheScaleParams& params, const float* k, const float* v, int kv_head)
        : k(k, params.k_strides, params.k_number, params.k_per_token != 0, kv_head),
          v(v, params.v_strides, params.v_number, params.v_per_token != 0, kv_head) {}
};

// Applies scales to a warp's scores of one tile of keys.  Layout: of a fragment's values; Rows:
// RowsOfLane<Layout>.
//
// Probabilities times value scales of tokens must fit Element.  Therefore they and the output
// accumulators are in units of a power of two, at least the largest such scale so far.
template <class Layout, class Rows, int kRowFragments, int kKeyFragments> struct TileScales {
    static constexpr float kSmallestUnit = 0x1p-125f;  // units and their inverses are normal
    float factor;                                      // of all scores
    bool of_keys, of_values;
    float unit;

    DEVICE TileScales(const KvScales& scales)
        : factor(scales.k.factor),
          of_keys(scales.k.tokens != nullptr),
          of_values(scales.v.tokens != nullptr),
          unit(kSmallestUnit) {}

    // Calls f(n, i, scale) for this lane's accumulators; scale: their key's.  scales: of the warp's
    // keys.
    template <class F> DEVICE static void for_each(const float* scales, const F& f) {
#pragma unroll
        for (int n = 0; n < kKeyFragments; ++n) {
#pragma unroll
            for (int i = 0; i < Layout::kCount; ++i)
                f(n, i, scales[n * 16 + Layout::col(lane_id(), i)]);
        }
    }
    template <class Scores> DEVICE void scale_scores(Scores& scores, const float* scales) const {
        if (!of_keys) return;
        for_each(scales, [&](int n, int i, float scale) {
#pragma unroll
            for (int m = 0; m < kRowFragments; ++m) scores.at(m, n).values[i] *= scale;
        });
    }
    // The largest magnitude of the scales of a lane's keys, which are the same in all its rows.
    DEVICE static float largest_of(const float* scales) {
        float largest = 0.0f;
        for_each(scales, [&](int, int i, float scale) {
            if (Rows::slot(i) == 0) largest = maximum(largest, magnitude(scale));
        });
        return largest;
    }
    // If any lane's scales exceed the unit, the warp calls `grow` before `scale_probabilities`, and
    // multiplies the output accumulators by its result.
    DEVICE bool exceeds(const float* scales) const {
        return of_values && largest_of(scales) > unit;
    }
    DEVICE float grow(const float* scales) {
        if (!of_values) return 1.0f;
        // The lanes of a row have all keys of the warp.
        const float largest = Rows::across_lanes(largest_of(scales), Max());
        if (largest <= unit) return 1.0f;
        const float before = unit;
        unit = unit_of(largest);
        return before * inverse_of(unit);
    }
    template <class Scores>
    DEVICE void scale_probabilities(Scores& probabilities, const float* scales) const {
        if (!of_values) return;
        const float inverse = inverse_of(unit);
        for_each(scales, [&](int n, int i, float scale) {
#pragma unroll
            for (int m = 0; m < kRowFragments; ++m)
                probabilities.at(m, n).values[i] *= scale * inverse;
        });
    }
    // The power of two above a positive number, at most 2^125.
    DEVICE static float unit_of(float x) {
        const uint32_t exponent = bit_cast<uint32_t>(x) >> 23;
        return bit_cast<float>((exponent < 251 ? exponent + 1 : 252) << 23);
    }
    DEVICE static float inverse_of(float unit) {
        return bit_cast<float>(0x7f000000u - bit_cast<uint32_t>(unit));
    }
};
