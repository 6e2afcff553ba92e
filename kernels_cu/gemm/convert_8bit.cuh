// In-register dequantisation of 8-bit weights B^T, wgmma's A operand (gemm/mainloop_sm90_rs.cuh).
//
// Pair: as in ConvertNvfp4 (gemm/convert_nvfp4.cuh); K-major only.
#pragma once
#include "gemm/mainloop_sm90.cuh"

namespace gemm {

template <class Mainloop> struct Convert8Bit {
    using Stage = typename Mainloop::StageRows;
    using From = typename Mainloop::RowElement;
    using To = typename Mainloop::ColElement;
    static constexpr int kMmaK = Mainloop::kMmaK;
    static constexpr bool kMnMajor = Mainloop::kMnMajorRows;
    static constexpr bool kPair = Mainloop::Operands::B::kCount == 2;
    static_assert(!(kPair && kMnMajor), "a register would have rows of one matrix");
    // K-major: tile rows between a thread's two rows of wgmma's A.
    static constexpr int kSecondRow = kPair ? Mainloop::kRows / 2 : 8;
    // Elements of k per conversion.  Four consumer warpgroups have registers for only 32.
    static constexpr int kDepth = Mainloop::kTileK < 128 || Mainloop::kConsumers > 3 ? 32 : 64;
    using Fragment = uint32_t[kDepth / kMmaK][4];
    // Not with sliced-K: no gain.  An early version was wrong on the H200, a later one correct; the
    // cause is unknown (docs/experiments.md).
    static constexpr bool kFetches = !Mainloop::kSlicedK;
    static constexpr float kUnit = 1.0f;
    using Fetched = uint32_t[kMnMajor ? kDepth / 8 : kDepth / 4];
    int row;  // first of the warp's 16 tile rows; Pair: of its 8 rows of each matrix

    DEVICE Convert8Bit(const typename Mainloop::WorkTile&, int row) : row(kPair ? row / 2 : row) {}
    // Loads kDepth of k from `k` on.  A register has four elements if MN-major, two if K-major.
    DEVICE void fetch(Fetched& fetched, const unsigned char* stage, int k) const {
        const int lane = threadIdx.x % 32;
        if constexpr (kMnMajor) {
            static_assert(Mainloop::kRows <= kSwizzleBytes, "one box has all rows");
#pragma unroll
            for (int i = 0; i < kDepth / 32; ++i) {
                uint32_t bytes[4];  // k 0-7, 8-15, 16-23, 24-31
                load_matrix<true>(bytes, stage + Stage::offset(k + 32 * i + lane, row));
#pragma unroll
                for (int j = 0; j < 4; ++j) fetched[4 * i + j] = bytes[j];
            }
        } else {
#pragma unroll
            for (int i = 0; i < kDepth / 8; ++i) {  // i / 2: 16 of k; i % 2: first or second row
                const int at = k + i / 2 * kMmaK;
                const unsigned char* p =
                    stage + at / Stage::kRowBytes * Stage::kBoxBytes +
                    Stage::offset(row + lane / 4, at % Stage::kRowBytes + lane % 4 * 2) +
                    i % 2 * kSecondRow * Stage::kRowBytes;
                fetched[2 * i] = *reinterpret_cast<const uint16_t*>(p);
                fetched[2 * i + 1] = *reinterpret_cast<const uint16_t*>(p + 8);
            }
        }
    }
    DEVICE void load(Fragment& a, const unsigned char* stage, int, int k) const {
        Fetched fetched;
        fetch(fetched, stage, k);
        convert(fetched, a);
    }
    DEVICE void convert(const Fetched& fetched, Fragment& a) const {
#pragma unroll
        for (int i = 0; i < kDepth / 8; ++i) {
            if constexpr (kMnMajor) {
                // Transposed as 16-bit elements, a register has pairs of rows at one k: the even
                // rows become wgmma's rows 0-7, the odd ones rows 8-15 (EpilogueTile::row_of_half).
                convert_bytes<From, To>(permute_bytes<0x3120>(fetched[i]), a[i / 2][i % 2 * 2],
                                        a[i / 2][i % 2 * 2 + 1]);
            } else {
                a[i / 2][i % 2] = convert_pair<From, To>(fetched[2 * i]);
                a[i / 2][i % 2 + 2] = convert_pair<From, To>(fetched[2 * i + 1]);
            }
        }
    }
};

}  // namespace gemm
