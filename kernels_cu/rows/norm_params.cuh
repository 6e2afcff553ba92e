// Parameters of the layer_norm and rms_norm kernels, except of normalize_even.cu (EvenParams and
// RareParams: rows/load_even.cuh).
#pragma once
#include "rows/tile.cuh"

namespace rows {

struct NormParams {
    enum Operand { kX, kResidual, kY, kSum, kStatistic, kOperands };

    int64_t stores_last_from;  // the first row that is stored with evict_last
    int64_t loads_last;        // nonzero: evict_last
    RowLayout<kOperands> layout;
    int64_t num_chunks, weight_stride, bias_stride;
    int32_t dtype, weight_dtype, bias_dtype;
    int32_t centered, compensated, stages;
    float eps;
    int32_t threads_log2;  // log2 of a row's threads in normalize_span.cu
};

}  // namespace rows
