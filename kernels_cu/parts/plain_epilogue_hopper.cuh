// The short way of a warpgroup's sums to memory, in registers:
//     out = activation(alpha * (scale_a * (scale_b * sum)) + bias of its column) + residual
// where TMA stores the output, nothing else is to be done and, if there is a residual, TMA loads it
// (gemm_hopper.py: is_plain, _is_boxed).
#include "parts/epilogue_hopper.cuh"

struct alignas(8) ColumnPair { float numbers[2]; };

// 16-bit operands may have a scale each, of all numbers of a matrix, if there is no residual.
constexpr bool kScalesOfAll = kGeneral && !kScales && !kTurned;

// A tile's bias and scales wait in shared memory, where one of the producer's warps has put them
// while the sums were under way.  Rows and columns are the output's.
struct TileFactors {
    static constexpr int kOfCol = kScales ? 2 : 1;
    static constexpr int kRowScales = !kScales ? 0 : kTurned ? 1 : kRows;  // turned: one of all
    alignas(16) float cols[kOfCol][kTileN];       // scale_b, if there are scales, and bias
    float rows[kRowScales > 0 ? kRowScales : 2];  // scale_a; with kScalesOfAll scale_b and scale_a
    // Row and column of the tile's first number, which of the batch, and of the residual's, or, where
    // there is none, whether there is a bias.
    Bytes<16> place;
    Barrier full, empty;

