// One operand's slice of a pipeline stage in shared memory: how TMA loads it and wgmma reads it.
#pragma once
#include "platform/wgmma.cuh"

namespace gemm {

constexpr int kSwizzleBytes = 128;  // 128-byte swizzle; shorter rows have a swizzle of their length

// kExtent rows of A or columns of B, kTileK of k.
template <class Operand, int kExtent, int kTileK> struct StageOperand {
    using Element = typename Operand::Element;
    static constexpr bool kMnMajor = Operand::kMnMajor;
    static constexpr Major kMajor = kMnMajor ? kMajorMN : kMajorK;
    static constexpr int kSize = int(sizeof(Element));
    static constexpr int kPacked = kSame<Element, e2m1x2> ? 2 : 1;  // values per element
    static constexpr int kBytes = kExtent * kTileK * kSize / kPacked;
    static constexpr int kContiguousBytes = (kMnMajor ? kExtent : kTileK) * kSize / kPacked;
    static_assert(kPacked == 1 || !kMnMajor, "the values of a byte are contiguous along k");
    // A TMA box is kRowBytes bytes wide, the span of its swizzle.
    static constexpr int kRowBytes =
        kContiguousBytes < kSwizzleBytes ? kContiguousBytes : kSwizzleBytes;
    static constexpr int kBoxBytes = (kMnMajor ? kTileK : kExtent) * kRowBytes;
    static_assert(kBytes % kBoxBytes == 0 && kBoxBytes % (8 * kRowBytes) == 0, "whole boxes");

    static constexpr int kSwizzleRows = 8;  // rows per period of the swizzle
    static_assert(kExtent % kSwizzleRows == 0, "whole groups");
    // Rows of A or columns of B in a box.
    static constexpr int kBoxExtent = kMnMajor ? kRowBytes * kPacked / kSize : kExtent;

    // Returns the bytes that are loaded for a stage of a tile with `left` valid rows of A or
    // columns of B.  TMA would take several times as long for rows out of bounds as for others (7
    // cycles for 128 bytes on an H200), so they are not loaded.  Their stale data affects only
    // accumulators out of bounds.  Boxes have whole groups of 8 rows, the period of the swizzle.
    DEVICE static int bytes(int left) {
        if (left >= kExtent) return kBytes;
        if (left <= 0) return 0;
        if (kMnMajor) return (left + kBoxExtent - 1) / kBoxExtent * kBoxBytes;
        return (left + kSwizzleRows - 1) / kSwizzleRows * kSwizzleRows * (kBytes / kExtent);
    }
    // The map of a tile, or of a slice of one.  K-major: the boxes of `edge` have only the last
    // rows.  MN-major: tiles at the edge skip whole boxes of the same map.
    DEVICE static const TensorMap& map(const TensorMap& whole, const TensorMap& edge,
                                       bool is_edge) {
        return is_edge && !kMnMajor ? edge : whole;
    }

    // extent: the first row of A or column of B.  step: bytes from one box to the next.
    // kEdge: a compile-time constant, so that the map's address is constant, too.  kMayBeEmpty: the
    // tile can have no valid row.
    template <bool kEdge, bool kMayBeEmpty>
    DEVICE static void load(unsigned char* stage, const TensorMap& whole, const TensorMap& edge,
                            Barrier& full, int k, int extent, int left, int batch,
                            int step = kBoxBytes) {
        const TensorMap& map = StageOperand::map(whole, edge, kEdge);
#pragma unroll
        for (int i = 0; i < kBytes / kBoxBytes; ++i) {
            const int contiguous = i * kRowBytes / kSize;
            const bool may_end = kMnMajor ? kMayBeEmpty || i > 0 : kMayBeEmpty;
            if (kEdge && may_end && left <= (kMnMajor ? i * kBoxExtent : 0)) break;
            tma_load(stage + i * step, map, full,
                     {kMnMajor ? extent + contiguous : k / kPacked + contiguous,
                      kMnMajor ? k : extent, batch});
        }
    }
    // Multicasts block `rank`'s slice to the cluster: some of the boxes (MN-major), or a part of
    // each box (K-major).  kEdge: the slice is at the edge.
    template <int kClusterSize, bool kEdge>
    DEVICE static void load_multicast(unsigned char* stage, const TensorMap& whole,
                                      const TensorMap& edge, Barrier& full, int k, int extent,
                                      int left, int batch, int rank) {
        constexpr int kBoxes = kBytes / kBoxBytes / (kMnMajor ? kClusterSize : 1);
        constexpr int kSliceBytes = kBoxBytes / (kMnMajor ? 1 : kClusterSize);
        static_assert(kBoxes > 0 && kSliceBytes % (8 * kRowBytes) == 0, "a slice for every block");
        const TensorMap& map = StageOperand::map(whole, edge, kEdge);
        stage += kMnMajor ? rank * kBoxes * kBoxBytes : rank * kSliceBytes;
        extent += slice_begin<kClusterSize>(rank);
        left -= slice_begin<kClusterSize>(rank);
#pragma unroll
        for (int i = 0; i < kBoxes; ++i) {
            const int contiguous = i * kRowBytes / kSize;
            if (kEdge && left <= (kMnMajor ? i * kBoxExtent : 0)) break;
            tma_load_multicast(stage + i * kBoxBytes, map, full,
                               {kMnMajor ? extent + contiguous : k / kPacked + contiguous,
                                kMnMajor ? k : extent, batch},
                               (1 << kClusterSize) - 1);
        }
    }
    // The first row or column of block `rank`'s slice.
    template <int kClusterSize> DEVICE static int slice_begin(int rank) {
        return rank * (kExtent / kClusterSize);
    }
    // L2 prefetch of the first box at k = 0; `extent` can be the start of a block's slice.
    DEVICE static void prefetch(const TensorMap& map, int extent, int batch) {
        tma_prefetch(map, {kMnMajor ? extent : 0, kMnMajor ? 0 : extent, batch});
    }
    // wgmma descriptor of the tile at (extent, k).
    DEVICE static uint64_t descriptor(const unsigned char* stage, int extent, int k) {
        const int contiguous = (kMnMajor ? extent : k) * kSize, row = kMnMajor ? k : extent;
        const unsigned char* p =
            stage + contiguous / kRowBytes * kBoxBytes + row * kRowBytes + contiguous % kRowBytes;
        return matrix_descriptor<kRowBytes>(p, kMnMajor ? kBoxBytes : 0, 8 * kRowBytes);
    }
    // Bytes from a descriptor at k = 0 to the one at `k` of the same stage.
    DEVICE static constexpr int step(int k) {
        if (kMnMajor) return k * kRowBytes;
        return k * kSize / kRowBytes * kBoxBytes + k * kSize % kRowBytes;
    }
    // Swizzled offset of byte `byte` of row `row` of the first box; 8 rows add 8 * kRowBytes.
    DEVICE static int offset(int row, int byte) {
        const int offset = row * kRowBytes;
        return (offset | (offset >> 3 & (kRowBytes - 16))) ^ byte;
    }
};

}  // namespace gemm
