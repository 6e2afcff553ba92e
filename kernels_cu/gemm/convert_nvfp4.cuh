// In-register dequantisation of NVFP4 weights B^T, wgmma's A operand (gemm/mainloop_sm90_rs.cuh):
// codes from shared memory, times scales that are prefetched from global memory.
//
// Pair: the first half of a tile's rows are columns of one matrix B, the second half columns of the
// other.  Rows 0-7 of wgmma's 16 are from the first half, rows 8-15 from the second.
#pragma once
#include "gemm/mainloop_sm90.cuh"
#include "gemm/nvfp4.cuh"

namespace gemm {

template <class Mainloop> struct ConvertNvfp4 {
    using Stage = typename Mainloop::StageRows;
    using To = typename Mainloop::ColElement;
    static constexpr int kMmaK = Mainloop::kMmaK, kTileK = Mainloop::kTileK;
    static constexpr bool kPair = Mainloop::Operands::B::kCount == 2;
    // k per conversion; larger conversions hide more latency.
    static constexpr int kDepth = kTileK < 128 ? 32 : kTileK < 256 ? 64 : 128;
    using Fragment = uint32_t[kDepth / kMmaK][4];
    static constexpr bool kFetches = false;
    struct Fetched {};
    static constexpr int kStageWords = kTileK / kWordK;  // words of four scales
    static constexpr int kPrefetchedWords = 4;           // spread over the four lanes of a row
    // Whether fragments stay in units of kScaledUnit<To>, and kUnit multiplies the final
    // accumulators.  Not for 256 columns, which leave no registers for that.
    static constexpr bool kUnits = Mainloop::kCols < 256;
    static constexpr float kUnit =
        kUnits ? 1.0f / kScaledUnit<To> : 1.0f;  // factor of the final accumulators

    const RowScales& scales;
    int first_row, second_row;  // the thread's first row in a stage; from it to its second
    int first;                  // first word of scales of the warpgroup's first stage
    // Lane i of four has word i of the current kPrefetchedWords, as factors, and of the next ones,
    // as loaded.
    uint32_t factors[2][2], prefetched[2];

    DEVICE ConvertNvfp4(const typename Mainloop::WorkTile& work, int row)
        : scales(work.row_scales) {
        const int lane = threadIdx.x % 32;
        first_row = kPair ? row / 2 + lane / 4 : row + lane / 4;
        second_row = kPair ? Mainloop::kRows / 2 : 8;
        first = (work.first_k_tile + (Mainloop::kSlicedK ? work.consumer : 0)) * kStageWords;
        fetch(0);
    }
    // Prefetches the scales of the warpgroup's stages, from word `from` on.
    DEVICE void fetch(int from) {
        constexpr int kStride = Mainloop::kStride;
        const int own = from + int(threadIdx.x % kPrefetchedWords);
        const int word = first + own / kStageWords * kStride * kStageWords + own % kStageWords,
                  count = scales.count - word * kWord;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const e4m3* p = scales.rows[half] + word * scales.steps[half];
            prefetched[half] = 0;
            if (count >= kWord && scales.aligned) {
                prefetched[half] = load_vector<4>(p).words[0];
            } else {
#pragma unroll
                for (int i = 0; i < kWord; ++i) {
                    if (i < count) prefetched[half] |= uint32_t(bit_cast<uint8_t>(p[i])) << 8 * i;
                }
            }
        }
    }
    // Dequantises stage `index` of the tile from `k` on; called in the order of k.
    DEVICE void load(Fragment& a, const unsigned char* stage, int index, int k) {
        const int lane = threadIdx.x % 32,
                  word = index / Mainloop::kStride * kStageWords + k / kWordK;
        if (k % kWordK == 0 && word % kPrefetchedWords == 0) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                factors[half][0] = scale_factors<To, kUnits>(prefetched[half]);
                factors[half][1] = scale_factors<To, kUnits>(prefetched[half] >> 16);
            }
            fetch(word + kPrefetchedWords);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < kDepth / kMmaK; i += 2) {
                const int at = k + i * kMmaK, ahead = word + (at - k) / kWordK;
                const uint32_t two = shuffle(factors[half][at % kWordK / (2 * kMmaK)],
                                             lane / 4 * 4 + ahead % kPrefetchedWords);
                const Bytes<16> codes =
                    *reinterpret_cast<const Bytes<16>*>(stage + Stage::offset(first_row, at / 2) +
                                                        half * second_row * Stage::kRowBytes);
                uint32_t pairs[4];
                decode_bytes<To, kUnits>(codes.words, lane % 4, two, pairs);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    a[i + j][half] = pairs[2 * j];
                    a[i + j][half + 2] = pairs[2 * j + 1];
                }
            }
        }
    }
};

}  // namespace gemm
