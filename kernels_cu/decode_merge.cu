// decode_merge.cu: out = (sum over chunks of w_c * O_c) / (sum of w_c * l_c), w_c = 2^(e_c - max e), of
// the partial results of decode_attention.cu.
//
// The sums' order follows from the number of chunks alone: warps of 32 lanes take every kWarps-th chunk
// in turn, and their sums are added in the warps' order; l_c are added by lanes, pairwise.  Sequences of one chunk are finished already.
// Constants: Element, kDim (that of decode_attention.cu), kMaxChunks.  Launch: grid (batch * heads * queries), block (kNumThreads).
#include "parts/decode_task.cuh"

constexpr int kLanes = 32;  // that read one chunk's values
constexpr int kWarps = kNumThreads / kLanes;
constexpr int kVectors = (kDim + 127) / 128;  // of 4 values, of a lane
constexpr int kBatch = 8;                     // chunks of a warp under way at once
constexpr int kRounds = kMaxChunks / kLanes;
static_assert(kRounds * kLanes == kMaxChunks, "lanes share the chunks' sums");

KERNEL void decode_merge(const int* seq_lens, float* partial_memory, Element* out, float* lse,
                         const DecodeParams params) {
    SHARED(float, weights, [kMaxChunks]);
    SHARED(float, totals, [kWarps][kVectors * 128]);
    const int tid = int(threadIdx.x), lane = tid % kLanes, warp = tid / kLanes;
    const Partials partials(params, partial_memory);
    const int row = int(blockIdx.x) % partials.num_rows;
    const int64_t batch_and_head = int(blockIdx.x) / partials.num_rows;
    const int64_t batch = batch_and_head / params.num_kv_heads;
    const int num_keys = params.num_keys(seq_lens, batch);
    const int num_chunks = count_chunks(num_keys, params.chunk_size(num_keys));
    if (num_chunks == 1) return;

    Bytes<16> values[kBatch][kVectors];
    const auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int chunk = first + i * kWarps + warp;
            const int64_t place = partials.first(batch_and_head, chunk) + row;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                const int col = (v * kLanes + lane) * 4;
                if (chunk >= num_chunks || col >= kDim) continue;
                values[i][v] = load_vector_read_only<16>(partials.values + place * kDim + col);
            }
        }
    };
    load(0);  // while the weights are made

    PartialSum sums[kRounds];
    PartialSum total = {-kInfinity, 0.0f};
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
        const int chunk = i * kLanes + lane;
        const int64_t place = partials.first(batch_and_head, chunk) + row;
        sums[i] = total;
        if (chunk < num_chunks) sums[i] = partials.sums[place];
    }
#pragma unroll
    for (int i = 0; i < kRounds; ++i) total.exponent = maximum(total.exponent, sums[i].exponent);
    total.exponent = MergeFloats<Max>().across_lanes(total.exponent, 1, kLanes);
    const float finite = total.exponent == -kInfinity ? 0.0f : total.exponent;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
        const float weight = exp2_approx(sums[i].exponent - finite);
        total.sum += weight * sums[i].sum;
        if (warp == 0) weights[i * kLanes + lane] = weight;
    }
    total.sum = MergeFloats<Sum>().across_lanes(total.sum, 1, kLanes);
    sync_block();

    float mine[kVectors][4] = {};
#pragma unroll 1
    for (int first = 0; first < num_chunks; first += kBatch * kWarps) {
        if (first > 0) load(first);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int chunk = first + i * kWarps + warp;
            if (chunk >= num_chunks) continue;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    mine[v][j] += weights[chunk] * bit_cast<float>(values[i][v].words[j]);
                }
            }
        }
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) totals[warp][(v * kLanes + lane) * 4 + i] = mine[v][i];
    }
    sync_block();

    const OutputRow place(params, batch, batch_and_head % params.num_kv_heads, row);
    const float factor = normalizer(total.sum);
    for (int col = tid; col < params.dim_v; col += kNumThreads) {
        float value = totals[0][col];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) value += totals[w][col];
        out[place.out + col * params.out[3]] = from_float<Element>(value * factor);
    }
    if (lse && tid == 0) lse[place.lse] = log_sum_exp(total);
}
