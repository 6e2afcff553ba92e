// Policy types that define a variant of Hopper attention: tile, stages, mask, sequences and score.
#pragma once
#include "attention/score.cuh"

namespace attention {

// Head sizes of queries and keys (kHeadDim) and of values (kHeadDimV); TMA pads to these with
// zeros.  Tiles have kM queries x kN keys.
template <int kHeadDim_, int kM_, int kN_, int kHeadDimV_ = kHeadDim_> struct Tile {
    static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kM = kM_, kN = kN_;
};
// Stages of keys (and of values), and of queries.  With two query stages, the first GEMM of the
// next query tile overlaps the epilogue of this one.
template <int kKeys_, int kQueries_> struct Stages {
    static constexpr int kKeys = kKeys_, kQueries = kQueries_;
};

// Causality and the end of the sequence only.
struct NoMask {
    static constexpr bool kArray = false, kBlocks = false, kUniform = false, kFormula = false;
};
// A bool or bias array, or scores scaled before the softmax.
struct ArrayMask {
    static constexpr bool kArray = true, kBlocks = false, kUniform = false, kFormula = false;
};
// A block mask: blocks are masked, causal, full or partial.  kUniform: blocks of 128 x 128, so that
// all warpgroups of a query tile visit the same key tiles.
template <bool kUniform_> struct BlockMask {
    static constexpr bool kArray = false, kBlocks = true, kUniform = kUniform_, kFormula = false;
};
// A mask formula: a key tile is masked, full or partial for all warpgroups alike.
struct FormulaMask {
    static constexpr bool kArray = false, kBlocks = true, kUniform = true, kFormula = true;
};

struct ContiguousKv;
struct PagedKv;

// Sequences and the storage of their keys: batched with one length, varlen, or varlen queries over
// pages of keys.  head(): head `number` of the call.  Kv: loads key tiles (kv_sm90.cuh).
struct Batched {
    static constexpr bool kVarlen = false;
    using Kv = ContiguousKv;
    template <class Params>
    DEVICE static AttentionHead head(const Params& params, const int32_t*, const int32_t*,
                                     int number) {
        return AttentionHead::of(params, nullptr, nullptr, number);
    }
};
struct Varlen {
    static constexpr bool kVarlen = true;
    using Kv = ContiguousKv;
    template <class Params>
    DEVICE static AttentionHead head(const Params& params, const int32_t* cu_seqlens_q,
                                     const int32_t* cu_seqlens_k, int number) {
        return AttentionHead::of(params, cu_seqlens_q, cu_seqlens_k, number);
    }
};
struct Paged {
    static constexpr bool kVarlen = true;
    using Kv = PagedKv;
    DEVICE static AttentionHead head(const AttentionParams& params, const int32_t* cu_seqlens_q,
                                     const int32_t* seq_lens, int number) {
        return AttentionHead::of_pages(params, cu_seqlens_q, seq_lens, number);
    }
};

template <class Element_, class Tile_, class Stages_, class Mask_, class Sequences_,
          class Score_ = PlainScore>
struct TraitsSm90 {
    using Element = Element_;
    using Mask = Mask_;
    using Score = Score_;
    using Sequences = Sequences_;
    using Kv = typename Sequences_::Kv;
    using Params = typename Score::Params;
    using Arrays = typename Score::Arrays;
    static constexpr bool kGeneral = Score::kGeneral;
    static constexpr int kHeadDim = Tile_::kHeadDim, kHeadDimV = Tile_::kHeadDimV;
    static constexpr int kTileM = Tile_::kM, kTileN = Tile_::kN;
    static constexpr int kStages = Stages_::kKeys, kQueryStages = Stages_::kQueries;
    static constexpr int kConsumers = kTileM / 64;  // warpgroups of 64 queries
    static constexpr int kThreads = 128 * (kConsumers + 1);
    static constexpr bool kVarlen = Sequences_::kVarlen;
    // The times of query tiles are unknown: blocks take the next one from an atomic counter.
    static constexpr bool kDynamic = kVarlen || Mask::kBlocks;
    // Warpgroups skip different key tiles.
    static constexpr bool kDivergent = Mask::kBlocks && !Mask::kUniform;
    // Warpgroups begin a step's products in order if these take as long as the softmax.  H200,
    // heads of 64: 575 to 511 us with three warpgroups (4 x 16 x 4096), 58 to 53 us with two
    // (4 x 16 x 1024).  Heads of 128, whose products take longer: 0.5% slower.
    static constexpr bool kOrdered = kHeadDim <= 64 && !kDivergent;

    static constexpr int kSwizzleBytes = 128, kBoxDims = kSwizzleBytes / 2;
    static constexpr int kStepK = 16, kSteps = kTileN / kStepK;  // k of one wgmma, along keys
    static_assert(kTileM % 64 == 0, "a warpgroup has 64 queries");
    static_assert(kHeadDim % kStepK == 0 && kHeadDimV % kBoxDims == 0 && kHeadDimV <= 256,
                  "whole steps of dims, whole boxes of values, one wgmma for all outputs");
    static_assert(kTileN % kStepK == 0 && kTileN <= 256, "whole steps of keys");
    static_assert((kHeadDimV - 1) / kBoxDims <= (kHeadDim - 1) / kBoxDims,
                  "outputs are staged in the boxes of their queries");
    static_assert(!Mask::kBlocks || Mask::kFormula || (Mask::kUniform ? 128 : 64) % kTileN == 0,
                  "a warpgroup's part of a tile is in one block of a mask");
};

}  // namespace attention
