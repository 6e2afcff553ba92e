// What the kernels of layer_norm and rms_norm are told of a call (cupykern/rows/norm_plan.py: _PARAMS).
#include "parts/row.cuh"

enum Operand { kX, kResidual, kY, kSum, kStatistic, kOperands };

struct NormParams {
    RowLayout<kOperands> layout;
    int64_t num_chunks, weight_stride, bias_stride;
    float eps;
    int32_t dtype, weight_dtype, bias_dtype;
    int32_t compensated, stages;
    int32_t evict_last, padding;  // evict_last: nonzero: so are loads
};
