// The scales of an 8-bit cache, applied to a warp's part of a tile.
// Types and constants: see decode_attention.cu.
#pragma once
#include "attention/decode/mma.cuh"

using KeyScales = TileScales<AccumulatorLayout, Rows, kWarpRowFragments, kWarpKeyFragments>;
struct WarpScales : KeyScales {
    DEVICE WarpScales(const KvScales& scales) : KeyScales(scales) {}
    DEVICE float k_factor() const { return factor; }

    template <class Stage>
    DEVICE void scale_scores(Scores& scores, const Stage& stage) const {
        KeyScales::scale_scores(scores, &stage.k_scales[warp_first_key()]);
    }
    template <class Stage> DEVICE bool exceeds(const Stage& stage) const {
        return KeyScales::exceeds(&stage.v_scales[warp_first_key()]);
    }
    template <class Stage> DEVICE float grow(const Stage& stage) {
        return KeyScales::grow(&stage.v_scales[warp_first_key()]);
    }
    template <class Stage>
    DEVICE void scale_probabilities(Scores& probabilities, const Stage& stage) const {
        KeyScales::scale_probabilities(probabilities, &stage.v_scales[warp_first_key()]);
    }
    DEVICE void end_chunk(OutputAccumulator<WarpOutput>& output) {
        if (!of_values) return;
        output.for_each([&](int, int, int, float& value) { value *= unit; });
        unit = kSmallestUnit;
    }
};
// For a 16-bit cache, which has no scales.
struct NoWarpScales {
    DEVICE NoWarpScales(const KvScales&) {}
    DEVICE static constexpr float k_factor() { return 1.0f; }
    DEVICE void scale_scores(Scores&, const KvStage&) const {}
    DEVICE static constexpr bool exceeds(const KvStage&) { return false; }
    DEVICE static constexpr float grow(const KvStage&) { return 1.0f; }
    DEVICE void scale_probabilities(Scores&, const KvStage&) const {}
    DEVICE void end_chunk(OutputAccumulator<WarpOutput>&) {}
};
