// The way of logits to memory that leaves a softmax half done: for every row and set of the 64
// columns of a warpgroup, the exponentials over the set's largest, in 16 bits, and the statistics
// that their last factor comes from.  The logits stay in registers, in FP32.
#include "parts/epilogue.cuh"
#include "parts/math.cuh"
#include "parts/max_sum.cuh"
#include "parts/normalize_logits.cuh"
#include "parts/ring_hopper.cuh"

constexpr int kRowsAtOnce = kCols < 128 ? kCols : 128;  // of the logits, at once
constexpr int kBoxRows = 64, kBoxBytes = kBoxRows * kLineBytes;
constexpr int kBoxes = kRowsAtOnce / kBoxRows;
constexpr int kRowSums = kRowsAtOnce / 2;   // a thread's numbers of two columns
constexpr int kOwnRows = kRowSums / 2 / 8;  // of the rows that it has, merged with other lanes
static_assert(kTurned && kBlocks == 1 && kConsumerRows == 64, "a warpgroup has 64 columns");

// Of a warpgroup.
struct SharesStorage {
    alignas(1024) unsigned char boxes[kBoxes][kBoxBytes];
    float warp_max[4][kRowsAtOnce], warp_sum[4][kRowsAtOnce];
    alignas(128) float max[kRowsAtOnce];
};

// Each lane has a number of kCount rows, the same as the seven lanes that differ in lane / 4 only;
// after it, the merged ones of kCount / 8: number i of number lane / 4 * kCount / 8 + i.  All lanes
// of a group share the work of their rows, so that it is as much as for one lane's numbers.
template <int kCount, class Combine>
DEVICE void merge_rows(float (&values)[kCount], Combine combine) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int level = 1; level <= 3; ++level) {
        const int bit = 32 >> level, rest = kCount >> level;
        const bool upper = (lane & bit) != 0;
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) {
            if (i >= rest) continue;
            const float kept = upper ? values[i + rest] : values[i];
            const float sent = upper ? values[i] : values[i + rest];
            values[i] = combine(kept, shuffle_xor(sent, bit));
        }
    }
}

// What a thread's two columns are multiplied with, and what is added: loaded while the sums are under
// way.  A column that is not there counts as -inf.
struct ShareColumns {
    float scale[2], added[2];

    // first_col: of the warpgroup.
    DEVICE void load(const Epilogue& epilogue, int first_col) {
        const EpilogueParams& params = epilogue.params;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int col = first_col + warp * 16 +
                            (kOuterMajorRows ? lane / 4 * 2 + half : lane / 4 + half * 8);
            const bool there = col < params.n;
            const bool scaled = there && epilogue.scale_b, biased = there && epilogue.bias;
            const float factor = scaled ? epilogue.scale_b[col * params.scale_b_stride] : 1.0f;
            scale[half] = there ? factor * params.alpha : 0.0f;
            added[half] = there ? 0.0f : -kInfinity;
            if (biased) {
                added[half] = load_number(epilogue.bias, col * params.bias.col, params.bias_dtype);
            }
        }
    }
};

// (first_row, first_col): of the warpgroup's first logit; its sums are used up.
template <class Out>
DEVICE void store_shares(SharesStorage& to, const TensorMap& map, const EpilogueParams& params,
                         const ShareColumns& columns, MaxSum* statistics, int64_t num_sets,
                         int first_row, int first_col, TileSums& sums) {
    const int lane = threadIdx.x % 32, thread = threadIdx.x % 128, warp = thread / 32;
    const int barrier = 1 + threadIdx.x / 128;
    constexpr int kValues = kRowSums / 2;
    // Number i of a lane's rows: of those that it begins with, and of those that it merges.
    const auto begun = [&](int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; };
    const auto merged = [&](int i) { return begun(lane / 4 * kOwnRows + i); };
    const int64_t set = first_col / 64;
#pragma unroll 1
    for (int part = 0; part < kCols / kRowsAtOnce; ++part) {
        const int row = first_row + part * kRowsAtOnce;
        float values[kValues];
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            float& one = sums[0][i / 2 * 4 + i % 2];
            float& other = sums[0][i / 2 * 4 + i % 2 + 2];
            one = one * columns.scale[0] + columns.added[0];
            other = other * columns.scale[1] + columns.added[1];
            values[i] = maximum(one, other);
        }
        merge_rows(values, Max());
#pragma unroll
        for (int i = 0; i < kOwnRows; ++i) to.warp_max[warp][merged(i)] = values[i];
        named_barrier(barrier, 128);
        if (thread < kRowsAtOnce) {
            float max = -kLargestFloat;
#pragma unroll
            for (int i = 0; i < 4; ++i) max = maximum(max, to.warp_max[i][thread]);
            to.max[thread] = max;
        }
        if (thread == 0) tma_store_wait_read<0>();  // the boxes are free
        named_barrier(barrier, 128);
#pragma unroll
        for (int i = 0; i < kValues; i += 2) {
            const auto two = *reinterpret_cast<const Bytes<8>*>(&to.max[begun(i)]);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float max = bit_cast<float>(two.words[j]);
                float& one = sums[0][i / 2 * 4 + j];
                float& other = sums[0][i / 2 * 4 + j + 2];
                one = exp2_approx((one - max) * kLog2E);
                other = exp2_approx((other - max) * kLog2E);
                values[i + j] = one + other;
            }
        }
