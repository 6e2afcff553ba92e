// Parameters and shared memory of an output tile of FP32 operands in 16-bit parts
// (gemm/mainloop_parts.cuh).
#pragma once
#include "gemm/epilogue/linear_combination.cuh"
#include "gemm/mainloop_parts.cuh"

struct PartsGemmParams {
    TileParams tile;  // block_scales: blocks of 128 rows or columns x 64 along k
    EpilogueParams epilogue;
    int64_t part_steps[2];  // strides of the parts of a and b, in elements
};
using PartsStorage = TileStorage<gemm::PartsStage>;
