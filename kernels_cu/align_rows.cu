// align_rows.cu: copies misaligned rows of bytes to rows that are aligned to 16 bytes.
//
// Each thread assembles 16-byte chunks, each from the two aligned chunks that its bytes overlap.
// The padding of a result row is undefined.
// Launch: grid (any), block (kNumThreads).
#include "gemm/align_rows.cuh"

KERNEL void align_rows(const char* source, char* result, const CopyParams params) {
    wait_for_previous_grid();
    const int64_t step = int64_t(gridDim.x) * kNumThreads;
    int64_t number = int64_t(blockIdx.x) * kNumThreads + threadIdx.x;
    for (; number < params.num_chunks; number += step) copy_chunk(source, result, params, number);
}
