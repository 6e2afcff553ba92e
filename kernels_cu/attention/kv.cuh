// Sources of the portable kernel's keys and values.  A source gives the heads of a launch, and the
// copier of a head's tiles.
#pragma once
#include "attention/products.cuh"
#include "attention/pages.cuh"

// The steps of a copier that copies Element unchanged (with conversion: attention/kv_8bit.cuh).
struct PlainTiles {
    // Complete the copies that were started, before the barrier that publishes the tile.
    DEVICE void finish_keys(KeyTile&) const {}
    DEVICE void finish_values(KeyTile&) const {}
    DEVICE void scale_scores(Scores&) const {}
    // rescale(factor) multiplies the output accumulators.
    template <class Rescale> DEVICE void scale_probabilities(Scores&, const Rescale&) const {}
    // Factor of the results.
    DEVICE static constexpr float factor() { return 1.0f; }
};

// One array each of keys and values, batched or varlen.
struct ContiguousKv {
    const Element *k, *v;
    const int32_t *cu_seqlens_q, *cu_seqlens_k;  // see AttentionHead::of

    struct Copier : PlainTiles {
        TileCopier<Element, KeyTile> keys, values;

        // Issue the copies of num_rows rows from first_key on.  kUnpredicated: num_rows covers the
        // tile.
        template <bool kUnpredicated>
        DEVICE void start_keys(KeyTile& tile, int first_key, int num_rows) const {
            keys.template start<kUnpredicated>(tile, first_key, num_rows);
        }
        template <bool kUnpredicated>
        DEVICE void start_values(KeyTile& tile, int first_key, int num_rows) const {
            values.template start<kUnpredicated>(tile, first_key, num_rows);
        }
    };

    template <class Params> DEVICE AttentionHead head(const Params& params, int number) const {
        return AttentionHead::of(params, cu_seqlens_q, cu_seqlens_k, number);
    }
    DEVICE Copier copier(const AttentionParams& params, const AttentionHead& head) const {
        const Element* k_origin = k + head.k_offset(params.k);
        const Element* v_origin = v + head.k_offset(params.v);
        return {{},
                {k_origin, int(params.k.row), int(params.head_dim)},
                {v_origin, int(params.v.row), int(params.head_dim_v)}};
    }
};

// A thread's part of the tiles of a paged sequence: 8 elements of one row in each pass.
class PagedTile {
  protected:
    static constexpr int kChunks = KeyTile::kChunks, kPerChunk = 16 / int(sizeof(Element));
    static constexpr int kAtOnce = kNumThreads / kChunks;
    static constexpr int kPasses = (KeyTile::kRows + kAtOnce - 1) / kAtOnce;
    static_assert(kAtOnce * kChunks == kNumThreads && (kAtOnce & (kAtOnce - 1)) == 0,
                  "whole rows per iteration");
    // Keys or values of a head.
    template <class T> struct Cache {
        const T* origin;  // this thread's chunk of row 0 of page 0
        int64_t page_stride;
        int row_stride;
        bool exists;

        DEVICE Cache(const T* head, const AttentionStrides& strides, int dim)
            : page_stride(strides.batch), row_stride(int(strides.row)) {
            const int chunk = int(threadIdx.x) % kChunks;
            origin = head + chunk * kPerChunk;
            exists = chunk * kPerChunk < dim;
        }
    };
    const int32_t* table;  // of the sequence
    const PageParams& pages;
    int row, index;  // this thread's row in the first pass; index of its chunk
    // Pages of this thread's rows in the last tile of keys, which is also the next tile of values.
    // Kept if registers suffice; otherwise they are read again.
    static constexpr bool kKeepsPages = kHeadDim <= 128;
    int numbers[kKeepsPages ? kPasses : 1];

    DEVICE PagedTile(const int32_t* table, const PageParams& pages)
        : table(table),
          pages(pages),
          row(int(threadIdx.x) / kChunks),
          index(KeyTile::index(row, int(threadIdx.x) % kChunks)) {}
    DEVICE int page_of(int key, bool exists) const {
        pages.size.divide(key);
        return exists ? clamp_page(table[key], pages.last) : 0;
    }
    DEVICE bool has(int pass, int num_rows) const { return pass * kAtOnce + row < num_rows; }
    DEVICE void look_up(int first_key, int num_rows) {
        if constexpr (kKeepsPages) {
#pragma unroll
            for (int i = 0; i < kPasses; ++i) {
                numbers[i] = page_of(first_key + i * kAtOnce + row, has(i, num_rows));
            }
        }
    }
    // Calls f(pass, address, index of the chunk in the tile) for this thread's chunks.
    template <class T, class F>
    DEVICE void for_each_chunk(const Cache<T>& from, int first_key, int num_rows,
                               const F& f) const {
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            if (KeyTile::kRows < kAtOnce && row >= KeyTile::kRows) break;
            int key = first_key + i * kAtOnce + row;
            const int page = kKeepsPages ? numbers[i] : page_of(key, has(i, num_rows));
            const int in_page = pages.size.divide(key);
            f(i, from.origin + page * from.page_stride + int64_t(in_page) * from.row_stride,
              chunk_of(i));
        }
    }
    // The bits of `row` are below those of the pass.
    DEVICE int chunk_of(int pass) const {
        return (index ^ KeyTile::swizzle(pass * kAtOnce)) + pass * kAtOnce * kChunks;
    }
};

// Caches in pages, which a block table lists.
struct PagedKv {
    const Element *k, *v;
    const int32_t *cu_seqlens_q, *seq_lens, *block_table;
    const PageParams& pages;

    class Copier : PagedTile, public PlainTiles {
        Cache<Element> keys, values;

        DEVICE void start(KeyTile& tile, const Cache<Element>& from, int first_key,
                          int num_rows) const {
            for_each_chunk(from, first_key, num_rows, [&](int i, const Element* vector, int chunk) {
                copy_async<16>(&tile.chunks[chunk], vector, from.exists && has(i, num_rows));
            });
        }

      public:
        DEVICE Copier(const PagedKv& kv, const AttentionParams& params, const AttentionHead& head)
            : PagedTile(kv.block_table + head.batch * kv.pages.table_stride, kv.pages),
              keys(kv.k + head.kv_head * params.k.head, params.k, int(params.head_dim)),
              values(kv.v + head.kv_head * params.v.head, params.v, int(params.head_dim_v)) {}
        // Like ContiguousKv's; values belong to the keys that were started last.
        template <bool kUnpredicated>
        DEVICE void start_keys(KeyTile& tile, int first_key, int num_rows) {
            const int rows = kUnpredicated ? KeyTile::kRows : clamp_to(num_rows, KeyTile::kRows);
            look_up(first_key, rows);
            start(tile, keys, first_key, rows);
        }
        template <bool kUnpredicated>
        DEVICE void start_values(KeyTile& tile, int first_key, int num_rows) const {
            start(tile, values, first_key, kUnpredicated ? KeyTile::kRows : num_rows);
        }
    };

    DEVICE AttentionHead head(const AttentionParams& params, int number) const {
        return AttentionHead::of_pages(params, cu_seqlens_q, seq_lens, number);
    }
    DEVICE Copier copier(const AttentionParams& params, const AttentionHead& head) const {
        return {*this, params, head};
    }
};