    DEVICE void init() {
        full.init(kScales ? 3 : 1, 32);                     // both operands' scales and the rest
        empty.init(4 * (kShareRows ? kConsumers : 1), 32);  // warps that store a tile
    }
    // By one warp: those of a task's tile, when the ones before have been read.  No scales: 1.  For
    // gelu_of_twice, half the bias.
    DEVICE void load(const EpilogueParams& p, const BatchLayout& batch, const GemmTask& task,
                     const float* scale_a, const float* scale_b, const void* bias, int count) {
        empty.wait((count & 1) ^ 1);
        if (threadIdx.x % 32 == 0) {
            place = {uint32_t(task.row), uint32_t(task.col),
                     uint32_t(batch.offset(kOut, task.batch)),
                     kGeneral ? uint32_t(batch.offset(kResidual, task.batch))
                              : uint32_t(bias != nullptr)};
        }
        const int cols_there = int(p.n) - int(task.col);
        if constexpr (kScales) {
            // alpha, exactly, in the place of a scale that is not there (is_plain): `store_plain`
            // multiplies with both alone.
            const float of_rows = kTurned || scale_a ? 1.0f : p.alpha;
            const float of_cols = kTurned || scale_b || !scale_a ? 1.0f : p.alpha;
            load_scales(cols[0], kTileN, scale_b, batch.offset(kScaleB, task.batch), task.col,
                        p.scale_b_stride, cols_there, of_cols);
            load_scales(rows, kRowScales, scale_a, batch.offset(kScaleA, task.batch), task.row,
                        p.scale_a_stride, int(p.m) - int(task.row), of_rows);
        }
        if constexpr (kScalesOfAll) {
            if (threadIdx.x % 32 == 0) {
                rows[0] = scale_b ? scale_b[batch.offset(kScaleB, task.batch)] : 1.0f;
                rows[1] = scale_a ? scale_a[batch.offset(kScaleA, task.batch)] : 1.0f;
            }
        }
        load_bias(bias, batch.offset(kBias, task.batch) + task.col * p.bias.col, p.bias.col,
                  p.bias_dtype, cols_there, p.activation == kGelu ? 0.5f : 1.0f);
        sync_warp();
        full.arrive_for<32>();
    }
    // Scales of the tile's rows or columns, of which there are `there`; those of others are anything.
    // By TMA, where they lie side by side and aligned: one by one they take longer than the products of
    // a tile with a small k, and loads of a lane that are all under way at once, or asynchronous copies,
    // cost FP8's main loop 1% where k is large.
    DEVICE void load_scales(float* to, int count, const float* scales, int64_t offset,
                            int64_t first, int64_t stride, int there, float absent) {
        const int lane = threadIdx.x % 32;
        const bool any = scales && there > 0;
        const float* from = scales + offset + first * stride;
        const int bytes = 4 * (there < count ? there : count);
        if (any && stride == 1 && (reinterpret_cast<uint64_t>(from) | bytes) % 16 == 0) {
            if (lane == 0) {
                full.arrive_expect_tx(bytes);
                bulk_load(to, from, bytes, full);
            } else if (kEveryThreadArrives) full.arrive();
            return;
        }
        const float one = any ? *from : absent;
#pragma unroll 1
        for (int i = lane; i < count; i += 32)
            to[i] = any && stride != 0 && i < there ? from[i * stride] : one;
        fence_async_proxy();  // another tile's may come by TMA
        sync_warp();
        full.arrive_for<32>();
    }
    // The bias times `factor`; of 16-bit operands four of a lane's numbers are under way at once.
    DEVICE void load_bias(const void* bias, int64_t offset, int64_t stride, int dtype, int there,
                          float factor) {
        constexpr int kAtOnce = kScales ? 1 : 4;
#pragma unroll 1
        for (int first = threadIdx.x % 32; first < kTileN; first += 32 * kAtOnce) {
            uint32_t bits[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int col = first + 32 * i;
                bits[i] = 0;
                if (!bias || col >= there || col >= kTileN) continue;
                const int64_t place = offset + col * stride;
                bits[i] = dtype == kFloat ? static_cast<const uint32_t*>(bias)[place]
                                          : static_cast<const uint16_t*>(bias)[place];
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int col = first + 32 * i;
                float number = bit_cast<float>(bits[i]), other;
                if (dtype == kHalf) unpack<half>(bits[i], number, other);
                if (dtype == kBf16) unpack<bf16>(bits[i], number, other);
                if (col < kTileN) cols[kOfCol - 1][col] = number * factor;
            }
        }
    }
    // Those of two neighbours, from an even column on.
    DEVICE ColumnPair pair(int which, int col) const {
        return *reinterpret_cast<const ColumnPair*>(&cols[which][col]);
    }
    // Whether a bias is to be read; not so only where kernels have the short end alone.
    DEVICE bool biased() const { return !kPromotes || kGeneral || place.words[3] != 0; }
    // By a warp that has read them.
    DEVICE void release() {
        sync_warp();
        empty.arrive_for<32>();
    }
    // With kTurned: a part finished but for the activation.  row: of its first sum in the tile.
    DEVICE void finish(const SumType (&sums)[kValues], float alpha, int row,
                       float (&values)[kValues]) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int of_row = row + row_of_half(lane, half);
            const float added = cols[kOfCol - 1][of_row];
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                if (i / 2 % 2 != half) continue;
                float x = float(sums[i]);
                if constexpr (kScales) x = x * cols[0][of_row] * rows[0];
                values[i] = x * alpha + added;
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

// A warp's residual, or with kTurned a warpgroup's, of the output's dtype: each box comes by TMA to where
// its results leave from, a tile's first two while its sums are under way, every other one when TMA has
// read the results that were there.
struct Residual {
    static constexpr int kTileBoxes = kBlocks * OwnChunks::kCount;
    const TensorMap& map;
    Barrier (&full)[2];
    Staging* staging;

