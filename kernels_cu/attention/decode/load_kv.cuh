// Loads tiles of keys and values into shared memory by cp.async, from caches of any strides.
//
// With kWarpOwnsKeys each warp loads its own keys; otherwise all threads load all keys.
// Types: CacheElement.  Constants: kDim (D and Dv padded), kTileN (keys per tile), kStages.
#pragma once
#include "attention/decode/load_q.cuh"
#include "attention/decode/scales.cuh"
#include "attention/decode/warp_layout.cuh"
#include "attention/pages.cuh"

// kLoadThreads threads load the same keys: kKeysPerPass keys in each of kPasses passes.  A thread
// loads one vector of a key per pass.
constexpr int kPerVector = 16 / int(sizeof(CacheElement));
constexpr int kVectors = kDim / kPerVector;  // per key or value
constexpr int kLoadThreads = kWarpOwnsKeys ? kWarpSize : kNumThreads;
constexpr int kKeysPerPass = kLoadThreads / kVectors;
constexpr int kPasses = kTileN / (kNumThreads / kLoadThreads) / kKeysPerPass;
static_assert(kPasses * kKeysPerPass * kNumThreads == kTileN * kLoadThreads, "vectors of a tile");

constexpr int kColumnDim = kDim;
using KvColumn = SharedTile<kTileN, kDim* int(sizeof(CacheElement))>;
struct KvTile { KvColumn columns[1]; };
struct PlainKvStage { KvTile k, v; };
struct ScaledKvStage : PlainKvStage { float k_scales[kTileN], v_scales[kTileN]; };
using KvStage = Choose<kScaledCache, ScaledKvStage, PlainKvStage>::Type;
struct KvCache {
    const CacheElement* k;
    const CacheElement* v;
};

// Loads the scales of tokens: each thread loads the scales of one key per tile.
struct ScaleLoader {
    static constexpr int kKeys = kWarpOwnsKeys ? kTileN / kNumWarps : kTileN;
    static_assert(kKeys <= kLoadThreads, "a key a thread");
    CacheScales k, v;
    int index;  // of the thread's key in a tile; -1: none
    int page;   // of the thread's key in the next tile; contiguous caches: the batch element

    DEVICE ScaleLoader(const KvScales& scales, int batch) : k(scales.k), v(scales.v), page(batch) {
        const int thread = int(threadIdx.x) % kLoadThreads;
        const bool has_key = thread < kKeys && (k.tokens || v.tokens);
        index = has_key ? (kWarpOwnsKeys ? warp_first_key() : 0) + thread : -1;
    }
    DEVICE void load_page(const int* table, FastDivmod page_size, int tile_key, int end_key) {
        if (index < 0) return;
        int key = tile_key + index;
        const bool valid = key < end_key;
        page_size.divide(key);
        page = valid ? table[key] : 0;
    }
    // Scales of keys past the end become zero, because NaN times a zero probability is NaN.
    template <class Stage>
    DEVICE void load(Stage& stage, FastDivmod page_size, bool paged, int last_page, int tile_key,
                     int end_key) const {
        if (index < 0) return;
        int key = tile_key + index;
        const bool valid = key < end_key;
        if (paged) key = page_size.divide(key);
        const int64_t from = paged ? clamp_page(page, last_page) : page;
        if (k.tokens)
            copy_async<4>(&stage.k_scales[index], k.tokens + from * k.page_stride + key * k.stride,
                          valid);
        if (v.tokens)
            copy_async<4>(&stage.v_scales[index], v.tokens + from * v.page_stride + key * v.stride,
                          valid);
    }
};
struct NoScaleLoader {
    DEVICE NoScaleLoader(const KvScales&, int) {}
    DEVICE void load_page(const int*, FastDivmod, int, int) {}
    DEVICE void load(KvStage&, FastDivmod, bool, int, int, int) const {}
};

// Loads keys and values tile by tile.
struct KvLoader {
    // Contiguous: address of this thread's first key of the next tile; paged: of key 0 of page 0.
    const CacheElement* k;
    const CacheElement* v;
    const int* table;  // block table of the sequence, or null
    int64_t k_page_stride, v_page_stride, k_stride, v_stride;
    FastDivmod page_size;
    int last_page, end_key;
    int first_key, vector;  // this thread's key and vector in the first pass
    bool has_k, has_v;      // the vector is within D, within Dv
    int pages[kPasses];     // of this thread's keys in the next tile
    Choose<kScaledCache, ScaleLoader, NoScaleLoader>::Type scales;

