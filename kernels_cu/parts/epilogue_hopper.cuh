// The way of a warpgroup's sums (parts/ring_hopper.cuh) to memory: where TMA can store the output,
// the epilogue in registers, in parts of kPart columns, and boxes of shared memory that TMA stores;
// else by way of shared memory in runs of neighbouring columns (parts/epilogue.cuh).
// Rows and columns are those of the sums; with kTurned they are the output's columns and rows.
#include "parts/epilogue.cuh"
#include "parts/ring_hopper.cuh"

constexpr int kOwnCols = kCols / (kSplitK ? kClusterSize : 1);  // that a block finishes
constexpr int kChunk =
    kOwnCols < 64 ? kOwnCols : 64;  // columns that a warp takes through shared memory at once
constexpr int kWarpRows = 16;
constexpr int kPart = kChunk < 32 ? kChunk : 32,
              kValues = kPart / 2;  // columns that a warp finishes at once; a lane's numbers
static_assert(kChunk % kPart == 0 && (kTurned || kChunk == 64), "whole parts");
static_assert(kOwnCols % kChunk == 0 || (!kTurned && !kSplitK && kOwnCols % 8 == 0),
              "whole chunks, or columns that store_matrix takes at once");
// A tile's chunks, and their parts.  The last chunk ends where the tile does: if they are not whole ones,
// it stores again what the one before has of it.
constexpr int kTileChunks = (kCols + kChunk - 1) / kChunk, kPartsOfBox = kChunk / kPart,
              kTileParts = kTileChunks * kPartsOfBox;
DEVICE constexpr int chunk_col(int chunk) {
    return chunk * kChunk < kCols - kChunk ? chunk * kChunk : kCols - kChunk;
}
DEVICE constexpr int part_col(int part) {
    return chunk_col(part / kPartsOfBox) + part % kPartsOfBox * kPart;
}

// A warp's way to memory: boxes that it fills in turn and TMA stores, or one chunk in FP32.  With
// kTurned a warpgroup has its boxes together.  FP8's tiles of three chunks have one for each, so that
// a chunk need not wait until TMA has read another one of the tile.
constexpr int kBoxBytes = kWarpRows * 64 * 2;
constexpr int kStagedBoxes = kPromotes && !kTurned && kTileChunks == 3 ? 3 : 2;
union Staging {
    unsigned char boxes[kStagedBoxes][kBoxBytes];
    alignas(16) uint32_t chunk[kWarpRows * 64];
};

// The thread's, worked out where it is asked for: what comes of it would hold registers while sums are made.
// As the compiler knows that it is not negative, divisions are shifts.
DEVICE int lane_anew() { return opaque(threadIdx.x % 32) & 31; }

// Pairs of columns of 8-bit numbers come in one register (mainloop_converted_hopper.cuh).
constexpr bool kPairedRows = kConverts && kOuterMajorRows;
// Where the first (half 0) or the second 8 rows that a lane has a number of are among a warp's 16.
DEVICE int row_of_half(int lane, int half) {
    return kPairedRows ? lane / 4 * 2 + half : lane / 4 + half * 8;
}

// Numbers of a tile's columns, those of a chunk spread over a warp's lanes; absent ones are zero.
struct ColumnNumbers {
    float pairs[kTileChunks][2];

    DEVICE void load(const void* p, int64_t stride, int dtype, int col, int64_t num_cols) {
        col += 2 * int(threadIdx.x % 32);
#pragma unroll
        for (int i = 0; i < kTileChunks * 2; ++i) {
            const int at = col + chunk_col(i / 2) + i % 2;
            pairs[i / 2][i % 2] = p && at < num_cols ? load_number(p, at * stride, dtype) : 0.0f;
        }
    }
};
// The same of the rows of a thread's accumulators.
struct RowNumbers {
    float rows[kBlocks][2];

