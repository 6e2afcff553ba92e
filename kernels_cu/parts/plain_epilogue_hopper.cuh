// The short way of a warpgroup's sums to memory, in registers:
//     out = activation(alpha * (scale_a * (scale_b * sum)) + bias of its column)
// where TMA stores the output and nothing else is to be done.  The factors of a tile's rows and columns wait
// in shared memory, where one of the producer's warps has put them while the sums were under way.
#include "parts/epilogue_hopper.cuh"

constexpr bool kPlain = !kTurned;  // the kernels that have it

struct TileFactors {
    static constexpr int kOfCol = kScales ? 2 : 1;
    alignas(16) float cols[kPlain ? kCols : 1][kOfCol];  // scale_b, if there are scales, and bias
    float rows[kPlain && kScales ? kRows : 1];           // scale_a
    Barrier full, empty;

    DEVICE void init() {
        full.init(1);
        empty.init(4 * (kShareRows ? kConsumers : 1));  // warps that store a tile
    }
    // By one warp: those of a task's tile, when the ones before have been read.  No scales: 1.
    DEVICE void load(const EpilogueParams& p, const BatchLayout& batch, const GemmTask& task,
                     const float* scale_a, const float* scale_b, const void* bias, int count) {
        const int lane = threadIdx.x % 32;
        empty.wait((count & 1) ^ 1);
        fill<kOfCol>(&cols[0][kOfCol - 1], kCols, bias, 0.0f, batch.offset(kBias, task.batch), p.bias.col,
                     p.bias_dtype, int(task.col), int(p.n));
        if constexpr (kScales) {
            fill<kOfCol>(&cols[0][0], kCols, scale_b, 1.0f, batch.offset(kScaleB, task.batch),
                         p.scale_b_stride, kFloat, int(task.col), int(p.n));
            fill<1>(rows, kRows, scale_a, 1.0f, batch.offset(kScaleA, task.batch), p.scale_a_stride, kFloat,
                    int(task.row), int(p.m));
        }
        sync_warp();
        if (lane == 0) full.arrive();
    }
    template <int kStep>
    DEVICE static void fill(float* to, int count, const void* from, float absent, int64_t offset,
                            int64_t stride, int dtype, int first, int last) {
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < count; i += 32) {
            const bool there = from && first + i < last;
            to[i * kStep] = there ? load_number(from, offset + (first + i) * stride, dtype) : absent;
        }
    }
    // By a warp that has read them.
    DEVICE void release() {
        sync_warp();
        if (threadIdx.x % 32 == 0) empty.arrive();
    }
};

DEVICE bool is_plain(const EpilogueParams& params, bool tma_stores, const void* bias, const void* residual) {
    const bool bias_of_cols = params.bias.row == 0 && params.bias.col != 0;
    return tma_stores && !residual && (!bias || bias_of_cols);
}

// A warp's sums of kPart columns, a part of a box of 16 rows x 64 columns.
constexpr int kPartsOfBox = kChunk / kPart;

// Finished but for the activation.  row, col: of the warp's first sum in the tile; `sums`: this thread's.
DEVICE void finish_plain(const SumType (&sums)[kValues], const TileFactors& factors, float alpha, int row,
                         int col, float (&values)[kValues]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kValues; i += 4) {
        const float* cols = factors.cols[col + wgmma_col(lane, i)];
        const auto pair = *reinterpret_cast<const Bytes<8 * TileFactors::kOfCol>*>(cols);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int at = j % 2 * TileFactors::kOfCol;
            float x = float(sums[i + j]);
            if constexpr (kScales) {
                x = x * bit_cast<float>(pair.words[at]) * factors.rows[row + lane / 4 + j / 2 * 8];
            }
            values[i + j] = x * alpha + bit_cast<float>(pair.words[at + TileFactors::kOfCol - 1]);
        }
    }
}

// Part `part` of the warp's sums to its place in a box, which is stored when it is whole.
DEVICE void store_part(Staging& staging, int& box, const TensorMap& map, int part, int row, int col,
                       int batch, int dtype, const float (&values)[kValues]) {
    const int lane = threadIdx.x % 32;
    uint32_t packed[kPart / 16][4];
    if (dtype == kHalf) {  // one branch for all
#pragma unroll
        for (int i = 0; i < kValues; i += 2) {
            packed[i / 8][i / 2 % 4] = pack<half>(values[i], values[i + 1]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kValues; i += 2) {
            packed[i / 8][i / 2 % 4] = pack<bf16>(values[i], values[i + 1]);
        }
    }
    unsigned char* to = staging.boxes[box];
    if (part % kPartsOfBox == 0) {
        if (lane == 0) tma_store_wait_read<1>();
        sync_warp();
    }
#pragma unroll
    for (int j = 0; j < kPart / 16; ++j) {
        const int line = lane % 16, place = part % kPartsOfBox * (kPart / 8) + 2 * j + lane / 16;
        store_matrix(to + line * kLineBytes + (place ^ line % 8) * 16, packed[j]);
    }
    if (part % kPartsOfBox < kPartsOfBox - 1) return;
    fence_async_proxy();
    sync_warp();
    if (lane == 0) {
        tma_store(map, to, {col - part % kPartsOfBox * kPart, row, batch});
        tma_store_commit();
    }
    box ^= 1;
}

// The warp's sums.  row: the warp's first one in the tile; (out_row, col): its first sum in the output.
// box: the box to fill next.
DEVICE void store_plain(Staging& staging, int& box, const TensorMap& map, const TileFactors& factors,
                        const EpilogueParams& params, int row, int out_row, int col, int batch,
                        const TileSums& sums) {
    const int activation = params.activation;
    const OwnChunks own;
    constexpr int kParts = kCols / kPart;
    SumType picked[kValues];
    float values[kValues];
    const auto pick = [&](int part) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) picked[i] = sums[part / kParts][part % kParts * kValues + i];
    };
    const auto finish = [&](int part) {
        finish_plain(picked, factors, params.alpha, row + part / kParts * 64, part % kParts * kPart, values);
    };
    const auto store = [&](int part) {
        store_part(staging, box, map, part, out_row + part / kParts * 64, col + part % kParts * kPart,
                   batch, params.out_dtype, values);
    };
    if (activation == kNoActivation) {
#pragma unroll
        for (int part = 0; part < kBlocks * kParts; ++part) {
            if (!own.has(part % kParts / kPartsOfBox)) continue;
            pick(part);
            finish(part);
            store(part);
        }
        return;
    }
    // One at a time: the activations are many instructions.
#pragma unroll 1
    for (int part = 0; part < kBlocks * kParts; ++part) {
        if (!own.has(part % kParts / kPartsOfBox)) continue;
        pick(0);  // before it is another one: else the numbers of the tile before hold registers
#pragma unroll
        for (int known = 1; known < kBlocks * kParts; ++known) {
            if (known == part) pick(known);
        }
        finish(part);
        activate_all(values, activation);
        store(part);
    }
}
