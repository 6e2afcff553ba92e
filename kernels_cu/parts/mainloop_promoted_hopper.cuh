// The sums of a tile of FP8 operands.  Hopper's tensor cores keep 13 fractional bits of a sum of
// FP8 products: after every stage, 128 of k, it is multiplied by the scales of its blocks and added
// to others in FP32.
//
// The warpgroups take turns: one gives the tensor cores the products of its rows and kProductCols
// columns while the other one adds its own to the sums.  Without turns both would wait for
// products, and add them, at the same time.
#include "parts/ring_hopper.cuh"

static_assert(kTileK == kBlockK && !kPingPong && kLead == 0 && kBlocks == 1,
              "a stage is a block of scales");
constexpr int kProductCols = kCols < kBlockK ? kCols : kBlockK, kProducts = kProductCols / 2;
constexpr int kChunks = kCols / kProductCols;
static_assert(kCols % kProductCols == 0, "one scale for the columns");

// The factors of a thread's products: of its rows, and of every kProductCols columns.  Four lanes
// with the same rows load those of four stages, a stage ahead of their use.
constexpr int kAhead = 4;
struct BlockFactors {
    float rows[2], cols[kChunks];

    // Of the warpgroup's kAhead stages from `first` on.
    DEVICE void load(const TileWork& work, int first) {
        const BlockScales& scales = work.scales;
        const int mine = first + int(threadIdx.x % kAhead) * kStride;
        const int64_t k = work.first_k_tile + (mine < work.num_k_tiles ? mine : 0);
        const int row = work.first_row + threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = row + i * 8;
            const int64_t there = at < scales.last_row ? at : scales.last_row;
            rows[i] = scales.a ? scales.a[there * scales.a_row + k * scales.a_k] : 1.0f;
        }
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const int at = work.first_col / kBlockK + i;
            const int64_t there = at < scales.last_block ? at : scales.last_block;
            cols[i] = scales.b ? scales.b[k * scales.b_k + there * scales.b_col] : 1.0f;
        }
    }
    // Of stage `i` of those.
    DEVICE BlockFactors of(int i) const {
        const int lane = threadIdx.x % 32 / kAhead * kAhead + i;
        BlockFactors factors;
#pragma unroll
        for (int j = 0; j < 2; ++j) factors.rows[j] = shuffle(rows[j], lane);
#pragma unroll
        for (int j = 0; j < kChunks; ++j) factors.cols[j] = shuffle(cols[j], lane);
        return factors;
    }
};

// A's rows of a stage, those of the warpgroup: registers leave the bandwidth of shared memory,
// which limits FP8 products, to B.
using RowRegisters = uint32_t[kTileK / kStepK][4];
DEVICE void load_rows(RowRegisters& a, const unsigned char* stage, int first_row) {
    const int lane = threadIdx.x % 32, row = first_row + threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < kTileK / kStepK; ++i) {
        load_matrix<false>(a[i], stage + RowStage::place(row, i * 32 + lane / 16 * 16));
    }
}

// ring.turn: all warps of a warpgroup have given their products of a chunk of columns.
DEVICE void multiply(Ring& ring, const TileWork& work, TileSums& sums) {
    constexpr bool kTurns = kShareRows;
    clear(sums);
    OwnStages own(work);
    if (!own.there()) return;  // the only stage is the other warpgroup's, or none is this block's
    BlockFactors loaded;
    loaded.load(work, own.index);
    int turn = kChunks % 2 == 0 ? 0 : work.count * work.num_k_tiles;
#pragma unroll 1
    for (int i = 0; own.there(); own.next(), i = (i + 1) % kAhead) {
        const int stage = own.place.stage;
        const uint64_t cols = ColStage::tile(ring.cols[stage], 0, 0);
        const BlockFactors factors = loaded.of(i);
        if (i == kAhead - 1) loaded.load(work, own.index + kStride);
        ring.full[stage].wait(own.place.parity);
        RowRegisters a;
        load_rows(a, ring.rows[stage], work.row);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk, ++turn) {
            float products[kProducts];
            if (kTurns) ring.turn[work.consumer ^ 1].wait((turn + work.consumer + 1) & 1);
            wgmma_fence(products, a[0], a[1], a[2], a[3]);
#pragma unroll
            for (int k = 0; k < kTileK; k += kStepK) {
                wgmma<RowElement, ColElement>(
                    products, a[k / kStepK],
                    advance(cols, chunk * kProductCols * ColStage::kLine + k), k > 0);
            }
            wgmma_commit();
            if (kTurns && elect_one()) ring.turn[work.consumer].arrive();
            wgmma_wait<0>(products);
            if (chunk == kChunks - 1) ring.release(stage);
#pragma unroll
            for (int j = 0; j < kProducts; ++j) {
                const float factor = factors.rows[j / 2 % 2] * factors.cols[chunk];
                sums[0][chunk * kProducts + j] += products[j] * factor;
            }
        }
    }
}
