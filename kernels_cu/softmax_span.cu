// softmax_span.cu: y = softmax(x) or log_softmax(x) of contiguous rows of any length, without
// options but a positive scale (rows/load_span.cuh).
// Other arguments: see softmax_shared.cu.
// Constants: Element, kScaled; see also rows/load_span.cuh.
// Launch: grid (ceil(rows / (kNumThreads >> params.threads_log2))), block (kNumThreads), dynamic
// shared memory sizeof(SpanStorage).
#include "rows/softmax_span.cuh"

KERNEL void softmax_span(const Element* x, const uint8_t*, void* y, MaxSum*,
                         const rows::SoftmaxParams params, int64_t) {
    wait_for_previous_grid();
    using namespace rows;
    SHARED_STORAGE(SpanStorage, tile);
    const int num_cols = int(params.layout.num_cols);
    const RowThreads t = RowThreads::of(params.threads_log2, params.layout.num_rows);
    const Span span = Span::of(x, t, num_cols);
    span.load(tile.vectors, x, load_policy(params.loads_last));
    span.loaded();
    const int begin = span.begin + t.row_in_block * num_cols;
    if (t.count < kWarpSize) {
        softmax_span_row<1>(tile, begin, t, num_cols, params);
    } else {
        softmax_span_row<kWarpSize>(tile, begin, t, num_cols, params);
    }
    sync_block();
    span.store(tile.vectors, static_cast<Element*>(y),
               store_policy(t.first_row >= params.stores_last_from));
}
