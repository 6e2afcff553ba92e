// The short way of a warpgroup's sums to memory, in registers:
//     out = activation(alpha * (scale_a * (scale_b * sum)) + bias of its column)
// where TMA stores the output and nothing else is to be done (gemm_hopper.py: is_plain).
#include "parts/epilogue_hopper.cuh"

// A tile's bias and scales wait in shared memory, where one of the producer's warps has put them
// while the sums were under way.  Rows and columns are the output's.
struct TileFactors {
    static constexpr int kOfCol = kScales ? 2 : 1;
    static constexpr int kRowScales = !kScales ? 0 : kTurned ? 1 : kRows;  // turned: one of all
    alignas(16) float cols[kTileN][kOfCol];       // scale_b, if there are scales, and bias
    float rows[kRowScales > 0 ? kRowScales : 1];  // scale_a
    Bytes<16> place;  // row and column of the tile's first number, and which of the batch
    Barrier full, empty;

    DEVICE void init() {
        full.init(1, 32);
        empty.init(4 * (kShareRows ? kConsumers : 1), 32);  // warps that store a tile
    }
    // By one warp: those of a task's tile, when the ones before have been read.  No scales: 1.  For
    // gelu_of_twice, half the bias.
    DEVICE void load(const EpilogueParams& p, const BatchLayout& batch, const GemmTask& task,
                     const float* scale_a, const float* scale_b, const void* bias, int count) {
        empty.wait((count & 1) ^ 1);
        if (threadIdx.x % 32 == 0) {
            place = {uint32_t(task.row), uint32_t(task.col),
                     uint32_t(batch.offset(kOut, task.batch)), 0};
        }
        fill<kOfCol>(&cols[0][kOfCol - 1], kTileN, bias, 0.0f, batch.offset(kBias, task.batch),
                     p.bias.col, p.bias_dtype, int(task.col), int(p.n),
                     p.activation == kGelu ? 0.5f : 1.0f);
        if constexpr (kScales) {
            // alpha, exactly, in the place of a scale that is not there (is_plain): `store_plain`
            // multiplies with both alone.
            const float of_rows = kTurned || scale_a ? 1.0f : p.alpha;
            const float of_cols = kTurned || scale_b || !scale_a ? 1.0f : p.alpha;
            fill<kOfCol>(&cols[0][0], kTileN, scale_b, of_cols, batch.offset(kScaleB, task.batch),
                         p.scale_b_stride, kFloat, int(task.col), int(p.n));
            fill<1>(rows, kRowScales, scale_a, of_rows, batch.offset(kScaleA, task.batch),
                    p.scale_a_stride, kFloat, int(task.row), int(p.m));
        }
        sync_warp();
        full.arrive_for<32>();
    }
    template <int kStep>
    DEVICE static void fill(float* to, int count, const void* from, float absent, int64_t offset,
                            int64_t stride, int dtype, int first, int last, float factor = 1.0f) {
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < count; i += 32) {
            const bool there = from && first + i < last;
            const float x =
                there ? load_number(from, offset + (first + i) * stride, dtype) : absent;
            to[i * kStep] = x * factor;
        }
    }
    // By a warp that has read them.
    DEVICE void release() {
        sync_warp();
        empty.arrive_for<32>();
    }
    // A part finished but for the activation.  row, col: of its first sum in the tile.
    DEVICE void finish(const SumType (&sums)[kValues], float alpha, int row, int col,
                       float (&values)[kValues]) const {
        const int lane = threadIdx.x % 32;
        if constexpr (kTurned) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const auto of_row = *reinterpret_cast<const Bytes<4 * kOfCol>*>(
                    cols[row + row_of_half(lane, half)]);
                const float added = bit_cast<float>(of_row.words[kOfCol - 1]);
#pragma unroll
                for (int i = 0; i < kValues; ++i) {
                    if (i / 2 % 2 != half) continue;
                    float x = float(sums[i]);
                    if constexpr (kScales) x = x * bit_cast<float>(of_row.words[0]) * rows[0];
                    values[i] = x * alpha + added;
                }
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < kValues; i += 4) {
            const auto pair =
                *reinterpret_cast<const Bytes<8 * kOfCol>*>(cols[col + wgmma_col(lane, i)]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int at = j % 2 * kOfCol;
                float x = float(sums[i + j]);
                if constexpr (kScales) {
                    x = x * bit_cast<float>(pair.words[at]) * rows[row + lane / 4 + j / 2 * 8];
                }
                values[i + j] = x * alpha + bit_cast<float>(pair.words[at + kOfCol - 1]);
            }
        }
    }
};

