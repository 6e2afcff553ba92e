// The second half of a softmax whose y has exponentials relative to the maximum of each set of
// kSetColumns columns (gemm/epilogue/partial_softmax.cuh): scales each set by the row's statistics.
#pragma once
#include "common/math.cuh"
#include "common/max_sum.cuh"
#include "logits/normalize.cuh"
#include "common/vector.cuh"

// Scales columns [begin, end) of one row, in whole runs, as TMA stored them.  y: contiguous,
// aligned to 16 bytes.
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
    load(runs, run);  // overlaps the merge of the row's statistics
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

// Called by all blocks of the grid.  of_warps: kBlockWarps elements in shared memory.
template <class Out>
DEVICE void scale_probabilities(Out* y, const MaxSum* statistics, const NormalizeParams& p,
                                MaxSum* of_warps) {
    for_each_own_row(p, [&](int64_t row, int64_t begin, int64_t end) {
        scale_row(y + row * p.y.row, statistics + row * p.num_sets, p.num_sets, of_warps, begin,
                  end);
    });
}