    DEVICE void load(const void* p, int64_t stride, int dtype, int row, int64_t num_rows) {
#pragma unroll
        for (int i = 0; i < kBlocks * 2; ++i) {
            const int at = row + i / 2 * 64 + row_of_half(threadIdx.x % 32, i % 2);
            rows[i / 2][i % 2] = p && at < num_rows ? load_number(p, at * stride, dtype) : 0.0f;
        }
    }
};

constexpr bool kScales = sizeof(ElementB) == 1;  // others come with one of all, or without

// The chunks of its columns that a block finishes.
struct OwnChunks {
    static constexpr int kCount = kSplitK ? kOwnCols / kChunk : kTileChunks;
    int first;

    DEVICE OwnChunks() : first(kSplitK ? cluster_rank() * kCount : 0) {}
    DEVICE bool has(int chunk) const {
        return !kSplitK || (chunk >= first && chunk < first + kCount);
    }
};

// What a tile's sums go through in registers: vectors are loaded before the sums are there.
struct TileVectors {
    ColumnNumbers col_bias, col_scale;
    RowNumbers row_bias, row_scale;

    DEVICE void load(const Epilogue& e, int row, int col) {
        const EpilogueParams& p = e.params;
        const void* by_row = e.bias_of_rows() ? e.bias : nullptr;
        const void* by_col = e.bias_of_cols() ? e.bias : nullptr;
        if constexpr (kTurned) {
            row_bias.load(by_col, p.bias.col, p.bias_dtype, row, p.n);
            col_bias.load(by_row, p.bias.row, p.bias_dtype, col, p.m);
            row_scale.load(e.scale_b, p.scale_b_stride, kFloat, row, p.n);
            col_scale.load(e.scale_a, p.scale_a_stride, kFloat, col, p.m);
        } else {
            row_bias.load(by_row, p.bias.row, p.bias_dtype, row, p.m);
            col_bias.load(by_col, p.bias.col, p.bias_dtype, col, p.n);
            if (!kScales) return;
            row_scale.load(e.scale_a, p.scale_a_stride, kFloat, row, p.m);
            col_scale.load(e.scale_b, p.scale_b_stride, kFloat, col, p.n);
        }
    }
};

// The residual of the warp's sums comes to L2 while they are made.  (row, col): of the first one.
DEVICE void prefetch_residual(const Epilogue& e, int row, int col) {
    if (!e.residual) return;
    const EpilogueParams& p = e.params;
    // Of neighbours in the output, what lies in one line of 128 bytes.
    const int line = 128 / dtype_size(p.residual_dtype);
    const int along = kTurned ? kWarpRows : kCols, across = kTurned ? kCols : kBlocks * kWarpRows;
    const int lines = (along + line - 1) / line;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < across * lines; i += 32) {
        const int far = i / lines, near = i % lines * line;
        const int64_t at_m = kTurned ? col + far : row + far / kWarpRows * 64 + far % kWarpRows,
                      at_n = kTurned ? row + near : col + near;
        if (at_m >= p.m || at_n >= p.n) continue;
        const int64_t offset = at_m * p.residual.row + at_n * p.residual.col;
        prefetch(element_address(e.residual, offset, p.residual_dtype));
    }
}

// values += the numbers of the output's matrix `p` at the sums from (row, col) on, all of which are
// under way before the first one is added.
template <class T>
DEVICE void add_numbers(const T* p, const MatrixStrides& strides, const EpilogueParams& params,
                        int row, int col, float (&values)[kValues]) {
    const int lane = lane_anew();
    const int64_t by_row = kTurned ? strides.col : strides.row,
                  by_col = kTurned ? strides.row : strides.col,
                  rows = kTurned ? params.n : params.m, cols = kTurned ? params.m : params.n;
    T added[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        const int at_row = row + row_of_half(lane, i / 2 % 2), at_col = col + wgmma_col(lane, i);
        const bool there = at_row < rows && at_col < cols;
        added[i] = there ? p[at_row * by_row + at_col * by_col] : from_float<T>(0.0f);
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] += to_float(added[i]);
}
DEVICE void add_matrix(const void* p, int dtype, const MatrixStrides& strides,
                       const EpilogueParams& params, int row, int col, float (&values)[kValues]) {
    if (dtype == kHalf) {
        add_numbers(static_cast<const half*>(p), strides, params, row, col, values);
    } else if (dtype == kBf16) {
        add_numbers(static_cast<const bf16*>(p), strides, params, row, col, values);
    } else {
        add_numbers(static_cast<const float*>(p), strides, params, row, col, values);
    }
}

