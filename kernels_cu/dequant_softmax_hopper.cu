// dequant_softmax_hopper.cu: logits A @ (scale_b * B) + bias on Hopper, or their exponentials, and
// the statistics from which normalize_logits.cu computes the softmax.
//
// Mixed-input mainloop with a partial-softmax epilogue (gemm/epilogue/partial_softmax.cuh).
// Types: Mainloop, a MainloopSm90RS, Epilogue, a PartialSoftmaxEpilogue, and Scheduler.
// Launch: grid (any), block (kNumThreads = 384), dynamic shared memory
// sizeof(Kernel::SharedStorage).  statistics: (m, ceil(n / kSetColumns)).
#include "gemm/epilogue/partial_softmax.cuh"
#include "gemm/kernel_sm90.cuh"

using Kernel = gemm::KernelSm90<Mainloop, Epilogue, Scheduler>;
static_assert(Kernel::kThreads == kNumThreads, "the launch is the kernel's");

KERNEL void dequant_softmax_hopper(GRID_CONSTANT TensorMap a_map, GRID_CONSTANT TensorMap a_edge,
                                   GRID_CONSTANT TensorMap b_map, GRID_CONSTANT TensorMap b_edge,
                                   GRID_CONSTANT TensorMap y_map, const void* bias,
                                   const float* scale_b, float* logits, MaxSum* statistics,
                                   const Kernel::Params params) {
    SHARED_STORAGE(Kernel::SharedStorage, storage);
    const Kernel::Arguments arguments{a_map, a_edge,  b_map,  b_edge,     y_map,
                                      bias,  scale_b, logits, statistics, params};
    Kernel{params, arguments, storage}.run();
}
