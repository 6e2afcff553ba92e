// Which queries and keys a block of an attention kernel computes, and in which order.
#pragma once
#include "attention/mask.cuh"
#include "common/fast_divmod.cuh"

// Strides of batch, head and row, in elements.
struct AttentionStrides { int64_t batch, head, row; };

// Order of the query tiles of all heads.  Heads whose keys and values fit L2 together form a
// section.  Within a section, tiles go from the last, which has the most keys if causal, to the
// first.  The host computes the divisors: a block must know its tile before it can load.
struct QueryTileOrder {
    int64_t tiles;                 // of a head
    FastDivmod section;            // tiles of a section
    FastDivmod heads, last_heads;  // of a section, and of a shorter section at the end
    int64_t whole_sections;        // sections without the shorter one
};

struct AttentionParams {
    AttentionStrides q, k, v, out, stats;
    int64_t batch, sq, sk, head_dim, head_dim_v;
    FastDivmod heads, group;  // heads of queries; those that share a head of keys
    QueryTileOrder order;
    int64_t total_q, total_k;  // varlen: total rows; else 0
    MaskParams mask;
    // Scores are q k^T, times score_scale if prescale.  score * exponent_scale is the exponent in
    // base 2, score * unit in base e.
    float score_scale, exponent_scale, unit;
    int32_t prescale, causal, offset, bottom_right, padding;
};

// The additional fields of GeneralParams: options of a score, and windows (attention/score.cuh).
struct ScoreParams {
    int64_t slope_batch, slope_head;  // strides of alibi_slopes
    int64_t q_rows, k_rows;           // padded batches in varlen tensor maps: rows per element
    int32_t left, right;              // keys from i + offset - left to i + offset + right; -1: any
    float softcap, softcap_exponent;  // exponent: 2 log2(e) * scale / softcap; softcap 0: none
};
struct GeneralParams : AttentionParams { ScoreParams options; };

DEVICE int clamp_index(int64_t x, int64_t low, int64_t high) {
    return int(x < low ? low : x > high ? high : x);
}

// Offsets of a head, in element `batch` of a batch or in sequence `batch` of a varlen call.  Varlen
// arrays have a batch stride of 0; the batch stride of paged caches is the stride of pages.
struct AttentionHead {
    int batch, head, kv_head;
    int sq, sk, offset;        // query i keeps keys j <= i + offset, if causal
    int64_t q_first, k_first;  // rows before the sequence

    DEVICE static AttentionHead of(const AttentionParams& params, const int32_t* cu_seqlens_q,
                                   const int32_t* cu_seqlens_k, int number) {
        AttentionHead h;
        h.batch = number;
        h.head = params.heads.divide(h.batch);
        h.kv_head = h.head;
        params.group.divide(h.kv_head);
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
            h.batch = 0;  // varlen arrays have no batch
        }
        return h;
    }
    // Without cu_seqlens_q, cu_seqlens_k has the lengths of a padded batch, or is null.
    DEVICE static AttentionHead of(const GeneralParams& params, const int32_t* cu_seqlens_q,
                                   const int32_t* cu_seqlens_k, int number) {
        const AttentionParams& plain = params;
        AttentionHead h = of(plain, cu_seqlens_q, cu_seqlens_k, number);
        h.batch = number;  // varlen: strides of batches are 0
        params.heads.divide(h.batch);
        if (!cu_seqlens_q && cu_seqlens_k) {
            h.sk = clamp_index(cu_seqlens_k[h.batch], 0, params.sk);
            if (params.bottom_right) h.offset += h.sk - int(params.sk);
            h.q_first = h.batch * params.options.q_rows;
            h.k_first = h.batch * params.options.k_rows;
        }
        return h;
    }
    // Head of sequence `batch`, whose seq_lens[batch] keys are in pages.
    DEVICE static AttentionHead of_pages(const AttentionParams& params, const int32_t* cu_seqlens_q,
                                         const int32_t* seq_lens, int number) {
        AttentionHead h = of(params, nullptr, nullptr, number);
        h.q_first = clamp_index(cu_seqlens_q[h.batch], 0, params.total_q);
        const int q_end = clamp_index(cu_seqlens_q[h.batch + 1], h.q_first, params.total_q);
        h.sq = clamp_index(q_end - h.q_first, 0, params.sq);
        h.sk = clamp_index(seq_lens[h.batch], 0, params.sk);
        h.offset = params.bottom_right ? h.sk - h.sq : 0;
        return h;
    }
    // The same, uniform over the warp.
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
    // `row` keeps only keys below this.
    DEVICE int limit(const AttentionParams& params, int row) const {
        const int seen = row + offset + 1;
        return params.causal && seen < sk ? seen : sk;
    }
    DEVICE int limit(const GeneralParams& params, int row) const {
        const int right = params.options.right, seen = row + offset + right + 1;
        return right >= 0 && seen < sk ? seen : sk;
    }
    // `row` keeps no keys below this.
    DEVICE int first_key(const AttentionParams&, int) const { return 0; }
    DEVICE int first_key(const GeneralParams& params, int row) const {
        const int left = params.options.left, first = row + offset - left;
        return left >= 0 && first > 0 ? first : 0;
    }
};

