// rope_and_cache.cu: RMS norm of the heads of q and k, rotary embedding, and writes of k and v to
// the cache.
//   y = x / sqrt(mean(x^2) + eps) * weight;  (a, b) = (a cos t - b sin t, b cos t + a sin t) for
//   each pair of y, t = position * inv_freq[pair], or cos t and sin t read from row `position` of
//   a table.  Results are rounded once; 8-bit caches divide by their scale before.
// A block computes a run of head vectors, which can begin and end within a token.  Each token has
// the heads of q, then k, then (with a cache) v.  A block computes each angle of its tokens once.
// Types: Element.  Constants: kVectorWidth, kLoads (rope/head_vector.cuh), kVectors: per thread,
// kTableFloats, kMaxTokens: per block.  Launch: grid (blocks), block (kNumThreads).
#include "rope/sine_cosine.cuh"
#include "rope/head_vector.cuh"

using namespace rope;

// A token of the block, and the cache slot of its keys and values.
struct Token {
    int32_t sequence, number;  // number: index in the sequence
    int32_t page, slot;        // page: the sequence if the cache is contiguous
    int32_t has_slot;

    Token() = default;  // trivial, because tokens are in shared memory
    DEVICE Token(const RopeParams& p, int token) {
        sequence = token / p.seq_len, number = token - sequence * p.seq_len;
    }
    DEVICE int position(const RopeParams& p, const int* positions) const {
        return positions[sequence * p.position_strides[0] + number * p.position_strides[1]];
    }
    DEVICE void find_slot(const RopeParams& p, const int* block_table, int position) {
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
                           const int* positions, const float* rotation, const void* q_weight,
                           const void* k_weight, const int* block_table, Element* out, void* k_out,
                           void* v_out, float* k_scale, float* v_scale, const RopeParams p) {
    wait_for_previous_grid();
    SHARED(float, floats, [kTableFloats]);
    SHARED(Token, tokens, [kMaxTokens]);
    const int lane = threadIdx.x & ((1 << p.lanes_log2) - 1);
    const int first_vector = blockIdx.x * p.vectors_per_block;
    const int left = p.num_vectors - first_vector;
    const int num_vectors = left < p.vectors_per_block ? left : p.vectors_per_block;
    const int first_token = first_vector / p.num_heads;
    const int first_head = first_vector - first_token * p.num_heads;
    const int num_tokens = (first_head + num_vectors - 1) / p.num_heads + 1;
    const Token first(p, first_token);

    // Positions are loaded before the vectors, because slots and angles depend on them.
    const bool has_token = int(threadIdx.x) < num_tokens;
    Token mine(p, first_token + (has_token ? int(threadIdx.x) : 0));
    const int position = mine.position(p, positions);

    HeadVector vectors[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        HeadVector& x = vectors[i];
        const int number = (int(threadIdx.x) + i * kNumThreads) >> p.lanes_log2;
        x.exists = number < num_vectors;
        x.head = first_head + number, x.token = 0;
#pragma unroll 1
        while (x.exists && x.head >= p.num_heads) x.head -= p.num_heads, ++x.token;
        int token = first.number + x.token, sequence = first.sequence;
#pragma unroll 1
        while (token >= p.seq_len) token -= p.seq_len, ++sequence;
        const int of_kv = x.head - p.num_q_heads;
        x.kind = of_kv < 0 ? kQuery : of_kv < p.num_kv_heads ? kKey : kValue;
        const bool is_q = x.kind == kQuery, is_k = x.kind == kKey;
        x.head = is_q ? x.head : is_k ? of_kv : of_kv - p.num_kv_heads;
        const auto stride = [&](int dim) {
            return is_q ? p.q_strides[dim] : is_k ? p.k_strides[dim] : p.v_strides[dim];
        };
        const Element* const from = is_q ? q : is_k ? k : v;
        x.load(p, from + sequence * stride(0) + token * stride(1) + x.head * stride(2),
               kVectorWidth > 1 ? 1 : stride(3), lane);
    }

    const bool has_weights = q_weight || k_weight;
    const int num_pairs = p.num_pairs();
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
    if (has_token) {
        mine.find_slot(p, block_table, position);
        tokens[threadIdx.x] = mine;
    }
    float* const angles = floats + (has_weights ? 4 * num_pairs : 0);
    for (int i = kNumThreads - 1 - int(threadIdx.x); i < num_tokens * p.half; i += kNumThreads) {
        const int of_block = i / p.half, pair = i - of_block * p.half;
        const int turns = Token(p, first_token + of_block).position(p, positions);
        const float* const from = rotation + pair * p.rotation_strides[1];
        SineCosine found;
        if (p.num_rows) {
            const int last = p.num_rows - 1, row = turns < 0 ? 0 : turns < last ? turns : last;
            const float* const cosines = from + row * p.rotation_strides[0];
            found = {cosines[p.half * p.rotation_strides[1]], cosines[0]};
        } else {
            found = sine_cosine(double(turns) * double(*from));
        }
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
        if (!is_q && !token.has_slot) continue;
        const auto stride = [&](int dim) {
            return is_q ? p.out_strides[dim] : is_k ? p.k_out_strides[dim] : p.v_out_strides[dim];
        };
        const int64_t offset = (is_q ? token.sequence : token.page) * stride(0) +
                               (is_q ? token.number : token.slot) * stride(1) + x.head * stride(2);
        const int64_t step = kVectorWidth > 1 ? 1 : stride(3);
        void* const to = is_q ? out : is_k ? k_out : v_out;
        if (is_q || p.cache_dtype == dtype_of<Element>()) {
            Element* const row = static_cast<Element*>(to) + offset;
            if (is_q || is_k) x.store(p, row, step, lane, 1.0f);
            else x.store_loaded(p, row, step, lane);
            continue;
        }
        const int64_t of_scale =
            is_k ? token.page * p.k_scale_strides[0] + token.slot * p.k_scale_strides[1] +
                       x.head * p.k_scale_strides[2]
                 : token.page * p.v_scale_strides[0] + token.slot * p.v_scale_strides[1] +
                       x.head * p.v_scale_strides[2];
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