// The warp's sums of part `part`, finished.  (row, col): of the warp's first sum of that part.
DEVICE void finish_part(const Epilogue& epilogue, const TileVectors& vectors, int part, int row,
                        int col, const TileSums& sums, float (&values)[kValues]) {
    const EpilogueParams& params = epilogue.params;
    float col_bias[2] = {}, col_scale[2] = {}, row_bias[2] = {}, row_scale[2] = {};
    SumType picked[kValues] = {};  // else those of the tile before hold registers
#pragma unroll
    for (int p = 0; p < kBlocks * kTileParts; ++p) {
        if (p != part) continue;
#pragma unroll
        for (int i = 0; i < kValues; ++i)
            picked[i] = sums[p / kTileParts][part_col(p % kTileParts) / 2 + i];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            col_bias[i] = vectors.col_bias.pairs[p % kTileParts / kPartsOfBox][i];
            row_bias[i] = vectors.row_bias.rows[p / kTileParts][i];
            if (!kScales) continue;
            col_scale[i] = vectors.col_scale.pairs[p % kTileParts / kPartsOfBox][i];
            row_scale[i] = vectors.row_scale.rows[p / kTileParts][i];
        }
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = float(picked[i]);
    // The factors and addends of value i's column, which is value i + 2's too.
    const auto of_col = [&](const float (&pair)[2], int i) {
        const int lane = part % kPartsOfBox * kPart / 2 + i / 4 * 4 + threadIdx.x % 4;
        return shuffle(pair[i % 2], lane);
    };
    if (!kScales && epilogue.scale_b) {
        const float factor = *epilogue.scale_b;
#pragma unroll
        for (int i = 0; i < kValues; ++i) values[i] *= factor;
    }
    if (!kScales && epilogue.scale_a) {
        const float factor = *epilogue.scale_a;
#pragma unroll
        for (int i = 0; i < kValues; ++i) values[i] *= factor;
    }
    const bool scaled_rows = kScales && (kTurned ? epilogue.scale_b : epilogue.scale_a);
    const bool scaled_cols = kScales && (kTurned ? epilogue.scale_a : epilogue.scale_b);
    if (scaled_cols) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            if (i / 2 % 2 == 1) continue;
            const float factor = of_col(col_scale, i);
            values[i] *= factor;
            values[i + 2] *= factor;
        }
    }
    if (scaled_rows) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) values[i] *= row_scale[i / 2 % 2];
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = values[i] * params.alpha + row_bias[i / 2 % 2];
    if (kTurned ? epilogue.bias_of_rows() : epilogue.bias_of_cols()) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            if (i / 2 % 2 == 1) continue;
            const float added = of_col(col_bias, i);
            values[i] += added;
            values[i + 2] += added;
        }
    }
    const bool bias_matrix = epilogue.bias && !epilogue.bias_of_rows() && !epilogue.bias_of_cols();
#pragma unroll 1  // one code for both addends
    for (int i = 0; i < 2; ++i) {
        const bool first = i == 0;
        if (first ? bias_matrix : epilogue.residual != nullptr) {
            add_matrix(first ? epilogue.bias : epilogue.residual,
                       first ? params.bias_dtype : params.residual_dtype,
                       first ? params.bias : params.residual, params, row, col, values);
        }
        if (first && params.activation != kNoActivation) {
            activate_in_turn(values, params.activation);
        }
    }
}

// Of a lane's numbers, pair `i`, of neighbours in the output: the first one, and how far the second one is.
DEVICE constexpr int first_of_pair(int i) { return kPairedRows ? i / 2 * 4 + i % 2 : 2 * i; }
constexpr int kApart = kPairedRows ? 2 : 1;