// With scales of rows and columns besides, they leave no registers.
constexpr bool kActivates = sizeof(ElementA) == 2;

// scale_a of a lane's rows.  row: the warp's first one in the tile.
struct RowFactors {
    float of_block[kBlocks][2];

    DEVICE void load(const TileFactors& factors, int row) {
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
            const int below = 64 * (i / 2) + int(threadIdx.x) % 32 / 4 + 8 * (i % 2);
            of_block[i / 2][i % 2] = kScales ? factors.rows[row + below] : 1.0f;
        }
    }
};

// The warp's sums in boxes of 16 rows x 64 columns.  kGelus: their gelu, for which alpha and the bias
// are halved.  halves: FP16 results, else BF16.  (out_row, col): its first sum in the output.  box:
// the box to fill next.  Where the boxes hold all sums they are filled and stored together, so that
// the warp waits once for what it did with them before, and once until TMA may read them.
template <bool kGelus>
DEVICE void store_chunks(Staging& staging, int& box, const TensorMap& map,
                         const TileFactors& factors, const RowFactors& rows, float alpha,
                         bool halves, int out_row, int col, int batch, const TileSums& sums) {
    constexpr int kTogether = kBlocks == 1 && !kSplitK && kCols == 2 * kChunk ? 2 : 1;
    // Columns at once.  Where tiles are large there is another one, whose products are beside gelu: many
    // of its instructions in a row, independent of each other, would keep the tensor cores from the
    // registers.  The largest tiles' sums leave no registers for more either.
    constexpr bool kFewAtOnce = kPingPong && kBlocks > 1 && (kGelus || kBlocks * kCols > 352);
    constexpr int kAtOnce = kFewAtOnce ? 16 : kChunk, kWords = kAtOnce / 16;
    const int lane = opaque(threadIdx.x % 32);
    const OwnChunks own;
    // Of the columns of block `block` from `begin` on.
    const auto pack_columns = [&](int block, int begin, uint32_t (&packed)[kWords][4]) {
        float values[kAtOnce / 2];
#pragma unroll
        for (int i = 0; i < kAtOnce / 2; i += 4) {
            const int at = begin + wgmma_col(lane, i);
            const auto pair =
                *reinterpret_cast<const Bytes<8 * TileFactors::kOfCol>*>(factors.cols[at]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int word = j % 2 * TileFactors::kOfCol;
                const float bias = bit_cast<float>(pair.words[word + TileFactors::kOfCol - 1]);
                float x = float(sums[block][begin / 2 + i + j]);
                if (kScales) x *= bit_cast<float>(pair.words[word]);
                x = x * (kScales ? rows.of_block[block][j / 2] : alpha) + bias;
                values[i + j] = kGelus ? gelu_of_twice(x) : x;
            }
        }
        if (halves) {  // one branch for all
#pragma unroll
            for (int i = 0; i < kAtOnce / 4; ++i)
                packed[i / 4][i % 4] = pack<half>(values[2 * i], values[2 * i + 1]);
        } else {
#pragma unroll
            for (int i = 0; i < kAtOnce / 4; ++i)
                packed[i / 4][i % 4] = pack<bf16>(values[2 * i], values[2 * i + 1]);
        }
    };
    // The same to a box, from its column `begin` on.
    const auto fill = [&](unsigned char* to, int begin, const uint32_t (&packed)[kWords][4]) {
#pragma unroll
        for (int j = 0; j < kWords; ++j) {
            const int line = lane % 16, place = begin / 8 + 2 * j + lane / 16;
            store_matrix(to + line * kLineBytes + (place ^ line % 8) * 16, packed[j]);
        }
    };
#pragma unroll
    for (int first = 0; first < kBlocks * kTileChunks; first += kTogether) {
        const int block = first / kTileChunks, chunk = first % kTileChunks;
        if (!own.has(chunk)) continue;
        uint32_t packed[kTogether][kWords][4];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) pack_columns(block, chunk_col(chunk + i), packed[i]);
        if (lane == 0) tma_store_wait_read<2 - kTogether>();
        sync_warp();
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            unsigned char* to = staging.boxes[kTogether == 2 ? i : box];
            fill(to, 0, packed[i]);
#pragma unroll
            for (int begin = kAtOnce; begin < kChunk; begin += kAtOnce) {
                pack_columns(block, chunk_col(chunk + i) + begin, packed[i]);
                fill(to, begin, packed[i]);
            }
        }
        fence_async_proxy();
        sync_warp();
        if (lane == 0) {
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                tma_store(map, staging.boxes[kTogether == 2 ? i : box],
                          {col + chunk_col(chunk + i), out_row + 64 * block, batch});
            }
            tma_store_commit();
        }
        if (kTogether == 1) box ^= 1;
    }
}

