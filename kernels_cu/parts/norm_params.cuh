// What the kernels of layer_norm and rms_norm but normalize_plain.cu are told of a call
// (cupykern/rows/norm_plan.py: _PARAMS).
#include "parts/row.cuh"

enum Operand { kX, kResidual, kY, kSum, kStatistic, kOperands };

struct NormParams {
    int64_t stores_last_from;  // the first row whose results are evicted last
    int64_t loads_last;        // nonzero: evicted last
    RowLayout<kOperands> layout;
    int64_t num_chunks, weight_stride, bias_stride;
    int32_t dtype, weight_dtype, bias_dtype;
    int32_t centered, compensated, stages;
    float eps;
    int32_t threads_log2;
};