DEVICE void pack_pairs(const float (&values)[kValues], int dtype, uint32_t (&packed)[kValues / 2]) {
    if (dtype == kHalf) {  // one branch for all
#pragma unroll
        for (int i = 0; i < kValues / 2; ++i)
            packed[i] = pack<half>(values[first_of_pair(i)], values[first_of_pair(i) + kApart]);
    } else {
#pragma unroll
        for (int i = 0; i < kValues / 2; ++i)
            packed[i] = pack<bf16>(values[first_of_pair(i)], values[first_of_pair(i) + kApart]);
    }
}
// values += the same pairs.
template <class T>
DEVICE void add_pairs(const uint32_t (&added)[kValues / 2], float (&values)[kValues]) {
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
        float low, high;
        unpack<T>(added[i], low, high);
        values[first_of_pair(i)] += low;
        values[first_of_pair(i) + kApart] += high;
    }
}
DEVICE void add_pairs(const uint32_t (&added)[kValues / 2], int dtype, float (&values)[kValues]) {
    if (dtype == kHalf) add_pairs<half>(added, values);
    else add_pairs<bf16>(added, values);
}

static_assert(!kTurned || kBlocks == 1, "a warpgroup fills its boxes together");

// A part's pairs to (kLoads: from) their places in the box `to`, of which it is part `part_of_box`.
template <bool kLoads, class Pairs>
DEVICE void move_part(unsigned char* to, int part_of_box, Pairs& packed) {
    const int lane = lane_anew(), warp = threadIdx.x / 32;
    // 16 bytes of a line.
    const auto place = [&](int line, int i) {
        return to + line * kLineBytes + (i ^ line % 8) * 16;
    };
    if constexpr (kPairedRows) {  // two rows of a column are one word
#pragma unroll
        for (int i = 0; i < kValues / 2; ++i) {
            const int line = part_of_box * kPart + wgmma_col(lane, i / 2 * 4 + i % 2);
            unsigned char* words = place(line, warp % 4 * 2 + lane / 16);
            auto& word = *reinterpret_cast<uint32_t*>(words + lane / 4 % 4 * 4);
            if constexpr (kLoads) packed[i] = word;
            else word = packed[i];
        }
    } else {
#pragma unroll
        for (int j = 0; j < kPart / 16; ++j) {
            const int line = part_of_box * kPart + j * 16 + lane / 16 * 8 + lane % 8;
            unsigned char* row =
                kTurned ? place(line, warp % 4 * 2 + lane / 8 % 2)
                        : place(lane % 16, part_of_box * (kPart / 8) + 2 * j + lane / 16);
            uint32_t four[4];
            if constexpr (kLoads) load_matrix<kTurned>(four, row);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if constexpr (kLoads) packed[4 * j + i] = four[i];
                else four[i] = packed[4 * j + i];
            }
            if constexpr (!kLoads) store_matrix<kTurned>(row, four);
        }
    }
}

// Part `part` of the warp's sums to its place in box `box`, which TMA stores when it is whole: 16
// rows of 64 columns; with kTurned 64 rows of the warpgroup, each of the columns a line.  (row,
// col): of the warp's first sum of the part.
DEVICE void store_part(Staging* warps, int& box, const TensorMap& map, int part, int row, int col,
                       int batch, int dtype, const float (&values)[kValues]) {
    const int warp = threadIdx.x / 32, warpgroup = warp / 4;
    const int part_of_box = part % kPartsOfBox;
    unsigned char* to =
        warps[kTurned ? 4 * warpgroup : warp].boxes[0] + box * (kTurned ? 4 : 1) * kBoxBytes;
    const bool stores = threadIdx.x % (kTurned ? 128 : 32) == 0;
    const auto sync = [&] {
        if constexpr (kTurned) named_barrier(1 + warpgroup, 128);
        else sync_warp();
    };
    uint32_t packed[kValues / 2];
    pack_pairs(values, dtype, packed);
    if (part_of_box == 0) {
        if (stores) tma_store_wait_read<1>();
        sync();
    }
    move_part<false>(to, part_of_box, packed);
    if (part_of_box < kPartsOfBox - 1) return;
    fence_async_proxy();
    sync();
    if (stores) {
        col -= part_of_box * kPart;
        if constexpr (kTurned) tma_store(map, to, {row, col, batch});
        else tma_store(map, to, {col, row, batch});
        tma_store_commit();
    }
    box ^= 1;
}

