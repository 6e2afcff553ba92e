// gemm_expression_hopper.cu: out = Expression(alpha * (A @ B)), a user's formula
// (expression/apply.cuh), on Hopper; otherwise like gemm_hopper.cu.
// Launch: see gemm_hopper.cu.
#include "gemm/epilogue/expression.cuh"
#include "gemm/kernel_sm90.cuh"

using Kernel =
    gemm::KernelSm90<Mainloop, gemm::ExpressionEpilogueSm90<Epilogue, Expression>, Scheduler>;
static_assert(Kernel::kThreads == kNumThreads && Mainloop::kClusterSize == kClusterSize,
              "the launch is the kernel's");

KERNEL void gemm_expression_hopper(GRID_CONSTANT TensorMap a_map, GRID_CONSTANT TensorMap a_edge,
                                   GRID_CONSTANT TensorMap b_map, GRID_CONSTANT TensorMap b_edge,
                                   GRID_CONSTANT TensorMap out_map,
                                   GRID_CONSTANT TensorMap residual_map, void* out,
                                   const void* bias, const void* residual, const float* scale_a,
                                   const float* scale_b, const e4m3* groups_b, const void* x0,
                                   const void* x1, const void* x2, const void* x3, const void* x4,
                                   const void* x5, const void* x6, const void* x7,
                                   const gemm::ExpressionMatmulParams params) {
    SHARED_STORAGE(Kernel::SharedStorage, storage);
    const Kernel::Arguments arguments{{a_map, a_edge, b_map, b_edge, out_map, residual_map, out,
                                       nullptr, nullptr, scale_a, scale_b, groups_b, params.matmul},
                                      {{x0, x1, x2, x3, x4, x5, x6, x7}, {}, params.expression, 0}};
    Kernel{params.matmul, arguments, storage}.run();
}
