// User formulas for the score and the mask, in addition to the options of GeneralScore.
//
// Formulas: a struct that cupykern/expression/cpp_attention.py generates and that precedes the
// kernel's own source.
#pragma once
#include "attention/score.cuh"
#include "expression/operands.cuh"

struct Formulas;

struct FormulaParams : GeneralParams { OperandParams operands; };
struct FormulaArrays : ScoreArrays { OperandArrays operands; };

template <class Base, class Score, int kTileM, int kTileN> struct FormulaTiles;

template <class Formulas>
struct FormulaScore : GeneralScore {
    using Params = FormulaParams;
    using Arrays = FormulaArrays;
    static constexpr bool kMask = Formulas::kMask;
    template <class Base, int kTileM, int kTileN> struct Tiles {
        using Type =
            typename Choose<kMask, FormulaTiles<Base, FormulaScore, kTileM, kTileN>, Base>::Type;
    };

    template <class Tiles>
    DEVICE static void begin(Tiles& tiles, const Params& params, const Arrays& arrays,
                             const AttentionHead& head, int row) {
        if constexpr (kMask) tiles.begin(params, arrays, head, row);
    }
    DEVICE static FormulaOperands operands(const Params& params, const Arrays& arrays) {
        return {params.operands, arrays.operands};
    }
    // for_each.at_positions(change) calls change(score, query's position, key) for each score.
    template <class ForEach>
    DEVICE static void apply(const Params& params, const Arrays& arrays, const AttentionHead& head,
                             const ForEach& for_each) {
        if constexpr (Formulas::kSoftcap) cap(params, for_each);
        if constexpr (Formulas::kScore) {
            const FormulaOperands x = operands(params, arrays);
            for_each.at_positions([&](float& score, int i, int j) {
                score = Formulas::score(x, score, head.batch, head.head, head.kv_head, i, j);
            });
        }
        if constexpr (Formulas::kAlibi) add_alibi(params, arrays, head, for_each);
    }
    // Sets the scores that the mask hides to -inf.
    template <class ForEach>
    DEVICE static void mask(const Params& params, const Arrays& arrays, const AttentionHead& head,
                            const ForEach& for_each) {
        const FormulaOperands x = operands(params, arrays);
        for_each.at_positions([&](float& score, int i, int j) {
            if (!Formulas::mask(x, head.batch, head.head, head.kv_head, i, j)) score = -kInfinity;
        });
    }
    template <class Tiles> DEVICE static int type_of(const Tiles& tiles) {
        if constexpr (kMask) return tiles.type;
        else return kFullBlock;
    }
    // The type of a tile of queries [row, row + rows) and keys [key, key + keys): kMaskedBlock,
    // kFullBlock or kPartialBlock.
    DEVICE static int tile_type(const Params& params, const Arrays& arrays,
                                const AttentionHead& head, int row, int rows, int key, int keys) {
        const int last_row = (row + rows < head.sq ? row + rows : head.sq) - 1;
        const int last_key = (key + keys < head.sk ? key + keys : head.sk) - 1;
        const Interval<bool> keeps = Formulas::mask_over(
            operands(params, arrays), point(head.batch), point(head.head),
            Interval<int>{row + head.offset, last_row + head.offset}, Interval<int>{key, last_key});
        return keeps.lo ? kFullBlock : keeps.hi ? kPartialBlock : kMaskedBlock;
    }
};

// The key tiles of `Base` that the formula does not mask completely.
template <class Base, class Score, int kTileM, int kTileN>
struct FormulaTiles {
    using Params = typename Score::Params;
    using Arrays = typename Score::Arrays;
    const Params* params;
    const Arrays* arrays;
    const AttentionHead* head;
    int row;  // the query tile's first row
    Base base;
    int key, type;            // key: the tile's first key
    int next_key, next_type;  // of the next tile; kMaskedBlock: no tile is left

    DEVICE FormulaTiles(const HeadMask& mask, int row, int sq, int begin, int end)
        : base(mask, row, sq, begin, end) {}
    // Called before the first call of `next`.
    DEVICE void begin(const Params& all_params, const Arrays& all_arrays,
                      const AttentionHead& of_head, int first_row) {
        params = &all_params;
        arrays = &all_arrays;
        head = &of_head;
        row = first_row;
        look();
    }
    DEVICE void look() {
        next_type = kMaskedBlock;
        while (next_type == kMaskedBlock && base.next()) {
            next_key = base.key;
            next_type = Score::tile_type(*params, *arrays, *head, row, kTileM, next_key, kTileN);
        }
    }
    DEVICE bool more() const { return next_type != kMaskedBlock; }
    DEVICE bool next() {
        if (!more()) return false;
        key = next_key;
        type = next_type;
        look();
        return true;
    }
};
