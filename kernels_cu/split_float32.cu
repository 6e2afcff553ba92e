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
// Launch: grid (any), block (kNumThreads).
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
constexpr float kOnePart = 2048.0f, kAllIntegers = 16777216.0f;
DEVICE bool is_integer(float x) { return magnitude(x) >= kAllIntegers || float(int32_t(x)) == x; }

// Returns whether the parts of block `block` stand for it.
template <bool kMnMajor>
DEVICE bool split_block(const float* x, Part* parts, float* scales, const SplitOperand& p,
                        const SplitParams& params, int block,
                        uint32_t (&first_shared)[kNumThreads / kWarpSize],
                        uint32_t (&second_shared)[kNumThreads / kWarpSize]) {
    constexpr int kNear = kMnMajor ? kBlockMn : kBlockK, kFar = kMnMajor ? kBlockK : kBlockMn;
    constexpr int kLanes = kNear / kWidth, kRows = kNumThreads / kLanes;
    const int per_matrix = p.num_far * p.num_near, matrix = block / per_matrix;
    const int in_matrix = block - matrix * per_matrix;
    const int far_block = in_matrix / p.num_near, near_block = in_matrix - far_block * p.num_near;
    const int near = near_block * kNear + int(threadIdx.x) % kLanes * kWidth;
    const int first = far_block * kFar + int(threadIdx.x) / kLanes, count = p.near_size - near;
    x += p.batch.offset(kA, matrix) + near * p.near_step;
    float values[kLoads][kWidth];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        const int far = first + i * kRows;
        const float* from = x + far * p.far_step;
        const bool inside = far < p.far_size;
        if (inside && p.vectors && count >= kWidth) {
            Vector<float, kWidth> vector;
            vector.load(from);
#pragma unroll
            for (int j = 0; j < kWidth; ++j) values[i][j] = vector[j];
        } else {
#pragma unroll
            for (int j = 0; j < kWidth; ++j)
                values[i][j] = inside && j < count ? from[j * p.near_step] : 0.0f;
        }
    }
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            const uint32_t bits = bit_cast<uint32_t>(magnitude(values[i][j]));
            largest = largest > bits ? largest : bits;
        }
    }
    largest = largest_of_block(largest, first_shared);
    int exponent = int(largest >> 23) - 127 - kLargestExponent;
    bool holds = largest < kExponent && exponent <= kMostScale;
    exponent = exponent < -kMostScale ? -kMostScale : holds ? exponent : kMostScale;
    const float inverse = power_of_two(-exponent);
    bool integers = kShift > 0 && bit_cast<float>(largest) > kOnePart;
    parts += matrix * kParts * p.part_step + near;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        const int far = first + i * kRows;
        float of_parts[kParts][kWidth];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            holds &= split(values[i][j], inverse, params, j, of_parts);
            integers &= is_integer(values[i][j]);
        }
        if (far >= p.far_size || near >= p.pitch) continue;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            Vector<Part, kWidth> vector;
            vector.from_floats(of_parts[part]);
            vector.store(parts + part * p.part_step + int64_t(far) * p.pitch);
        }
    }
    const Found mine = !holds ? kLossy : integers ? kIntegers : kNumbers;
    const bool all = largest_of_block(mine, second_shared) == kNumbers;
    if (threadIdx.x == 0) {
        const int mn = kMnMajor ? near_block : far_block, k = kMnMajor ? far_block : near_block;
        const int num_k = kMnMajor ? p.num_far : p.num_near;
        const float scale = power_of_two(exponent);
        scales[int64_t(matrix) * per_matrix + int64_t(mn) * num_k + k] = all ? scale : -scale;
    }
    return all;
}

// lossy: of each block of the launch, whether it made a scale negative.
KERNEL void split_float32(const float* a, const float* b, Part* parts_a, Part* parts_b,
                          float* scales_a, float* scales_b, int32_t* lossy,
                          const SplitParams params) {
    SHARED(uint32_t, first, [kNumThreads / kWarpSize]);
    SHARED(uint32_t, second, [kNumThreads / kWarpSize]);
    const int of_a = params.operands[0].num_blocks, all = of_a + params.operands[1].num_blocks;
    bool holds = true;
    for (int i = blockIdx.x; i < all; i += gridDim.x) {
        const bool is_b = i >= of_a;
        const SplitOperand& p = params.operands[is_b];
        const float* x = is_b ? b : a;
        Part* parts = is_b ? parts_b : parts_a;
        float* scales = is_b ? scales_b : scales_a;
        const int block = is_b ? i - of_a : i;
        holds &= p.mn_major ? split_block<true>(x, parts, scales, p, params, block, first, second)
                            : split_block<false>(x, parts, scales, p, params, block, first, second);
    }
    if (threadIdx.x == 0) lossy[blockIdx.x] = !holds;
}
