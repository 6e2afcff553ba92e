// Pages of KV caches: key j of a sequence is key j % size of page block_table[j / size].
#pragma once
#include "common/fast_divmod.cuh"

struct PageParams {
    int64_t table_stride;  // of the block table, from one sequence to the next
    FastDivmod size;       // keys per page
    int32_t last;          // index of the last page
    // Tensor maps of keys and values: rows per box, and rows from one page to the next.
    int32_t box_rows, k_rows, v_rows;
};

// Clamps `page` to the pages that exist.
DEVICE int clamp_page(int page, int last_page) {
    return page < 0 ? 0 : page < last_page ? page : last_page;
}
