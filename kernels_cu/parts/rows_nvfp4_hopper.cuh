// NVFP4 numbers of B^T on their way to wgmma's registers (parts/mainloop_converted_hopper.cuh):
// codes from shared memory, times their scales, which come from global memory a while ahead.
//   kTwoProducts   the first half of a tile's rows are columns of one matrix, the others of another
//                  one: a thread's numbers 0 to 7 of wgmma's 16 rows are of the first, 8 to 15 of
//                  the second.
#include "parts/nvfp4.cuh"
#include "parts/ring_hopper.cuh"

// Of k that are converted at once: the more, the more warps have to do while they wait.
constexpr int kDepth = kTileK < 128 ? 32 : kTileK < 256 ? 64 : 128;
constexpr int kStageWords = kTileK / kWordK;  // words of scales
using RowRegisters = uint32_t[kDepth / kStepK][4];
constexpr int kWordsAhead = 4;  // words of scales that four lanes with the same rows hold at once

struct Rows {
    static constexpr bool kFetches = false;
    // 256 columns' sums leave no register for what divides them in the end.
    static constexpr bool kUnits = kCols < 256;
    static constexpr float kInUnits = kUnits ? 1.0f / kScaledUnit<ColElement> : 1.0f;  // of sums
    struct Fetched {};
    const RowScales& scales;
    int line, other;               // in a stage, of the thread's two rows; the second one after it
    int first;                     // word of the warpgroup's first stage
    uint32_t words[2], coming[2];  // lane i of four: word i of the rows' next kWordsAhead

    DEVICE Rows(const TileWork& work, int row) : scales(work.row_scales) {
        const int lane = threadIdx.x % 32;
        line = kTwoProducts ? row / 2 + lane / 4 : row + lane / 4;
        other = kTwoProducts ? kRows / 2 : 8;
        first = (work.first_k_tile + (kShareK ? work.consumer : 0)) * kStageWords;
        fetch(0);
    }
    // Of the warpgroup's own stages, the words from `from` on.
    DEVICE void fetch(int from) {
        const int own = from + int(threadIdx.x % kWordsAhead);
        const int word = first + own / kStageWords * kStride * kStageWords + own % kStageWords,
                  count = scales.count - word * kWord;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const e4m3* p = scales.rows[half] + word * scales.steps[half];
            coming[half] = 0;
            if (count >= kWord && scales.aligned) {
                coming[half] = load_vector<4>(p).words[0];
            } else {
#pragma unroll
                for (int i = 0; i < kWord; ++i) {
                    if (i < count) coming[half] |= uint32_t(bit_cast<uint8_t>(p[i])) << 8 * i;
                }
            }
        }
    }
    // Of the tile's stage `index`, of k from `k` on; in their order.
    DEVICE void load(RowRegisters& a, const unsigned char* stage, int index, int k) {
        const int lane = threadIdx.x % 32, word = index / kStride * kStageWords + k / kWordK;
        if (k % kWordK == 0 && word % kWordsAhead == 0) {
            words[0] = coming[0];
            words[1] = coming[1];
            fetch(word + kWordsAhead);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t four = 0;
#pragma unroll
            for (int i = 0; i < kDepth / kStepK; i += 2) {
                const int at = k + i * kStepK, ahead = word + (at - k) / kWordK;
                if (i == 0 || at % kWordK == 0) {
                    four = shuffle(words[half], lane / 4 * 4 + ahead % kWordsAhead);
                }
                const Bytes<16> codes = *reinterpret_cast<const Bytes<16>*>(
                    stage + RowStage::place(line, at / 2) + half * other * RowStage::kLine);
                uint32_t pairs[4];
                decode_bytes<ColElement, kUnits>(codes.words, lane % 4, four >> at % kWordK / 2,
                                                 pairs);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    a[i + j][half] = pairs[2 * j];
                    a[i + j][half + 2] = pairs[2 * j + 1];
                }
            }
        }
    }
};
