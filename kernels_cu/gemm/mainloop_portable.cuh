// The portable mainloop: cp.async copies tiles of A and B to kStages stages in shared memory; warps
// load fragments and multiply them by mma.
//
// A block computes a tile of kTileM x kTileN accumulators with kWarpsM x kWarpsN x kWarpsK warps;
// the kWarpsK warps slice the k of every stage, and their accumulators are added in order.
//   kProducts            matrices B: 1, or 2 for a dual GEMM, with kTileN columns of each.
//   ElementA, ElementB   storage types; e2m1x2: NVFP4 (gemm/nvfp4.cuh).
//   ComputeA, ComputeB   types of the multiplication; they represent every value of the storage
//                        types.
//   kLayoutA, kLayoutB   kLayoutKMajor, kLayoutMnMajor: aligned to 16 bytes.  kLayoutStrided: any
//                        strides and dtypes, by scalar loads, converted before the store to shared
//                        memory.
//   kPromoteK            0, or the k after which MMA accumulators are multiplied by block scales
//                        and promoted to FP32: for scales along k, and for FP8, whose accumulators
//                        keep few bits in tensor cores.
//   kHalfAccumulator     FP16 accumulators, promoted once after all of k; needs kPromoteK > 0.
#pragma once
#include "common/dtype.cuh"
#include "gemm/work_tile.cuh"
#include "gemm/nvfp4.cuh"
#include "common/shared_tile.cuh"

enum Layout { kLayoutKMajor, kLayoutMnMajor, kLayoutStrided };

constexpr int kNumWarps = kNumThreads / kWarpSize;
static_assert(kNumThreads == 32 * kWarpsM * kWarpsN * kWarpsK,
              "warps are counted as if of 32 lanes");
// A warp of 64 lanes does the work of two warps of 32.
constexpr bool kWide = kWarpSize == 64;
constexpr int kGridK = kWide && kWarpsK % 2 == 0 ? kWarpsK / 2 : kWarpsK;
constexpr int kGridN = kWide && kGridK == kWarpsK && kWarpsN % 2 == 0 ? kWarpsN / 2 : kWarpsN;
constexpr int kGridM = kNumWarps / (kGridK * kGridN);

constexpr int kFragmentsM = kTileM / kGridM / 16;
constexpr int kColFragments = kTileN / kGridN / 16;  // per product
constexpr int kFragmentsN = kProducts * kColFragments;
static_assert(kFragmentsM * kGridM * 16 == kTileM && kColFragments * kGridN * 16 == kTileN,
              "warps share a tile in fragments of 16 x 16");
// Mixed input: operands are converted between shared memory and fragments, two fragments at once.
constexpr bool kMixedInput =
    sizeof(ElementA) < sizeof(ComputeA) || sizeof(ElementB) < sizeof(ComputeB);
template <class Element> constexpr bool kScaled = kSame<Element, e2m1x2>;
// Factor of the final accumulators: the inverse of their unit, kScaledUnit.
constexpr float kAccumulatorScale = (kScaled<ElementA> ? 1.0f / kScaledUnit<ComputeA> : 1.0f) *
                                    (kScaled<ElementB> ? 1.0f / kScaledUnit<ComputeB> : 1.0f);
constexpr LaneOrder kLaneOrder =
    kScaled<ElementA> || kScaled<ElementB> ? LaneOrder::kEights
    : (sizeof(ElementA) < sizeof(ComputeA) && kLayoutA == kLayoutKMajor) ||
            (sizeof(ElementB) < sizeof(ComputeB) && kLayoutB == kLayoutKMajor)
        ? LaneOrder::kFours
        : LaneOrder::kPairs;
constexpr int kStep = kMixedInput ? 32 : kFragmentK<ComputeA>;
constexpr int kStepsPerWarp = kTileK / kStep / kGridK;
static_assert(kStepsPerWarp * kStep * kGridK == kTileK, "warps share a stage's k in whole steps");
// Full unrolling would take all registers for NVFP4's decoding.
constexpr int kUnrolledSteps = kScaled<ElementA> || kScaled<ElementB> ? 1 : kStepsPerWarp;

// An operand's tile in shared memory.
template <class Element, int kLayout, int kExtent>
struct OperandTile {
    using Stored = Element;
    static constexpr bool kMnMajor = kLayout == kLayoutMnMajor;
    static constexpr int kRowElements = kMnMajor ? kExtent : kTileK;
    using Tile = SharedTile<kMnMajor ? kTileK : kExtent, int(sizeof(Element)) * kRowElements>;
};
template <int kLayout, int kExtent>
struct OperandTile<e2m1x2, kLayout, kExtent> {
    static_assert(kLayout == kLayoutKMajor, "the elements of a byte are contiguous along k");
    using Stored = e2m1x2;
    static constexpr bool kMnMajor = false;
    using Tile = ScaledTile<kExtent, kTileK>;
};
using OperandA = OperandTile<ElementA, kLayoutA, kTileM>;
using OperandB = OperandTile<ElementB, kLayoutB, kTileN>;

