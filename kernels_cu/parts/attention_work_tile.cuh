// Which queries and keys a block of an attention kernel works on, and in which order.
#include "parts/attention_mask.cuh"

// The step from a batch, head or row to the next, in elements.
struct AttentionStrides { int64_t batch, head, row; };

struct AttentionParams {
    AttentionStrides q, k, v, out, stats;
    int64_t batch, heads, kv_heads, sq, sk, head_dim, head_dim_v;
    int64_t tiles, heads_per_section;
    int64_t total_q, total_k;  // rows in all, of packed sequences; else 0
    MaskParams mask;
    // Scores are q k^T * score_scale where prescale, exponents that times exponent_scale in units
    // of log2, and `unit` makes scores units of e.
    float score_scale, exponent_scale, unit;
    int32_t prescale, causal, offset, bottom_right, padding;
};

DEVICE int clamp_index(int64_t x, int64_t low, int64_t high) {
    return int(x < low ? low : x > high ? high : x);
}

// Where a head's arrays begin: sequence `batch` of packed ones, or element `batch` of a batch.
struct AttentionHead {
    int batch, head, kv_head;
    int sq, sk, offset;        // query i keeps keys j <= i + offset, if causal
    int64_t q_first, k_first;  // rows before the sequence

    DEVICE static AttentionHead of(const AttentionParams& params, const int32_t* cu_seqlens_q,
                                   const int32_t* cu_seqlens_k, int number) {
        AttentionHead h;
        h.batch = number / int(params.heads);
        h.head = number - h.batch * int(params.heads);
        h.kv_head = h.head / int(params.heads / params.kv_heads);
        h.sq = int(params.sq);
        h.sk = int(params.sk);
        h.offset = params.offset;
        h.q_first = h.k_first = 0;
        if (cu_seqlens_q) {
            h.q_first = clamp_index(cu_seqlens_q[h.batch], 0, params.total_q);
            h.k_first = clamp_index(cu_seqlens_k[h.batch], 0, params.total_k);
            const int q_end = clamp_index(cu_seqlens_q[h.batch + 1], h.q_first, params.total_q);
            const int k_end = clamp_index(cu_seqlens_k[h.batch + 1], h.k_first, params.total_k);
            h.sq = clamp_index(q_end - h.q_first, 0, params.sq);
            h.sk = clamp_index(k_end - h.k_first, 0, params.sk);
            h.offset = params.bottom_right ? h.sk - h.sq : 0;
            h.batch = 0;  // there is one of all sequences
        }
        return h;
    }
    // The same, as whole warps work on it.
    DEVICE AttentionHead of_warp() const {
        return {uniform(batch), uniform(head),   uniform(kv_head),      uniform(sq),
                uniform(sk),    uniform(offset), uniform(int(q_first)), uniform(int(k_first))};
    }
    DEVICE int64_t q_offset(const AttentionStrides& s) const {
        return batch * s.batch + head * s.head + q_first * s.row;
    }
    DEVICE int64_t k_offset(const AttentionStrides& s) const {
        return batch * s.batch + kv_head * s.head + k_first * s.row;
    }
    // Keys from here on are not kept by `row`.
    DEVICE int limit(const AttentionParams& params, int row) const {
        const int seen = row + offset + 1;
        return params.causal && seen < sk ? seen : sk;
    }
};

// The head's number and the tile of queries of a block.  Heads whose keys and values fit in the L2
// cache together are a section; in it the tiles come from the last on, which has the most keys if
// any has more.
struct AttentionWorkTile {
    int head, tile;

    DEVICE static AttentionWorkTile of(const AttentionParams& params, uint32_t index) {
        return of(index, params.tiles, params.batch * params.heads, params.heads_per_section);
    }
    // Of `all` heads with so many tiles each.
    DEVICE static AttentionWorkTile of(uint32_t index, uint32_t tiles, uint32_t all,
                                       uint32_t per_section) {
        const uint32_t section = index / (per_section * tiles),
                       in_section = index % (per_section * tiles);
        const uint32_t rest = all - section * per_section,
                       heads = rest < per_section ? rest : per_section;
        const uint32_t number = in_section / heads;
        return {int(section * per_section + in_section % heads), int(tiles - 1 - number)};
    }
};

