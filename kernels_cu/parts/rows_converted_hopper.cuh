// 8-bit numbers of B^T on their way to wgmma's registers (parts/mainloop_converted_hopper.cuh).
#include "parts/ring_hopper.cuh"

constexpr int kDepth = kTileK < 128 ? 32 : 64;  // of k that are converted at once
using RowRegisters = uint32_t[kDepth / kStepK][4];

struct Rows {
    // Where warpgroups share k it gains nothing, and gave wrong sums on an H200 (docs/experiments.md).
    static constexpr bool kFetches = !kShareK;
    static constexpr float kInUnits = 1.0f;
    using Fetched = uint32_t[kOuterMajorRows ? kDepth / 8 : kDepth / 4];
    int row;  // the warp's first one of 16, in the tile

    DEVICE Rows(const TileWork&, int row) : row(row) {}
    // B^T's numbers of a stage, of k from `k` on: four in a word, or, where they are neighbours along
    // k, two.
    DEVICE void fetch(Fetched& numbers, const unsigned char* stage, int k) const {
        const int lane = threadIdx.x % 32;
        if constexpr (kOuterMajorRows) {
            static_assert(kRows <= kLineBytes, "a line has all rows");
#pragma unroll
            for (int i = 0; i < kDepth / 32; ++i) {
                uint32_t bytes[4];  // k 0-7, 8-15, 16-23, 24-31
                load_matrix<true>(bytes, stage + RowStage::place(k + 32 * i + lane, row));
#pragma unroll
                for (int j = 0; j < 4; ++j) numbers[4 * i + j] = bytes[j];
            }
        } else {
#pragma unroll
            for (int i = 0; i < kDepth / 8; ++i) {  // of 16 of k, the first rows and the others
                const int at = k + i / 2 * kStepK;
                const unsigned char* p =
                    stage + at / RowStage::kLine * RowStage::kBoxBytes +
                    RowStage::place(row + lane / 4, at % RowStage::kLine + lane % 4 * 2) +
                    i % 2 * 8 * RowStage::kLine;
                numbers[2 * i] = *reinterpret_cast<const uint16_t*>(p);
                numbers[2 * i + 1] = *reinterpret_cast<const uint16_t*>(p + 8);
            }
        }
    }
    DEVICE void load(RowRegisters& a, const unsigned char* stage, int, int k) const {
        Fetched numbers;
        fetch(numbers, stage, k);
        convert(numbers, a);
    }
    DEVICE void convert(const Fetched& numbers, RowRegisters& a) const {
#pragma unroll
        for (int i = 0; i < kDepth / 8; ++i) {
            if constexpr (kOuterMajorRows) {
                // A 16-bit number of the transposed matrices is two rows' numbers at one k: the even
                // rows become wgmma's first 8 rows, the odd ones the others (epilogue_hopper.cuh:
                // row_of_half).
                convert_bytes<RowElement, ColElement>(permute_bytes<0x3120>(numbers[i]),
                                                      a[i / 2][i % 2 * 2], a[i / 2][i % 2 * 2 + 1]);
            } else {
                convert_bytes<RowElement, ColElement>(numbers[2 * i] | numbers[2 * i + 1] << 16,
                                                      a[i / 2][i % 2], a[i / 2][i % 2 + 2]);
            }
        }
    }
};
