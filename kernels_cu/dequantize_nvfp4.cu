// dequantize_nvfp4.cu: y = code * scale for batches of NVFP4 matrices, exact in FP16 and BF16.
//
// One launch decodes all NVFP4 operands of a product, at most three.  The FP32 global scale is not
// applied.
// Constants: Element, the type of y: (batch, rows, 8 * words), contiguous.
// Launch: grid (any), block (kNumThreads).
#include "gemm/dequantize_nvfp4.cuh"

KERNEL void dequantize_nvfp4(const uint8_t* codes0, const e4m3* scales0, Element* y0,
                             const uint8_t* codes1, const e4m3* scales1, Element* y1,
                             const uint8_t* codes2, const e4m3* scales2, Element* y2,
                             const DequantizeParams params) {
    wait_for_previous_grid();
    decode_operand(codes0, scales0, y0, params.operands[0]);
    decode_operand(codes1, scales1, y1, params.operands[1]);
    decode_operand(codes2, scales2, y2, params.operands[2]);
}
