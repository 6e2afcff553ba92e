// split_float32.cu: FP32 matrices as sums of 16-bit parts, for products of these on tensor cores.
//
// A block of 128 rows of A (columns of B) and 64 of k is
//     x = scale * sum over p of 2^(-kShift p) part[p],
// scale a power of two that brings the block's largest magnitude to [2^14, 2^15).  Each part is what
// the ones before leave, rounded to nearest.  A scale is negative where parts cannot stand for the
// block: it has an infinity or a NaN, numbers beyond 2^78, or one that is below `smallest` or loses
// more than `tolerance`, relative to itself; or, if products of parts are dropped that FP32 sums of
// integers below 2^24 hold, integers that have second parts alone.  gemm_flagged.cu computes these tiles.
// Types: Part (half or bf16).  Constants: kParts, kShift.
// Launch: grid (any), block (kNumThreads), dynamic shared memory sizeof(SplitStorage).
#include "parts/gemm_work_tile.cuh"
#include "parts/vector.cuh"

struct SplitOperand {
    BatchLayout batch;                   // kA: of x
    int64_t far_step, near_step;         // of x; parts are contiguous along `near`
    int64_t part_step;                   // from a part to the next, and of matrices kParts of it
    int32_t far_size, near_size, pitch;  // pitch: of the parts' rows
    int32_t num_far, num_near;           // blocks along these
    int32_t num_blocks;                  // of the whole batch
    int32_t mn_major;                    // near is along the rows of A or columns of B, else k
    int32_t vectors;                     // x is read by vectors
};
struct SplitParams {
    SplitOperand operands[2];
    float tolerance, smallest;  // smallest: over the scale
};

constexpr int kBlockMn = 128, kBlockK = 64;
constexpr int kWidth = 4, kLoads = kBlockMn * kBlockK / (kWidth * kNumThreads);
constexpr int kLargestExponent = 14;  // of a block's numbers over its scale
constexpr int kMostScale = 63;        // exponent: products of scales are normal numbers
constexpr uint32_t kExponent = 0x7f800000u;

// A thread reads the vectors that it has copied: no barrier is needed.
struct SplitStorage {
    Bytes<16> vectors[2][kLoads][kNumThreads];
    uint32_t first[kNumThreads / kWarpSize], second[kNumThreads / kWarpSize];
};

DEVICE float power_of_two(int exponent) { return bit_cast<float>(uint32_t(127 + exponent) << 23); }

DEVICE float magnitude(float x) { return bit_cast<float>(bit_cast<uint32_t>(x) & 0x7fffffffu); }

// The largest of all threads' values.  Calls take turns with two arrays: the barrier of one call
// tells that the other's array has been read.
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

// Whether the parts of x / scale stand for it.  parts: of `i` along `near`, what is stored of each.
DEVICE bool split(float x, float inverse, const SplitParams& params, int i,
                  float (&parts)[kParts][kWidth]) {
    const float y = x * inverse;
    float rest = y, unit = 1.0f;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
        if (p > 0) {
            rest *= power_of_two(kShift);
            unit *= power_of_two(kShift);
        }
        parts[p][i] = to_float(from_float<Part>(rest));
        rest -= parts[p][i];
    }
    const float size = magnitude(y);
    return x == 0 || (size >= params.smallest && magnitude(rest) <= params.tolerance * unit * size);
}

// What a block's largest tells: whether all its numbers are integers, and whether parts do.
enum Found { kIntegers, kNumbers, kLossy };
constexpr float kOnePart = 2048.0f, kFewBits = 16777216.0f;  // integers of 11 and of 24 bits

// Where a thread's vectors of a block lie: kLoads of them, kRows rows apart.
template <bool kMnMajor> struct BlockCoord {
    static constexpr int kNear = kMnMajor ? kBlockMn : kBlockK,
                         kFar = kMnMajor ? kBlockK : kBlockMn;
    static constexpr int kLanes = kNear / kWidth, kRows = kNumThreads / kLanes;
    static_assert(kRows * kLoads == kFar, "a block's rows");
    int matrix, far_block, near_block, far, near;

    DEVICE BlockCoord(const SplitOperand& p, int block) {
        const int per_matrix = p.num_far * p.num_near;
        matrix = block / per_matrix;
        const int in_matrix = block - matrix * per_matrix;
        far_block = in_matrix / p.num_near;
        near_block = in_matrix - far_block * p.num_near;
        far = far_block * kFar + int(threadIdx.x) / kLanes;
        near = near_block * kNear + int(threadIdx.x) % kLanes * kWidth;
    }
    // Copies the thread's vectors to shared memory, zeros past the matrix.
    DEVICE void copy(const float* x, const SplitOperand& p,
                     Bytes<16> (&vectors)[kLoads][kNumThreads]) const {
        const int count = p.near_size - near;
        x += p.batch.offset(kA, matrix) + near * p.near_step;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const float* from = x + (far + i * kRows) * p.far_step;
            const bool inside = far + i * kRows < p.far_size;
            Bytes<16>& to = vectors[i][threadIdx.x];
            if (p.vectors && count >= kWidth) {
                copy_async<16>(&to, from, inside);
            } else {
#pragma unroll
                for (int j = 0; j < kWidth; ++j) {
                    const bool exists = inside && j < count;
                    copy_async<4>(&to.words[j], exists ? from + j * p.near_step : x, exists);
                }
            }
        }
    }
};

