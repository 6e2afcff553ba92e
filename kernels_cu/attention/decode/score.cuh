// Policies of decode attention's scores: PlainScore and GeneralScore of attention/score.cuh.
#pragma once
#include "attention/score.cuh"
#include "attention/decode/work_tile.cuh"

// The query of a score; head: index among all query heads.
struct DecodeQuery { int batch, head, kv_head, position; };

// Without formulas no tile is skipped.
struct AnyDecodeTiles {
    static constexpr bool kFormula = false, kMask = false;
    template <class Params, class Arrays>
    DEVICE static int tile_type(const Params&, const Arrays&, const WorkTile&, int, int) {
        return kFullBlock;
    }
};

struct PlainDecodeScore : AnyDecodeTiles {
    using Params = DecodeParams;
    static constexpr bool kGeneral = false;
    struct Arrays {};
    DEVICE static Arrays arrays(const float*, const float*) { return {}; }
};

struct GeneralDecodeScore : AnyDecodeTiles {
    using Params = GeneralDecodeParams;
    static constexpr bool kGeneral = true;
    struct Arrays {
        const float* slopes;  // ALiBi: per head, or per sequence and head
        const float* sinks;   // per head
    };
    DEVICE static Arrays arrays(const float* slopes, const float* sinks) { return {slopes, sinks}; }

    DEVICE static float slope(const Params& params, const Arrays& arrays, const WorkTile& work,
                              int head_of_group) {
        const int64_t head = int64_t(work.kv_head) * params.heads_per_kv_head + head_of_group;
        const int64_t i = work.batch * params.slope_batch + head * params.slope_head;
        return arrays.slopes ? arrays.slopes[i] : 0.0f;
    }
    // Applies the soft cap, whose exponent has the scale, or the scale if `scales`.
    DEVICE static float cap_or_scale(const Params& params, float x, bool scales) {
        const float cap = params.softcap, exponent = params.softcap_exponent;
        if (cap > GeneralScore::kLargeCap) return GeneralScore::capped_by_large(x, cap, exponent);
        if (cap != 0.0f) return GeneralScore::capped(x, cap, exponent);
        return scales ? x * params.score_scale : x;
    }
    // Applies scale, soft cap and ALiBi to a score of a query at `position`.
    DEVICE static float apply(const Params& params, const Arrays& arrays, float x, float slope,
                              int position, int key) {
        x = cap_or_scale(params, x, arrays.slopes);
        return arrays.slopes ? GeneralScore::with_alibi(x, slope, float(position - key)) : x;
    }
    // The state of a row before its first key.
    DEVICE static SoftmaxState first_state(const Params& params, const Arrays& arrays,
                                           const WorkTile& work, int row) {
        int head = work.first_row + row;
        if (!arrays.sinks || head >= params.num_rows) return {-kInfinity, 0.0f};
        params.queries.divide(head);
        const float sink = arrays.sinks[work.kv_head * params.heads_per_kv_head + head];
        return {sink * kLog2E, sink == -kInfinity ? 0.0f : 1.0f};
    }
};
