// User formulas for the score and the mask in decode attention, in addition to the options of
// GeneralDecodeScore.
//
// Formulas: a struct that cupykern/expression/cpp_attention.py generates and that precedes the
// kernel's own source.
#pragma once
#include "attention/decode/score.cuh"
#include "expression/operands.cuh"

struct FormulaDecodeParams : GeneralDecodeParams { OperandParams operands; };

template <class Formulas>
struct FormulaDecodeScore : GeneralDecodeScore {
    using Params = FormulaDecodeParams;
    static constexpr bool kFormula = true, kMask = Formulas::kMask;
    struct Arrays : GeneralDecodeScore::Arrays { OperandArrays operands; };

    DEVICE static FormulaOperands operands(const Params& params, const Arrays& arrays) {
        return {params.operands, arrays.operands};
    }
    DEVICE static float apply(const Params& params, const Arrays& arrays, float x, float slope,
                              const DecodeQuery& q, int key, int type) {
        if constexpr (Formulas::kSoftcap) x = GeneralDecodeScore::cap_or_scale(params, x, false);
        else if constexpr (Formulas::kScore || Formulas::kAlibi) x *= params.score_scale;
        const FormulaOperands given = operands(params, arrays);
        if constexpr (Formulas::kScore)
            x = Formulas::score(given, x, q.batch, q.head, q.kv_head, q.position, key);
        if constexpr (Formulas::kAlibi)
            x = GeneralScore::with_alibi(x, slope, float(q.position - key));
        if constexpr (kMask) {
            const bool hides = type == kPartialBlock &&
                               !Formulas::mask(given, q.batch, q.head, q.kv_head, q.position, key);
            if (hides) x = -kInfinity;
        }
        return x;
    }
    // The type of the work tile's rows and keys [key, key + keys): kMaskedBlock, kFullBlock or
    // kPartialBlock.
    DEVICE static int tile_type(const Params& params, const Arrays& arrays, const WorkTile& work,
                                int key, int keys) {
        if constexpr (!kMask) return kFullBlock;
        const int rows = work.num_rows < kTileM ? work.num_rows : kTileM;
        int first = work.first_row, last = work.first_row + rows - 1;
        params.queries.divide(first);
        params.queries.divide(last);
        const int head = work.kv_head * params.heads_per_kv_head;
        const int position = params.position(work.num_keys);
        const int last_key = (key + keys < work.num_keys ? key + keys : work.num_keys) - 1;
        const Interval<bool> keeps = Formulas::mask_over(
            operands(params, arrays), point(work.batch), Interval<int>{head + first, head + last},
            Interval<int>{position, position + params.queries.divisor - 1},
            Interval<int>{key, last_key < key ? key : last_key});
        return keeps.lo ? kFullBlock : keeps.hi ? kPartialBlock : kMaskedBlock;
    }
};
