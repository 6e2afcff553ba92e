// quantize_held_tiles.cu: as quantize_tiles.cu, of tiles that their threads hold in registers: x is
// read once.  A thread has kVectorsPerThread vectors of a tile, or one each of kTiles tiles, one
// under the other, so that as many loads are under way at once, and one lane makes each scale.
//   Of matrices whose rows, and tiles' rows, are whole and aligned vectors; the vectors of a tile's
//   row divide kThreadsPerRow.
// Constants and arguments: those of quantize_tiles.cu; a "tile" of params is kTiles tiles of x.
// Launch: grid (ceil(params.num_tiles / kRowsPerBlock)), block (kNumThreads).
#include "parts/quantize.cuh"
#include "parts/tiles.cuh"

constexpr int kTiles = kVectorsPerThread == 1 ? 8 : 1, kHeld = kTiles * kVectorsPerThread;
using Items = Vector<Element, kVectorWidth>;

// This thread's vectors: number n is in row first + n * step of the stack of tiles.
struct HeldTiles {
    Tile stack;
    int height, first, step, col;

    DEVICE static HeldTiles of(const TileParams& p, const RowThread& t, int64_t index) {
        HeldTiles held;
        held.stack = Tile::of(p, index);
        held.height = int(p.scale_row_elements);
        const int per_row = int(p.tile_cols) / kVectorWidth;
        held.first = t.lane / per_row;
        held.col = (t.lane - held.first * per_row) * kVectorWidth;
        held.step = kTiles > 1 ? held.height : kThreadsPerRow / per_row;
        return held;
    }
    DEVICE bool holds(int n) const {
        const int row = first + n * step;
        return (kTiles == 1 || first < height) && row < stack.num_rows && col < stack.num_cols;
    }
};

// words[i], without an array in memory.
DEVICE uint32_t select_word(const LargestOfWords<Element> (&words)[kTiles], int i) {
    if constexpr (kTiles == 1) {
        return words[0].word;
    } else {
        uint32_t fours[4], pairs[2];
#pragma unroll
        for (int j = 0; j < 4; ++j) fours[j] = i & 1 ? words[2 * j + 1].word : words[2 * j].word;
#pragma unroll
        for (int j = 0; j < 2; ++j) pairs[j] = i & 2 ? fours[2 * j + 1] : fours[2 * j];
        return i & 4 ? pairs[1] : pairs[0];
    }
}

DEVICE void make_scales(const HeldTiles& held, const TileParams& p, const RowThread& t,
                        const LargestOfWords<Element> (&largest)[kTiles], float* scales,
                        float (&encode)[kTiles]) {
    constexpr bool kLaneEach = kTiles > 1 && kThreadsPerRow >= kTiles;
    const float of_format = largest_number(p.dtype);
    if constexpr (kLaneEach) {
        const LargestOfWords<Element> mine{select_word(largest, t.lane % kTiles)};
        const QuantizeScale scale(mine.value(), of_format);
        if (t.lane < kTiles && t.lane * held.height < held.stack.num_rows) {
            scales[held.stack.scale + t.lane * p.col_tiles] = scale.decode;
        }
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            encode[i] = shuffle(scale.encode, (lane_id() & ~(kTiles - 1)) + i);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            const QuantizeScale scale(largest[i].value(), of_format);
            if (t.lane == 0 && i * held.height < held.stack.num_rows) {
                scales[held.stack.scale + i * p.col_tiles] = scale.decode;
            }
            encode[i] = scale.encode;
        }
    }
}

template <class Code>
DEVICE void write(Code* y, const HeldTiles& held, const TileParams& p, const Items (&items)[kHeld],
                  const float (&encode)[kTiles]) {
    y += held.stack.y + held.col + held.first * p.y_row;
    const int64_t step = held.step * p.y_row;
#pragma unroll
    for (int n = 0; n < kHeld; ++n, y += step) {
        if (!held.holds(n)) continue;
        float values[kVectorWidth];
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            values[j] = items[n][j] * encode[n / kVectorsPerThread];
        }
        Vector<Code, kVectorWidth> codes;
        codes.from_floats(values);
        codes.store(y);
    }
}

KERNEL void quantize_held_tiles(const Element* x, void* y, float* scales, const TileParams params) {
    const RowThread t = RowThread::here();
    const HeldTiles held =
        HeldTiles::of(params, t, int64_t(blockIdx.x) * kRowsPerBlock + t.row_in_block);
    x += held.stack.x + held.col + held.first * params.x_row;
    const int64_t step = held.step * params.x_row;
    Items items[kHeld];
#pragma unroll
    for (int n = 0; n < kHeld; ++n, x += step) {
        if (held.holds(n)) {
            items[n].load(x);
        } else {
            items[n].fill(from_float<Element>(0.0f));
        }
    }
    LargestOfWords<Element> largest[kTiles];
#pragma unroll
    for (int n = 0; n < kHeld; ++n) largest[n / kVectorsPerThread].take(items[n]);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) largest[n].across_lanes(1, kLastLaneBit);
    if constexpr (kWarpsPerRow > 1) {
        SHARED(uint32_t, of_warps, [kRowsPerBlock][kTiles][kWarpsPerRow]);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            if (lane_id() == 0) of_warps[t.row_in_block][n][t.lane / kWarpSize] = largest[n].word;
        }
        sync_block();
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            largest[n].word = of_warps[t.row_in_block][n][lane_id() % kWarpsPerRow];
            largest[n].across_lanes(1, kWarpsPerRow);
        }
    }
    float encode[kTiles];
    make_scales(held, params, t, largest, scales, encode);
    if (params.dtype == kE4m3) {
        write(static_cast<e4m3*>(y), held, params, items, encode);
    } else if (params.dtype == kE5m2) {
        write(static_cast<e5m2*>(y), held, params, items, encode);
    } else {
        write(static_cast<int8_t*>(y), held, params, items, encode);
    }
}