    // By one thread, which also stores the boxes.
    DEVICE static bool loads() { return threadIdx.x % (kTurned ? 128 : 32) == 0; }
    // Which box of a tile has a chunk of the columns of block `block`.
    DEVICE static int box_of(int block, int chunk) {
        return block * OwnChunks::kCount + chunk - OwnChunks().first;
    }
    // Where box `i` of tile number `count` is.
    DEVICE unsigned char* box(int count, int i) const {
        return staging->boxes[0] + (count * kTileBoxes + i) % 2 * (kTurned ? 4 : 1) * kBoxBytes;
    }
    DEVICE void wait(int count, int i) const {
        const int number = count * kTileBoxes + i;
        full[number % 2].wait(number / 2 & 1);
    }
    // (row, col): of the tile's first sum.
    DEVICE void load(int count, int i, int row, int col, int batch) const {
        Barrier& barrier = full[(count * kTileBoxes + i) % 2];
        barrier.arrive_expect_tx(kTurned ? kChunk * kLineBytes : kBoxBytes);
        const auto at = place(i, row, col, batch);
        tma_load(box(count, i), map, barrier, at.of);
    }
    // Before tile number `count` is stored: the boxes that there is a place for, the others to L2.
    DEVICE void begin(int count, int row, int col, int batch) const {
        if (loads()) {
            tma_store_wait_read<0>();
#pragma unroll
            for (int i = 0; i < kTileBoxes; ++i) {
                if (i < 2) load(count, i, row, col, batch);
                else tma_prefetch(map, place(i, row, col, batch).of);
            }
        }
        sync_warp();
    }
    // When box `i` is being stored: what takes its place.
    DEVICE void follow(int count, int i, int row, int col, int batch) const {
        if (i + 2 >= kTileBoxes) return;
        tma_store_wait_read<0>();
        load(count, i + 2, row, col, batch);
    }
    struct Place { int of[3]; };
    DEVICE static Place place(int i, int row, int col, int batch) {
        row += i / OwnChunks::kCount * 64;
        col += chunk_col(OwnChunks().first + i % OwnChunks::kCount);
        return {{kTurned ? row : col, kTurned ? col : row, batch}};
    }
};

// Of 16-bit results, where gelu is of twice its argument.
template <int kActivation>
DEVICE float activate_plain(float x) {
    return kActivation == kGelu ? gelu_of_twice(x) : activate(x, kActivation);
}

// values[2 i] and values[2 i + 1] += the two numbers of word i; and packed to it, but for those of kept
// columns.
template <class T, int kWords>
DEVICE void add_pairs(float (&values)[8 * kWords], const uint32_t (&added)[kWords][4]) {
#pragma unroll
    for (int i = 0; i < 4 * kWords; ++i) {
        float low, high;
        unpack<T>(added[i / 4][i % 4], low, high);
        values[2 * i] += low;
        values[2 * i + 1] += high;
    }
}
template <class T, int kWords>
DEVICE void pack_pairs(const float (&values)[8 * kWords], uint32_t (&packed)[kWords][4], int kept) {
#pragma unroll
    for (int i = 0; i < 4 * kWords; ++i)
        if (i >= 4 * kept) packed[i / 4][i % 4] = pack<T>(values[2 * i], values[2 * i + 1]);
}

// The end of a warp's sums, in boxes of 16 lines of 128 bytes.  row: its first one in the tile, count: the
// tile's number; box: to fill next.
struct PlainEnd {
    Staging& staging;
    int& box;
    const TensorMap& map;
    const TileFactors& factors;
    const RowFactors& rows;
    const EpilogueParams& params;
    int row, count;
    const Residual& residual;

