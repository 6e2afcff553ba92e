// Strips of columns in shared memory and registers: statistics, scales and codes
// (quantize_columns.cu).
#pragma once
#include "rows/quantize.cuh"
#include "rows/reduce.cuh"
#include "rows/tiles.cuh"

namespace rows {

static_assert(kLanesAcrossRows && kEven && !kChunked, "lanes across columns, all of them here");
static_assert(kRowsPerBlock <= kWarpSize, "a warp has each of the strip's columns");

constexpr int kColumns = kRowsPerBlock * kVectorWidth, kPackedPerVector = 4,
              kWarps = kNumThreads / kWarpSize;
using Items = Vector<Element, kVectorWidth>;
static_assert(sizeof(Items) == 4 * kPackedPerVector, "vectors of 16 bytes");

// Per-element maxima of vectors, in pairs for 16-bit elements.
struct alignas(16) LargestOfItems {
    LargestPacked<Element> packed[kPackedPerVector];

    DEVICE void take(const Items& items) {
#pragma unroll
        for (int i = 0; i < kPackedPerVector; ++i) packed[i].take(items.bytes[0].words[i]);
    }
    DEVICE void merge(const LargestOfItems& other) {
#pragma unroll
        for (int i = 0; i < kPackedPerVector; ++i) packed[i].merge(other.packed[i].packed);
    }
};

// Returns the statistics of the strip's blocks in rank order: LargestOfItems per column of vectors.
using OfBlocks = Bytes<16>[kClusterSize][kRowsPerBlock];
DEVICE const OfBlocks& exchange(const LargestOfItems& mine, const RowThread& t) {
    SHARED(Bytes<16>, of_warps, [kWarps][kRowsPerBlock]);
    SHARED(Bytes<16>, of_blocks, [kClusterSize][kRowsPerBlock]);
    const int warp = int(threadIdx.x) / kWarpSize;
    if (lane_id() < kRowsPerBlock) of_warps[warp][lane_id()] = bit_cast<Bytes<16>>(mine);
    if constexpr (kClusterSize > 1) {
        const int bytes = t.blocks * int(sizeof(of_blocks[0]));
        if (threadIdx.x == 0) exchange_barriers()[0].arrive_expect_tx(bytes);
        cluster_wait();  // all blocks have started (init_exchange_barriers)
    }
    sync_block();
    if (int(threadIdx.x) < kRowsPerBlock) {
        LargestOfItems largest{};
        for (int i = 0; i < kWarps; ++i)
            largest.merge(bit_cast<LargestOfItems>(of_warps[i][threadIdx.x]));
        const auto found = bit_cast<Bytes<16>>(largest);
        if constexpr (kClusterSize > 1) {
#pragma unroll 1
            for (int rank = 0; rank < t.blocks; ++rank) {
                store_async(&of_blocks[t.rank][threadIdx.x], found, exchange_barriers()[0], rank);
            }
        } else {
            of_blocks[0][threadIdx.x] = found;
        }
    }
    if constexpr (kClusterSize > 1) {
        exchange_barriers()[0].wait(0);
    } else {
        sync_block();
    }
    return of_blocks;
}

// A thread's vectors: the first ones in registers, the rest in shared memory.
constexpr int kStored = kVectorsPerThread - kInRegisters;
struct ColumnStorage { Items vectors[kStored][kNumThreads]; };
struct Column {
    Items registers[kInRegisters > 0 ? kInRegisters : 1];
    ColumnStorage& storage;
    int count;  // valid vectors

