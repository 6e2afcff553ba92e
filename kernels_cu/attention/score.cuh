// Score policies: the changes of scale * q k^T before masks, and the score with which a row's
// softmax begins.
#pragma once
#include "attention/work_tile.cuh"
#include "common/clamp.cuh"

// Without a mask formula, iterators of key tiles are unchanged.
struct AnyKeyTiles {
    static constexpr bool kMask = false;
    template <class Base, int kTileM, int kTileN> struct Tiles { using Type = Base; };
    template <class Tiles, class Params, class Arrays>
    DEVICE static void begin(Tiles&, const Params&, const Arrays&, const AttentionHead&, int) {}
    template <class Tiles> DEVICE static int type_of(const Tiles&) { return kFullBlock; }
    template <class Params, class Arrays, class ForEach>
    DEVICE static void mask(const Params&, const Arrays&, const AttentionHead&, const ForEach&) {}
};

struct PlainScore : AnyKeyTiles {
    using Params = AttentionParams;
    using Arrays = MaskArrays;
    static constexpr bool kGeneral = false;

    // The arrays of calls without a mask.
    DEVICE static Arrays without_mask(const float*, const float*) { return {}; }
    template <class ForEach>
    DEVICE static void apply(const Params&, const Arrays&, const AttentionHead&, const ForEach&) {}
    DEVICE static float sink(const Params&, const Arrays&, const AttentionHead&) {
        return -kInfinity;
    }
};

struct ScoreArrays : MaskArrays {
    const float* slopes;  // ALiBi: per head, or per batch element and head
    const float* sinks;   // per head
};

// Soft caps, ALiBi, sinks, windows and lengths of padded batches.  Parameters select them; the
// branches are uniform over a launch.
struct GeneralScore : AnyKeyTiles {
    using Params = GeneralParams;
    using Arrays = ScoreArrays;
    static constexpr bool kGeneral = true;

    DEVICE static Arrays without_mask(const float* slopes, const float* sinks) {
        return {{}, slopes, sinks};
    }
    // cap * tanh(y), where tanh(y) = 1 - 2 / (1 + e^2y) and 2y log2 e = x * exponent.  The absolute
    // error is that of rounding the cap.
    DEVICE static float capped(float x, float cap, float exponent) {
        const float power = exp2_approx(x * exponent);
        return multiply_add(-2.0f * cap, reciprocal_approx(1.0f + power), cap);
    }
    // The same for caps that are much larger than most scores.  Small y use a Taylor polynomial,
    // whose next term is y^6 / 18 of the result.
    static constexpr float kLargeCap = 128.0f, kSmallY = 0.0625f;
    DEVICE static float capped_by_large(float x, float cap, float exponent) {
        const float y = x * (exponent * 0.34657359f), square = y * y;  // ln 2 / 2
        const float ratio =
            multiply_add(multiply_add(2.0f / 15.0f, square, -1.0f / 3.0f), square, 1.0f);
        return magnitude(y) < kSmallY ? cap * y * ratio : capped(x, cap, exponent);
    }
    // distance: the query's aligned position minus the key.
    DEVICE static float with_alibi(float x, float slope, float distance) {
        return multiply_add(-slope, maximum(distance, -distance), x);
    }
    // Caps scores and adds ALiBi.  for_each(change) calls change(score, distance) for each score.
    template <class ForEach>
    DEVICE static void apply(const Params& params, const Arrays& arrays, const AttentionHead& head,
                             const ForEach& for_each) {
        cap(params, for_each);
        add_alibi(params, arrays, head, for_each);
    }
    template <class ForEach>
    DEVICE static void cap(const Params& params, const ForEach& for_each) {
        const ScoreParams& options = params.options;
        const float cap = options.softcap, exponent = options.softcap_exponent;
        if (cap > kLargeCap) {
            for_each([&](float& x, float) { x = capped_by_large(x, cap, exponent); });
        } else if (cap != 0.0f) {
            for_each([&](float& x, float) { x = capped(x, cap, exponent); });
        }
    }
    template <class ForEach>
    DEVICE static void add_alibi(const Params& params, const Arrays& arrays,
                                 const AttentionHead& head, const ForEach& for_each) {
        const ScoreParams& options = params.options;
        if (arrays.slopes) {
            const float slope =
                arrays.slopes[head.batch * options.slope_batch + head.head * options.slope_head];
            for_each([&](float& x, float distance) { x = with_alibi(x, slope, distance); });
        }
    }
    // The sink's score, with which a row begins; -inf: none.  Finite if the sink is finite.
    DEVICE static float sink(const Params& params, const Arrays& arrays,
                             const AttentionHead& head) {
        if (!arrays.sinks) return -kInfinity;
        const float sink = arrays.sinks[head.head], score = sink / params.unit;
        return magnitude(sink) > kLargestFloat ? score : clamp_magnitude(score, kLargestFloat);
    }
};

// The policy of portable variants with kGeneral; kernels with formulas specialise it.
template <class Element> struct GeneralPolicy { using Type = GeneralScore; };
