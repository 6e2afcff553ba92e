// rope_and_cache.cu: RMS norm of the heads of q and k, rotary embedding, and writes of k and v to
// the cache.
//   y = x / sqrt(mean(x^2) + eps) * weight;  (a, b) = (a cos t - b sin t, b cos t + a sin t) for
//   each pair of y, t = position * inv_freq[pair], or cos t and sin t read from row `position` of
//   a table.  Results are rounded once; 8-bit caches divide by their scale before.
// Each token has the heads of q, then k, then (with a cache) v, numbered in a row.  A group of
// 2^lanes_log2 threads has one head of kTokens tokens at a time, so that what depends on the head
// alone is computed once for all of them.  A block computes each angle of its tokens once.
// Types: Element.  Constants: kVectorWidth, kLoads (rope/head_vector.cuh), kTokens (per block),
// kTableFloats (at least the floats of Tables).
// Launch: grid (blocks_per_token * ceil(p.num_tokens / kTokens)), block (kNumThreads).
#include "rope/block.cuh"

using namespace rope;

KERNEL void rope_and_cache(const Element* q, const Element* k, const Element* v,
                           const int* positions, const float* rotation, const void* q_weight,
                           const void* k_weight, const int* block_table, Element* out, void* k_out,
                           void* v_out, float* k_scale, float* v_scale, const RopeParams p) {
    wait_for_previous_grid();
    SHARED(float, floats, [kTableFloats]);
    SHARED(Slot, slots, [kTokens]);
    const int lane = threadIdx.x & ((1 << p.lanes_log2) - 1);
    int run = blockIdx.x;
    const int part = p.blocks_per_token.divide(run);
    const int first_token = run * kTokens, num_tokens = tokens_from(p, first_token);
    Token tokens[kTokens];
    find_tokens(p, first_token, tokens);
    const int group = int(threadIdx.x) >> p.lanes_log2, groups = kNumThreads >> p.lanes_log2;
    Head head(p, group + part * groups);
    const Inputs inputs{q, k, v};
    const Outputs outputs{out, k_out, v_out, k_scale, v_scale};
    HeadVector vectors[kTokens];
    load_heads(p, head, inputs, tokens, num_tokens, lane, vectors);
    const bool has_weights = q_weight || k_weight;
    const Tables tables{floats, floats + (has_weights ? 4 * p.num_pairs() : 0)};
    if (has_weights) tables.fill_weights(p, q_weight, k_weight);
    fill_tokens(p, slots, tables, first_token, num_tokens, positions, rotation, block_table);
    sync_block();
#pragma unroll 1
    while (true) {
        store_heads(p, head, outputs, tokens, num_tokens, slots, tables, q_weight, k_weight, lane,
                    vectors);
        head = Head(p, head.number + groups * p.blocks_per_token.divisor);
        if (!vote_any(head.number < p.num_heads)) break;
        load_heads(p, head, inputs, tokens, num_tokens, lane, vectors);
    }
}