// The warp's sums by TMA.  (row, col): of the warp's first one.  box: the box to fill next.
DEVICE void store_boxes(Staging* warps, int& box, const TensorMap& map, const Epilogue& epilogue,
                        const TileVectors& vectors, int row, int col, int batch,
                        const TileSums& sums) {
    const OwnChunks own;
#pragma unroll 1
    for (int part = 0; part < kBlocks * kTileParts; ++part) {
        if (!own.has(part % kTileParts / kPartsOfBox)) continue;
        const int first_row = row + part / kTileParts * 64,
                  first_col = col + part_col(part % kTileParts);
        float values[kValues];
        finish_part(epilogue, vectors, part, first_row, first_col, sums, values);
        store_part(warps, box, map, part, first_row, first_col, batch, epilogue.params.out_dtype,
                   values);
    }
}

// The epilogue of the warp's sums, by way of shared memory.
DEVICE void store_runs(Staging& staging, const Epilogue& epilogue, int row, int col,
                       const TileSums& sums) {
    constexpr int kRun = 8;
    // Lines are rows, or with kTurned columns, in runs of neighbours in the output.
    constexpr int kRuns = (kTurned ? kWarpRows : kChunk) / kRun,
                  kNumLines = kWarpRows * kChunk / kRun / kRuns;
    const int lane = lane_anew();
    // A run's place in its line is permuted, so that lanes spread over the banks.
    const auto place = [&](int line, int run) {
        const int bits = kTurned ? line / 2 % 2 : line % 8;
        return &staging.chunk[line * kRuns * kRun + (run ^ bits) * kRun];
    };
    const OwnChunks own;
#pragma unroll 1
    for (int chunk = 0; chunk < kBlocks * kTileChunks; ++chunk) {
        if (!own.has(chunk % kTileChunks)) continue;
        sync_warp();  // what was here has been read
#pragma unroll
        for (int c = 0; c < kBlocks * kTileChunks; ++c) {
            if (c != chunk) continue;
#pragma unroll
            for (int i = 0; i < kChunk / 2; i += 2) {
                const SumType* pair = &sums[c / kTileChunks][chunk_col(c % kTileChunks) / 2 + i];
                const Bytes<8> bits = {bit_cast<uint32_t>(pair[0]), bit_cast<uint32_t>(pair[1])};
                const int r = row_of_half(lane, i / 2 % 2), at = wgmma_col(lane, i);
                if constexpr (kTurned) {
                    place(at, r / kRun)[r % kRun] = bits.words[0];
                    place(at + 1, r / kRun)[r % kRun] = bits.words[1];
                } else {
                    *reinterpret_cast<Bytes<8>*>(&place(r, at / kRun)[at % kRun]) = bits;
                }
            }
        }
        sync_warp();
        const int first_row = row + chunk / kTileChunks * 64,
                  first_col = col + chunk_col(chunk % kTileChunks);
#pragma unroll 1
        for (int line = lane / kRuns; line < kNumLines; line += 32 / kRuns) {
            const int at = lane % kRuns * kRun;
            const uint32_t* from = place(line, lane % kRuns);
            SumType run[kRun];
#pragma unroll
            for (int i = 0; i < kRun; i += 4) {
                const Bytes<16> four = *reinterpret_cast<const Bytes<16>*>(from + i);
#pragma unroll
                for (int j = 0; j < 4; ++j) run[i + j] = bit_cast<SumType>(four.words[j]);
            }
            if constexpr (kTurned) epilogue.store(first_col + line, first_row + at, run);
            else epilogue.store(first_row + line, first_col + at, run);
        }
    }
}
