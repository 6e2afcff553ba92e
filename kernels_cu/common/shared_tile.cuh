// Operand tiles in shared memory, and their loads.
#pragma once
#include "common/dtype.cuh"

// kRows rows of kRowBytes, in 16-byte chunks.  Swizzle: a chunk's index in its row is XORed with
// bits of the row's index.  Accesses to the same chunk of 8 rows have no bank conflicts, nor have
// half chunks of 4 adjacent pairs, nor 4 adjacent chunks of 2 rows.
template <int kRows_, int kRowBytes>
struct SharedTile {
    static constexpr int kRows = kRows_, kChunks = kRowBytes / 16;
    static constexpr int kPeriod = 8;  // rows after which the swizzle repeats
    static_assert(kRowBytes % 16 == 0 && (kChunks & (kChunks - 1)) == 0, "chunks: a power of two");
    Bytes<16> chunks[kRows * kChunks];

    // Linear over XOR: if two rows share no bits, the swizzle of their sum is the XOR of theirs.
    DEVICE static constexpr int swizzle(int row) {
        return kChunks >= 8   ? (row & 1) << 2 | (row & 2) | (row >> 2 & 1)
               : kChunks == 4 ? row >> 1 & 3
               : kChunks == 2 ? row >> 2 & 1
                              : 0;
    }
    DEVICE static constexpr int index(int row, int chunk) {
        return row * kChunks + (chunk ^ swizzle(row));
    }
    DEVICE void* operator()(int row, int chunk) { return &chunks[index(row, chunk)]; }
    DEVICE const void* operator()(int row, int chunk) const { return &chunks[index(row, chunk)]; }
};

DEVICE int clamp_to(int64_t x, int high) { return x < 0 ? 0 : x < high ? int(x) : high; }

// Issues the copies of num_rows rows of num_elements from `origin` on; the rest of the tile
// becomes zero.  Rows are aligned to 16 bytes.
template <class T, int kRows, int kRowBytes>
DEVICE void copy_tile(SharedTile<kRows, kRowBytes>& tile, const T* origin, int64_t row_stride,
                      int num_rows, int num_elements) {
    constexpr int kChunks = kRowBytes / 16, kPerChunk = 16 / int(sizeof(T));
    constexpr int kCount = kRows * kChunks;
#pragma unroll
    for (int first = 0; first < kCount; first += kNumThreads) {
        const int i = first + int(threadIdx.x);
        if (kCount % kNumThreads != 0 && i >= kCount) break;
        const int row = i / kChunks, chunk = i % kChunks;
        const int elements = clamp_to(num_elements - chunk * kPerChunk, kPerChunk);
        const int bytes = row < num_rows ? elements * int(sizeof(T)) : 0;
        copy_async_part(tile(row, chunk), origin + row * row_stride + chunk * kPerChunk, bytes);
    }
}

// copy_tile for a loop over tiles: keeps a thread's invariant addresses.  row_stride: 32 bits, so
// that an address takes one instruction.  num_elements: a multiple of a chunk's elements.
template <class T, class Tile>
struct TileCopier {
    static constexpr int kChunks = Tile::kChunks, kPerChunk = 16 / int(sizeof(T));
    static constexpr int kAtOnce = kNumThreads / kChunks;
    static_assert(kAtOnce * kChunks == kNumThreads && (kAtOnce & (kAtOnce - 1)) == 0,
                  "whole rows per iteration");
    const T* origin;  // this thread's chunk of row 0
    int row_stride;
    bool exists;
    int row, index;

    DEVICE TileCopier(const T* origin, int row_stride, int num_elements) : row_stride(row_stride) {
        const int thread = int(threadIdx.x), chunk = thread % kChunks;
        row = thread / kChunks;
        index = Tile::index(row, chunk);
        exists = chunk * kPerChunk < num_elements;
        this->origin = origin + int64_t(row) * row_stride + chunk * kPerChunk;
    }
    // Issues the copies of num_rows rows from first_row on.  kUnpredicated: num_rows covers the
    // tile.
    template <bool kUnpredicated>
    DEVICE void start(Tile& tile, int first_row, int num_rows) const {
        if constexpr (!kUnpredicated) {
            if (num_rows >= Tile::kRows) return start<true>(tile, first_row, num_rows);
        }
        const int stride = opaque(row_stride);  // or the loop keeps its multiples in registers
        const T* from = origin + int64_t(first_row) * stride;
#pragma unroll
        for (int first = 0; first < Tile::kRows; first += kAtOnce) {
            if (Tile::kRows < kAtOnce && row >= Tile::kRows) break;
            // The bits of `row` are below those of `first`.
            void* to = &tile.chunks[(index ^ Tile::swizzle(first)) + first * kChunks];
            copy_async<16>(to, from + int64_t(first) * stride,
                           exists && (kUnpredicated || first + row < num_rows));
        }
    }
};

// Element i of an array of any dtype, converted to T, which holds it exactly.
template <class T>
DEVICE T load_as(const void* p, int64_t i, int dtype) {
    if constexpr (kSame<T, int8_t>) {
        return static_cast<const int8_t*>(p)[i];
    } else {
        if (dtype == kE4m3) return from_float<T>(to_float(static_cast<const e4m3*>(p)[i]));
        if (dtype == kE5m2) return from_float<T>(to_float(static_cast<const e5m2*>(p)[i]));
        if (dtype == kInt8) return from_float<T>(to_float(static_cast<const int8_t*>(p)[i]));
        return static_cast<const T*>(p)[i];
    }
}

// Loads num_rows rows of num_elements at any strides with scalar loads, converted to T; the rest of
// the tile becomes zero.
template <class T, int kRows, int kRowBytes>
DEVICE void load_tile_scalar(SharedTile<kRows, kRowBytes>& tile, const void* p, int dtype,
                             int64_t origin, int64_t row_stride, int64_t element_stride,
                             int num_rows, int num_elements) {
    constexpr int kChunks = kRowBytes / 16, kPerChunk = 16 / int(sizeof(T));
    constexpr int kCount = kRows * kChunks;
    // Coalesced along the smaller stride.
    const bool along_rows = (row_stride < 0 ? -row_stride : row_stride) <
                            (element_stride < 0 ? -element_stride : element_stride);
    for (int i = int(threadIdx.x); i < kCount; i += kNumThreads) {
        const int row = along_rows ? i % kRows : i / kChunks;
        const int chunk = along_rows ? i / kRows : i % kChunks;
        const int64_t first = origin + row * row_stride + chunk * kPerChunk * element_stride;
        T elements[kPerChunk];
#pragma unroll
        for (int j = 0; j < kPerChunk; ++j) {
            const bool valid = row < num_rows && chunk * kPerChunk + j < num_elements;
            elements[j] = valid ? load_as<T>(p, first + j * element_stride, dtype) : T();
        }
        memcpy(tile(row, chunk), elements, 16);
    }
}
