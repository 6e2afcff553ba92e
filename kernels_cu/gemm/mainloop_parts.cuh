// The portable mainloop for FP32 operands in 16-bit parts (split_float32.cu):
//     A @ B = scale * sum over i, j of 2^(-kShift (i + j)) A_i @ B_j.
// A stage has all parts of a tile of both operands.  Tensor cores truncate, so partial accumulators
// are promoted to FP32 after each stage, every 32 of k.  They accumulate the small products first,
// then A_0 @ B_0.
// Constants: kPartsA, kPartsB, kShift, kOrder (gemm::Parts); see also gemm/mainloop_portable.cuh.
#pragma once
#include "gemm/policies.cuh"
#include "gemm/tile.cuh"

namespace gemm {

using FloatParts = Parts<kPartsA, kPartsB, kShift, kOrder>;
constexpr int kSplitMn = 128, kSplitK = 64;  // gemm/split_float32.cuh: kBlockMn, kBlockK
static_assert(kPromoteK == 32 && kTileK == kPromoteK && kGridK == 1 && kProducts == 1,
              "accumulators are promoted after each stage");
static_assert(kSplitMn % kTileM == 0 && kSplitMn % kTileN == 0,
              "a tile has one row and column of blocks of scales");
static_assert(!kMixedInput && kLayoutA == kLayoutKMajor && kLayoutB == kLayoutKMajor,
              "parts are K-major");

struct PartsStage {
    typename OperandA::Tile a[FloatParts::kCountA];
    typename OperandB::Tile b[FloatParts::kCountB];
};

// An operand's parts in global memory, given by the first one, and the scales of its blocks along
// k.
struct PartsSource {
    OperandSource first;
    int64_t part_step;  // from one part to the next, in elements
    const float* scales;

    template <class Operand, int kExtent, int kCount>
    DEVICE void load(typename Operand::Tile (&tiles)[kCount], int64_t k, int64_t end_k) const {
        OperandSource source = first;
#pragma unroll
        for (int part = 0; part < kCount; ++part) {
            source.load<Operand, kLayoutKMajor, kExtent>(tiles[part], k, end_k);
            source.data = static_cast<const typename Operand::Stored*>(source.data) + part_step;
        }
    }
};

// acc += one stage's small products, or its A_0 @ B_0.
template <bool kSmall>
DEVICE void multiply_parts(const PartsStage& stage, const WarpCoord& warp,
                           MmaAccumulatorTile& acc) {
    constexpr int kCountA = kSmall ? FloatParts::kCountA : 1,
                  kCountB = kSmall ? FloatParts::kCountB : 1;
#pragma unroll
    for (int step = 0; step < kStepsPerWarp; ++step) {
        FragmentB<ComputeB> b[kCountB][kFragmentsN];
#pragma unroll
        for (int j = 0; j < kCountB; ++j) {
#pragma unroll
            for (int n = 0; n < kFragmentsN; ++n)
                load_fragment<false>(b[j][n], stage.b[j], warp.col(n), step * kStep);
        }
#pragma unroll
        for (int i = 0; i < kCountA; ++i) {
            FragmentA<ComputeA> a[kFragmentsM];
#pragma unroll
            for (int m = 0; m < kFragmentsM; ++m)
                load_fragment<false>(a[m], stage.a[i], warp.row(m), step * kStep);
#pragma unroll
            for (int j = 0; j < kCountB; ++j) {
                if (!kSmall || (i + j > 0 && i + j <= FloatParts::kOrder)) mma(acc, a, b[j]);
            }
        }
    }
}

// acc += A * B over k in [first_k, end_k).  Called by all threads of the block.
DEVICE void multiply(PartsStage (&stages)[kStages], const PartsSource& a, const PartsSource& b,
                     int64_t first_k, int64_t end_k, const WarpCoord& warp, AccumulatorTile& acc) {
    int64_t next_k = first_k;
    int next_stage = 0, stage = 0;
    const auto load_next = [&] {
        if (next_k < end_k) {
            a.load<OperandA, kTileM>(stages[next_stage].a, next_k, end_k);
            b.load<OperandB, kTileN>(stages[next_stage].b, next_k, end_k);
        }
        copy_async_commit();
        next_k += kTileK;
        next_stage = next_stage + 1 < kStages ? next_stage + 1 : 0;
    };
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) load_next();
#pragma unroll 1
    for (int64_t k = first_k; k < end_k; k += kTileK) {
        copy_async_wait<kStages - 2>();
        sync_block();  // this stage has arrived, and all have read the one before it
        load_next();
        const float scale = a.scales[k / kSplitK] * b.scales[k / kSplitK];
        MmaAccumulatorTile products{};
        if constexpr (FloatParts::kOrder > 0) {
            multiply_parts<true>(stages[stage], warp, products);
            if constexpr (FloatParts::kShift > 0) {
#pragma unroll
                for (auto& row : products) {
#pragma unroll
                    for (MmaAccumulator& fragment : row) {
#pragma unroll
                        for (float& x : fragment.values) x *= FloatParts::kUnit;
                    }
                }
            }
        }
        multiply_parts<false>(stages[stage], warp, products);
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) {
#pragma unroll
            for (int n = 0; n < kFragmentsN; ++n) {
#pragma unroll
                for (int i = 0; i < AccumulatorFragment::kCount; ++i)
                    acc[m][n].values[i] += scale * products[m][n].values[i];
            }
        }
        stage = stage + 1 < kStages ? stage + 1 : 0;
    }
    copy_async_wait<0>();
    sync_block();  // the stages' memory is free
}

}  // namespace gemm
