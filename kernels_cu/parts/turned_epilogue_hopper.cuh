// PlainEnd of parts/plain_epilogue_hopper.cuh for sums that are transposed (kTurned).
#include "parts/plain_epilogue_hopper.cuh"

// The end of a warp's sums with kTurned, in boxes of its warpgroup.  (out_row, col): of the warp's first sum in the output.
struct TurnedEnd {
    Staging* warps;
    int& box;
    const TensorMap& map;
    const TileFactors& factors;
    const EpilogueParams& params;
    int row, out_row, col, batch, count;
    const Residual& residual;

    // kBoxed: with a residual.
    template <bool kBoxed>
    DEVICE void store(const TileSums& sums) const {
        const OwnChunks own;
        SumType picked[kValues];
        float values[kValues];
        const auto pick = [&](int part) {
#pragma unroll
            for (int i = 0; i < kValues; ++i) picked[i] = sums[0][part_col(part) / 2 + i];
        };
        const auto finish = [&](float alpha) { factors.finish(picked, alpha, row, values); };
        const auto store = [&](int part) {
            const int number = Residual::box_of(0, part / kPartsOfBox);
            if constexpr (kBoxed) {
                residual.wait(count, number);
                uint32_t added[kValues / 2];
                move_part<true>(residual.box(count, number), part % kPartsOfBox, added);
                add_pairs(added, params.out_dtype, values);
            }
            store_part(warps, box, map, part, out_row, col + part_col(part), batch,
                       params.out_dtype, values);
            if (kBoxed && part % kPartsOfBox == kPartsOfBox - 1 && residual.loads()) {
                residual.follow(count, number, out_row, col, int(factors.place.words[3]));
            }
        };
        if (!kBoxed && (!kActivates || params.activation == kNoActivation)) {
#pragma unroll
            for (int part = 0; part < kTileParts; ++part) {
                if (!own.has(part / kPartsOfBox)) continue;
                pick(part);
                finish(params.alpha);
                store(part);
            }
            return;
        }
        const bool gelus = kActivates && params.activation == kGelu;
        if (!kBoxed && gelus) {  // the same: picking sums at run time takes as long
#pragma unroll
            for (int part = 0; part < kTileParts; ++part) {
                if (!own.has(part / kPartsOfBox)) continue;
                pick(part);
                finish(0.5f * params.alpha);  // and half the bias
#pragma unroll
                for (int i = 0; i < kValues; ++i) values[i] = gelu_of_twice(values[i]);
                store(part);
            }
            return;
        }
        // One at a time: the activations are many instructions.
#pragma unroll 1
        for (int part = 0; part < kTileParts; ++part) {
            if (!own.has(part / kPartsOfBox)) continue;
            pick(0);  // even if it is another one: else those of the tile before hold registers
#pragma unroll
            for (int known = 1; known < kTileParts; ++known) {
                if (known == part) pick(known);
            }
            if (kBoxed && gelus) {
                finish(0.5f * params.alpha);
#pragma unroll
                for (int i = 0; i < kValues; ++i) values[i] = gelu_of_twice(values[i]);
            } else {
                finish(params.alpha);
                if (kActivates) activate_all(values, params.activation);
            }
            store(part);
        }
    }
};