// The same by params.  row: the warp's first one in the tile.
DEVICE void store_plain(Staging& staging, int& box, const TensorMap& map,
                        const TileFactors& factors, const RowFactors& rows,
                        const EpilogueParams& params, int row, const TileSums& sums) {
    const Bytes<16> place = factors.place;
    const int out_row = int(place.words[0]) + row, col = int(place.words[1]),
              batch = int(place.words[2]);
    const bool halves = params.out_dtype == kHalf;
    if (kActivates && params.activation == kGelu) {
        store_chunks<kActivates>(staging, box, map, factors, rows, 0.5f * params.alpha, halves,
                                 out_row, col, batch, sums);
    } else {
        store_chunks<false>(staging, box, map, factors, rows, params.alpha, halves, out_row, col,
                            batch, sums);
    }
}

// The warp's sums, with another activation or kTurned.  row: the warp's first one in the tile; (out_row,
// col): its first sum in the output.  box: the box to fill next.
DEVICE void store_parts(Staging* warps, int& box, const TensorMap& map, const TileFactors& factors,
                        const EpilogueParams& params, int row, int out_row, int col, int batch,
                        const TileSums& sums) {
    const OwnChunks own;
    SumType picked[kValues];
    float values[kValues];
    const auto pick = [&](int part) {
#pragma unroll
        for (int i = 0; i < kValues; ++i)
            picked[i] = sums[part / kTileParts][part_col(part % kTileParts) / 2 + i];
    };
    const auto finish = [&](int part, float alpha) {
        factors.finish(picked, alpha, row + part / kTileParts * 64, part_col(part % kTileParts),
                       values);
    };
    const auto store = [&](int part) {
        store_part(warps, box, map, part, out_row + part / kTileParts * 64,
                   col + part_col(part % kTileParts), batch, params.out_dtype, values);
    };
    if constexpr (kTurned) {  // others: store_plain
        if (!kActivates || params.activation == kNoActivation) {
#pragma unroll
            for (int part = 0; part < kBlocks * kTileParts; ++part) {
                if (!own.has(part % kTileParts / kPartsOfBox)) continue;
                pick(part);
                finish(part, params.alpha);
                store(part);
            }
            return;
        }
        if (params.activation == kGelu) {  // the same: picking sums at run time takes as long
#pragma unroll
            for (int part = 0; part < kBlocks * kTileParts; ++part) {
                if (!own.has(part % kTileParts / kPartsOfBox)) continue;
                pick(part);
                finish(part, 0.5f * params.alpha);  // and half the bias
#pragma unroll
                for (int i = 0; i < kValues; ++i) values[i] = gelu_of_twice(values[i]);
                store(part);
            }
            return;
        }
    }
    // One at a time: the activations are many instructions.
#pragma unroll 1
    for (int part = 0; part < kBlocks * kTileParts; ++part) {
        if (!own.has(part % kTileParts / kPartsOfBox)) continue;
        pick(0);  // even if it is another one: else those of the tile before hold registers
#pragma unroll
        for (int known = 1; known < kBlocks * kTileParts; ++known) {
            if (known == part) pick(known);
        }
        finish(part, params.alpha);
        activate_all(values, params.activation);
        store(part);
    }
}
