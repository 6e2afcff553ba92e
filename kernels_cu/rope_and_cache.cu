// rope_and_cache.cu: RMS norm of the heads of q and k, rotary positions, and k and v to the cache.
//   y = x / sqrt(mean(x^2) + eps) * weight;  (a, b) = (a cos t - b sin t, b cos t + a sin t) for
//   each pair of y, t = position * inv_freq[pair]; one rounding, of 8-bit caches after a division.
// A block has a run of head vectors, which may begin and end within a token: the heads of q, k and,
// with a cache, v of one token after the other.  It computes each angle of its tokens once.
// Types: Element.  Constants: kVectorWidth, kLoads (rope/head_vector.cuh), kVectors: of each
// thread, kTableFloats, kMaxTokens: of a block.  Launch: grid (blocks), block (kNumThreads).
#include "parts/sine_cosine.cuh"
#include "rope/head_vector.cuh"

using namespace rope;

// A token of the block, and where its keys and values go.
struct Token {
    int32_t sequence, number, position;  // number: in the sequence
    int32_t page, slot;                  // page: or sequence
    int32_t has_slot;

    DEVICE void find_slot(const RopeParams& p, const int* block_table) {
        page = sequence, slot = p.has_cache ? position : number;
        has_slot = !p.has_cache || (position >= 0 && position < p.num_slots);
        if (p.page_size == 0 || !has_slot) return;
        const int index = position / p.page_size;
        page = block_table[sequence * p.table_strides[0] + index * p.table_strides[1]];
        slot = position - index * p.page_size;
        has_slot = page >= 0 && page < p.num_pages;
    }
};

