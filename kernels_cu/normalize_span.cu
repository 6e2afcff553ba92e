// normalize_span.cu: layer_norm (kCentered) and rms_norm of contiguous rows of any length
// (rows/load_span.cuh), with contiguous weights in the rows' dtype or FP32; neither quantized nor
// compensated.
// Other arguments: see normalize_shared.cu.
// Constants: Element, kCentered; see also rows/load_span.cuh.
// Launch: grid (ceil(rows / (kNumThreads >> params.threads_log2))), block (kNumThreads), dynamic
// shared memory sizeof(SpanStorage), twice that with a residual.
#include "rows/norm_span.cuh"

KERNEL void normalize_span(const Element* x, const Element* residual, const void* weight,
                           const void* bias, void* y, Element* sum, float* mean, float* rstd,
                           float*, void*, const rows::NormParams params, int64_t) {
    wait_for_previous_grid();
    using namespace rows;
    SHARED_STORAGE(SpanStorage, tile);
    const int num_cols = int(params.layout.num_cols);
    const RowThreads t = RowThreads::of(params.threads_log2, params.layout.num_rows);
    const Span span = Span::of(x, t, num_cols);
    const LoadPolicy policy = load_policy(params.loads_last);
    SpanStorage* second = residual ? &tile + 1 : nullptr;
    if (residual) span.load(second->vectors, residual, policy);
    span.load(tile.vectors, x, policy);
    span.loaded();
    const int64_t row = t.first_row + t.row_in_block;
    const SpanNormOptions options{
        weight,        bias,       params.weight_dtype,         params.bias_dtype,
        num_cols,      params.eps, mean ? mean + row : nullptr, rstd ? rstd + row : nullptr,
        sum != nullptr};
    const int begin = span.begin + t.row_in_block * num_cols;
    if (t.count < kWarpSize) {
        normalize_span_row<1>(tile, second, begin, t, options);
    } else {
        normalize_span_row<kWarpSize>(tile, second, begin, t, options);
    }
    sync_block();
    const StorePolicy stores = store_policy(t.first_row >= params.stores_last_from);
    if (sum) span.store(second->vectors, sum, stores);
    span.store(tile.vectors, static_cast<Element*>(y), stores);
}
