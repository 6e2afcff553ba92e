// Sources of the key tiles of Hopper attention: load_keys and load_values issue the TMA loads of
// the tile whose first key is `key`.
#pragma once
#include "attention/storage_sm90.cuh"
#include "attention/pages.cuh"

namespace attention {

// One array each of keys and values.
struct ContiguousKv {
    template <class Rows>
    DEVICE void load_keys(Rows& to, const TensorMap& map, Barrier& full, const AttentionHead& head,
                          int key) const {
        to.load(map, full, {key, head.kv_head, head.batch, int(head.k_first), head.sk});
    }
    template <class Rows>
    DEVICE void load_values(Rows& to, const TensorMap& map, Barrier& full,
                            const AttentionHead& head, int key) const {
        load_keys(to, map, full, head, key);
    }
};

// Caches in pages.  In the varlen tensor map a page is a sequence, so that its rows after the last
// key are out of bounds.  A tile has one load per box_rows keys, which are in one page.
struct PagedKv {
    const int32_t* block_table;
    const PageParams& pages;

    template <class Rows>
    DEVICE void load_keys(Rows& to, const TensorMap& map, Barrier& full, const AttentionHead& head,
                          int key) const {
        load(to, map, full, head, key, pages.k_rows);
    }
    template <class Rows>
    DEVICE void load_values(Rows& to, const TensorMap& map, Barrier& full,
                            const AttentionHead& head, int key) const {
        load(to, map, full, head, key, pages.v_rows);
    }
    // rows_of_page: rows of the map per page.  Not unrolled: the producer has few registers, and
    // the table is in the L1 cache after its first load.
    template <class Rows>
    DEVICE void load(Rows& to, const TensorMap& map, Barrier& full, const AttentionHead& head,
                     int key, int rows_of_page) const {
        full.arrive_expect_tx(sizeof(to.bytes));
        const int32_t* table = block_table + head.batch * pages.table_stride;
#pragma unroll 1
        for (int row = 0; row < Rows::kRows; row += pages.box_rows) {
            int page = key + row;
            const int in_page = pages.size.divide(page);
            // Keys of the page, up to the sequence's last one.
            const int length = clamp_index(head.sk - (key + row - in_page), 0, pages.size.divisor);
            const int number = in_page < length ? clamp_page(table[page], pages.last) : 0;
            to.load_rows(row, map, full, {in_page, head.kv_head, 0, number * rows_of_page, length});
        }
    }
};

}  // namespace attention
