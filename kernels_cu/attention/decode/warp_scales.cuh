// The scales of an 8-bit cache, applied to a warp's part of a tile.
// Types and constants: see decode_attention.cu.
#pragma once
#include "attention/decode/mma.cuh"

// Probabilities times scales of tokens must fit Element, so they, and the output accumulators, are
// in units of a power of two, at least the largest such scale of the chunk so far.
struct WarpScales {
    static constexpr float kSmallestUnit = 0x1p-125f;
    float factor;  // of all scores
    bool of_keys, of_values;
    float unit;

    DEVICE WarpScales(const KvScales& scales)
        : factor(scales.k.factor),
          of_keys(scales.k.tokens != nullptr),
          of_values(scales.v.tokens != nullptr),
          unit(kSmallestUnit) {}
    DEVICE float k_factor() const { return factor; }

    DEVICE static float scale_of(const float (&scales)[kTileN], int n, int i) {
        return scales[warp_first_key() + n * 16 + AccumulatorLayout::col(lane_id(), i)];
    }
    // f(n, i, scale) for each key of this lane's values.
    template <class F>
    DEVICE static void for_each(const float (&scales)[kTileN], const F& f) {
#pragma unroll
        for (int n = 0; n < kWarpKeyFragments; ++n) {
#pragma unroll
            for (int i = 0; i < AccumulatorLayout::kCount; ++i) f(n, i, scale_of(scales, n, i));
        }
    }
    template <class Stage>
    DEVICE void scale_scores(Scores& scores, const Stage& stage) const {
        if (!of_keys) return;
        for_each(stage.k_scales, [&](int n, int i, float scale) {
#pragma unroll
            for (int m = 0; m < kWarpRowFragments; ++m) scores.at(m, n).values[i] *= scale;
        });
    }
    template <class Stage>
    DEVICE void scale_probabilities(Scores& probabilities, OutputAccumulator<WarpOutput>& output,
                                    const Stage& stage) {
        if (!of_values) return;
        float largest = 0.0f;
        for_each(stage.v_scales, [&](int, int, float scale) {
            largest = maximum(largest, maximum(scale, -scale));
        });
        // The keys of a row are those of the warp.
        largest = Rows::across_lanes(largest, [](float a, float b) { return maximum(a, b); });
        if (vote_any(largest > unit)) {
            const float before = unit;
            unit = unit_of(largest);
            const float rescaled = before * inverse_of(unit);
            output.for_each([&](int, int, int, float& value) { value *= rescaled; });
        }
        const float inverse = inverse_of(unit);
        for_each(stage.v_scales, [&](int n, int i, float scale) {
#pragma unroll
            for (int m = 0; m < kWarpRowFragments; ++m)
                probabilities.at(m, n).values[i] *= scale * inverse;
        });
    }
    DEVICE void end_chunk(OutputAccumulator<WarpOutput>& output) {
        if (!of_values) return;
        output.for_each([&](int, int, int, float& value) { value *= unit; });
        unit = kSmallestUnit;
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
// Of a 16-bit cache.
struct NoWarpScales {
    DEVICE NoWarpScales(const KvScales&) {}
    DEVICE static constexpr float k_factor() { return 1.0f; }
    DEVICE void scale_scores(Scores&, const KvStage&) const {}
    DEVICE void scale_probabilities(Scores&, OutputAccumulator<WarpOutput>&, const KvStage&) {}
    DEVICE void end_chunk(OutputAccumulator<WarpOutput>&) {}
};
