// Parameters of the kernels of layer_norm and rms_norm but those of rows/norm_even.cuh
// (cupykern/rows/norm_plan.py: _PARAMS).
#include "rows/tile.cuh"

namespace rows {

struct NormParams {
    enum Operand { kX, kResidual, kY, kSum, kStatistic, kOperands };

    int64_t stores_last_from;  // the first row whose results are evicted last
    int64_t loads_last;        // nonzero: evicted last
    RowLayout<kOperands> layout;
    int64_t num_chunks, weight_stride, bias_stride;
    int32_t dtype, weight_dtype, bias_dtype;
    int32_t centered, compensated, stages;
    float eps;
    int32_t threads_log2;  // of a span's row
};

}  // namespace rows
