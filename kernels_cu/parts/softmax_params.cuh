// What the kernels of softmax and log_softmax are told of a call (cupykern/rows/softmax.py: _PARAMS).
#include "parts/row.cuh"

enum Operand { kX, kY, kMask, kOperands };

struct SoftmaxParams {
    int64_t stores_last_from;  // the first row whose results are evicted last
    int32_t loads_last;        // nonzero: evicted last
    int32_t whole;             // nonzero: all of a thread's vectors and rows are there
    RowLayout<kOperands> layout;
    int64_t num_chunks;
    float scale;
    int32_t dtype;
    int32_t log;           // nonzero: log_softmax
    int32_t threads_log2;  // of a stretch, that share a row
    int32_t blocks;        // of a cluster, of long rows
};
