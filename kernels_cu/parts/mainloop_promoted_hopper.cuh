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
constexpr int kProductCols = kCols % kBlockK == 0 ? kBlockK : kCols;
constexpr int kProducts = kProductCols / 2, kChunks = kCols / kProductCols;
static_assert(kProductCols <= 192, "products and sums fit into registers");
constexpr int kHandOff = 0;
constexpr int kTurning = 1;
constexpr bool kHeld = false;

// The factors of a thread's products: of its two rows, which are A's, and of every kScaleCols
// columns.  With kTurned, of its rows, which are of one block, and of each of its columns.  Lanes
// with the same rows (with kTurned, columns) load those of kAhead stages, a stage ahead of their
// use.
constexpr int kScaleCols = kCols % kBlockK == 0 ? kBlockK : 64;
constexpr int kRowScales = kTurned ? 1 : 2, kColScales = kTurned ? kCols / 4 : kCols / kScaleCols;
constexpr int kAhead = kTurned ? 8 : 4;
struct BlockFactors {
    float rows[kRowScales], cols[kColScales];

    // Of the warpgroup's kAhead stages from `first` on.
    DEVICE void load(const TileWork& work, int first) {
        const int lane = threadIdx.x % 32;
        const int mine = first + (kTurned ? lane / 4 : lane % 4) * kStride;
        const int64_t k = work.first_k_tile + (mine < work.num_k_tiles ? mine : 0);
#pragma unroll
        for (int i = 0; i < kRowScales; ++i) {
            rows[i] = kTurned ? of_b(work.scales, work.first_row, k)
                              : of_a(work.scales, work.first_row + lane / 4 + i * 8, k);
        }
#pragma unroll
        for (int i = 0; i < kColScales; ++i) {
            cols[i] = kTurned ? of_a(work.scales, work.first_col + wgmma_col(lane, i % 2 + i / 2 * 4), k)
                              : of_b(work.scales, work.first_col + i * kScaleCols, k);
        }
    }
    DEVICE static float of_a(const BlockScales& scales, int row, int64_t k) {
        const int64_t there = row < scales.last_row ? row : scales.last_row;
        return scales.a ? scales.a[there * scales.a_row + k * scales.a_k] : 1.0f;
    }
    DEVICE static float of_b(const BlockScales& scales, int col, int64_t k) {
        const int block = col / kBlockK;
        const int64_t there = block < scales.last_block ? block : scales.last_block;
        return scales.b ? scales.b[k * scales.b_k + there * scales.b_col] : 1.0f;
    }
    // Of stage `i` of those.
    DEVICE BlockFactors of(int i) const {
        const int own = threadIdx.x % 32, lane = kTurned ? i * 4 + own % 4 : own / 4 * 4 + i;
        BlockFactors factors;
#pragma unroll
        for (int j = 0; j < kRowScales; ++j) factors.rows[j] = shuffle(rows[j], lane);
#pragma unroll
        for (int j = 0; j < kColScales; ++j) factors.cols[j] = shuffle(cols[j], lane);
        return factors;
    }
    // Of the thread's number `i` of a row of sums.
    DEVICE float of_sum(int i) const {
        if (kTurned) return rows[0] * cols[i / 4 * 2 + i % 2];
        return rows[i / 2 % 2] * cols[i / 4 * 8 / kScaleCols];
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
    constexpr bool kTurns = kShareRows && kConsumers == 2 && kTurning;
    clear(sums);
    OwnStages own(work);
    if (!own.there()) return;  // the only stage is the other warpgroup's, or none is this block's
    BlockFactors loaded;
    loaded.load(work, own.index);
    int turn = kChunks % 2 == 0 ? 0 : work.count * work.num_k_tiles;
    RowRegisters a;
    ring.full[own.place.stage].wait(own.place.parity);
    if (kHeld) load_rows(a, ring.rows[own.place.stage], work.row);
#pragma unroll 1
    for (int i = 0; own.there(); i = (i + 1) % kAhead) {
        const int stage = own.place.stage;
        const uint64_t rows = RowStage::tile(ring.rows[stage], work.row, 0);
        const uint64_t cols = ColStage::tile(ring.cols[stage], 0, 0);
        const BlockFactors factors = loaded.of(i);
        if (i == kAhead - 1 && work.scales.there()) loaded.load(work, own.index + kStride);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk, ++turn) {
            float products[kProducts];
            if (kTurns) ring.turn[work.consumer ^ 1].wait((turn + work.consumer + 1) & 1);
            if (kHeld) wgmma_fence(products, a[0], a[1], a[2], a[3]);
            else wgmma_fence(products);
#pragma unroll
            for (int k = 0; k < kTileK; k += kStepK) {
                if (kHandOff == 1 && k == kTileK - kStepK) wgmma_commit();
                const int col = chunk * kProductCols * ColStage::kLine;
                if (kHeld) {
                    wgmma<RowElement, ColElement>(products, a[k / kStepK], advance(cols, col + k),
                                                  k > 0);
                } else {
                    wgmma<RowElement, ColElement>(products, advance(rows, k), advance(cols, col + k),
                                                  k > 0);
                }
            }
            wgmma_commit();
            if (kHandOff == 1) wgmma_wait<1>();
            if (kTurns && elect_one()) ring.turn[work.consumer].arrive();
            wgmma_wait<0>(products);
            if (chunk == kChunks - 1) {
                ring.release(stage);
                // The next stage's rows come while the products are added.
                own.next();
                if (own.there()) {
                    ring.full[own.place.stage].wait(own.place.parity);
                    if (kHeld) load_rows(a, ring.rows[own.place.stage], work.row);
                }
            }
#pragma unroll
            for (int j = 0; j < kProducts; ++j) {
                const int i = chunk * kProducts + j;
                sums[0][i] += products[j] * factors.of_sum(i);
            }
        }
    }
}
