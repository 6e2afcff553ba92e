// Misaligned rows of an operand in shared memory: the aligned 16-byte chunks that a row overlaps
// are copied; readers add the row's offset in its first chunk.
#include "parts/shared_tile.cuh"

template <class T, int kLines_, int kElements>
struct MisalignedTile {
    using Element = T;
    static constexpr int kLines = kLines_, kChunks = kElements * int(sizeof(T)) / 16;
    static constexpr int kLineElements = kElements;
    Bytes<16> chunks[kLines][kChunks + 1];  // padding against bank conflicts
};

template <class Tile> constexpr bool kIsMisaligned = false;
template <class T, int kLines, int kElements>
constexpr bool kIsMisaligned<MisalignedTile<T, kLines, kElements>> = true;

// Byte offsets of the rows in their first chunks, the same in every stage.
struct LinePhases {
    uint32_t first, step;  // in bytes

    template <class T>
    DEVICE static LinePhases of(const T* first, int64_t line_stride) {
        return {uint32_t(uintptr_t(first)), uint32_t(line_stride) * uint32_t(sizeof(T))};
    }
    template <class Tile>
    DEVICE typename Tile::Element* line(Tile& tile, uint32_t i) const {
        char* chunks = reinterpret_cast<char*>(tile.chunks[i % Tile::kLines]);
        return reinterpret_cast<typename Tile::Element*>(chunks +
                                                         (first + i % Tile::kLines * step) % 16);
    }
    template <class Tile>
    DEVICE const typename Tile::Element* line(const Tile& tile, uint32_t i) const {
        return line(const_cast<Tile&>(tile), i);
    }
};

// A lane's share of the copies, stage by stage.  The operand itself is aligned to 16 bytes, or a
// chunk would begin before it; nothing is read past a row's end, or before the operand.
template <class T, class Tile>
struct MisalignedCopier {
    static constexpr int kChunks = Tile::kChunks, kAtOnce = kWarpSize / kChunks;
    static_assert(kAtOnce * kChunks == kWarpSize && Tile::kLines % kAtOnce == 0,
                  "lanes share lines in whole");
    const void* begin;
    const T* next;  // the first line of the next stage
    int64_t line_stride, stage_stride;

    DEVICE MisalignedCopier(const T* begin, const T* origin, int64_t line_stride,
                            int64_t stage_stride)
        : begin(begin), next(origin), line_stride(line_stride), stage_stride(stage_stride) {}
    DEVICE void copy(Tile& tile, int line, int chunk, int lines, int elements) const {
        const char* from = reinterpret_cast<const char*>(next + line * line_stride);
        const int phase = int(uintptr_t(from) % 16);
        const int bytes = elements * int(sizeof(T)) + phase - 16 * chunk;
        from += 16 * chunk - phase;
        copy_async_part(&tile.chunks[line][chunk], from,
                        line < lines && from >= begin ? clamp_to(bytes, 16) : 0);
    }
    // Copies `lines` rows of `elements`; the rest of the tile becomes zero.
    DEVICE void start(Tile& tile, int lines, int elements) {
        elements = elements < Tile::kLineElements ? elements : Tile::kLineElements;
#pragma unroll
        for (int first = 0; first < Tile::kLines; first += kAtOnce) {
            copy(tile, first + lane_id() / kChunks, lane_id() % kChunks, lines, elements);
        }
#pragma unroll
        for (int first = 0; first < Tile::kLines; first += kWarpSize) {
            const int line = first + lane_id();
            if (line < Tile::kLines) copy(tile, line, kChunks, lines, elements);
        }
        next += stage_stride;
    }
};
