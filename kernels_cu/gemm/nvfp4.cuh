// NVFP4 operands: e2m1 elements, two per byte along k, and one e4m3 scale per 16 elements of k.
#pragma once
#include "common/shared_tile.cuh"
#include "platform/nvfp4.cuh"

constexpr int kGroup = 16;             // k per scale
constexpr int kWord = 4, kWordK = 64;  // adjacent scales, and their k

// Addresses of an operand's scales, from row (B: column) 0 on; strides in bytes.  Scales are plain,
// or in cuBLAS's blocks of 128 rows x 4 scales, in which row i is at i % 32 * 16 + i / 32 * 4.
struct GroupScales {
    const e4m3* scales;
    int64_t block, quarter, row, word;  // strides of 128 rows, 32 rows, a row, 4 scales

    DEVICE const e4m3* at(int64_t mn, int64_t k) const {
        return scales + mn / 128 * block + mn % 128 / 32 * quarter + mn % 32 * row +
               k / kWordK * word + k % kWordK / kGroup;
    }
};

// Calls f(row, i, next) for every i < count and every row < rows, kAtOnce rows per call: `row`,
// `row` + `next`, ...; f must skip rows >= rows.  Adjacent threads have adjacent i; a thread
// keeps its i, so that it divides only once.
template <int kAtOnce = 1, class F>
DEVICE void for_each_in_rows(uint32_t rows, uint32_t count, F f) {
    const uint32_t threads = gridDim.x * kNumThreads,
                   thread = blockIdx.x * kNumThreads + threadIdx.x;
    const uint32_t across = count < threads ? count : threads;
    const uint32_t down = threads / across, top = thread / across;
    if (top >= down) return;
    for (uint32_t i = thread - top * across; i < count; i += across) {
        for (uint32_t row = top; row < rows; row += kAtOnce * down) f(row, i, down);
    }
}

template <int kRows, int kDepth>
struct ScaledTile {
    static_assert(kDepth % kWordK == 0, "a tile has whole words of scales");
    SharedTile<kRows, kDepth / 2> codes;
    Bytes<kWord> words[kRows][kDepth / kWordK];

    DEVICE e4m3 scale(int row, int group) const {
        return reinterpret_cast<const e4m3*>(words[row])[group];
    }
};

// Issues the copies of num_rows rows of num_k elements, a multiple of 16, from (first_row,
// first_k) on.  codes: row first_row; rows are aligned to 8 bytes.  The rest of the tile, including
// scales, becomes zero; nothing is read past the last group.
template <int kRows, int kDepth>
DEVICE void copy_scaled_tile(ScaledTile<kRows, kDepth>& tile, const uint8_t* codes,
                             int64_t row_stride, const GroupScales& groups, int64_t first_row,
                             int64_t first_k, int num_rows, int num_k) {
    codes += first_k / 2;
    if ((uintptr_t(codes) | uintptr_t(row_stride)) % 16 == 0) {
        copy_tile(tile.codes, codes, row_stride, num_rows, num_k / 2);
    } else {
        constexpr int kPieces = kDepth / 16;  // pieces of 8 bytes per row
#pragma unroll 1
        for (int i = int(threadIdx.x); i < kRows * kPieces; i += kNumThreads) {
            const int row = i / kPieces, piece = i % kPieces;
            const bool valid = row < num_rows && piece * 16 < num_k;
            char* to = static_cast<char*>(tile.codes(row, piece / 2)) + piece % 2 * 8;
            copy_async<8>(to, valid ? codes + row * row_stride + piece * 8 : codes, valid);
        }
    }
    constexpr int kWords = kDepth / kWordK;
    const bool aligned = (uintptr_t(groups.scales) | uintptr_t(groups.block) |
                          uintptr_t(groups.quarter) | uintptr_t(groups.row)) %
                             kWord ==
                         0;
#pragma unroll 1
    for (int i = int(threadIdx.x); i < kRows * kWords; i += kNumThreads) {
        const int row = i / kWords, word = i % kWords;
        const int count = row < num_rows ? clamp_to(num_k / kGroup - word * kWord, kWord) : 0;
        const e4m3* from = groups.at(first_row + row, first_k + word * kWordK);
        Bytes<kWord>& to = tile.words[row][word];
        if (count == kWord && aligned) {
            copy_async<kWord>(&to, from);
        } else {
            uint32_t scales = 0;
#pragma unroll
            for (int j = 0; j < kWord; ++j) {
                if (j < count) scales |= uint32_t(bit_cast<uint8_t>(from[j])) << 8 * j;
            }
            to.words[0] = scales;
        }
    }
}
