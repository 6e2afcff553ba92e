// The sums of a tile of FP8 operands.  Hopper's tensor cores keep 13 fractional bits of a sum of FP8
// products: after every stage, 128 of k, it is multiplied by the scales of its blocks and added to others
// in FP32.  kProductCols columns are multiplied at once, so that the products beside the sums do not take
// as many registers; while one warpgroup adds them, the other one keeps the tensor cores busy.
#include "parts/ring_hopper.cuh"

static_assert(kTileK == kBlockK && !kPingPong && kLead == 0, "a stage is a block of scales");
constexpr int kProductCols = kCols < kBlockK ? kCols : kBlockK;
static_assert(kCols % kProductCols == 0 && kBlockK % kProductCols == 0, "one scale for the columns");

// The factors of a thread's products: of its rows, and of every kProductCols columns.  Four lanes with the
// same rows load those of four stages, a stage ahead of their use.
constexpr int kAhead = 4;
struct BlockFactors {
    float rows[kBlocks][2], cols[kCols / kProductCols];

    // Of the warpgroup's kAhead stages from `first` on.
    DEVICE void load(const TileWork& work, int first) {
        const BlockScales& scales = work.scales;
        const int mine = first + int(threadIdx.x % kAhead) * kStride;
        const int64_t k = mine < work.num_k_tiles ? mine : work.num_k_tiles - 1;
        const int row = work.first_row + threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
            const int at = row + i / 2 * 64 + i % 2 * 8;
            const int64_t there = at < scales.last_row ? at : scales.last_row;
            rows[i / 2][i % 2] = scales.a ? scales.a[there * scales.a_row + k * scales.a_k] : 1.0f;
        }
#pragma unroll
        for (int i = 0; i < kCols / kProductCols; ++i) {
            const int at = (work.first_col + i * kProductCols) / kBlockK;
            const int64_t there = at < scales.last_block ? at : scales.last_block;
            cols[i] = scales.b ? scales.b[k * scales.b_k + there * scales.b_col] : 1.0f;
        }
    }
    // Of stage `i` of those.
    DEVICE BlockFactors of(int i) const {
        const int lane = threadIdx.x % 32 / kAhead * kAhead + i;
        BlockFactors factors;
#pragma unroll
        for (int j = 0; j < 2 * kBlocks; ++j) factors.rows[j / 2][j % 2] = shuffle(rows[j / 2][j % 2], lane);
#pragma unroll
        for (int j = 0; j < kCols / kProductCols; ++j) factors.cols[j] = shuffle(cols[j], lane);
        return factors;
    }
};

DEVICE void multiply(Ring& ring, const TileWork& work, TileSums& sums) {
    constexpr int kProducts = kProductCols / 2;
    clear(sums);
    OwnStages own(work);
    BlockFactors loaded;
    loaded.load(work, own.index);
#pragma unroll 1
    for (int i = 0; own.there(); own.next(), i = (i + 1) % kAhead) {
        const int stage = own.place.stage;
        const BlockFactors factors = loaded.of(i);
        if (i == kAhead - 1) loaded.load(work, own.index + kStride);
        ring.full[stage].wait(own.place.parity);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
            for (int col = 0; col < kCols; col += kProductCols) {
                float products[kProducts];
                wgmma_fence(products);
#pragma unroll
                for (int k = 0; k < kTileK; k += kStepK) {
                    wgmma<RowElement, ColElement>(
                        products, RowStage::tile(ring.rows[stage], work.row + 64 * block, k),
                        ColStage::tile(ring.cols[stage], col, k), k > 0);
                }
                wgmma_commit();
                wgmma_wait<0>(products);
                if (block == kBlocks - 1 && col + kProductCols == kCols) ring.release(stage);
#pragma unroll
                for (int j = 0; j < kProducts; ++j) {
                    const float factor = factors.rows[block][j / 2 % 2] * factors.cols[col / kProductCols];
                    sums[block][col / 2 + j] += products[j] * factor;
                }
            }
        }
    }
}
