// 8-bit keys and values of the portable kernel, in pages, with scales
// (attention/cache_scales.cuh).
//
// Codes pass through registers.  They are loaded while the previous tile is multiplied, if
// registers suffice, and stored to shared memory as Element, in which they are exact.
// Types: CacheElement: e4m3 or int8_t; others: see attention/block.cuh.
#pragma once
#include "attention/cache_scales.cuh"
#include "attention/kv.cuh"
#include "common/vector.cuh"

struct KeyScaleTile { float k[kTileN], v[kTileN]; };
struct ScaledStorage {
    AttentionStorage attention;
    KeyScaleTile scales;
};

struct ScaledPagedKv {
    const CacheElement *k, *v;
    const int32_t *cu_seqlens_q, *seq_lens, *block_table;
    const PageParams& pages;
    const float *k_scale, *v_scale;
    const CacheScaleParams& scales;
    KeyScaleTile& tile;  // in shared memory

    class Copier : PagedTile {
        static_assert(kTileN <= kNumThreads, "a thread loads the scales of one key");
        const ScaledPagedKv& kv;
        const AttentionParams& params;
        int kv_head;
        TileScales<Layout, Rows, kRowFragments, kKeyFragments> scales;
        static constexpr bool kAhead = kHeadDim <= 128;  // registers suffice for codes loaded ahead
        int first_key, num_rows;                         // of the tile that was started last
        Vector<CacheElement, kPerChunk> codes[kPasses];  // of its keys or values
        float k_scale, v_scale;                          // of this thread's key

        // Recomputed at each use, to save registers.
        DEVICE Cache<CacheElement> keys() const {
            return {kv.k + kv_head * params.k.head, params.k, int(params.head_dim)};
        }
        DEVICE Cache<CacheElement> values() const {
            return {kv.v + kv_head * params.v.head, params.v, int(params.head_dim_v)};
        }
        DEVICE KvScales of_head() const {
            return KvScales(kv.scales, kv.k_scale, kv.v_scale, kv_head);
        }
        DEVICE void start(const Cache<CacheElement>& from, int key, int rows) {
            first_key = key;
            num_rows = rows;
            if constexpr (kAhead) load(from);
        }
        DEVICE void finish(const Cache<CacheElement>& from, KeyTile& to) {
            if constexpr (!kAhead) load(from);
            store(to);
        }
        DEVICE void load(const Cache<CacheElement>& from) {
            for_each_chunk(from, first_key, num_rows, [&](int i, const CacheElement* vector, int) {
                codes[i] = {};
                if (from.exists && has(i, num_rows)) codes[i].load(vector);
            });
        }
        // Scales of keys past the end become zero, because NaN times a zero probability is NaN.
        DEVICE void load_scales() {
            if (!scales.of_keys && !scales.of_values) return;
            const KvScales all = of_head();
            int key = first_key + int(threadIdx.x);
            const bool exists = int(threadIdx.x) < num_rows;
            const int64_t page = page_of(key, exists);
            key = pages.size.divide(key);
            const auto scale_of = [&](const CacheScales& x) {
                const bool has = exists && x.tokens;
                return has ? x.tokens[page * x.page_stride + key * x.stride] : 0.0f;
            };
            k_scale = scale_of(all.k);
            v_scale = scale_of(all.v);
        }
        DEVICE void store(KeyTile& to) const {
#pragma unroll
            for (int i = 0; i < kPasses; ++i) {
                if (KeyTile::kRows < kAtOnce && row >= KeyTile::kRows) break;
                float elements[kPerChunk];
#pragma unroll
                for (int j = 0; j < kPerChunk; ++j) elements[j] = codes[i][j];
                Vector<Element, kPerChunk> converted;
                converted.from_floats(elements);
                to.chunks[chunk_of(i)] = converted.bytes[0];
            }
        }

      public:
        DEVICE Copier(const ScaledPagedKv& kv, const AttentionParams& params,
                      const AttentionHead& head)
            : PagedTile(kv.block_table + head.batch * kv.pages.table_stride, kv.pages),
              kv(kv),
              params(params),
              kv_head(head.kv_head),
              scales(of_head()) {}
        // Like PagedKv's.
        template <bool kUnpredicated>
        DEVICE void start_keys(KeyTile&, int first_key, int num_rows) {
            const int rows = kUnpredicated ? KeyTile::kRows : clamp_to(num_rows, KeyTile::kRows);
            look_up(first_key, rows);
            start(keys(), first_key, rows);
        }
        template <bool kUnpredicated>
        DEVICE void start_values(KeyTile&, int first_key, int num_rows) {
            const int rows = kUnpredicated ? KeyTile::kRows : clamp_to(num_rows, KeyTile::kRows);
            start(values(), first_key, rows);
            load_scales();
        }
        // Like PlainTiles'.
        DEVICE void finish_keys(KeyTile& to) { finish(keys(), to); }
        DEVICE void finish_values(KeyTile& to) {
            finish(values(), to);
            if ((scales.of_keys || scales.of_values) && int(threadIdx.x) < kTileN) {
                kv.tile.k[threadIdx.x] = k_scale;
                kv.tile.v[threadIdx.x] = v_scale;
            }
        }
        DEVICE void scale_scores(Scores& scores) const {
            scales.scale_scores(scores, kv.tile.k);
            if (scales.factor == 1.0f) return;
#pragma unroll
            for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
                for (int n = 0; n < kKeyFragments; ++n) {
#pragma unroll
                    for (int i = 0; i < Layout::kCount; ++i)
                        scores.at(m, n).values[i] *= scales.factor;
                }
            }
        }
        template <class Rescale>
        DEVICE void scale_probabilities(Scores& probabilities, const Rescale& rescale) {
            if (vote_any(scales.exceeds(kv.tile.v))) rescale(scales.grow(kv.tile.v));
            scales.scale_probabilities(probabilities, kv.tile.v);
        }
        DEVICE float factor() const { return scales.of_values ? scales.unit : of_head().v.factor; }
    };

    DEVICE AttentionHead head(const AttentionParams& params, int number) const {
        return AttentionHead::of_pages(params, cu_seqlens_q, seq_lens, number);
    }
    DEVICE Copier copier(const AttentionParams& params, const AttentionHead& head) const {
        return {*this, params, head};
    }
};
