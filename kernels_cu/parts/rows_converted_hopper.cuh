// 8-bit numbers of B^T on their way to wgmma's registers (parts/mainloop_converted_hopper.cuh).
#include "parts/ring_hopper.cuh"

constexpr int kDepth = kTileK < 128 ? 32 : 64;  // of k that are converted at once
using RowRegisters = uint32_t[kDepth / kStepK][4];

struct Rows {
    int row;  // the warp's first one of 16, in the tile

    DEVICE Rows(const TileWork&, int row) : row(row) {}
    // B^T's numbers of a stage, of k from `k` on.
    DEVICE void load(RowRegisters& a, const unsigned char* stage, int, int k) const {
        const int lane = threadIdx.x % 32;
        if constexpr (kOuterMajorRows) {
            // A 16-bit number of the transposed matrices is two rows' numbers at one k: the even
            // rows become wgmma's first 8 rows, the odd ones the others (epilogue_hopper.cuh:
            // row_of_half).
            static_assert(kRows <= kLineBytes, "a line has all rows");
            uint32_t bytes[kDepth / 32][4];  // k 0-7, 8-15, 16-23, 24-31
#pragma unroll
            for (int i = 0; i < kDepth / 32; ++i) {
                load_matrix<true>(bytes[i], stage + RowStage::place(k + 32 * i + lane, row));
            }
#pragma unroll
            for (int i = 0; i < kDepth / 8; ++i) {
                convert_bytes<RowElement, ColElement>(permute_bytes<0x3120>(bytes[i / 4][i % 4]),
                                                      a[i / 2][i % 2 * 2], a[i / 2][i % 2 * 2 + 1]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < kDepth / kStepK; ++i) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int at = k + i * kStepK;
                    const unsigned char* p =
                        stage + at / RowStage::kLine * RowStage::kBoxBytes +
                        RowStage::place(row + lane / 4, at % RowStage::kLine + lane % 4 * 2) +
                        half * 8 * RowStage::kLine;
                    const uint32_t low = *reinterpret_cast<const uint16_t*>(p);
                    const uint32_t high = *reinterpret_cast<const uint16_t*>(p + 8);
                    convert_bytes<RowElement, ColElement>(low | high << 16, a[i][half],
                                                          a[i][half + 2]);
                }
            }
        }
    }
};