    DEVICE void load(const Element* from, int64_t step) {
        const Element* p = from + kInRegisters * step;
#pragma unroll 4
        for (int i = 0; i < kStored; ++i, p += step) {
            if (i + kInRegisters < count) copy_async<16>(&storage.vectors[i][threadIdx.x], p);
        }
        copy_async_commit();
#pragma unroll
        for (int i = 0; i < kInRegisters; ++i, from += step) {
            registers[i].fill(from_float<Element>(0.0f));
            if (i < count) registers[i].load(from);
        }
        copy_async_wait<0>();
    }
    // Calls use(index, items) for each valid vector.
    template <class Use>
    DEVICE void for_each(Use use) const {
#pragma unroll
        for (int i = 0; i < kInRegisters; ++i) {
            if (i < count) use(i, registers[i]);
        }
#pragma unroll 4
        for (int i = kInRegisters; i < kVectorsPerThread; ++i) {
            if (i < count) use(i, storage.vectors[i - kInRegisters][threadIdx.x]);
        }
    }
};

template <class Code>
DEVICE void store_columns(Code* y, int64_t step, const Column& column,
                          const float (&encode)[kVectorWidth]) {
    column.for_each([&](int i, const Items& items) {
        float values[kVectorWidth];
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) values[j] = items[j] * encode[j];
        Vector<Code, kVectorWidth> codes;
        codes.from_floats(values);
        codes.store(y + i * step);
    });
}

DEVICE void quantize_strip(const Element* x, void* y, float* scales,
                           const QuantizeTileParams& params) {
    init_exchange_barriers();
    SHARED_STORAGE(ColumnStorage, storage);
    RowThread t = RowThread::here();
    if constexpr (kClusterSize > 1) t.blocks = params.blocks;
    const MatrixTile strip = MatrixTile::of(params, blockIdx.x / unsigned(t.blocks));
    const int col = t.row_in_block * kVectorWidth;
    const int row = t.rank * (kThreadsPerRow * kVectorsPerThread) + t.lane;
    // This thread's valid vectors.
    const int below = col < strip.num_cols ? strip.num_rows - row : 0;
    const int count = below <= 0 ? 0 : (below + kThreadsPerRow - 1) / kThreadsPerRow;

    const Element* from = x + strip.x + row * params.x_row + col;
    const int64_t step = kThreadsPerRow * params.x_row;
    Column items{{}, storage, count};
    items.load(from, step);
    LargestOfItems largest{};
    items.for_each([&](int, const Items& these) { largest.take(these); });
#pragma unroll
    for (auto& packed : largest.packed) packed.across_lanes(kRowsPerBlock, kWarpSize);
    const OfBlocks& of_blocks = exchange(largest, t);

    // One thread per scale.
    SHARED(float, encodes, [kColumns]);
    const int column = int(threadIdx.x);
    if (column < strip.num_cols) {
        constexpr int kPerPacked = 4 / int(sizeof(Element));
        const int vector = column / kVectorWidth, part = column % kVectorWidth / kPerPacked;
        LargestPacked<Element> of_column;
#pragma unroll 1
        for (int i = 0; i < t.blocks; ++i) of_column.merge(of_blocks[i][vector].words[part]);
        if constexpr (kPerPacked == 2) {
            of_column.packed = column % 2 ? of_column.packed >> 16 : of_column.packed & 0xffffu;
        }
        const QuantizeScale scale(of_column.value(), largest_finite(params.dtype));
        encodes[column] = scale.encode;
        const int64_t matrix = quotient(strip.scale, params.col_tiles);
        const int64_t first = (strip.scale - matrix * params.col_tiles) * kColumns;
        if (t.rank == 0) scales[matrix * params.num_cols + first + column] = scale.decode;
    }
    sync_block();
    float encode[kVectorWidth];
#pragma unroll
    for (int j = 0; j < kVectorWidth; ++j) encode[j] = encodes[col + j];
    const int64_t offset = strip.y + row * params.y_row + col;
    const int64_t y_step = kThreadsPerRow * params.y_row;
    if (params.dtype == kE4m3) {
        store_columns(static_cast<e4m3*>(y) + offset, y_step, items, encode);
    } else if (params.dtype == kE5m2) {
        store_columns(static_cast<e5m2*>(y) + offset, y_step, items, encode);
    } else {
        store_columns(static_cast<int8_t*>(y) + offset, y_step, items, encode);
    }
}

}  // namespace rows
