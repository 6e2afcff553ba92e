// The names that a variant of Hopper attention is written in: tile, stages, mask and sequences.
#include "parts/attention_work_tile.cuh"

namespace attention {

// kHeadDim: what TMA pads the head sizes to with zeros.  kM queries by kN keys.
template <int kHeadDim_, int kM_, int kN_> struct Tile {
    static constexpr int kHeadDim = kHeadDim_, kM = kM_, kN = kN_;
};
// Buffers of keys (and as many of values), and of queries: with two, the first GEMM of the next query tile
// runs beside the epilogue of this one.
template <int kKeys_, int kQueries_> struct Stages {
    static constexpr int kKeys = kKeys_, kQueries = kQueries_;
};

// No mask but causality and the end of the sequence.
struct NoMask { static constexpr bool kArray = false, kBlocks = false, kUniform = false; };
// A bool or bias array, or scores that are scaled before the softmax.
struct ArrayMask { static constexpr bool kArray = true, kBlocks = false, kUniform = false; };
// Blocks that are masked, causal, full or partial.  kUniform: of 128 queries and keys, so that the
// warpgroups of a query tile visit the same keys.
template <bool kUniform_> struct BlockMask {
    static constexpr bool kArray = false, kBlocks = true, kUniform = kUniform_;
};

// Sequences of one length, or packed ones of different lengths.
struct Batched { static constexpr bool kVarlen = false; };
struct Varlen { static constexpr bool kVarlen = true; };

template <class Element_, class Tile_, class Stages_, class Mask_, class Sequences_>
struct TraitsSm90 {
    using Element = Element_;
    using Mask = Mask_;
    static constexpr int kHeadDim = Tile_::kHeadDim, kTileM = Tile_::kM, kTileN = Tile_::kN;
    static constexpr int kStages = Stages_::kKeys, kQueryStages = Stages_::kQueries;
    static constexpr int kConsumers = kTileM / 64;  // warpgroups, of 64 queries each
    static constexpr int kThreads = 128 * (kConsumers + 1);
    static constexpr bool kVarlen = Sequences_::kVarlen;
    // The host does not know how long a query tile takes: blocks take the next one from a counter.
    static constexpr bool kDynamic = kVarlen || Mask::kBlocks;
    // Warpgroups skip different key tiles.
    static constexpr bool kDivergent = Mask::kBlocks && !Mask::kUniform;

    static constexpr int kSwizzleBytes = 128, kBoxDims = kSwizzleBytes / 2;
    static constexpr int kBoxes = kHeadDim / kBoxDims;
    static constexpr int kStepK = 16, kSteps = kTileN / kStepK;  // of a wgmma, along keys
    static_assert(kTileM % 64 == 0, "a warpgroup has 64 queries");
    static_assert(kHeadDim % kBoxDims == 0 && kTileN % kStepK == 0 && kTileN <= 256,
                  "whole boxes and steps");
    static_assert(!Mask::kBlocks || (Mask::kUniform ? 128 : 64) % kTileN == 0,
                  "a warpgroup's part of a tile is in one block of a mask");
};

}  // namespace attention
