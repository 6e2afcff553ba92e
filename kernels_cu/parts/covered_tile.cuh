// Lines of an operand that begin anywhere, in shared memory: with them come the whole chunks of 16
// bytes that they lie in, and who reads a line begins where it does.
#include "parts/shared_tile.cuh"

template <class T, int kLines_, int kElements>
struct CoveredTile {
    using Element = T;
    static constexpr int kLines = kLines_, kChunks = kElements * int(sizeof(T)) / 16;
    static constexpr int kLineElements = kElements;
    Bytes<16> chunks[kLines][kChunks + 1];  // lines in different banks
};

// Where the lines of an operand begin in their first chunks.  They stay there from stage to stage.
struct LinePhases {
    uint32_t first, step;  // in bytes

    template <class T>
    DEVICE static LinePhases of(const T* first, int64_t line_stride) {
        return {uint32_t(uintptr_t(first)), uint32_t(line_stride) * uint32_t(sizeof(T))};
    }
    template <class Tile>
    DEVICE const typename Tile::Element* line(const Tile& tile, int i) const {
        const char* chunks = reinterpret_cast<const char*>(tile.chunks[i]);
        return reinterpret_cast<const typename Tile::Element*>(chunks + (first + i * step) % 16);
    }
};

// The chunks that a lane copies into one stage after the other.  The operand begins at a multiple of
// 16 bytes, or there would be a chunk that begins before it; behind the end of a line nothing is read.
template <class T, class Tile>
struct CoveredCopier {
    static constexpr int kChunks = Tile::kChunks, kAtOnce = kWarpSize / kChunks;
    static_assert(kAtOnce * kChunks == kWarpSize && Tile::kLines % kAtOnce == 0,
                  "lanes share lines in whole");
    const T* next;  // the first line of the next stage
    int64_t line_stride, stage_stride;

    DEVICE CoveredCopier(const T* origin, int64_t line_stride, int64_t stage_stride)
        : next(origin), line_stride(line_stride), stage_stride(stage_stride) {}
    DEVICE void copy(Tile& tile, int line, int chunk, int lines, int elements) const {
        const char* from = reinterpret_cast<const char*>(next + line * line_stride);
        const int phase = int(uintptr_t(from) % 16);
        const int bytes = elements * int(sizeof(T)) + phase - 16 * chunk;
        copy_async_part(&tile.chunks[line][chunk], from - phase + 16 * chunk,
                        line < lines ? clamp_to(bytes, 16) : 0);
    }
    // Of `lines` lines of `elements`; the rest of the tile becomes zero.
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
