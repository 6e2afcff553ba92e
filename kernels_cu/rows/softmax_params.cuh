// Parameters of the softmax and log_softmax kernels.
#pragma once
#include "rows/tile.cuh"

namespace rows {

// What even rows use comes first: the constant bank is fetched in lines of 64 bytes.
struct SoftmaxParams {
    enum Operand { kX, kY, kMask, kOperands };

    int64_t stores_last_from;     // the first row that is stored with evict_last
    int32_t loads_last;           // nonzero: evict_last
    uint16_t unpredicated;        // nonzero: all vectors of all threads have elements, in all rows
    uint16_t log;                 // nonzero: log_softmax
    float scale, exponent_scale;  // exponent_scale: scale * log2(e)
    RowLayout<kOperands> layout;
    int64_t num_chunks;
    int32_t dtype;            // y's
    int32_t threads_log2;     // log2 of a row's threads in softmax_span.cu
    int32_t blocks, padding;  // blocks: per cluster in softmax_cluster.cu
};

}  // namespace rows
