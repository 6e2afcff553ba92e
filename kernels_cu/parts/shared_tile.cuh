// Tiles of operands in shared memory, and their loads.
#include "parts/dtype.cuh"

// kLines rows of kLineBytes, in 16-byte chunks.  Swizzle: a chunk's index in its row is XORed with
// bits of the row, so that the same chunk of 8 rows is free of bank conflicts; so are half chunks
// of 4 adjacent pairs, and 4 adjacent chunks of 2 rows.
template <int kLines_, int kLineBytes>
struct SharedTile {
    static constexpr int kLines = kLines_, kChunks = kLineBytes / 16;
    static constexpr int kPeriod = 8;  // rows after which the swizzle repeats
    static_assert(kLineBytes % 16 == 0 && (kChunks & (kChunks - 1)) == 0, "chunks: a power of two");
    Bytes<16> chunks[kLines * kChunks];

    // Linear over XOR: of rows without common bits, the swizzle of the sum is the XOR of theirs.
    DEVICE static constexpr int swizzle(int line) {
        return kChunks >= 8   ? (line & 1) << 2 | (line & 2) | (line >> 2 & 1)
               : kChunks == 4 ? line >> 1 & 3
               : kChunks == 2 ? line >> 2 & 1
                              : 0;
    }
    DEVICE static constexpr int index(int line, int chunk) {
        return line * kChunks + (chunk ^ swizzle(line));
    }
    DEVICE void* operator()(int line, int chunk) { return &chunks[index(line, chunk)]; }
    DEVICE const void* operator()(int line, int chunk) const { return &chunks[index(line, chunk)]; }
};

DEVICE int clamp_to(int64_t x, int high) { return x < 0 ? 0 : x < high ? int(x) : high; }

// Issues the copies of num_lines rows of num_elements from `origin` on; the rest of the tile
// becomes zero.  Rows are aligned to 16 bytes.
template <class T, int kLines, int kLineBytes>
DEVICE void copy_tile(SharedTile<kLines, kLineBytes>& tile, const T* origin, int64_t line_stride,
                      int num_lines, int num_elements) {
    constexpr int kChunks = kLineBytes / 16, kPerChunk = 16 / int(sizeof(T));
    constexpr int kCount = kLines * kChunks;
#pragma unroll
    for (int first = 0; first < kCount; first += kNumThreads) {
        const int i = first + int(threadIdx.x);
        if (kCount % kNumThreads != 0 && i >= kCount) break;
        const int line = i / kChunks, chunk = i % kChunks;
        const int elements = clamp_to(num_elements - chunk * kPerChunk, kPerChunk);
        const int bytes = line < num_lines ? elements * int(sizeof(T)) : 0;
        copy_async_part(tile(line, chunk), origin + line * line_stride + chunk * kPerChunk, bytes);
    }
}

// The same for a loop over tiles: keeps a thread's invariant addresses.  line_stride: 32 bits, so
// that an address takes one instruction.  num_elements: a multiple of a chunk's.
template <class T, class Tile>
struct TileCopier {
    static constexpr int kChunks = Tile::kChunks, kPerChunk = 16 / int(sizeof(T));
    static constexpr int kAtOnce = kNumThreads / kChunks;
    static_assert(kAtOnce * kChunks == kNumThreads && (kAtOnce & (kAtOnce - 1)) == 0,
                  "threads share lines in whole");
    const T* origin;  // this thread's chunk of row 0
    int line_stride;
    bool exists;
    int line, index;

    DEVICE TileCopier(const T* origin, int line_stride, int num_elements)
        : line_stride(line_stride) {
        const int thread = int(threadIdx.x), chunk = thread % kChunks;
        line = thread / kChunks;
        index = Tile::index(line, chunk);
        exists = chunk * kPerChunk < num_elements;
        this->origin = origin + int64_t(line) * line_stride + chunk * kPerChunk;
    }
    // Issues the copies of num_lines rows from first_line on.  kUnpredicated: num_lines covers the
    // tile.
    template <bool kUnpredicated>
    DEVICE void start(Tile& tile, int first_line, int num_lines) const {
        if constexpr (!kUnpredicated) {
            if (num_lines >= Tile::kLines) return start<true>(tile, first_line, num_lines);
        }
        const int stride =
            opaque(line_stride);  // or the loop would keep its multiples in registers
        const T* from = origin + int64_t(first_line) * stride;
#pragma unroll
        for (int first = 0; first < Tile::kLines; first += kAtOnce) {
            if (Tile::kLines < kAtOnce && line >= Tile::kLines) break;
            // The bits of `line` are below those of `first`.
            void* to = &tile.chunks[(index ^ Tile::swizzle(first)) + first * kChunks];
            copy_async<16>(to, from + int64_t(first) * stride,
                           exists && (kUnpredicated || first + line < num_lines));
        }
    }
};

// One element of an array of any dtype, converted to T, which holds it exactly.
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

// Loads num_lines rows of num_elements of any strides by scalar loads, converted to T.
template <class T, int kLines, int kLineBytes>
DEVICE void load_tile_scalar(SharedTile<kLines, kLineBytes>& tile, const void* p, int dtype,
                             int64_t origin, int64_t line_stride, int64_t element_stride,
                             int num_lines, int num_elements) {
    constexpr int kChunks = kLineBytes / 16, kPerChunk = 16 / int(sizeof(T));
    constexpr int kCount = kLines * kChunks;
    // Coalesced along the smaller stride.
    const bool along_lines = (line_stride < 0 ? -line_stride : line_stride) <
                             (element_stride < 0 ? -element_stride : element_stride);
    for (int i = int(threadIdx.x); i < kCount; i += kNumThreads) {
        const int line = along_lines ? i % kLines : i / kChunks;
        const int chunk = along_lines ? i / kLines : i % kChunks;
        const int64_t first = origin + line * line_stride + chunk * kPerChunk * element_stride;
        T elements[kPerChunk];
#pragma unroll
        for (int j = 0; j < kPerChunk; ++j) {
            const bool valid = line < num_lines && chunk * kPerChunk + j < num_elements;
            elements[j] = valid ? load_as<T>(p, first + j * element_stride, dtype) : T();
        }
        memcpy(tile(line, chunk), elements, 16);
    }
}