    // A lane's numbers of kCount columns of block `block`, from column `first` on, but for the residual and
    // the first 16 * kept columns.  For gelu, alpha and the bias are halved.  Where an end is little else,
    // shared memory gives factors no faster than the sums can take them: a bias that is not there is not
    // read.
    template <int kActivation, bool kScaled, int kCount>
    DEVICE void finish(const TileSums& sums, int lane, int block, int first, float alpha,
                       float (&values)[kCount], int kept = 0) const {
        const auto of_col = [&](int which, int i) {
            return factors.pair(which, first + wgmma_col(lane, i / 4 * 4)).numbers[i % 2];
        };
        const auto of_row = [&](int i) {
            return kScales ? rows.of_block[block][i / 2 % 2] : alpha;
        };
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            if (i < 8 * kept) continue;
            values[i] = float(sums[block][first / 2 + i]);
            if (kScales) values[i] *= of_col(0, i);
        }
        if constexpr (kScaled) {
            const float of_b = factors.rows[0], of_a = factors.rows[1];
#pragma unroll
            for (int i = 0; i < kCount; ++i) values[i] = values[i] * of_b * of_a;
        }
        if (factors.biased()) {
#pragma unroll
            for (int i = 0; i < kCount; ++i)
                if (i >= 8 * kept)
                    values[i] = values[i] * of_row(i) + of_col(TileFactors::kOfCol - 1, i);
        } else {
#pragma unroll
            for (int i = 0; i < kCount; ++i)
                if (i >= 8 * kept) values[i] *= of_row(i);
        }
        if constexpr (kActivation != kNoActivation) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) values[i] = activate_plain<kActivation>(values[i]);
        }
    }
    // 16-bit results.  Where the boxes hold all sums they are filled and stored together, so that the warp
    // waits once for what it did with them before, and once until TMA may read them.
    template <int kActivation, bool kAdds>
    DEVICE void store_pairs(const TileSums& sums) const {
        constexpr int kTogether = kBlocks == 1 && !kSplitK && kCols == 2 * kChunk ? 2 : 1;
        constexpr bool kOwnBoxes = kStagedBoxes > 2;  // every chunk has its own
        // Columns at once.  Where tiles are large there is another one, whose products are beside the
        // activation: many of its instructions in a row, independent of each other, would keep the tensor
        // cores from the registers.  The largest tiles' sums leave no registers for more either.
        constexpr bool kFewAtOnce =
            kPingPong && kBlocks > 1 && (kActivation > kRelu || kBlocks * kCols >= 352);
        constexpr int kAtOnce = kFewAtOnce ? 16 : kChunk, kWords = kAtOnce / 16;
        using Values = float[kAtOnce / 2];
        const Bytes<16> place = factors.place;
        const int out_row = int(place.words[0]) + row, out_col = int(place.words[1]),
                  batch = int(place.words[2]);
        const int lane = lane_anew();
        const bool halves = params.out_dtype == kHalf;
        const float alpha = (kActivation == kGelu ? 0.5f : 1.0f) * params.alpha;
        const OwnChunks own;
        // 16 x 16 numbers of a box, from its column `begin` on.
        const int place_of_lane = lane % 16 * kLineBytes + (lane / 16 ^ lane % 8) * 16;
        const auto matrix = [&](unsigned char* from, int begin) {
            return from + (place_of_lane ^ begin * 2);
        };
        // Of a chunk of the columns of block `block`, from its column `begin` on.  to: its box.
        const auto pack_columns = [&](int block, int chunk, int begin, unsigned char* to,
                                      uint32_t (&packed)[kWords][4], int kept = 0) {
            Values values;
            finish<kActivation, kScalesOfAll && !kAdds>(sums, lane, block, chunk_col(chunk) + begin,
                                                        alpha, values, kept);
            if constexpr (kAdds) {
                uint32_t added[kWords][4];
#pragma unroll
                for (int j = 0; j < kWords; ++j) load_matrix(added[j], matrix(to, begin + 16 * j));
                if (halves) add_pairs<half>(values, added);
                else add_pairs<bf16>(values, added);
            }
            if (halves) pack_pairs<half>(values, packed, kept);  // one branch for all
            else pack_pairs<bf16>(values, packed, kept);
        };
        const auto fill = [&](unsigned char* to, int begin, const uint32_t (&packed)[kWords][4]) {
#pragma unroll
            for (int j = 0; j < kWords; ++j) store_matrix(matrix(to, begin + 16 * j), packed[j]);
        };
        uint32_t packed[kTogether][kWords][4];
#pragma unroll
        for (int first = 0; first < kBlocks * kTileChunks; first += kTogether) {
            const int block = first / kTileChunks, chunk = first % kTileChunks;
            if (!own.has(chunk)) continue;
            const int number = Residual::box_of(block, chunk);
            unsigned char* to[kTogether];
            // 16 columns each that the chunk before has too.
            const int kept =
                kPromotes && kTogether == 1 ? (chunk * kChunk - chunk_col(chunk)) / 16 : 0;
#pragma unroll
            for (int i = 0; i < 4 * kept; ++i)
                packed[0][i / 4][i % 4] = packed[0][kWords - kept + i / 4][i % 4];
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                to[i] = staging.boxes[kTogether == 2 ? i : kOwnBoxes ? first : box];
                if constexpr (kAdds) residual.wait(count, number + i);
                pack_columns(block, chunk + i, 0, to[i], packed[i], kept);
            }
            if (!kOwnBoxes || first == 0) {
                if (lane == 0) tma_store_wait_read<kOwnBoxes ? 0 : 2 - kTogether>();
                sync_warp();
            }
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                fill(to[i], 0, packed[i]);
#pragma unroll
                for (int begin = kAtOnce; begin < kChunk; begin += kAtOnce) {
                    pack_columns(block, chunk + i, begin, to[i], packed[i]);
                    fill(to[i], begin, packed[i]);
                }
            }
            fence_async_proxy();
            sync_warp();
            if (lane == 0) {
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    tma_store(map, to[i],
                              {out_col + chunk_col(chunk + i), out_row + 64 * block, batch});
                }
                tma_store_commit();
                if constexpr (kAdds) {
                    residual.follow(count, number, out_row, out_col, int(place.words[3]));
                }
            }
            if (kTogether == 1 && !kOwnBoxes) box ^= 1;
        }
    }
    // FP32 results, 32 columns a box.
    DEVICE void store_floats(const TileSums& sums) const {
        constexpr int kFloats = 32, kBoxes = (kCols + kFloats - 1) / kFloats;
        const Bytes<16> place = factors.place;
        const int out_row = int(place.words[0]) + row, out_col = int(place.words[1]),
                  batch = int(place.words[2]);
        const int lane = lane_anew();
        const OwnChunks own;
#pragma unroll
        for (int i = 0; i < kBlocks * kBoxes; ++i) {
            const int block = i / kBoxes, at = i % kBoxes * kFloats;
            if (!own.has(at / kChunk)) continue;
            const int first = at < kCols - kFloats ? at : kCols - kFloats;
            if (lane == 0) tma_store_wait_read<1>();
            sync_warp();
            unsigned char* to = staging.boxes[box];
#pragma unroll
            for (int begin = 0; begin < kFloats; begin += 16) {
                float values[8];
                finish<kNoActivation, kScalesOfAll>(sums, lane, block, first + begin, params.alpha,
                                                    values);
#pragma unroll
                for (int j = 0; j < 8; j += 2) {
                    const int line = lane / 4 + j / 2 % 2 * 8, col = begin + wgmma_col(lane, j);
                    unsigned char* four = to + line * kLineBytes + (col / 4 ^ line % 8) * 16;
                    *reinterpret_cast<Bytes<8>*>(four + col % 4 * 4) = {
                        bit_cast<uint32_t>(values[j]), bit_cast<uint32_t>(values[j + 1])};
                }
            }
            fence_async_proxy();
            sync_warp();
            if (lane == 0) {
                tma_store(map, to, {out_col + first, out_row + 64 * block, batch});
                tma_store_commit();
            }
            box ^= 1;
        }
    }
    // kAdds: a residual, to results that are not FP32.
    template <bool kAdds>
    DEVICE void store(const TileSums& sums) const {
        if constexpr (kGeneral && !kAdds) {
            if (params.out_dtype == kFloat) return store_floats(sums);
        }
        if constexpr (kActivates) {
            if (params.activation == kRelu) return store_pairs<kRelu, kAdds>(sums);
            if (params.activation == kGelu) return store_pairs<kGelu, kAdds>(sums);
            if (params.activation == kGeluTanh) return store_pairs<kGeluTanh, kAdds>(sums);
            if (params.activation == kSilu) return store_pairs<kSilu, kAdds>(sums);
        }
        store_pairs<kNoActivation, kAdds>(sums);
    }
};
