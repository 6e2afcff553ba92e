// Partition of a warp's accumulators in the epilogues: chunks of up to 64 columns, slices of up to
// 32, boxes of shared memory.  Rows and columns refer to the accumulators; with SwapAB they are the
// output's columns and rows.
#pragma once
#include "gemm/mainloop_sm90.cuh"

namespace gemm {

// kGeneral: the general epilogue is compiled in.
template <class Mainloop_, bool kGeneral_> struct EpilogueTile {
    using Mainloop = Mainloop_;
    using Accumulator = typename Mainloop::Accumulator;
    static constexpr bool kGeneral = kGeneral_, kSwapAB = Mainloop::kSwapAB;
    static constexpr bool kSplitK = Mainloop::kSplitK;
    static constexpr int kRows = Mainloop::kRows, kCols = Mainloop::kCols;
    static constexpr int kMmasM = Mainloop::kMmasM;

    static constexpr int kOwnCols =
        kCols / (kSplitK ? Mainloop::kClusterSize : 1);  // this block's columns
    static constexpr int kChunk = kOwnCols < 32 ? 16 : kOwnCols < 64 ? 32 : 64;
    // Whether the staging holds the whole tile.  Then slices follow each other without regard to
    // chunks, and TMA stores all chunks once the last slice is there.
    static constexpr bool kWhole =
        kSwapAB && !kSplitK && !kGeneral && kMmasM == 1 && kOwnCols <= 128;
    static constexpr int kSlice = kChunk < 32 || (kWhole && kOwnCols % 32 != 0) ? 16 : 32;
    static constexpr int kValues = kSlice / 2;  // per lane and slice
    static_assert(kOwnCols >= kChunk && (kSwapAB || kChunk == 64), "at least a chunk");
    static_assert(kOwnCols % 8 == 0, "whole chunks, or columns that store_matrix takes at once");
    // If chunks do not divide a block's columns, the last chunk ends at the last column and
    // overlaps the chunk before.
    static constexpr int kOwnChunks = (kOwnCols + kChunk - 1) / kChunk;
    static constexpr int kChunks = kCols / kOwnCols * kOwnChunks;
    static constexpr int kSlicesOfChunk = kChunk / kSlice;
    static constexpr int kSlices =
        kWhole ? (kOwnCols + kSlice - 1) / kSlice : kChunks * kSlicesOfChunk;
    DEVICE static constexpr int chunk_col(int chunk) {
        const int in_own = chunk % kOwnChunks * kChunk;
        return chunk / kOwnChunks * kOwnCols +
               (in_own < kOwnCols - kChunk ? in_own : kOwnCols - kChunk);
    }
    DEVICE static constexpr int slice_col(int slice) {
        if (kWhole) return slice < kSlices - 1 ? slice * kSlice : kOwnCols - kSlice;
        return chunk_col(slice / kSlicesOfChunk) + slice % kSlicesOfChunk * kSlice;
    }
    // The chunks that this block stores.
    struct OwnChunks {
        static constexpr int kCount = kOwnChunks;
        int first;

        DEVICE OwnChunks() : first(kSplitK ? cluster_rank() * kCount : 0) {}
        DEVICE bool has(int chunk) const {
            return !kSplitK || (chunk >= first && chunk < first + kCount);
        }
    };

    // A warp's staging: boxes that TMA stores, or one chunk in FP32.  With SwapAB a warpgroup
    // shares its boxes.  FP8's tiles of three chunks have a box per chunk, so that no chunk waits
    // until TMA has read another.
    static constexpr int kBoxBytes = kWarpRows * 64 * 2;
    static constexpr int kBoxes = Mainloop::kFp8 && !kSwapAB && kChunks == 3 ? 3 : 2;
    union Staging {
        unsigned char boxes[kBoxes][kBoxBytes];
        alignas(16) uint32_t chunk[kWarpRows * 64];
    };

    static_assert(!kWhole || kOwnCols * kSwizzleBytes <= 4 * kBoxes * kBoxBytes,
                  "the staging of a warpgroup holds the tile");

    // Lane id, rematerialised so that it is not live across the mainloop.  The mask makes it known
    // to be nonnegative, so that divisions become shifts.
    DEVICE static int lane() { return opaque(threadIdx.x % 32) & 31; }

    // 8-bit MN-major weights: a register has a pair of columns (gemm/convert_8bit.cuh).
    static constexpr bool kPairedRows = Mainloop::kMixedInput && Mainloop::kMnMajorRows;
    // A lane's first (half 0) or second row of a warp's 16.
    DEVICE static int row_of_half(int lane, int half) {
        return kPairedRows ? lane / 4 * 2 + half : lane / 4 + half * 8;
    }

    // kScales: scales of A's rows and B's columns.  16-bit operands have one scale per matrix, or
    // none; the mainloop applies block scales.
    static constexpr bool kEightBits = sizeof(typename Mainloop::ElementB) == 1;
    static constexpr bool kScales = kEightBits && !Mainloop::kBlockScales;
    // A has a scale per row.
    static constexpr bool kRowScales = kScales && !kSwapAB;
};

}  // namespace gemm
