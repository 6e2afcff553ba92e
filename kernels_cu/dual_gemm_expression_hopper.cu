// dual_gemm_expression_hopper.cu: out = Expression(A @ B1, A @ B2), a user's formula
// (expression/apply.cuh), on Hopper; otherwise like dual_gemm_hopper.cu.
// Launch: see gemm_hopper.cu.  Tensor maps: DualArguments.
#include "gemm/epilogue/gate_expression.cuh"
#include "gemm/epilogue/gated.cuh"
#include "gemm/kernel_sm90.cuh"

using Kernel =
    gemm::KernelSm90<Mainloop, Epilogue::WithGate<gemm::ExpressionGate<Expression>>, Scheduler>;
static_assert(Kernel::kThreads == kNumThreads && Mainloop::kClusterSize == kClusterSize,
              "the launch is the kernel's");

KERNEL void dual_gemm_expression_hopper(
    GRID_CONSTANT TensorMap a_map, GRID_CONSTANT TensorMap a_edge, GRID_CONSTANT TensorMap b1_map,
    GRID_CONSTANT TensorMap b1_edge, GRID_CONSTANT TensorMap b2_map,
    GRID_CONSTANT TensorMap b2_edge, GRID_CONSTANT TensorMap out_map, void* out,
    const float* scale_a, const float* scale_b1, const float* scale_b2, const e4m3* groups_b1,
    const e4m3* groups_b2, const void* x0, const void* x1, const void* x2, const void* x3,
    const void* x4, const void* x5, const void* x6, const void* x7,
    const gemm::ExpressionGatedParams params) {
    SHARED_STORAGE(Kernel::SharedStorage, storage);
    const Kernel::Arguments arguments{
        {a_map, a_edge, b1_map, b1_edge, b2_map, b2_edge, out_map, out, scale_a, scale_b1, scale_b2,
         groups_b1, groups_b2, params.gated},
        {{x0, x1, x2, x3, x4, x5, x6, x7}, {}, params.expression, 0}};
    Kernel{params.gated, arguments, storage}.run();
}
