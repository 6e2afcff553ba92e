// dequantize_nvfp4.cu: y = code * scale for batches of NVFP4 matrices, exact in FP16 and BF16.
//
// One launch decodes all NVFP4 operands of a product.  The FP32 global scale is not applied.
// Constants: Element, the type of y: (batch, rows, 8 * words), contiguous.
// Launch: grid (any), block (kNumThreads).
#include "gemm/work_tile.cuh"
#include "gemm/nvfp4.cuh"

struct DequantizeOperand {
    BatchLayout batch;                                     // kA: codes, kGroupsA: scales
    int64_t batch_size, rows, words;                       // 32-bit words of eight elements
    int64_t row_stride;                                    // of the codes
    struct { int64_t block, quarter, row, word; } groups;  // GroupScales
};
constexpr int kMostDecoded = 3;
struct DequantizeParams { DequantizeOperand operands[kMostDecoded]; };

constexpr int kAtOnce = 4;  // loads in flight per thread

// codes: null if the operand is absent.
DEVICE void decode_operand(const uint8_t* codes, const e4m3* scales, Element* y,
                           const DequantizeOperand& p) {
    if (!codes) return;
    const uint32_t rows = uint32_t(p.rows), words = uint32_t(p.words),
                   flat_rows = rows * uint32_t(p.batch_size);
    for_each_in_rows<kAtOnce>(flat_rows, words,
                              [&](uint32_t flat_row, uint32_t word, uint32_t next) {
                                  uint32_t eights[kAtOnce];
                                  e4m3 factors[kAtOnce];
#pragma unroll
                                  for (int i = 0; i < kAtOnce; ++i) {
                                      const uint32_t at = flat_row + i * next;
                                      if (at >= flat_rows) continue;
                                      uint32_t row = at;
                                      int64_t from = word * 4;
                                      GroupScales groups{scales, p.groups.block, p.groups.quarter,
                                                         p.groups.row, p.groups.word};
                                      if (p.batch_size > 1) {
                                          const uint32_t matrix = at / rows;
                                          row -= matrix * rows;
                                          from += p.batch.offset(kA, matrix);
                                          groups.scales += p.batch.offset(kGroupsA, matrix);
                                      }
                                      from += row * p.row_stride;
                                      eights[i] = load_vector<4>(codes + from).words[0];
                                      factors[i] = *groups.at(row, int64_t(word) * 8);
                                  }
#pragma unroll
                                  for (int i = 0; i < kAtOnce; ++i) {
                                      const uint32_t at = flat_row + i * next;
                                      if (at >= flat_rows) continue;
                                      Bytes<16> eight;
                                      decode_scaled<Element>(eights[i], factors[i], eight.words);
                                      store_vector<16>(y + (int64_t(at) * words + word) * 8, eight);
                                  }
                              });
}

KERNEL void dequantize_nvfp4(const uint8_t* codes0, const e4m3* scales0, Element* y0,
                             const uint8_t* codes1, const e4m3* scales1, Element* y1,
                             const uint8_t* codes2, const e4m3* scales2, Element* y2,
                             const DequantizeParams params) {
    wait_for_previous_grid();
    decode_operand(codes0, scales0, y0, params.operands[0]);
    decode_operand(codes1, scales1, y1, params.operands[1]);
    decode_operand(codes2, scales2, y2, params.operands[2]);
}
