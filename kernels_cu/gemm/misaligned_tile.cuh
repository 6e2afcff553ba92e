// Misaligned rows of an operand in shared memory: the aligned 16-byte chunks that a row overlaps
// are copied; readers add the row's offset in its first chunk.
#pragma once
#include "common/shared_tile.cuh"

template <class T, int kRows_, int kElements>
struct MisalignedTile {
    using Element = T;
    static constexpr int kRows = kRows_, kChunks = kElements * int(sizeof(T)) / 16;
    static constexpr int kRowElements = kElements;
    Bytes<16> chunks[kRows][kChunks + 1];  // padding against bank conflicts
};

template <class Tile> constexpr bool kIsMisaligned = false;
template <class T, int kRows, int kElements>
constexpr bool kIsMisaligned<MisalignedTile<T, kRows, kElements>> = true;

// Byte offsets of the rows in their first chunks, the same in every stage.
struct RowSkews {
    uint32_t first, step;  // low bits of row 0's address; row stride in bytes

    template <class T>
    DEVICE static RowSkews of(const T* first, int64_t row_stride) {
        return {uint32_t(uintptr_t(first)), uint32_t(row_stride) * uint32_t(sizeof(T))};
    }
    template <class Tile>
    DEVICE typename Tile::Element* row(Tile& tile, uint32_t i) const {
        char* chunks = reinterpret_cast<char*>(tile.chunks[i % Tile::kRows]);
        return reinterpret_cast<typename Tile::Element*>(chunks +
                                                         (first + i % Tile::kRows * step) % 16);
    }
    template <class Tile>
    DEVICE const typename Tile::Element* row(const Tile& tile, uint32_t i) const {
        return row(const_cast<Tile&>(tile), i);
    }
};

// A lane's copies, stage by stage.  The operand itself must be aligned to 16 bytes, because chunks
// must not begin before it.  Nothing is read past a row's end or before the operand.
template <class T, class Tile>
struct MisalignedCopier {
    static constexpr int kChunks = Tile::kChunks, kAtOnce = kWarpSize / kChunks;
    static_assert(kAtOnce * kChunks == kWarpSize && Tile::kRows % kAtOnce == 0,
                  "whole rows per iteration");
    const void* begin;
    const T* next;  // the first row of the next stage
    int64_t row_stride, stage_stride;

    DEVICE MisalignedCopier(const T* begin, const T* origin, int64_t row_stride,
                            int64_t stage_stride)
        : begin(begin), next(origin), row_stride(row_stride), stage_stride(stage_stride) {}
    DEVICE void copy(Tile& tile, int row, int chunk, int rows, int elements) const {
        const char* from = reinterpret_cast<const char*>(next + row * row_stride);
        const int skew = int(uintptr_t(from) % 16);
        const int bytes = elements * int(sizeof(T)) + skew - 16 * chunk;
        from += 16 * chunk - skew;
        copy_async_part(&tile.chunks[row][chunk], from,
                        row < rows && from >= begin ? clamp_to(bytes, 16) : 0);
    }
    // Copies `rows` rows of `elements` elements; the rest of the tile becomes zero.
    DEVICE void start(Tile& tile, int rows, int elements) {
        elements = elements < Tile::kRowElements ? elements : Tile::kRowElements;
#pragma unroll
        for (int first = 0; first < Tile::kRows; first += kAtOnce) {
            copy(tile, first + lane_id() / kChunks, lane_id() % kChunks, rows, elements);
        }
#pragma unroll
        for (int first = 0; first < Tile::kRows; first += kWarpSize) {
            const int row = first + lane_id();
            if (row < Tile::kRows) copy(tile, row, kChunks, rows, elements);
        }
        next += stage_stride;
    }
};
