// Splits blocks of an FP32 operand into 16-bit parts: copies to shared memory, scales, rounding.
//
// A negative scale flags a block that the parts do not represent:
//   - it has an infinity, a NaN or a magnitude of at least 2^78;
//   - it has a nonzero magnitude below scale * `smallest`, or an element whose relative error
//     exceeds `tolerance`;
//   - kShift > 0 and it has only integers, the largest between 2^11 and 2^24: an FP32 product can
//     be exact for these, but dropped products of parts are lost.
// Types: Part (half or bf16).  Constants: kParts, kShift; kStages: 2, or 1 if two blocks do not fit
// shared memory.
#pragma once
#include "gemm/work_tile.cuh"
#include "common/vector.cuh"

struct SplitOperand {
    BatchLayout batch;               // kA: x
    int64_t mn_step, k_step;         // strides of x
    int64_t part_step;               // stride of parts; the stride of matrices is kParts times this
    int32_t mn_size, k_size, pitch;  // pitch: row stride of the parts, contiguous along k
    int32_t num_mn, num_k;           // blocks along m or n, and along k
    int32_t num_blocks;              // of the whole batch
    int32_t along_mn;                // x is read along m of A or n of B, otherwise along k
    int32_t vectors;                 // x is read by vectors
};
struct SplitParams {
    SplitOperand operands[2];
    float tolerance, smallest;  // smallest: in units of the scale
};

constexpr int kBlockMn = 128, kBlockK = 64;
constexpr int kWidth = 4, kLoads = kBlockMn * kBlockK / (kWidth * kNumThreads);
constexpr int kLargestExponent = 14;  // of a block's elements in units of its scale
constexpr int kMostScale = 63;        // largest exponent: products of scales are normal numbers
constexpr uint32_t kExponent = 0x7f800000u;

constexpr int kRows = kBlockMn / kLoads;     // rows of a block that all threads cover at once
constexpr int kPitchMn = kBlockMn + kWidth;  // row stride of `along_mn`: fewer bank conflicts
static_assert(kRows * kBlockK == kWidth * kNumThreads, "a vector of k per thread");
struct SplitStorage {
    union Stage {
        alignas(16) float along_k[kBlockMn][kBlockK];
        alignas(16) float along_mn[kBlockK][kPitchMn];
    } stages[kStages];
    uint32_t first[kNumThreads / kWarpSize], second[kNumThreads / kWarpSize];
};

DEVICE float power_of_two(int exponent) { return bit_cast<float>(uint32_t(127 + exponent) << 23); }

DEVICE float magnitude(float x) { return bit_cast<float>(bit_cast<uint32_t>(x) & 0x7fffffffu); }

// The largest value of all threads.  Calls alternate between two shared arrays: the barrier of one
// call guarantees that the other call's array has been read.
DEVICE uint32_t largest_of_block(uint32_t value, uint32_t (&shared)[kNumThreads / kWarpSize]) {
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
        const uint32_t other = shuffle_xor(value, offset);
        value = value > other ? value : other;
    }
    if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = value;
    sync_block();
#pragma unroll
    for (int i = 0; i < kNumThreads / kWarpSize; ++i) value = value > shared[i] ? value : shared[i];
    return value;
}

// Splits x / scale.  Returns whether the parts represent it within the tolerance.
DEVICE bool split(const float (&x)[kWidth], float inverse, float tolerance,
                  Bytes<2 * kWidth> (&parts)[kParts]) {
    float rest[kWidth], unit = 1.0f;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) rest[j] = x[j] * inverse;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
        const float step = p > 0 ? power_of_two(kShift) : 1.0f;
        unit *= step;
#pragma unroll
        for (int j = 0; j < kWidth; j += 2) {
            float low, high;
            rest[j] *= step;
            rest[j + 1] *= step;
            parts[p].words[j / 2] = pack<Part>(rest[j], rest[j + 1]);
            unpack<Part>(parts[p].words[j / 2], low, high);
            rest[j] -= low;
            rest[j + 1] -= high;
        }
    }
    bool holds = true;
    const float most = tolerance * unit * inverse;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) holds &= magnitude(rest[j]) <= most * magnitude(x[j]);
    return holds;
}

// A thread's finding; a block's is the largest of its threads.  kIntegers: only integers that may
// lose products of parts.  kNumbers: the parts represent the block.  kLossy: they do not.
enum Found { kIntegers, kNumbers, kLossy };
constexpr float kOnePart = 2048.0f, kFewBits = 16777216.0f;  // integers of 11 and of 24 bits

// A block of 128 x 64 elements of an operand.
struct SplitBlock {
    int matrix, mn_block, k_block;

    DEVICE SplitBlock(const SplitOperand& p, int block) {
        const int per_matrix = p.num_mn * p.num_k;
        matrix = block / per_matrix;
        const int in_matrix = block - matrix * per_matrix;
        mn_block = in_matrix / p.num_k;
        k_block = in_matrix - mn_block * p.num_k;
    }
};

