// The TMA-store epilogue, in registers:
//     out = activation(alpha * (scale_a * (scale_b * accumulator)) + bias of its column) + residual
// for outputs that TMA can store; TMA loads the residual, if any.
#pragma once
#include "gemm/epilogue/broadcast.cuh"
#include "gemm/epilogue/residual.cuh"
#include "gemm/epilogue/linear_combination.cuh"

namespace gemm {

// For 16-bit outputs: with gelu, x is half of the argument.
template <int kActivation> DEVICE float activate_16bit(float x) {
    return kActivation == kGelu ? gelu_of_twice(x) : activate(x, kActivation);
}

// add_words: values[2 i] and values[2 i + 1] += the two elements of word i.  pack_words: packs them
// into word i, except in the first 16 * kept columns, which `packed` has from the previous chunk.
template <class T, int kWords>
DEVICE void add_words(float (&values)[8 * kWords], const uint32_t (&added)[kWords][4]) {
#pragma unroll
    for (int i = 0; i < 4 * kWords; ++i) {
        float low, high;
        unpack<T>(added[i / 4][i % 4], low, high);
        values[2 * i] += low;
        values[2 * i + 1] += high;
    }
}
template <class T, int kWords>
DEVICE void pack_words(const float (&values)[8 * kWords], uint32_t (&packed)[kWords][4], int kept) {
#pragma unroll
    for (int i = 0; i < 4 * kWords; ++i)
        if (i >= 4 * kept) packed[i / 4][i % 4] = pack<T>(values[2 * i], values[2 * i + 1]);
}

// Boxes have 16 rows of 128 bytes.  row: the warp's first row in the tile; count: index of the
// tile; box: the next one to fill.
template <class Tile> struct StoreTma {
    using Mainloop = typename Tile::Mainloop;
    using Accumulator = typename Tile::Accumulator;
    using Broadcast = TileBroadcast<Tile>;
    static constexpr bool kScales = Tile::kScales, kGeneral = Tile::kGeneral;
    static constexpr int kMmasM = Tile::kMmasM, kCols = Tile::kCols;
    static constexpr int kChunk = Tile::kChunk, kChunks = Tile::kChunks, kBoxes = Tile::kBoxes;

    typename Tile::Staging& staging;
    int& box;
    const TensorMap& map;
    const Broadcast& broadcast;
    const RowScaleFragment<Tile>& row_scales;
    const EpilogueParams& params;
    int row, count;
    const Residual<Tile>& residual;

    // Computes a lane's results of kCount columns from `first` on, of rows 64 * m on, before the
    // residual and except the first 16 * kept columns.  For gelu, alpha and the bias are halved.
    // With a small k, shared-memory bandwidth for broadcasts limits the epilogue, so an absent bias
    // is not read.
    template <int kActivation, bool kScaled, int kCount>
    DEVICE void finish(const Accumulator& accumulator, int lane, int m, int first, float alpha,
                       float (&values)[kCount], int kept = 0) const {
        const auto of_col = [&](int vector, int i) {
            return broadcast.pair(vector, first + wgmma_col(lane, i / 4 * 4)).values[i % 2];
        };
        const auto of_row = [&](int i) {
            return Tile::kRowScales ? row_scales.rows[m][i / 2 % 2] : alpha;
        };
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            if (i < 8 * kept) continue;
            values[i] = float(accumulator[m][first / 2 + i]);
            if (kScales) values[i] *= of_col(0, i);
        }
        if constexpr (kScaled) {
            const float of_b = broadcast.rows[0], of_a = broadcast.rows[1];
#pragma unroll
            for (int i = 0; i < kCount; ++i) values[i] = values[i] * of_b * of_a;
        }
        if (broadcast.biased()) {
#pragma unroll
            for (int i = 0; i < kCount; ++i)
                if (i >= 8 * kept)
                    values[i] = values[i] * of_row(i) + of_col(Broadcast::kColVectors - 1, i);
        } else {
#pragma unroll
            for (int i = 0; i < kCount; ++i)
                if (i >= 8 * kept) values[i] *= of_row(i);
        }
        if constexpr (kActivation != kNoActivation) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) values[i] = activate_16bit<kActivation>(values[i]);
        }
    }
    // Stores 16-bit outputs.  If the boxes hold the whole tile, they are filled and stored together
    // with one wait for TMA's reads and one proxy fence.
    template <int kActivation, bool kAdds>
    DEVICE void store_pairs(const Accumulator& accumulator) const {
        constexpr int kChunksPerStore =
            kMmasM == 1 && !Tile::kSplitK && kCols == 2 * kChunk ? 2 : 1;
        constexpr bool kOwnBoxes = kBoxes > 2;  // a box per chunk
        // Columns per iteration.  During the other warpgroup's mainloop, a long run of independent
        // activation instructions would starve the tensor cores of register bandwidth.  The largest
        // tiles also leave no registers for more.
        constexpr bool kFewAtOnce =
            Mainloop::kPingPong && kMmasM > 1 && (kActivation > kRelu || kMmasM * kCols >= 352);
        constexpr int kAtOnce = kFewAtOnce ? 16 : kChunk, kWords = kAtOnce / 16;
        using Values = float[kAtOnce / 2];
        const Bytes<16> origin = broadcast.origin;
        const int out_row = int(origin.words[0]) + row, out_col = int(origin.words[1]),
                  batch = int(origin.words[2]);
        const int lane = Tile::lane();
        const bool halves = params.out_dtype == kHalf;
        const float alpha = (kActivation == kGelu ? 0.5f : 1.0f) * broadcast.alpha(params);
        const typename Tile::OwnChunks own;
        // This lane's address of the 16 x 16 elements of a box from its column `begin` on.
        const int lane_address = lane % 16 * kSwizzleBytes + (lane / 16 ^ lane % 8) * 16;
        const auto matrix = [&](unsigned char* from, int begin) {
            return from + (lane_address ^ begin * 2);
        };
        // Packs a chunk's columns of rows 64 * m on, from its column `begin` on.  to: its box.
        const auto pack_columns = [&](int m, int chunk, int begin, unsigned char* to,
                                      uint32_t (&packed)[kWords][4], int kept = 0) {
            Values values;
            finish<kActivation, Broadcast::kMatrixScales && !kAdds>(
                accumulator, lane, m, Tile::chunk_col(chunk) + begin, alpha, values, kept);
            if constexpr (kAdds) {
                uint32_t added[kWords][4];
#pragma unroll
                for (int j = 0; j < kWords; ++j) load_matrix(added[j], matrix(to, begin + 16 * j));
                if (halves) add_words<half>(values, added);
                else add_words<bf16>(values, added);
            }
            if (halves) pack_words<half>(values, packed, kept);  // branch once per fragment
            else pack_words<bf16>(values, packed, kept);
        };
        const auto fill = [&](unsigned char* to, int begin, const uint32_t (&packed)[kWords][4]) {
#pragma unroll
            for (int j = 0; j < kWords; ++j) store_matrix(matrix(to, begin + 16 * j), packed[j]);
        };
        uint32_t packed[kChunksPerStore][kWords][4];
#pragma unroll
        for (int first = 0; first < kMmasM * kChunks; first += kChunksPerStore) {
            const int m = first / kChunks, chunk = first % kChunks;
            if (!own.has(chunk)) continue;
            const int index = Residual<Tile>::box_of(m, chunk);
            unsigned char* to[kChunksPerStore];
            // Groups of 16 columns that this chunk shares with the previous one.
            const int kept = Mainloop::kFp8 && kChunksPerStore == 1
                                 ? (chunk * kChunk - Tile::chunk_col(chunk)) / 16
                                 : 0;
#pragma unroll
            for (int i = 0; i < 4 * kept; ++i)
                packed[0][i / 4][i % 4] = packed[0][kWords - kept + i / 4][i % 4];
#pragma unroll
            for (int i = 0; i < kChunksPerStore; ++i) {
                to[i] = staging.boxes[kChunksPerStore == 2 ? i : kOwnBoxes ? first : box];
                if constexpr (kAdds) residual.wait(count, index + i);
                pack_columns(m, chunk + i, 0, to[i], packed[i], kept);
            }
            if (!kOwnBoxes || first == 0) {
                if (lane == 0) tma_store_wait_read<kOwnBoxes ? 0 : 2 - kChunksPerStore>();
                sync_warp();
            }
#pragma unroll
            for (int i = 0; i < kChunksPerStore; ++i) {
                fill(to[i], 0, packed[i]);
#pragma unroll
                for (int begin = kAtOnce; begin < kChunk; begin += kAtOnce) {
                    pack_columns(m, chunk + i, begin, to[i], packed[i]);
                    fill(to[i], begin, packed[i]);
                }
            }
            fence_async_proxy();
            sync_warp();
            if (lane == 0) {
#pragma unroll
                for (int i = 0; i < kChunksPerStore; ++i) {
                    tma_store(map, to[i],
                              {out_col + Tile::chunk_col(chunk + i), out_row + 64 * m, batch});
                }
                tma_store_commit();
                if constexpr (kAdds) {
                    residual.follow(count, index, out_row, out_col, int(origin.words[3]));
                }
            }
            if (kChunksPerStore == 1 && !kOwnBoxes) box ^= 1;
        }
    }
    // Stores FP32 outputs, 32 columns per box.  The last box can overlap the one before.
    static constexpr int kFloats = 32, kFloatBoxes = (kCols + kFloats - 1) / kFloats;
    DEVICE void store_floats(const Accumulator& accumulator) const {
        static_assert(kCols >= kFloats, "a box");
        const float alpha = broadcast.alpha(params);
        const Bytes<16> origin = broadcast.origin;
        const int out_row = int(origin.words[0]) + row, out_col = int(origin.words[1]),
                  batch = int(origin.words[2]);
        const int lane = Tile::lane();
        const typename Tile::OwnChunks own;
#pragma unroll
        for (int i = 0; i < kMmasM * kFloatBoxes; ++i) {
            const int m = i / kFloatBoxes, col = i % kFloatBoxes * kFloats;
            const int at = col < kCols - kFloats ? col : kCols - kFloats;
            if (!own.has(at / kChunk)) continue;
            if (lane == 0) tma_store_wait_read<1>();
            sync_warp();
            unsigned char* to = staging.boxes[box];
#pragma unroll
            for (int begin = 0; begin < kFloats; begin += 16) {
                float values[8];
                finish<kNoActivation, Broadcast::kMatrixScales>(accumulator, lane, m, at + begin,
                                                                alpha, values);
#pragma unroll
                for (int j = 0; j < 8; j += 2) {
                    const int box_row = lane / 4 + j / 2 % 2 * 8,
                              box_col = begin + wgmma_col(lane, j);
                    unsigned char* four =
                        to + box_row * kSwizzleBytes + (box_col / 4 ^ box_row % 8) * 16;
                    *reinterpret_cast<Bytes<8>*>(four + box_col % 4 * 4) = {
                        bit_cast<uint32_t>(values[j]), bit_cast<uint32_t>(values[j + 1])};
                }
            }
            fence_async_proxy();
            sync_warp();
            if (lane == 0) {
                tma_store(map, to, {out_col + at, out_row + 64 * m, batch});
                tma_store_commit();
            }
            box ^= 1;
        }
    }
    // kAdds: 16-bit outputs with a residual.  kActivates: with an activation, if there is one.
    template <bool kAdds, bool kActivates> DEVICE void store(const Accumulator& accumulator) const {
        if constexpr (kGeneral && !kAdds) {
            if (params.out_dtype == kFloat) return store_floats(accumulator);
        }
        if constexpr (kActivates) {
#define ACTIVATION_STORE(name, value) \
    if (params.activation == name) return store_pairs<name, kAdds>(accumulator);
            ACTIVATIONS(ACTIVATION_STORE)
        }
        store_pairs<kNoActivation, kAdds>(accumulator);
    }
};

}  // namespace gemm