// The tiles of keys that a tile of queries needs, in descending order: those below `end`, and of a
// block mask those of blocks that at least one of its rows of blocks keeps.  The first one alone
// may reach beyond `end`.  kWarps: whole warps walk together, also where the mask is not of blocks.
template <int kTileM, int kTileN, bool kBlocks, bool kWarps = false>
struct KeyTiles {
    int key;  // the first one of the tile

    DEVICE KeyTiles(const HeadMask&, int, int, int end)
        : key(end > 0 ? ((end - 1) / kTileN + 1) * kTileN : 0) {}
    // Goes to the next tile; false: there is none.
    DEVICE bool next() {
        key -= kTileN;
        return key >= 0;
    }
    DEVICE bool more() const { return key >= kTileN; }  // after this one
};
template <int kTileM, int kTileN, bool kWarps>
struct KeyTiles<kTileM, kTileN, true, kWarps> {
    static constexpr int kMaxLists = kTileM > 64 ? kTileM / 64 : 1;
    static constexpr int kNone = -1;
    int key, end, first_key;  // first_key: of the block
    int kv_shift, list_step;
    const int32_t* indices;                // of the first list
    int left[kMaxLists], last[kMaxLists];  // blocks of each list; the last of them, read ahead

    // row, sq: the first query of the tile, and the queries of the head.
    DEVICE KeyTiles(const HeadMask& mask, int row, int sq, int end)
        : key(0),
          end(end),
          first_key(0x7fffffff),
          kv_shift(mask.params.kv_shift),
          list_step(mask.params.kv_blocks) {
        if (kWarps && mask.params.kind != kBlockMask) {  // one block, of all keys
            key = end > 0 ? (end + kTileN - 1) & -kTileN : 0;
            first_key = 0;
#pragma unroll
            for (int i = 0; i < kMaxLists; ++i) left[i] = 0, last[i] = kNone;
            return;
        }
        const int q_block = row >> mask.params.q_shift;
        indices = mask.arrays.kv_indices + mask.block(q_block, 0);
#pragma unroll
        for (int i = 0; i < kMaxLists; ++i) {
            const int first = row + i * 64;  // blocks are of 64 rows at least
            const bool own = i == 0 || (first & ((1 << mask.params.q_shift) - 1)) == 0;
            left[i] = of_all(
                own && first < sq ? mask.arrays.kv_num_blocks[mask.first_row + q_block + i] : 0);
            look(i);
            while (last[i] != kNone && last[i] << kv_shift >= end) drop(i);
        }
    }
    DEVICE static int of_all(int x) {
        if constexpr (kWarps) x = uniform(x);
        return x;
    }
    DEVICE void look(int i) {
        last[i] = left[i] > 0 ? indices[int64_t(i) * list_step + left[i] - 1] : kNone;
    }
    DEVICE void drop(int i) {
        --left[i];
        look(i);
    }
    DEVICE bool more() const {
        bool found = key - kTileN >= first_key;
#pragma unroll
        for (int i = 0; i < kMaxLists; ++i) found = found || last[i] != kNone;
        return found;
    }
    DEVICE bool next() {
        key -= kTileN;
        if (key >= first_key) return true;
        int block = kNone;
#pragma unroll
        for (int i = 0; i < kMaxLists; ++i) {
            last[i] = of_all(last[i]);  // only here, which waits for it
            block = last[i] > block ? last[i] : block;
        }
        if (block == kNone) return false;
#pragma unroll
        for (int i = 0; i < kMaxLists; ++i) {
            if (last[i] == block) drop(i);
        }
        first_key = block << kv_shift;
        const int block_end = first_key + (1 << kv_shift), tiles_end = (end + kTileN - 1) & -kTileN;
        key = (block_end < tiles_end ? block_end : tiles_end) - kTileN;
        return true;
    }
};
