// The portable main loop: tiles of A and B by asynchronous copies through kStages buffers in shared
// memory, fragments, mma.
//
// A block computes a tile of kTileM x kTileN sums; its warps share it as kWarpsM x kWarpsN, and kWarpsK
// of them share the k of every stage, whose sums are then added in the warps' order.
//   ElementA, ElementB   the operands as they are stored.
//   Compute              what they are multiplied as; it holds every number of both.
//   kLayoutA, kLayoutB   kInner: neighbours along k are neighbours in memory, kOuter: along m (of A) or
//                        n (of B); both begin at multiples of 16 bytes.  kStrided: any strides and
//                        dtypes, element by element.
#include "parts/dtype.cuh"
#include "parts/shared_tile.cuh"

enum Layout { kInner, kOuter, kStrided };

constexpr int kNumWarps = kNumThreads / kWarpSize;
static_assert(kNumThreads == 32 * kWarpsM * kWarpsN * kWarpsK, "warps are counted as if of 32 lanes");
// A warp of 64 lanes does what two of 32 would.
constexpr bool kWide = kWarpSize == 64;
constexpr int kGridK = kWide && kWarpsK % 2 == 0 ? kWarpsK / 2 : kWarpsK;
constexpr int kGridN = kWide && kGridK == kWarpsK && kWarpsN % 2 == 0 ? kWarpsN / 2 : kWarpsN;
constexpr int kGridM = kNumWarps / (kGridK * kGridN);

constexpr int kFragmentsM = kTileM / kGridM / 16;
constexpr int kFragmentsN = kTileN / kGridN / 16;
static_assert(kFragmentsM * kGridM * 16 == kTileM && kFragmentsN * kGridN * 16 == kTileN,
              "warps share a tile in fragments of 16 x 16");
constexpr int kStep = kFragmentK<Compute>;
constexpr int kStepsPerWarp = kTileK / kStep / kGridK;
static_assert(kStepsPerWarp * kStep * kGridK == kTileK, "warps share a stage's k in whole steps");

// What an operand's tile holds in shared memory, and in which order.
template <class Element, int kLayout, int kOuterSize>
struct OperandTile {
    using Stored = Element;
    static constexpr bool kOuterMajor = kLayout == kOuter;
    static constexpr int kLineElements = kOuterMajor ? kOuterSize : kTileK;
    using Tile = SharedTile<kOuterMajor ? kTileK : kOuterSize, kLineElements * int(sizeof(Element))>;
};
using OperandA = OperandTile<ElementA, kLayoutA, kTileM>;
using OperandB = OperandTile<ElementB, kLayoutB, kTileN>;
using Sums = Accumulator<Compute>;
using SumType = typename Sums::Sum;

// Where this warp stands in the block's tile.
struct WarpPlace {
    int m, n, k, lane;

    DEVICE static WarpPlace here() {
        const int warp = int(threadIdx.x) / kWarpSize;
        return {warp / kGridN % kGridM, warp % kGridN, warp / (kGridN * kGridM), lane_id()};
    }
    DEVICE int row(int fragment) const { return (m * kFragmentsM + fragment) * 16; }
    DEVICE int col(int fragment) const { return (n * kFragmentsN + fragment) * 16; }
};

// An operand in global memory: `outer` rows of A (columns of B) from the tile's first on.
struct OperandSource {
    const void* data;
    int64_t outer_stride, k_stride, outer;
    int dtype;

    // Starts to load k [first_k, end_k) of it, at most kTileK, into `tile`.
    template <class Operand, int kLayout, int kOuterSize>
    DEVICE void load(typename Operand::Tile& tile, int64_t first_k, int64_t end_k) const {
        using Element = typename Operand::Stored;
        const int num_outer = clamp_to(outer, kOuterSize), num_k = clamp_to(end_k - first_k, kTileK);
        if constexpr (kLayout == kStrided) {
            gather_tile<Element>(tile, data, dtype, first_k * k_stride, outer_stride, k_stride,
                                 num_outer, num_k);
        } else if constexpr (kLayout == kOuter) {
            copy_tile(tile, static_cast<const Element*>(data) + first_k * k_stride, k_stride, num_k,
                      num_outer);
        } else {
            copy_tile(tile, static_cast<const Element*>(data) + first_k, outer_stride, num_outer,
                      num_k);
        }
    }
};

struct Stage {
    typename OperandA::Tile a;
    typename OperandB::Tile b;
};

// acc += the products of one stage.
DEVICE void multiply_stage(const Stage& stage, const WarpPlace& warp,
                           Sums (&acc)[kFragmentsM][kFragmentsN]) {
#pragma unroll
    for (int step = 0; step < kStepsPerWarp; ++step) {
        const int k = (warp.k * kStepsPerWarp + step) * kStep;
        FragmentA<Compute> a[kFragmentsM];
        FragmentB<Compute> b[kFragmentsN];
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) {
            load_matrix<OperandA::kOuterMajor>(a[m], stage.a, warp.row(m), k);
        }
#pragma unroll
        for (int n = 0; n < kFragmentsN; ++n) {
            load_matrix<OperandB::kOuterMajor>(b[n], stage.b, warp.col(n), k);
        }
        mma(acc, a, b);
    }
}

// acc += A * B over k in [first_k, end_k).  Every thread of the block takes part.
DEVICE void multiply(Stage (&stages)[kStages], const OperandSource& a, const OperandSource& b,
                     int64_t first_k, int64_t end_k, const WarpPlace& warp,
                     Sums (&acc)[kFragmentsM][kFragmentsN]) {
    const auto load = [&](int64_t k) {
        Stage& stage = stages[(k - first_k) / kTileK % kStages];
        if (k < end_k) {
            a.load<OperandA, kLayoutA, kTileM>(stage.a, k, end_k);
            b.load<OperandB, kLayoutB, kTileN>(stage.b, k, end_k);
        }
        copy_async_commit();
    };
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) load(first_k + i * kTileK);
    for (int64_t k = first_k; k < end_k; k += kTileK) {
        copy_async_wait<kStages - 2>();
        sync_block();  // this stage is whole, and the one before it has been read by all
        load(k + (kStages - 1) * kTileK);
        multiply_stage(stages[(k - first_k) / kTileK % kStages], warp, acc);
    }
    copy_async_wait<0>();
    sync_block();  // the stages' memory is free
}
