// gemm_hopper.cu: out = activation(alpha * (A @ B) + bias) + residual on Hopper.
//
// Persistent and warp-specialised: one producer warpgroup issues TMA loads, the consumer warpgroups
// run wgmma and the epilogue.
// Types: Mainloop (gemm/mainloop_sm90.cuh), Epilogue, a MatmulEpilogue, and Scheduler
// (gemm/scheduler.cuh, gemm/scheduler_split_k.cuh).
// Launch: grid (any; with SplitKScheduler a block per tile and split; clusters of kClusterSize),
// block (kNumThreads = 256, 384 or 512), dynamic shared memory sizeof(Kernel::SharedStorage).
// Tensor maps: MatmulArguments.
#include "gemm/epilogue/matmul.cuh"
#include "gemm/kernel_sm90.cuh"

using Kernel = gemm::KernelSm90<Mainloop, Epilogue, Scheduler>;
static_assert(Kernel::kThreads == kNumThreads && Mainloop::kClusterSize == kClusterSize,
              "the launch is the kernel's");

KERNEL void gemm_hopper(GRID_CONSTANT TensorMap a_map, GRID_CONSTANT TensorMap a_edge,
                        GRID_CONSTANT TensorMap b_map, GRID_CONSTANT TensorMap b_edge,
                        GRID_CONSTANT TensorMap out_map, GRID_CONSTANT TensorMap residual_map,
                        void* out, const void* bias, const void* residual, const float* scale_a,
                        const float* scale_b, const e4m3* groups_b, const Kernel::Params params) {
    SHARED_STORAGE(Kernel::SharedStorage, storage);
    const Kernel::Arguments arguments{a_map,        a_edge,   b_map, b_edge,   out_map,
                                      residual_map, out,      bias,  residual, scale_a,
                                      scale_b,      groups_b, params};
    Kernel{params, arguments, storage}.run();
}
