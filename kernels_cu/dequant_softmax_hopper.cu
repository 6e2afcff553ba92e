// dequant_softmax_hopper.cu: y = softmax(A @ (scale_b * B) + bias) on Hopper.
//
// The mixed-input mainloop with a partial softmax (gemm/epilogue/partial_softmax.cuh); after a grid
// barrier the blocks share the rows and finish y.  Launch: grid (any), block (kNumThreads = 384),
// dynamic shared memory sizeof(Kernel::SharedStorage).  statistics: (m, ceil(n / kSetColumns)).
#include "gemm/epilogue/partial_softmax.cuh"
#include "gemm/kernel_sm90.cuh"
#include "parts/normalize_logits.cuh"
#include "parts/scale_probabilities.cuh"

using Kernel = gemm::KernelSm90<Mainloop, Epilogue, Scheduler>;
static_assert(Kernel::kThreads == kNumThreads, "the launch is the kernel's");

KERNEL void dequant_softmax_hopper(GRID_CONSTANT TensorMap a_map, GRID_CONSTANT TensorMap b_map,
                                   GRID_CONSTANT TensorMap y_map, void* y, const void* bias,
                                   const float* scale_b, float* logits, MaxSum* statistics,
                                   GridBarrier* barrier, const Kernel::Params params) {
    SHARED_STORAGE(Kernel::SharedStorage, storage);
    const Kernel::Arguments arguments{a_map, b_map, y_map, bias, scale_b, logits, statistics};
    Kernel{params, arguments, storage}.run();
    const NormalizeParams& p = params.normalize;
    MaxSum* of_warps = storage.staging.of_warps;
    after_all_blocks(barrier, [&](uint32_t block) {
        if (logits) {
            normalize_rows(block, logits, statistics, y, p, of_warps);
        } else if (p.dtype == kHalf) {
            scale_probabilities(block, static_cast<half*>(y), statistics, p, of_warps);
        } else {
            scale_probabilities(block, static_cast<bf16*>(y), statistics, p, of_warps);
        }
    });
}