// Copies the first `count` elements of a vector; the others become zero.
DEVICE void copy_vector(float* to, const float* from, int64_t step, int count, bool whole) {
    if (whole && count >= kWidth) {
        copy_async<16>(to, from);
    } else {
#pragma unroll
        for (int j = 0; j < kWidth; ++j)
            copy_async<4>(to + j, j < count ? from + j * step : from, j < count);
    }
}
// Copies this thread's elements of a block to shared memory; elements past the matrix become zero.
DEVICE void copy_block(const float* x, const SplitOperand& p, int block,
                       SplitStorage::Stage& stage) {
    const SplitBlock at(p, block);
    const int thread = int(threadIdx.x);
    x += p.batch.offset(kA, at.matrix);
    if (p.along_mn) {
        constexpr int kLanes = kBlockMn / kWidth, kRowsK = kNumThreads / kLanes;
        const int col = thread % kLanes * kWidth, mn = at.mn_block * kBlockMn + col;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int row = thread / kLanes + i * kRowsK, k = at.k_block * kBlockK + row;
            const int count = k < p.k_size ? p.mn_size - mn : 0;
            copy_vector(&stage.along_mn[row][col],
                        count > 0 ? x + mn * p.mn_step + k * p.k_step : x, p.mn_step, count,
                        p.vectors);
        }
    } else {
        constexpr int kLanes = kBlockK / kWidth;
        const int col = thread % kLanes * kWidth, k = at.k_block * kBlockK + col;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int row = thread / kLanes + i * kRows, mn = at.mn_block * kBlockMn + row;
            const int count = mn < p.mn_size ? p.k_size - k : 0;
            copy_vector(&stage.along_k[row][col], count > 0 ? x + mn * p.mn_step + k * p.k_step : x,
                        p.k_step, count, p.vectors);
        }
    }
}

// Stores the parts and the scale of the block in `stage`.  Returns whether the parts represent it.
DEVICE bool split_block(Part* parts, float* scales, const SplitParams& params,
                        const SplitOperand& p, int block, SplitStorage& storage,
                        const SplitStorage::Stage& stage) {
    const SplitBlock at(p, block);
    // A thread has a vector along k of every kRows-th row.  A warp stores whole sectors; its reads
    // of `along_mn` have two-way bank conflicts.
    const int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const int row = p.along_mn ? warp / 4 * 8 + lane % 8 : thread / (kBlockK / kWidth);
    const int col = kWidth * (p.along_mn ? warp % 4 * 4 + lane / 8 : thread % (kBlockK / kWidth));
    float values[kLoads][kWidth];
    // least: bits of the smallest nonzero magnitude, minus 1: a zero wraps to the largest value.
    uint32_t largest = 0, least = ~0u;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        if (p.along_mn) {
#pragma unroll
            for (int j = 0; j < kWidth; ++j)
                values[i][j] = stage.along_mn[col + j][row + i * kRows];
        } else {
            const Bytes<16> vector = load_vector<16>(&stage.along_k[row + i * kRows][col]);
#pragma unroll
            for (int j = 0; j < kWidth; ++j) values[i][j] = bit_cast<float>(vector.words[j]);
        }
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            const uint32_t bits = bit_cast<uint32_t>(magnitude(values[i][j]));
            largest = largest > bits ? largest : bits;
            least = least < bits - 1 ? least : bits - 1;
        }
    }
    largest = largest_of_block(largest, storage.first);
    const float most = bit_cast<float>(largest);
    int exponent = int(largest >> 23) - 127 - kLargestExponent;
    bool holds = largest < kExponent && exponent <= kMostScale;
    exponent = exponent < -kMostScale ? -kMostScale : holds ? exponent : kMostScale;
    const float inverse = power_of_two(-exponent), scale = power_of_two(exponent);
    holds &= least >= bit_cast<uint32_t>(params.smallest * scale) - 1;
    bool integers = kShift > 0 && most > kOnePart && most < kFewBits;
    const int k = at.k_block * kBlockK + col, mn = at.mn_block * kBlockMn + row;
    parts += at.matrix * kParts * p.part_step + k;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        Bytes<2 * kWidth> of_parts[kParts];
        holds &= split(values[i], inverse, params.tolerance, of_parts);
        if (integers) {
#pragma unroll
            for (int j = 0; j < kWidth; ++j)
                integers &= float(int32_t(values[i][j])) == values[i][j];
        }
        if (mn + i * kRows >= p.mn_size || k >= p.pitch) continue;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            Part* to = parts + part * p.part_step + int64_t(mn + i * kRows) * p.pitch;
            store_vector<2 * kWidth>(to, of_parts[part]);
        }
    }
    const Found mine = !holds ? kLossy : integers ? kIntegers : kNumbers;
    const bool all = largest_of_block(mine, storage.second) == kNumbers;
    if (thread == 0) {
        const int64_t row_of_blocks = int64_t(at.matrix) * p.num_mn + at.mn_block;
        scales[row_of_blocks * p.num_k + at.k_block] = all ? scale : -scale;
    }
    return all;
}