KERNEL void rope_and_cache(const Element* q, const Element* k, const Element* v,
                           const int* positions, const float* inv_freq, const void* q_weight,
                           const void* k_weight, const int* block_table, Element* out, void* k_out,
                           void* v_out, float* k_scale, float* v_scale, const RopeParams p) {
    SHARED(float, floats, [kTableFloats]);
    SHARED(Token, tokens, [kMaxTokens]);
    const int lane = threadIdx.x & ((1 << p.lanes_log2) - 1);
    const int first_vector = blockIdx.x * p.vectors_per_block;
    const int left = p.num_vectors - first_vector;
    const int num_vectors = left < p.vectors_per_block ? left : p.vectors_per_block;
    const int first_token = first_vector / p.num_heads;
    const int first_head = first_vector - first_token * p.num_heads;
    const int num_tokens = (first_head + num_vectors - 1) / p.num_heads + 1;
    const int first_sequence = first_token / p.seq_len;
    const int first_in_sequence = first_token - first_sequence * p.seq_len;

    // Requested before the vectors, which wait for less.
    const bool has_token = int(threadIdx.x) < num_tokens;
    Token mine{};
    if (has_token) {
        const int number = first_token + int(threadIdx.x);
        mine.sequence = number / p.seq_len, mine.number = number - mine.sequence * p.seq_len;
        mine.position =
            positions[mine.sequence * p.position_strides[0] + mine.number * p.position_strides[1]];
    }

    HeadVector vectors[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        HeadVector& x = vectors[i];
        const int number = (int(threadIdx.x) + i * kNumThreads) >> p.lanes_log2;
        x.exists = number < num_vectors;
        x.head = first_head + number, x.token = 0;
#pragma unroll 1
        while (x.exists && x.head >= p.num_heads) x.head -= p.num_heads, ++x.token;
        int of_sequence = first_in_sequence + x.token, in_batch = first_sequence;
#pragma unroll 1
        while (of_sequence >= p.seq_len) of_sequence -= p.seq_len, ++in_batch;
        const int of_kv = x.head - p.num_q_heads;
        x.kind = of_kv < 0 ? kQuery : of_kv < p.num_kv_heads ? kKey : kValue;
        const bool is_q = x.kind == kQuery, is_k = x.kind == kKey;
        x.head = is_q ? x.head : is_k ? of_kv : of_kv - p.num_kv_heads;
        const auto stride = [&](int dim) {
            return is_q ? p.q_strides[dim] : is_k ? p.k_strides[dim] : p.v_strides[dim];
        };
        const Element* const from = is_q ? q : is_k ? k : v;
        x.load(p, from + in_batch * stride(0) + of_sequence * stride(1) + x.head * stride(2),
               kVectorWidth > 1 ? 1 : stride(3), lane);
    }

    const bool has_weights = q_weight || k_weight;
    const int num_pairs = p.num_pairs();
    if (has_token) tokens[threadIdx.x].position = mine.position;
    if (has_weights) {
        for (int i = threadIdx.x; i < num_pairs; i += kNumThreads) {
            const Columns columns(p, i, 1);
            const auto fill = [&](const void* weight, int64_t stride, int dtype, float* to) {
                if (!weight) return;
                to[i] = load_element(weight, columns.first * stride, dtype);
                if (columns.has_second)
                    to[num_pairs + i] = load_element(weight, columns.second * stride, dtype);
                else to[num_pairs + i] = 0.0f;
            };
            fill(q_weight, p.q_weight_stride, p.q_weight_dtype, floats);
            fill(k_weight, p.k_weight_stride, p.k_weight_dtype, floats + 2 * num_pairs);
        }
    }
    sync_block();
    float* const angles = floats + (has_weights ? 4 * num_pairs : 0);
    if (has_token) {
        mine.find_slot(p, block_table);
        Token& token = tokens[threadIdx.x];  // others read the position
        token.sequence = mine.sequence, token.number = mine.number;
        token.page = mine.page, token.slot = mine.slot, token.has_slot = mine.has_slot;
    }
    for (int i = kNumThreads - 1 - int(threadIdx.x); i < num_tokens * p.half; i += kNumThreads) {
        const int of_block = i / p.half, pair = i - of_block * p.half;
        const double angle =
            double(tokens[of_block].position) * double(inv_freq[pair * p.inv_freq_stride]);
        const SineCosine found = sine_cosine(angle);
        float* const cosine = angles + 2 * of_block * p.half + pair;
        cosine[0] = found.cosine * p.attention_factor;
        cosine[p.half] = found.sine * p.attention_factor;
    }
    sync_block();

    const Tables tables{floats, angles};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        HeadVector& x = vectors[i];
        const bool is_q = x.kind == kQuery, is_k = x.kind == kKey;
        x.unpack_pairs(p, lane);
        if (has_weights)
            x.normalize(p, tables, lane, is_q ? q_weight != nullptr : is_k && k_weight);
        if (x.exists && (is_q || is_k)) x.rotate(p, tables, lane);
        const float largest = p.scales_per_token ? x.largest(p) : 0.0f;
        if (!x.exists) continue;
        const Token& token = tokens[x.token];
        if (is_q) {
            Element* const to = out + token.sequence * p.out_strides[0] +
                                token.number * p.out_strides[1] + x.head * p.out_strides[2];
            x.store(p, to, kVectorWidth > 1 ? 1 : p.out_strides[3], lane, 1.0f);
            continue;
        }
        if (!token.has_slot) continue;
        const auto stride = [&](int dim) {
            return is_k ? p.k_out_strides[dim] : p.v_out_strides[dim];
        };
        const int64_t offset = token.page * stride(0) + token.slot * stride(1) + x.head * stride(2);
        const int64_t step = kVectorWidth > 1 ? 1 : stride(3);
        void* const to = is_k ? k_out : v_out;
        if (p.cache_dtype == dtype_of<Element>()) {
            Element* const row = static_cast<Element*>(to) + offset;
            if (is_k) x.store(p, row, step, lane, 1.0f);
            else x.store_loaded(p, row, step, lane);
            continue;
        }
        const auto scale_stride = [&](int dim) {
            return is_k ? p.k_scale_strides[dim] : p.v_scale_strides[dim];
        };
        const int64_t of_scale =
            token.page * scale_stride(0) + token.slot * scale_stride(1) + x.head * scale_stride(2);
        float* const scales = is_k ? k_scale : v_scale;
        float factor;
        if (p.scales_per_token) {
            const rows::QuantizeScale scale(largest, rows::largest_finite(p.cache_dtype));
            if (lane == 0) scales[of_scale] = scale.decode;
            factor = scale.encode;
        } else {
            factor = 1.0f / (scales ? scales[of_scale] : is_k ? p.k_scale : p.v_scale);
        }
        if (p.cache_dtype == kE4m3) x.store(p, static_cast<e4m3*>(to) + offset, step, lane, factor);
        else x.store(p, static_cast<int8_t*>(to) + offset, step, lane, factor);
    }
}
