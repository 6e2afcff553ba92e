// Where the producer of Hopper attention loads key tiles from.
//
// find: where a tile lies, which may read the block table, before the producer waits for a stage;
// load_keys, load_values: the TMA loads of it.
#pragma once
#include "attention/storage_sm90.cuh"
#include "attention/pages.cuh"

namespace attention {

// One array each of keys and values.
struct ContiguousKv {
    using Place = RowRange;

    DEVICE Place find(const AttentionHead& head, int key) const {
        return {key, head.kv_head, head.batch, int(head.k_first), head.sk};
    }
    template <class Rows>
    DEVICE void load_keys(Rows& to, const TensorMap& map, Barrier& full, const Place& from) const {
        to.load(map, full, from);
    }
    template <class Rows>
    DEVICE void load_values(Rows& to, const TensorMap& map, Barrier& full,
                            const Place& from) const {
        to.load(map, full, from);
    }
};

// Caches in pages.  To the varlen tensor map a page is a sequence: what is in it after the last key
// is out of bounds.  A tile has one load for each box_rows keys, which are of one page.
template <int kTileN> struct PagedKv {
    static constexpr int kMostBoxes = kTileN / 16;
    const int32_t* block_table;
    const PageParams& pages;

    struct Place {
        int key, kv_head, sk;
        int numbers[kMostBoxes];  // pages of the boxes
    };

    DEVICE Place find(const AttentionHead& head, int key) const {
        const int32_t* table = block_table + head.batch * pages.table_stride;
        Place place{key, head.kv_head, head.sk};
#pragma unroll
        for (int i = 0; i < kMostBoxes; ++i) {
            const int row = i * pages.box_rows;
            int page = key + row;
            const bool exists = row < kTileN && page < head.sk;
            pages.size.divide(page);
            place.numbers[i] = exists ? clamp_page(table[page], pages.last) : 0;
        }
        return place;
    }
    template <class Rows>
    DEVICE void load_keys(Rows& to, const TensorMap& map, Barrier& full, const Place& from) const {
        load(to, map, full, from, pages.k_rows);
    }
    template <class Rows>
    DEVICE void load_values(Rows& to, const TensorMap& map, Barrier& full,
                            const Place& from) const {
        load(to, map, full, from, pages.v_rows);
    }
    // rows_of_page: of the map.
    template <class Rows>
    DEVICE void load(Rows& to, const TensorMap& map, Barrier& full, const Place& from,
                     int rows_of_page) const {
        full.arrive_expect_tx(sizeof(to.bytes));
#pragma unroll
        for (int i = 0; i < kMostBoxes; ++i) {
            const int row = i * pages.box_rows;
            if (row >= kTileN) break;
            int page = from.key + row;
            const int in_page = pages.size.divide(page);
            const int left = from.sk - (from.key + row - in_page);  // keys from the page's first on
            to.load_rows(row, map, full,
                         {in_page, from.kv_head, 0, from.numbers[i] * rows_of_page,
                          clamp_index(left, 0, pages.size.divisor)});
        }
    }
};

}  // namespace attention
