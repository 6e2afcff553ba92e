// Attention in three launches with all scores in global memory, a baseline for attention/block.cuh.
//
// Step 0: scores (B, H, Sq, Sk) = q k^T, scaled and masked; one thread per score.
// Step 1: exp(score - row max) and the row statistics; 32 threads per row.
// Step 2: out = scores v / row sum; one thread per element.
// Constants: Element, kGeneral.  Launch: grid (ceil(threads of the step / kNumThreads)), block
// (kNumThreads).
#pragma once
#include "attention/score.cuh"

using Score = Choose<kGeneral, GeneralPolicy<Element>::Type, PlainScore>::Type;
using Params = Score::Params;

// The head of global row `row`; in_head: index of the row in the head.
DEVICE AttentionHead head_of(const Params& params, const int32_t* lengths, int64_t row,
                             int& in_head) {
    in_head = int(row % params.sq);
    return AttentionHead::of(params, nullptr, lengths, int(row / params.sq));
}

struct OneScore {
    float& score;
    int position, key;

    template <class F>
    DEVICE void operator()(const F& f) const {
        f(score, float(position - key));
    }
    template <class F>
    DEVICE void at_positions(const F& f) const {
        f(score, position, key);
    }
};
DEVICE float score_of(const Params& params, const Score::Arrays& arrays, const int32_t* lengths,
                      const Element* q, const Element* k, int64_t all_rows, int col) {
    int row;
    const AttentionHead head = head_of(params, lengths, all_rows, row);
    const HeadMask mask = HeadMask::of(params.mask, arrays, head.batch, head.head);
    if (col >= head.limit(params, row)) return -kInfinity;
    if (kGeneral && col < head.first_key(params, row)) return -kInfinity;
    const Element* x = q + head.q_offset(params.q) + row * params.q.row;
    const Element* y = k + head.k_offset(params.k) + col * params.k.row;
    float sum = 0.0f;
    for (int i = 0; i < int(params.head_dim); ++i) sum += to_float(x[i]) * to_float(y[i]);
    if (params.prescale) sum *= params.score_scale;
    const OneScore one{sum, row + head.offset, col};
    Score::apply(params, arrays, head, one);
    if constexpr (Score::kMask) Score::mask(params, arrays, head, one);
    if (params.mask.kind == kNoMask) return sum;
    if (params.mask.kind != kBlockMask) return mask.of_array(sum, row, col);
    const int type = mask.block_type(row, col);
    bool keeps = type != kMaskedBlock && col < mask.block_limit(row, type);
    if (type == kPartialBlock) keeps = *mask.partial(row, col) != 0;
    return keeps ? sum : -kInfinity;
}

struct Statistics {
    float* lse;
    float* row_max;
    float* row_sum;
};

template <class Combine>
DEVICE float across_group(float x, Combine combine) {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) x = combine(x, shuffle_xor(x, bit));
    return x;
}

// Softmax of one row by 32 threads, which can be half a warp.  exists: false past the last row.
// sink: a score without a key; -inf: none.
DEVICE void softmax_row(const Params& params, float* scores, float* total,
                        const Statistics& statistics, float sink, int64_t row, bool exists) {
    const int64_t end = exists ? params.sk : 0;
    const int lane = int(threadIdx.x) % 32;
    float top = sink, sum = 0.0f;
    for (int64_t i = lane; i < end; i += 32) top = maximum(top, scores[i]);
    top = across_group(top, Max());
    const float scale = params.exponent_scale, origin = top == -kInfinity ? 0.0f : top;
    for (int64_t i = lane; i < end; i += 32) {
        scores[i] = exp2_approx((scores[i] - origin) * scale);
        sum += scores[i];
    }
    if (kGeneral && lane == 0 && sink != -kInfinity) sum += exp2_approx((sink - origin) * scale);
    sum = across_group(sum, Sum());
    if (lane != 0 || !exists) return;
    *total = sum;
    const float row_max = top == -kInfinity ? top : top * params.unit;
    if (statistics.lse) statistics.lse[row] = row_max + log_accurate(sum);
    if (statistics.row_max) statistics.row_max[row] = row_max;
    if (statistics.row_sum) statistics.row_sum[row] = sum;
}

DEVICE void naive_step(const Params& params, const Element* q, const Element* k, const Element* v,
                       Element* out, const Statistics& statistics, const Score::Arrays& arrays,
                       const int32_t* lengths, float* scores, int64_t step) {
    const int64_t rows = params.batch * params.heads.divisor * params.sq;
    const int64_t thread = int64_t(blockIdx.x) * kNumThreads + threadIdx.x;
    float* totals = scores + rows * params.sk;
    if (step == 0) {
        if (thread < rows * params.sk) {
            scores[thread] = score_of(params, arrays, lengths, q, k, thread / params.sk,
                                      int(thread % params.sk));
        }
    } else if (step == 1) {
        const int64_t row = thread / 32;
        float sink = -kInfinity;
        if constexpr (kGeneral) {
            int in_head;
            if (row < rows)
                sink = Score::sink(params, arrays, head_of(params, lengths, row, in_head));
        }
        softmax_row(params, scores + row * params.sk, totals + row, statistics, sink, row,
                    row < rows);
    } else if (thread < rows * params.head_dim_v) {
        const int64_t all_rows = thread / params.head_dim_v;
        const int col = int(thread % params.head_dim_v);
        int row;
        const AttentionHead head = head_of(params, lengths, all_rows, row);
        const Element* y = v + head.k_offset(params.v) + col;
        const float* x = scores + all_rows * params.sk;
        const float total = totals[all_rows];
        float sum = 0.0f;
        const int end = head.limit(params, row);
        for (int j = 0; j < end; ++j) {
            if (x[j] != 0.0f) sum += x[j] * to_float(y[j * params.v.row]);
        }
        out[head.q_offset(params.out) + row * params.out.row + col] =
            from_float<Element>(total == 0.0f ? 0.0f : sum / total);
    }
}