template <class P>
DEVICE float value_of(const P& products, int i) {
    if constexpr (kHalfAccumulator) return products.value(i);
    else return float(products.values[i]);
}

// MMA accumulators, and the FP32 accumulators that they are promoted to.
using MmaAccumulator =
    typename Choose<kHalfAccumulator, HalfAccumulator, Accumulator<ComputeA>>::Type;
static_assert(!kHalfAccumulator || (kHasHalfAccumulator && kSame<ComputeA, half> && kPromoteK > 0),
              "FP16 accumulators are promoted");
struct PromotedAccumulator {
    using Scalar = float;
    using Positions = Accumulator<ComputeA>;
    static constexpr int kCount = Positions::kCount;
    float values[kCount];

    DEVICE static int row(int lane, int i) { return Positions::row(lane, i); }
    DEVICE static int col(int lane, int i) { return Positions::col(lane, i); }
};
template <bool kPromote> struct AccumulatorOf { using Type = MmaAccumulator; };
template <> struct AccumulatorOf<true> { using Type = PromotedAccumulator; };
using AccumulatorFragment = typename AccumulatorOf<(kPromoteK > 0)>::Type;
using ElementAccumulator = typename AccumulatorFragment::Scalar;
using MmaAccumulatorTile = MmaAccumulator[kFragmentsM][kFragmentsN];
using AccumulatorTile = AccumulatorFragment[kFragmentsM][kFragmentsN];
static_assert(kPromoteK % kTileK == 0, "accumulators are promoted after whole stages");

// This warp's coordinates in the block's tile.
struct WarpCoord {
    int m, n, k, lane;

    DEVICE static WarpCoord here() {
        const int warp = int(threadIdx.x) / kWarpSize;
        return {warp / kGridN % kGridM, warp % kGridN, warp / (kGridN * kGridM), lane_id()};
    }
    DEVICE int row(int fragment) const { return (m * kFragmentsM + fragment) * 16; }
    // Column in its product; the second product's fragments follow the first's.
    DEVICE int col(int fragment) const {
        return (n * kColFragments + fragment % kColFragments) * 16;
    }
};

// An operand in global memory: `extent` rows of A (columns of B) from the tile's first on.
struct OperandSource {
    const void* data;
    int64_t mn_stride, k_stride, extent;
    int dtype;
    int64_t first_mn;    // first row of A or column of B
    GroupScales groups;  // NVFP4's scales

    // Issues the loads of k in [first_k, end_k), at most kTileK, into `tile`.
    template <class Operand, int kLayout, int kExtent>
    DEVICE void load(typename Operand::Tile& tile, int64_t first_k, int64_t end_k) const {
        using Element = typename Operand::Stored;
        const int num_mn = clamp_to(extent, kExtent), num_k = clamp_to(end_k - first_k, kTileK);
        if constexpr (kScaled<Element>) {
            copy_scaled_tile(tile, static_cast<const uint8_t*>(data), mn_stride, groups, first_mn,
                             first_k, num_mn, num_k);
        } else if constexpr (kLayout == kLayoutStrided) {
            load_tile_scalar<Element>(tile, data, dtype, first_k * k_stride, mn_stride, k_stride,
                                      num_mn, num_k);
        } else if constexpr (kLayout == kLayoutMnMajor) {
            copy_tile(tile, static_cast<const Element*>(data) + first_k * k_stride, k_stride, num_k,
                      num_mn);
        } else {
            copy_tile(tile, static_cast<const Element*>(data) + first_k, mn_stride, num_mn, num_k);
        }
    }
};

struct Stage {
    typename OperandA::Tile a;
    typename OperandB::Tile b[kProducts];
};

// Loads an operand's fragments of one step (kStep along k): one, or two for mixed input.
template <class Operand, class Fragment>
DEVICE void load_fragments(Fragment* fragments, int stride, const typename Operand::Tile& tile,
                           int first, int k) {
    using Stored = typename Operand::Stored;
    if constexpr (kScaled<Stored>) {
        load_scaled(fragments[0], fragments[stride], tile, first, k);
    } else if constexpr (kMixedInput) {
        load_mixed_input<Stored, Operand::kMnMajor, kLaneOrder>(fragments[0], fragments[stride],
                                                                tile, first, k);
    } else {
        load_fragment<Operand::kMnMajor>(fragments[0], tile, first, k);
    }
}