    DEVICE KvLoader(const DecodeParams& params, const WorkTile& work, const KvCache& cache,
                    const int* block_table, const KvScales& scales)
        : scales(scales, work.batch) {
        const int index = int(threadIdx.x) % kLoadThreads;
        first_key = (kWarpOwnsKeys ? warp_first_key() : 0) + index / kVectors;
        vector = index % kVectors;
        k_page_stride = params.k_strides[0], v_page_stride = params.v_strides[0];
        k_stride = params.k_strides[2], v_stride = params.v_strides[2];
        page_size = params.page_size, last_page = params.num_pages - 1;
        has_k = vector * kPerVector < params.dim, has_v = vector * kPerVector < params.dim_v;
        k = cache.k + work.kv_head * params.k_strides[1] + vector * kPerVector;
        v = cache.v + work.kv_head * params.v_strides[1] + vector * kPerVector;
        end_key = work.end_key;
        table = block_table;
        if (paged()) {
            table += work.batch * params.table_stride;
            if constexpr (kPrefetchPages) load_pages(work.first_key);
        } else {
            k += work.batch * k_page_stride + (work.first_key + first_key) * k_stride;
            v += work.batch * v_page_stride + (work.first_key + first_key) * v_stride;
        }
    }
    DEVICE bool paged() const { return table != nullptr; }
    // Reads the block table one tile ahead if registers suffice, so that copies do not wait for it.
    static constexpr bool kPrefetchPages = kDim <= 128;
    DEVICE void load_pages(int tile_key) {
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            const int key = tile_key + i * kKeysPerPass + first_key;
            int page = key;
            page_size.divide(page);
            pages[i] = key < end_key ? table[page] : 0;
        }
        scales.load_page(table, page_size, tile_key, end_key);
    }
    // reads: false for a tile that no query sees; it becomes zeros.
    DEVICE void load(KvStage& stage, int tile_key, bool reads) {
        // The swizzle repeats every kPeriod keys: kOffsets offsets serve all passes.
        constexpr int kPeriod = KvColumn::kPeriod;
        constexpr int kOffsets = kKeysPerPass < kPeriod ? kPeriod / kKeysPerPass : 1;
        static_assert(kOffsets * kKeysPerPass % kPeriod == 0, "offsets repeat");
        int offsets[kOffsets];
#pragma unroll
        for (int i = 0; i < kOffsets; ++i)
            offsets[i] = KvColumn::index(first_key + i * kKeysPerPass, vector);
        const auto copy = [&](int i, const CacheElement* from_k, const CacheElement* from_v) {
            const int offset =
                offsets[i % kOffsets] + i / kOffsets * kOffsets * kKeysPerPass * kVectors;
            // Keys past the end become zero, because NaN times a zero probability is NaN.
            const bool valid = reads && tile_key + i * kKeysPerPass + first_key < end_key;
            copy_async<16>(&stage.k.columns[0].chunks[offset], from_k, has_k && valid);
            copy_async<16>(&stage.v.columns[0].chunks[offset], from_v, has_v && valid);
        };
        if constexpr (!kPrefetchPages) {
            if (paged()) load_pages(tile_key);
        }
        scales.load(stage, page_size, paged(), last_page, tile_key, end_key);
        if (paged()) {
#pragma unroll
            for (int i = 0; i < kPasses; ++i) {
                const int page = clamp_page(pages[i], last_page);
                int key = tile_key + i * kKeysPerPass + first_key;
                // Divided again instead of kept: saves eight registers.
                const int key_of_page = page_size.divide(key);
                copy(i, k + page * k_page_stride + key_of_page * k_stride,
                     v + page * v_page_stride + key_of_page * v_stride);
            }
            if constexpr (kPrefetchPages) load_pages(tile_key + kTileN);
        } else {
#pragma unroll
            for (int i = 0; i < kPasses; ++i) {
                copy(i, k, v);
                k += kKeysPerPass * k_stride, v += kKeysPerPass * v_stride;
            }
            constexpr int kKeysOfOthers = kTileN - kPasses * kKeysPerPass;
            k += kKeysOfOthers * k_stride, v += kKeysOfOthers * v_stride;
        }
    }
};

// The producer side of the cp.async pipeline: issues the loads of a work tile.
struct KvPipeline {
    KvLoader loader;
    int next_key, end_key;  // first key of the next tile; end of the work tile
    int stage;              // of the next tile

    DEVICE KvPipeline(const DecodeParams& params, const WorkTile& work, const KvCache& cache,
                      const int* block_table, const KvScales& scales)
        : loader(params, work, cache, block_table, scales),
          next_key(work.first_key),
          // A work tile without keys still has one tile, of zeros.
          end_key(work.end_key > work.first_key ? work.end_key : work.first_key + 1),
          stage(0) {}
    // Issues the copies of the next tile, if there is one, and commits a group, which can be empty.
    // reads: false for a tile that no query sees.  load_more() issues copies that belong to the
    // group of the first tile.
    template <class LoadMore>
    DEVICE void issue(KvStage (&stages)[kStages], bool is_first, bool reads,
                      const LoadMore& load_more) {
        if (next_key < end_key) {
            loader.load(stages[stage], next_key, reads);
            if (is_first) load_more();
            next_key += kTileN;
        }
        copy_async_commit();
        stage = stage + 1 < kStages ? stage + 1 : 0;
    }
};
