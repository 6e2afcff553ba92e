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

constexpr int kTotals = 512;  // rows whose statistics a block knows at once

// Rows' largest logit and what exponentials over it are multiplied with; by all warps, each a row.
DEVICE void merge_totals(MaxSum* totals, const MaxSum* statistics, int64_t num_sets, int rows) {
    const MergeMaxSum merge{kLog2E};
    for (int row = threadIdx.x / 32; row < rows; row += kBlockWarps) {
        MaxSum total{-kInfinity, 0.0f};
        const MaxSum* sets = statistics + row * num_sets;
#pragma unroll 8
        for (int64_t i = threadIdx.x % 32; i < num_sets; i += 32) total = merge(total, sets[i]);
        total = merge.across_lanes(total, 1, 32);
        if (threadIdx.x % 32 == 0) totals[row] = {total.max, 1.0f / total.sum};
    }
}

// Rows of runs of kNormalRun columns, one after another.
struct RunPlace {
    int row, run;

    DEVICE void advance(int runs_of_row) {
        run += kNumThreads;
        if (run >= runs_of_row) {
            row += run / runs_of_row;
            run %= runs_of_row;
        }
    }
};

// Shares of sets become shares of the rows, in y: of neighbouring columns, its rows aligned to 16
// bytes.  The blocks of the grid share the rows.  totals: kTotals, in shared memory.
template <class Out>
DEVICE void scale_shares(Out* y, const MaxSum* statistics, const NormalizeParams& p,
                         MaxSum* totals) {
    constexpr int kAtOnce = 4, kPieceRuns = kPieceColumns / kNormalRun;
    struct Runs {
        Vector<Out, kNormalRun> values[kAtOnce];
        float largest[kAtOnce];
    };
    const int whole = int(p.n / kNormalRun), runs_of_row = whole > 0 ? whole : 1;
    OwnPieces pieces = OwnPieces::here(p);
    while (pieces.next < pieces.last) {
        const int64_t top = pieces.next / pieces.of_row, below = top + kTotals;
        const int64_t first = pieces.next;
        pieces.next = below * pieces.of_row < pieces.last ? below * pieces.of_row : pieces.last;
        // In rows from `top` on, the last one's runs up to `last_run`.
        const int last_row = int((pieces.next - 1) / pieces.of_row - top);
        const int64_t of_last = pieces.next - (top + last_row) * pieces.of_row;
        const int last_run = of_last * kPieceRuns < whole ? int(of_last) * kPieceRuns : whole;
        Out* rows = y + top * p.y.row;
        const MaxSum* sets = statistics + top * p.num_sets;
        const auto is_own = [&](const RunPlace& place) {
            return whole > 0 &&
                   (place.row < last_row || (place.row == last_row && place.run < last_run));
        };
        const auto load = [&](Runs& runs, RunPlace& place) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (is_own(place)) {
                    runs.values[i].load(rows + place.row * p.y.row + place.run * kNormalRun);
                    runs.largest[i] =
                        sets[place.row * p.num_sets + place.run * kNormalRun / kSetColumns].max;
                }
                place.advance(runs_of_row);
            }
        };
        const auto store = [&](Runs& runs, RunPlace& place) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (is_own(place)) {
                    const MaxSum total = totals[place.row];
                    const float scale =
                        exp2_approx((runs.largest[i] - total.max) * kLog2E) * total.sum;
                    float values[kNormalRun];
#pragma unroll
                    for (int j = 0; j < kNormalRun; ++j) values[j] = runs.values[i][j] * scale;
                    runs.values[i].from_floats(values);
                    runs.values[i].store(rows + place.row * p.y.row + place.run * kNormalRun);
                }
                place.advance(runs_of_row);
            }
        };
        RunPlace ahead{0, int(first - top * pieces.of_row) * kPieceRuns + int(threadIdx.x)};
        if (ahead.run >= runs_of_row) {
            ahead = {ahead.run / runs_of_row, ahead.run % runs_of_row};
        }
        RunPlace place = ahead;
        Runs runs, next;
        load(runs, ahead);  // under way while statistics are merged
        sync_block();       // the totals before have been read
        merge_totals(totals, sets, p.num_sets, last_row + 1);
        sync_block();
        while (is_own(place)) {
            load(next, ahead);
            store(runs, place);
            load(runs, ahead);
            store(next, place);
        }
        // Columns behind the last whole run.
        for (int i = threadIdx.x; i < (last_row + 1) * kNormalRun; i += kNumThreads) {
            const int row = i / kNormalRun, col = whole * kNormalRun + i % kNormalRun;
            const int64_t piece = (top + row + 1) * pieces.of_row - 1;
            if (col >= p.n || piece < first || piece >= pieces.next) continue;
            const float largest = sets[row * p.num_sets + col / kSetColumns].max;
            const float scale = exp2_approx((largest - totals[row].max) * kLog2E) * totals[row].sum;
            Out& share = rows[row * p.y.row + col];
            share = from_float<Out>(to_float(share) * scale);
        }
    }
}