// acc += A * B of one stage.
DEVICE void multiply_stage(const Stage& stage, const WarpCoord& warp, MmaAccumulatorTile& acc) {
#pragma unroll(kUnrolledSteps)
    for (int step = 0; step < kStepsPerWarp; ++step) {
        const int k = (warp.k * kStepsPerWarp + step) * kStep;
        constexpr int kCount = kMixedInput ? 2 : 1;
        FragmentA<ComputeA> a[kCount][kFragmentsM];
        FragmentB<ComputeB> b[kCount][kFragmentsN];
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) {
            load_fragments<OperandA>(&a[0][m], kFragmentsM, stage.a, warp.row(m), k);
        }
#pragma unroll
        for (int n = 0; n < kFragmentsN; ++n) {
            load_fragments<OperandB>(&b[0][n], kFragmentsN, stage.b[n / kColFragments], warp.col(n),
                                     k);
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) mma(acc, a[i], b[i]);
    }
}

// Block scales: A has one per row and kScaleBlock of k, from the tile's first row on; B has one per
// kScaleBlock x kScaleBlock block.  Null: 1.
struct BlockScales {
    const float* a;
    const float* b[kProducts];
    MatrixStrides a_strides, b_strides[kProducts];  // a: row, k block; b: k block, column block
    int64_t rows, cols, first_col;  // valid rows of A and columns of B; the tile's first column

    // Adds the MMA accumulators, times the scales of k's block, to acc, and clears them.
    DEVICE void promote(int64_t k, const WarpCoord& warp, MmaAccumulatorTile& products,
                        AccumulatorTile& acc) const {
        const int64_t block = k / kScaleBlock;
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) {
#pragma unroll
            for (int n = 0; n < kFragmentsN; ++n) {
#pragma unroll
                for (int i = 0; i < AccumulatorFragment::kCount; ++i) {
                    const int row = warp.row(m) + AccumulatorFragment::row(warp.lane, i),
                              col = warp.col(n);
                    const float* of_b = b[n / kColFragments];
                    const MatrixStrides& strides = b_strides[n / kColFragments];
                    float x = value_of(products[m][n], i);
                    if (of_b && col < cols) {
                        x *= of_b[block * strides.row +
                                  (first_col + col) / kScaleBlock * strides.col];
                    }
                    if (a && row < rows) x *= a[row * a_strides.row + block * a_strides.col];
                    acc[m][n].values[i] += x;
                }
                products[m][n] = {};
            }
        }
    }
};

// acc = A * B over k in [first_k, end_k); acc must be zero.  Called by all threads of the block.
template <class S>
DEVICE void multiply(Stage (&stages)[kStages], const OperandSource& a,
                     const OperandSource (&b)[kProducts], const BlockScales& scales,
                     int64_t first_k, int64_t end_k, const WarpCoord& warp,
                     S (&acc)[kFragmentsM][kFragmentsN]) {
    int64_t next_k = first_k;
    int next_stage = 0, stage = 0;
    const auto load_next = [&] {
        if (next_k < end_k) {
            a.load<OperandA, kLayoutA, kTileM>(stages[next_stage].a, next_k, end_k);
#pragma unroll
            for (int i = 0; i < kProducts; ++i) {
                b[i].load<OperandB, kLayoutB, kTileN>(stages[next_stage].b[i], next_k, end_k);
            }
        }
        copy_async_commit();
        next_k += kTileK;
        next_stage = next_stage + 1 < kStages ? next_stage + 1 : 0;
    };
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) load_next();
    MmaAccumulatorTile products{};
    for (int64_t k = first_k; k < end_k; k += kTileK) {
        copy_async_wait<kStages - 2>();
        sync_block();  // this stage has arrived, and all have read the one before it
        load_next();
        if constexpr (kPromoteK > 0) {
            multiply_stage(stages[stage], warp, products);
            const int64_t end = k + kTileK;
            if (!kHalfAccumulator && (end % kPromoteK == 0 || end >= end_k)) {
                scales.promote(k, warp, products, acc);
            }
        } else {
            multiply_stage(stages[stage], warp, acc);
        }
        stage = stage + 1 < kStages ? stage + 1 : 0;
    }
    if constexpr (kHalfAccumulator) scales.promote(first_k, warp, products, acc);
    if constexpr (kAccumulatorScale != 1.0f) {
#pragma unroll
        for (auto& row : acc) {
#pragma unroll
            for (S& fragment : row) {
#pragma unroll
                for (auto& sum : fragment.values) sum *= kAccumulatorScale;
            }
        }
    }
    copy_async_wait<0>();
    sync_block();  // the stages' memory is free
}