#pragma unroll
        for (int i = 0; i < kRowSums; i += 8) {
            const float* eight = &sums[0][i];
            unsigned char* lines = to.boxes[i * 2 / kBoxRows];
            const int top = i * 2 % kBoxRows;
            if constexpr (kOuterMajorRows) {  // two columns of a row are neighbours
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int line = top + wgmma_col(lane, j / 2 * 4 + j % 2);
                    const int place = (warp * 2 + lane / 16) ^ line % 8;
                    const float* two = eight + j / 2 * 4 + j % 2;
                    unsigned char* at = lines + line * kLineBytes + place * 16 + lane / 4 % 4 * 4;
                    *reinterpret_cast<uint32_t*>(at) = pack<Out>(two[0], two[2]);
                }
            } else {
                const uint32_t packed[4] = {
                    pack<Out>(eight[0], eight[1]), pack<Out>(eight[2], eight[3]),
                    pack<Out>(eight[4], eight[5]), pack<Out>(eight[6], eight[7])};
                const int line = top + lane / 16 * 8 + lane % 8;
                const int place = (warp * 2 + lane / 8 % 2) ^ line % 8;
                store_matrix<true>(lines + line * kLineBytes + place * 16, packed);
            }
        }
        fence_async_proxy();
        merge_rows(values, Sum());
#pragma unroll
        for (int i = 0; i < kOwnRows; ++i) to.warp_sum[warp][merged(i)] = values[i];
        named_barrier(barrier, 128);
        if (thread == 0) {
#pragma unroll
            for (int i = 0; i < kBoxes; ++i) {
                tma_store(map, to.boxes[i], {first_col, row + i * kBoxRows, 0});
            }
            tma_store_commit();
        }
        if (thread < kRowsAtOnce && row + thread < params.m && set < num_sets) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) sum += to.warp_sum[i][thread];
            statistics[(row + thread) * num_sets + set] = {to.max[thread], sum};
        }
        // The next part's to where this one's are: the loop's code is long.
#pragma unroll
        for (int i = 0; i < kCols / 2 - kRowSums; ++i) sums[0][i] = sums[0][i + kRowSums];
    }
}

// Shares of sets become shares of the row, of columns [begin, end), which are whole runs, as TMA has
// stored them.  y: of neighbouring columns, aligned to 16 bytes.
template <class Out>
DEVICE void scale_row(Out* y, const MaxSum* sets, int64_t num_sets, MaxSum* of_warps, int64_t begin,
                      int64_t end) {
    constexpr int kAtOnce = 4;
    constexpr int64_t kStep = kAtOnce * kNumThreads;
    const int64_t whole = end / kNormalRun;
    struct Runs {
        Vector<Out, kNormalRun> values[kAtOnce];
        float largest[kAtOnce];
    };
    const auto load = [&](Runs& runs, int64_t run) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int64_t at = run + i * kNumThreads;
            if (at < whole) runs.values[i].load(y + at * kNormalRun);
            runs.largest[i] = at < whole ? sets[at * kNormalRun / kSetColumns].max : 0.0f;
        }
    };
    int64_t run = begin / kNormalRun + threadIdx.x;
    Runs runs, next;
    load(runs, run);  // under way while the row's statistics are merged
    const MaxSum total = row_statistics(sets, num_sets, of_warps);
    const float factor = 1.0f / total.sum;
    const auto scale_of = [&](float largest) {
        return exp2_approx((largest - total.max) * kLog2E) * factor;
    };
    const auto store = [&](Runs& runs, int64_t run) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int64_t at = run + i * kNumThreads;
            if (at >= whole) break;
            const float scale = scale_of(runs.largest[i]);
            float values[kNormalRun];
#pragma unroll
            for (int j = 0; j < kNormalRun; ++j) values[j] = runs.values[i][j] * scale;
            runs.values[i].from_floats(values);
            runs.values[i].store(y + at * kNormalRun);
        }
    };
    for (; run < whole; run += 2 * kStep) {
        load(next, run + kStep);
        store(runs, run);
        load(runs, run + 2 * kStep);
        store(next, run + kStep);
    }
}

// The blocks of the grid share the rows.  of_warps: kBlockWarps, in shared memory.
template <class Out>
DEVICE void scale_shares(Out* y, const MaxSum* statistics, const NormalizeParams& p,
                         MaxSum* of_warps) {
    for_each_own_row(p, [&](int64_t row, int64_t begin, int64_t end) {
        scale_row(y + row * p.y.row, statistics + row * p.num_sets, p.num_sets, of_warps, begin,
                  end);
    });
}