// Head and query tile of a block.
struct AttentionWorkTile {
    int head, tile;

    DEVICE static AttentionWorkTile of(const AttentionParams& params, int index) {
        const QueryTileOrder& order = params.order;
        int section = index;
        int number = order.section.divide(section);
        const bool whole = section < int(order.whole_sections);
        const int head = (whole ? order.heads : order.last_heads).divide(number);
        return {section * order.heads.divisor + head, int(order.tiles) - 1 - number};
    }
    // The same order for a sequence: `all` heads with `tiles` query tiles each.
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

// Iterates over the key tiles that a query tile needs, in descending order: tiles below `end`, and
// with a block mask only tiles of blocks that one of its block rows keeps.  Only the first tile can
// reach past `end`.  kWarps: whole warps iterate, and keep the state uniform; serves calls without
// a block mask, too.  kWindow: only tiles from `begin` on, the first key of a tile; otherwise
// `begin` is 0.
template <int kTileM, int kTileN, bool kBlocks, bool kWarps = false, bool kWindow = false>
struct KeyTiles {
    int key, begin;  // key: the tile's first key

    DEVICE KeyTiles(const HeadMask&, int, int, int begin, int end)
        : key(end > 0 ? ((end - 1) / kTileN + 1) * kTileN : 0), begin(kWindow ? begin : 0) {}
    // Advances.  Returns false if no tile is left.
    DEVICE bool next() {
        key -= kTileN;
        return key >= begin;
    }
    DEVICE bool more() const { return key >= begin + kTileN; }  // after this one
};
template <int kTileM, int kTileN, bool kWarps, bool kWindow>
struct KeyTiles<kTileM, kTileN, true, kWarps, kWindow> {
    static constexpr int kMaxLists = kTileM > 64 ? kTileM / 64 : 1;
    static constexpr int kNone = -1;
    int key, begin, end, first_key;  // first_key: the block's first key, from `begin` on
    int kv_shift, list_step;
    const int32_t* indices;                // the first list
    int left[kMaxLists], last[kMaxLists];  // per list: blocks left; the last of these, prefetched

    // row: the tile's first query; sq: queries of the head.
    DEVICE KeyTiles(const HeadMask& mask, int row, int sq, int begin, int end)
        : key(0),
          begin(kWindow ? begin : 0),
          end(end),
          first_key(0x7fffffff),
          kv_shift(mask.params.kv_shift),
          list_step(mask.params.kv_blocks) {
        if (kWarps && mask.params.kind != kBlockMask) {  // like one block of all keys
            key = end > 0 ? (end + kTileN - 1) & -kTileN : 0;
            first_key = kWindow ? begin : 0;
#pragma unroll
            for (int i = 0; i < kMaxLists; ++i) left[i] = 0, last[i] = kNone;
            return;
        }
        const int q_block = row >> mask.params.q_shift;
        indices = mask.arrays.kv_indices + mask.block(q_block, 0);
#pragma unroll
        for (int i = 0; i < kMaxLists; ++i) {
            const int first = row + i * 64;  // blocks have at least 64 rows
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
        // No block below this one is in the window, either.
        if constexpr (kWindow) {
            if (last[i] != kNone && (last[i] + 1) << kv_shift <= begin) last[i] = kNone;
        }
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
            last[i] = of_all(last[i]);  // only here: waits for the load
            block = last[i] > block ? last[i] : block;
        }
        if (block == kNone) return false;
#pragma unroll
        for (int i = 0; i < kMaxLists; ++i) {
            if (last[i] == block) drop(i);
        }
        first_key = block << kv_shift;
        const int block_end = first_key + (1 << kv_shift);
        if constexpr (kWindow) first_key = first_key < begin ? begin : first_key;
        const int tiles_end = (end + kTileN - 1) & -kTileN;
        key = (block_end < tiles_end ? block_end : tiles_end) - kTileN;
        return true;
    }
};
