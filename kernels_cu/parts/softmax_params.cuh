// What the kernels of softmax and log_softmax are told of a call (cupykern/rows/softmax.py: _PARAMS).
#include "parts/row.cuh"

enum Operand { kX, kY, kMask, kOperands };

struct SoftmaxParams {
    int32_t loads_last, stores_last;  // nonzero: evicted last
    int32_t whole;                    // nonzero: all of a thread's vectors and rows are there
    int32_t log;                      // nonzero: log_softmax
    RowLayout<kOperands> layout;
    int64_t num_chunks;
    float scale;
    int32_t dtype;
};
