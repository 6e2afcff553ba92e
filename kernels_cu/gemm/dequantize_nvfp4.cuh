// Decodes NVFP4 operands to 16-bit elements, each element times the scale of its group.
#pragma once
#include "gemm/nvfp4.cuh"
#include "gemm/work_tile.cuh"

struct DequantizeOperand {
    BatchLayout batch;                                     // kA: codes, kGroupsA: scales
    int64_t batch_size, rows, words;                       // words: of eight elements, per row
    int64_t row_stride;                                    // of the codes, in bytes
    struct { int64_t block, quarter, row, word; } groups;  // strides of GroupScales
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
