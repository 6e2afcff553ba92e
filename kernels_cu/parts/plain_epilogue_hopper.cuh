// The short way of a warpgroup's sums of 8-bit operands to memory, in registers:
//     out = alpha * (scale_a * (scale_b * sum)) + bias of its column
// where TMA stores the output and nothing else is to be done.  The factors of a tile's rows and columns wait
// in shared memory, where one of the producer's warps has put them while the sums were under way.
#include "parts/epilogue_hopper.cuh"

constexpr bool kPlain = sizeof(ElementA) == 1;  // the kernels that have it

struct TileFactors {
    alignas(16) float cols[kPlain ? kCols : 1][2];  // scale_b and bias
    float rows[kPlain ? kRows : 1];                 // scale_a
    Barrier full, empty;

    DEVICE void init() {
        full.init(1);
        empty.init(4 * (kShareK ? 1 : kConsumers));  // warps that store
    }
    // By one warp: those of a task's tile, when the ones before have been read.  No scales: 1.
    DEVICE void load(const EpilogueParams& p, const BatchLayout& batch, const GemmTask& task,
                     const float* scale_a, const float* scale_b, const void* bias, int count) {
        const int lane = threadIdx.x % 32;
        empty.wait((count & 1) ^ 1);
        fill<2>(&cols[0][0], kCols, scale_b, 1.0f, batch.offset(kScaleB, task.batch), p.scale_b_stride,
                kFloat, int(task.col), int(p.n));
        fill<2>(&cols[0][1], kCols, bias, 0.0f, batch.offset(kBias, task.batch), p.bias.col,
                p.bias_dtype, int(task.col), int(p.n));
        fill<1>(rows, kRows, scale_a, 1.0f, batch.offset(kScaleA, task.batch), p.scale_a_stride, kFloat,
                int(task.row), int(p.m));
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
    return tma_stores && !residual && params.activation == kNoActivation && (!bias || bias_of_cols);
}

// The warp's sums, in boxes of 16 rows x 64 columns.  row: the warp's first one in the tile; (out_row, col):
// its first sum in the output.  box: the box to fill next.
template <class Out>
DEVICE void store_plain(Staging& staging, int& box, const TensorMap& map, const TileFactors& factors,
                        float alpha, int row, int out_row, int col, int batch, const TileSums& sums) {
    const int lane = threadIdx.x % 32;
    const OwnChunks own;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
        float row_factors[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) row_factors[i] = factors.rows[row + 64 * block + lane / 4 + 8 * i];
#pragma unroll
        for (int chunk = 0; chunk < kCols / kChunk; ++chunk) {
            if (!own.has(chunk)) continue;
            uint32_t packed[kChunk / 16][4];
#pragma unroll
            for (int i = 0; i < kChunk / 2; i += 4) {
                const int at = chunk * kChunk + wgmma_col(lane, i);
                const auto pair = *reinterpret_cast<const Bytes<16>*>(factors.cols[at]);
                float values[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float scale = bit_cast<float>(pair.words[j % 2 * 2]);
                    const float bias = bit_cast<float>(pair.words[j % 2 * 2 + 1]);
                    const float sum = float(sums[block][chunk * kChunk / 2 + i + j]);
                    values[j] = sum * scale * row_factors[j / 2] * alpha + bias;
                }
                packed[i / 8][i / 4 % 2 * 2] = pack<Out>(values[0], values[1]);
                packed[i / 8][i / 4 % 2 * 2 + 1] = pack<Out>(values[2], values[3]);
            }
            unsigned char* to = staging.boxes[box];
            if (lane == 0) tma_store_wait_read<1>();
            sync_warp();
#pragma unroll
            for (int j = 0; j < kChunk / 16; ++j) {
                const int line = lane % 16, place = 2 * j + lane / 16;
                store_matrix(to + line * kLineBytes + (place ^ line % 8) * 16, packed[j]);
            }
            fence_async_proxy();
            sync_warp();
            if (lane == 0) {
                tma_store(map, to, {col + chunk * kChunk, out_row + 64 * block, batch});
                tma_store_commit();
            }
            box ^= 1;
        }
    }
}
