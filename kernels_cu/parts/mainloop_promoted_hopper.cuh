// The sums of a tile of FP8 operands.  Hopper's tensor cores keep 13 fractional bits of a sum of FP8
// products: after every stage, 128 of k, it is multiplied by the scales of its blocks and added to others
// in FP32.
//
// A warpgroup multiplies kProductCols columns at a time into one of two sets of products, and adds those of
// one while the tensor cores fill the other.  A's rows come in registers: read from shared memory once a
// stage instead of once for every kProductCols columns, they leave its bandwidth, which is what limits FP8
// products, to B.
#include "parts/ring_hopper.cuh"

static_assert(kTileK == kBlockK && !kPingPong && kLead == 0 && kBlocks == 1, "a stage is a block of scales");
constexpr int kProductCols = 64, kProducts = kProductCols / 2;
constexpr int kChunks = kCols / kProductCols, kChunksOfBlock = kBlockK / kProductCols;
constexpr int kScaleCols = (kCols + kBlockK - 1) / kBlockK;  // blocks of columns
static_assert(kCols % kProductCols == 0 && (kScaleCols == 1 || kCols % kBlockK == 0), "whole blocks");
static_assert(kChunks == 1 || kChunks % 2 == 0, "the chunks alternate between two sets of products");

// The factors of a thread's products: of its rows, and of every block of columns.
struct Factors {
    float rows[2], cols[kScaleCols];

    DEVICE float of_chunk(int chunk, int half) const { return rows[half] * cols[chunk / kChunksOfBlock]; }
};
// Where they are; null: they are 1.
struct FactorPlaces {
    const float *rows[2], *cols;
    int64_t next_cols;  // from a block of columns to the next one that exists

    DEVICE FactorPlaces(const BlockScales& scales, const TileWork& work, int k) {
        const int row = work.first_row + threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = row + i * 8;
            const int64_t there = at < scales.last_row ? at : scales.last_row;
            rows[i] = scales.a ? scales.a + there * scales.a_row + k * scales.a_k : nullptr;
        }
        const int block = work.first_col / kBlockK;
        cols = scales.b ? scales.b + block * scales.b_col + k * scales.b_k : nullptr;
        next_cols = block < scales.last_block ? scales.b_col : 0;
    }
    // Of the stage; then goes on to the warpgroup's next one.
    DEVICE void load(const BlockScales& scales, Factors& factors) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            factors.rows[i] = 1.0f;
            if (!scales.a) continue;
            factors.rows[i] = *rows[i];
            rows[i] += kStride * scales.a_k;
        }
#pragma unroll
        for (int i = 0; i < kScaleCols; ++i) factors.cols[i] = scales.b ? cols[i * next_cols] : 1.0f;
        if (scales.b) cols += kStride * scales.b_k;
    }
};
static_assert(kScaleCols <= 2, "one step to the next block");

// sums += the products of chunk `chunk`, each row's times its factor.
DEVICE void promote(const float (&products)[kProducts], float factor, float factor_8, int chunk,
                    TileSums& sums) {
#pragma unroll
    for (int j = 0; j < kProducts; ++j) {
        sums[0][chunk * kProducts + j] += products[j] * (j / 2 % 2 == 0 ? factor : factor_8);
    }
}

// A's rows of a stage, those of the warpgroup.
using RowRegisters = uint32_t[kTileK / kStepK][4];
DEVICE void load_rows(RowRegisters& a, const unsigned char* stage, int first_row) {
    const int lane = threadIdx.x % 32, row = first_row + threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < kTileK / kStepK; ++i) {
        load_matrix<false>(a[i], stage + RowStage::place(row, i * 32 + lane / 16 * 16));
    }
}

DEVICE void multiply(Ring& ring, const TileWork& work, TileSums& sums) {
    clear(sums);
    OwnStages own(work);
    FactorPlaces places(work.scales, work, work.first_k_tile + own.index);
    Factors next;
    if (own.there()) places.load(work.scales, next);
    RowRegisters a;
    // Of the chunk that is not added yet; none at first.
    float products[2][kProducts], rest[2] = {};
    constexpr int kLast = (kChunks - 1) % 2;
#pragma unroll
    for (int j = 0; j < kProducts; ++j) products[kLast][j] = 0;
    bool first = true;
    int stage_before = 0;
#pragma unroll 1
    for (; own.there(); own.next()) {
        const int stage = own.place.stage;
        const Factors factors = next;
        if (!own.last()) places.load(work.scales, next);
        ring.full[stage].wait(own.place.parity);
        wgmma_wait<0>(products[kLast]);
        if (!first) ring.release(stage_before);
        load_rows(a, ring.rows[stage], work.row);
        if (kChunks == 1) promote(products[kLast], rest[0], rest[1], 0, sums);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            float(&now)[kProducts] = products[chunk % 2], (&other)[kProducts] = products[(chunk + 1) % 2];
            wgmma_fence(now, a[0], a[1], a[2], a[3]);
#pragma unroll
            for (int k = 0; k < kTileK; k += kStepK) {
                wgmma<RowElement, ColElement>(
                    now, a[k / kStepK], ColStage::tile(ring.cols[stage], chunk * kProductCols, k), k > 0);
            }
            wgmma_commit();
            if (kChunks == 1) continue;
            if (chunk == 0) {
                promote(other, rest[0], rest[1], kChunks - 1, sums);
            } else {
                wgmma_wait<1>(other);
                promote(other, factors.of_chunk(chunk - 1, 0), factors.of_chunk(chunk - 1, 1), chunk - 1,
                        sums);
            }
        }
        rest[0] = factors.of_chunk(kChunks - 1, 0);
        rest[1] = factors.of_chunk(kChunks - 1, 1);
        first = false;
        stage_before = stage;
    }
    wgmma_wait<0>(products[kLast]);
    if (!first) ring.release(stage_before);  // else the only stage is the other warpgroup's
    promote(products[kLast], rest[0], rest[1], kChunks - 1, sums);
}
