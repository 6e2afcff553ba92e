// Policy types that define a GEMM variant: operands, parts, tile, schedule and cluster.
#pragma once

namespace gemm {

// An operand in memory: K-major (contiguous along k) or MN-major (along m of A, n of B).
template <class Element_> struct KMajor {
    using Element = Element_;
    static constexpr bool kMnMajor = false;
    static constexpr int kCount = 1;
};
template <class Element_> struct MnMajor {
    using Element = Element_;
    static constexpr bool kMnMajor = true;
    static constexpr int kCount = 1;
};
// Two matrices B of a dual GEMM: half of a tile's columns are from each.
template <class Operand> struct Pair : Operand { static constexpr int kCount = 2; };

// Which operand is wgmma's A and gives the accumulators' rows.  Operands: A; the accumulators are
// A @ B.  SwapAB: B^T; the accumulators are transposed, so that few rows of A fill wgmma's N.
template <class A_, class B_> struct Operands {
    using A = A_;
    using B = B_;
    using Rows = A;
    using Cols = B;
    static constexpr bool kSwapAB = false;
};
template <class A_, class B_> struct SwapAB {
    using A = A_;
    using B = B_;
    using Rows = B;
    using Cols = A;
    static constexpr bool kSwapAB = true;
};

// Output tile, and tile_k.
template <int kM_, int kN_, int kK_> struct Tile {
    static constexpr int kM = kM_, kN = kN_, kK = kK_;
};
template <int kCount_> struct Stages { static constexpr int kCount = kCount_; };

// A and B as kCountA and kCountB 16-bit parts (mainloop_sm90_ss_parts.cuh, mainloop_parts.cuh).
// Products A_i @ B_j with i + j <= kOrder are computed.
template <int kCountA_, int kCountB_, int kShift_, int kOrder_> struct Parts {
    static constexpr int kCountA = kCountA_, kCountB = kCountB_;
    static constexpr int kCount = kCountA > kCountB ? kCountA : kCountB;
    static constexpr int kShift = kShift_, kOrder = kOrder_;
    static constexpr float kUnit = 1.0f / float(1 << kShift);
    static_assert(kOrder <= 1 || kShift == 0, "the small products have one scale");
};

// Schedules of the consumer warpgroups.
// Cooperative: each computes a slice of the rows of every tile.
// PingPong: each computes every second tile; the epilogue of one overlaps the mainloop of the
// other.
// SlicedK: each computes every second stage of a tile; their accumulators are added.
template <int kConsumers_> struct Cooperative {
    static constexpr int kConsumers = kConsumers_;
    static constexpr bool kPingPong = false, kSlicedK = false;
};
struct PingPong {
    static constexpr int kConsumers = 2;
    static constexpr bool kPingPong = true, kSlicedK = false;
};
struct SlicedK {
    static constexpr int kConsumers = 2;
    static constexpr bool kPingPong = false, kSlicedK = true;
};

// Cluster: the blocks compute tiles with the same columns of accumulators; each block loads a slice
// of these columns and multicasts it.
// SplitK: the blocks compute one tile, each a range of k.
template <int kSize_> struct Cluster {
    static constexpr int kSize = kSize_;
    static constexpr bool kMulticast = kSize > 1, kSplitK = false;
};
template <int kSize_> struct SplitK {
    static constexpr int kSize = kSize_;
    static constexpr bool kMulticast = false, kSplitK = true;
    static_assert(kSize > 1, "split-K takes a cluster of several blocks");
};

}  // namespace gemm
