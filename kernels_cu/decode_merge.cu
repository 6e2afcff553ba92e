// decode_merge.cu: out = (sum over chunks of w_c * O_c) / (sum of w_c * l_c), w_c = 2^(e_c - max e), of
// the partial results of decode_attention.cu.
//
// The sums' order follows from the number of chunks alone: warps of 32 lanes take every kWarps-th chunk
// in turn, and their sums are added in the warps' order.  Sequences of one chunk are finished already.
// Constants: Element, kDim (that of decode_attention.cu), kMaxChunks.  Launch: grid (batch * heads * queries), block (kNumThreads).
#include "parts/decode_task.cuh"

constexpr int kLanes = 32;  // that read one chunk's values
constexpr int kWarps = kNumThreads / kLanes;
constexpr int kVectors = (kDim + 127) / 128;  // of 4 values, of a lane
static_assert(kMaxChunks <= kNumThreads, "a thread for each chunk");

KERNEL void decode_merge(const int* seq_lens, float* partial_memory, Element* out, float* lse,
                         const DecodeParams params) {
    SHARED(PartialSum, sums, [kMaxChunks]);
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

    if (tid < num_chunks) sums[tid] = partials.sums[partials.first(batch_and_head, tid) + row];
    sync_block();
    float exponent = -kInfinity;
    for (int c = 0; c < num_chunks; ++c) exponent = maximum(exponent, sums[c].exponent);
    const float finite = exponent == -kInfinity ? 0.0f : exponent;
    if (tid < num_chunks) weights[tid] = exp2_approx(sums[tid].exponent - finite);
    sync_block();

    float mine[kVectors][4] = {};
#pragma unroll 8
    for (int c = warp; c < num_chunks; c += kWarps) {
        const float* chunk = partials.values + (partials.first(batch_and_head, c) + row) * kDim;
        const float weight = weights[c];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const int col = (v * kLanes + lane) * 4;
            if (col >= kDim) break;
            const Bytes<16> four = load_vector_read_only<16>(chunk + col);
#pragma unroll
            for (int i = 0; i < 4; ++i) mine[v][i] += weight * bit_cast<float>(four.words[i]);
        }
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) totals[warp][(v * kLanes + lane) * 4 + i] = mine[v][i];
    }
    sync_block();

    float sum = 0.0f;
    for (int c = 0; c < num_chunks; ++c) sum += weights[c] * sums[c].sum;
    const OutputRow place(params, batch, batch_and_head % params.num_kv_heads, row);
    const float factor = normalizer(sum);
    for (int col = tid; col < params.dim_v; col += kNumThreads) {
        float total = totals[0][col];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) total += totals[w][col];
        out[place.out + col * params.out[3]] = from_float<Element>(total * factor);
    }
    if (lse && tid == 0) lse[place.lse] = log_sum_exp({exponent, sum});
}
