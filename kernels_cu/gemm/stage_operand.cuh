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

    // extent: the first row of A or column of B.  step: from one box to the next, in bytes.
    DEVICE static void load(unsigned char* stage, const TensorMap& map, Barrier& full, int k,
                            int extent, int batch, int step = kBoxBytes) {
#pragma unroll
        for (int i = 0; i < kBytes / kBoxBytes; ++i) {
            const int contiguous = i * kRowBytes / kSize;
            tma_load(stage + i * step, map, full,
                     {kMnMajor ? extent + contiguous : k / kPacked + contiguous,
                      kMnMajor ? k : extent, batch});
        }
    }
    // Multicasts block `rank`'s slice to the cluster: some of the boxes, or a part of each.
    template <int kClusterSize>
    DEVICE static void load_multicast(unsigned char* stage, const TensorMap& map, Barrier& full,
                                      int k, int extent, int batch, int rank) {
        constexpr int kBoxes = kBytes / kBoxBytes / (kMnMajor ? kClusterSize : 1);
        constexpr int kSliceBytes = kBoxBytes / (kMnMajor ? 1 : kClusterSize);
        static_assert(kBoxes > 0 && kSliceBytes % (8 * kRowBytes) == 0, "a slice for every block");
        const int first = kMnMajor ? rank * kBoxes : 0;
        stage += first * kBoxBytes + (kMnMajor ? 0 : rank * kSliceBytes);
        extent += kMnMajor ? first * kRowBytes / kSize : rank * (kExtent / kClusterSize);
#pragma unroll
        for (int i = 0; i < kBoxes; ++i) {
            const int contiguous = i * kRowBytes / kSize;
            tma_load_multicast(stage + i * kBoxBytes, map, full,
                               {kMnMajor ? extent + contiguous : k / kPacked + contiguous,
                                kMnMajor ? k : extent, batch},
                               (1 << kClusterSize) - 1);
        }
    }
    // L2 prefetch of the first box at k = 0; `extent` may be that of a block's slice.
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
    // From there to the tile at k of the same stage, in bytes.
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
