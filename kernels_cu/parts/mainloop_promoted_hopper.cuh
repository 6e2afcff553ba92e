// The sums of a tile of FP8 operands.  Hopper's tensor cores keep 13 fractional bits of a sum of
// FP8 products: after every stage, 128 of k, it is multiplied by the scales of its blocks and added
// to others in FP32.
//
// A warpgroup has two sets of products: it adds one to the sums while the tensor cores compute the
// other, so that they wait for no addition.
#include "parts/ring_hopper.cuh"

static_assert(kTileK == kBlockK && !kPingPong && kLead == 0 && kBlocks == 1,
              "a stage is a block of scales");
constexpr int kProducts = kCols / 2;
static_assert(kCols <= kBlockK, "two sets of products and the sums fit into registers");

// The factors of a thread's products: of its two rows, which are A's, and of the columns, which
// are of one block.  With kTurned, of its rows, which are of one block, and of each of its columns.  Lanes
// with the same rows (with kTurned, columns) load those of kAhead stages, a stage ahead of their
// use.
constexpr int kRowScales = kTurned ? 1 : 2, kColScales = kTurned ? kCols / 4 : 1;
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
                              : of_b(work.scales, work.first_col, k);
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
        return rows[i / 2 % 2] * cols[0];
    }
};

// What a warpgroup does for the sums of its tile.
struct Promotion {
    Ring& ring;
    const TileWork& work;
    TileSums& sums;
    OwnStages given, added;  // of the products to be given to the tensor cores and to be added next
    BlockFactors loaded;     // those of `added`, number i of them, and of the stages after it
    int i;

    DEVICE Promotion(Ring& ring, const TileWork& work, TileSums& sums)
        : ring(ring), work(work), sums(sums), given(work), added(work), i(0) {
        loaded.load(work, added.index);
    }
    // The next products are under way.
    DEVICE void give(float (&products)[kProducts]) {
        const int stage = given.place.stage;
        const uint64_t rows = RowStage::tile(ring.rows[stage], work.row, 0);
        const uint64_t cols = ColStage::tile(ring.cols[stage], 0, 0);
        ring.full[stage].wait(given.place.parity);
        wgmma_fence(products);
#pragma unroll
        for (int k = 0; k < kTileK; k += kStepK) {
            wgmma<RowElement, ColElement>(products, advance(rows, k), advance(cols, k), k > 0);
        }
        wgmma_commit();
        given.next();
    }
    // Those that are there are added.
    DEVICE void add(const float (&products)[kProducts]) {
        ring.release(added.place.stage);
        const BlockFactors factors = loaded.of(i);
        if (i == kAhead - 1 && work.scales.there()) loaded.load(work, added.index + kStride);
        i = (i + 1) % kAhead;
        added.next();
#pragma unroll
        for (int j = 0; j < kProducts; ++j) sums[0][j] += products[j] * factors.of_sum(j);
    }
    // `next` are under way while `products` are added.
    DEVICE void step(float (&products)[kProducts], float (&next)[kProducts]) {
        give(next);
        wgmma_wait<1>(products);
        add(products);
    }
    DEVICE void last(float (&products)[kProducts]) {
        wgmma_wait<0>(products);
        add(products);
    }
};

DEVICE void multiply(Ring& ring, const TileWork& work, TileSums& sums) {
    clear(sums);
    Promotion promotion(ring, work, sums);
    const OwnStages& given = promotion.given;
    if (!given.there()) return;  // the only stage is the other warpgroup's, or none is this block's
    float even[kProducts], odd[kProducts];
    promotion.give(even);
#pragma unroll 1
    while (given.there() && !given.last()) {
        promotion.step(even, odd);
        promotion.step(odd, even);
    }
    if (given.there()) {
        promotion.step(even, odd);
        promotion.last(odd);
    } else {
        promotion.last(even);
    }
}