// Stores the parts and the scale of a block, whose vectors have come.  Returns whether the parts
// stand for it.
template <bool kMnMajor>
DEVICE bool split_block(Part* parts, float* scales, const SplitParams& params,
                        const SplitOperand& p, int block, SplitStorage& storage, int stage) {
    using Coord = BlockCoord<kMnMajor>;
    const Coord at(p, block);
    float values[kLoads][kWidth];
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        const Bytes<16> vector = storage.vectors[stage][i][threadIdx.x];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            values[i][j] = bit_cast<float>(vector.words[j]);
            const uint32_t bits = bit_cast<uint32_t>(magnitude(values[i][j]));
            largest = largest > bits ? largest : bits;
        }
    }
    largest = largest_of_block(largest, storage.first);
    int exponent = int(largest >> 23) - 127 - kLargestExponent;
    bool holds = largest < kExponent && exponent <= kMostScale;
    exponent = exponent < -kMostScale ? -kMostScale : holds ? exponent : kMostScale;
    const float inverse = power_of_two(-exponent);
    const float most = bit_cast<float>(largest);
    bool integers = kShift > 0 && most > kOnePart && most < kFewBits;
    parts += at.matrix * kParts * p.part_step + at.near;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        const int far = at.far + i * Coord::kRows;
        float of_parts[kParts][kWidth];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            holds &= split(values[i][j], inverse, params, j, of_parts);
            integers = integers && float(int32_t(values[i][j])) == values[i][j];
        }
        if (far >= p.far_size || at.near >= p.pitch) continue;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            Vector<Part, kWidth> vector;
            vector.from_floats(of_parts[part]);
            vector.store(parts + part * p.part_step + int64_t(far) * p.pitch);
        }
    }
    const Found mine = !holds ? kLossy : integers ? kIntegers : kNumbers;
    const bool all = largest_of_block(mine, storage.second) == kNumbers;
    if (threadIdx.x == 0) {
        const int mn = kMnMajor ? at.near_block : at.far_block;
        const int k = kMnMajor ? at.far_block : at.near_block;
        const int num_k = kMnMajor ? p.num_far : p.num_near, per_matrix = p.num_far * p.num_near;
        const float scale = power_of_two(exponent);
        scales[int64_t(at.matrix) * per_matrix + int64_t(mn) * num_k + k] = all ? scale : -scale;
    }
    return all;
}

// lossy: of each block of the launch, whether it made a scale negative.
KERNEL void split_float32(const float* a, const float* b, Part* parts_a, Part* parts_b,
                          float* scales_a, float* scales_b, int32_t* lossy,
                          const SplitParams params) {
    SHARED_STORAGE(SplitStorage, storage);
    const int of_a = params.operands[0].num_blocks, all = of_a + params.operands[1].num_blocks;
    const auto copy = [&](int i, int stage) {
        if (i < all) {
            const bool is_b = i >= of_a;
            const SplitOperand& p = params.operands[is_b];
            const float* x = is_b ? b : a;
            const int block = is_b ? i - of_a : i;
            if (p.mn_major) BlockCoord<true>(p, block).copy(x, p, storage.vectors[stage]);
            else BlockCoord<false>(p, block).copy(x, p, storage.vectors[stage]);
        }
        copy_async_commit();
    };
    bool holds = true;
    int stage = 0;
    copy(blockIdx.x, 0);
    for (int i = blockIdx.x; i < all; i += gridDim.x) {
        copy(i + gridDim.x, stage ^ 1);
        copy_async_wait<1>();
        const bool is_b = i >= of_a;
        const SplitOperand& p = params.operands[is_b];
        Part* parts = is_b ? parts_b : parts_a;
        float* scales = is_b ? scales_b : scales_a;
        const int block = is_b ? i - of_a : i;
        holds &= p.mn_major ? split_block<true>(parts, scales, params, p, block, storage, stage)
                            : split_block<false>(parts, scales, params, p, block, storage, stage);
        stage ^= 1;
    }
    if (threadIdx.x == 0) lossy[blockIdx.x] = !holds;
}
