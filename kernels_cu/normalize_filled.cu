// normalize_filled.cu: normalize_plain.cu of small matrices whose rows lie side by side and fill all threads of
// all blocks, with weights and biases, without statistics.  Nothing is asked at run time, and what the
// kernel is told, but for a bias beside a residual, is on one line of 64 bytes
// (parts/held_rows.cuh): such a matrix takes little longer than the way to its first load.
// other: the residual, or of rows without one (kSums) the bias of layer_norm.
// Constants: those of normalize_plain.cu.
// Launch: grid (rows / (kRowsPerBlock * kRowsPerThread)), block (kNumThreads).
constexpr bool kFilled = true;
#include "parts/normalized_rows.cuh"

static_assert(kInRegisters && kClusterSize == 1 && !kQuantized && kSums != kEither, "short rows");

KERNEL void normalize_filled(const Element* x, const void* weight, const void* other, void* y,
                             Element* sum, const float eps, const void* bias) {
    constexpr bool kHasResidual = kSums == kAlways;
    const PlainParams params{kChunk, kChunk, true, false, eps, kChunk, kChunk, 0};
    const RareParams rare{0, int64_t(gridDim.x) * (kRowsPerBlock * kRowsPerThread), kChunk, 0};
    normalize_rows<kHasResidual, true>(
        x, kHasResidual ? static_cast<const Element*>(other) : nullptr, weight,
        kHasResidual ? bias : other, y, sum, RowNumbers{}, params, rare);
}
