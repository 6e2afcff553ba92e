// dual_gemm_hopper.cu: out = silu(A @ B1) * (A @ B2) on Hopper.
//
// Half of a tile's kTileN columns come from B1, the other half are the same columns of B2.  Their
// stages are adjacent in shared memory, so that the mainloop reads one matrix B
// (gemm/epilogue/gated.cuh).
// Types: Mainloop, Epilogue, a GatedEpilogue, and Scheduler.
// Launch: see gemm_hopper.cu.  Tensor maps: DualArguments.
#include "gemm/epilogue/gated.cuh"
#include "gemm/kernel_sm90.cuh"

using Kernel = gemm::KernelSm90<Mainloop, Epilogue, Scheduler>;
static_assert(Kernel::kThreads == kNumThreads && Mainloop::kClusterSize == kClusterSize,
              "the launch is the kernel's");

KERNEL void dual_gemm_hopper(GRID_CONSTANT TensorMap a_map, GRID_CONSTANT TensorMap a_edge,
                             GRID_CONSTANT TensorMap b1_map, GRID_CONSTANT TensorMap b1_edge,
                             GRID_CONSTANT TensorMap b2_map, GRID_CONSTANT TensorMap b2_edge,
                             GRID_CONSTANT TensorMap out_map, void* out, const float* scale_a,
                             const float* scale_b1, const float* scale_b2, const e4m3* groups_b1,
                             const e4m3* groups_b2, const Kernel::Params params) {
    SHARED_STORAGE(Kernel::SharedStorage, storage);
    const Kernel::Arguments arguments{a_map,    a_edge,    b1_map,    b1_edge, b2_map,
                                      b2_edge,  out_map,   out,       scale_a, scale_b1,
                                      scale_b2, groups_b1, groups_b2, params};
    Kernel{params, arguments, storage}.run();
}
