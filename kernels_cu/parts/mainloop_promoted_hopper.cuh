// The sums of a tile of FP8 operands.  Hopper's tensor cores keep 13 fractional bits of a sum of
// FP8 products: after every stage, 128 of k, it is multiplied by the scales of its blocks and added
// to others in FP32.
//
// A warpgroup with registers for two sets of products adds one to the sums while the tensor cores
// compute the other.  With one set they compute another warpgroup's meanwhile.
//
//   kLead    stages of its first tile that a warpgroup multiplies before the next one begins, so that
//            they do not promote, or finish a tile, at the same time.
#include "parts/ring_hopper.cuh"

static_assert(kTileK == kBlockK && (kPingPong || kBlocks == 1), "a stage is a block of scales");
static_assert(kPingPong || ((kConsumers - 1) * kLead < kStages && !(kShareK && kLead > 0)),
              "the stages of a warpgroup's lead come before any is released");
constexpr int kProductCols = kCols < kBlockK ? kCols : kBlockK;
constexpr int kProducts = kProductCols / 2, kChunks = kCols / kProductCols;
constexpr int kSets = kBlocks * kChunks;  // of products, which make a stage's
constexpr bool kTwoSets = kConsumers == 2 && kSets == 1;
static_assert(kChunks * kProductCols == kCols, "the columns of a chunk are of one block");

// The factors of a thread's products: of its two rows, which are A's, and of every chunk's columns,
// which are of one block.  With kTurned, of its rows, which are of one block, and of each of its columns.  Lanes
// with the same rows (with kTurned, columns) load those of kAhead stages, a stage ahead of their
// use.
constexpr int kRowScales = kTurned ? 1 : 2 * kBlocks, kColScales = kTurned ? kCols / 4 : kChunks;
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
                              : of_a(work.scales, work.first_row + lane / 4 + i / 2 * 64 + i % 2 * 8, k);
        }
#pragma unroll
        for (int i = 0; i < kColScales; ++i) {
            cols[i] =
                kTurned ? of_a(work.scales, work.first_col + wgmma_col(lane, i % 2 + i / 2 * 4), k)
                        : of_b(work.scales, work.first_col + i * kProductCols, k);
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
    // Of the thread's number `i` of a block of sums.
    DEVICE float of_sum(int block, int i) const {
        if (kTurned) return rows[0] * cols[i / 4 * 2 + i % 2];
        return rows[block * 2 + i / 2 % 2] * cols[i / kProducts];
    }
};

// What a warpgroup does for the sums of its tile.
template <bool kByBlock, class BeforeLast>
struct Promotion {
    const BeforeLast& before_last;
    Ring& ring;
    const TileWork& work;
    TileSums& sums;
    OwnStages given, added;  // of the products to be given to the tensor cores and to be added next
    BlockFactors loaded;     // those of `added`, number i of them, and of the stages after it
    BlockFactors coming;     // of the kAhead stages after those
    int i;
    int turn;  // the stage of its first tile after which the next warpgroup begins

    DEVICE Promotion(Ring& ring, const TileWork& work, TileSums& sums,
                     const BeforeLast& before_last)
        : before_last(before_last),
          ring(ring),
          work(work),
          sums(sums),
          given(work),
          added(work),
          i(0) {
        turn = work.count > 0 ? -1 : (kLead < added.end ? kLead : added.end) - 1;
        if (!kByBlock) return;
        loaded.load(work, added.index);
        coming.load(work, added.index + kAhead * kStride);
    }
    DEVICE void wait() { ring.full[given.place.stage].wait(given.place.parity); }
    // Set number `set` of the products of the next stage, which is there, is under way.
    DEVICE void give(int set, float (&products)[kProducts]) {
        const int stage = given.place.stage, row = work.row + set / kChunks * 64;
        const uint64_t rows = RowStage::tile(ring.rows[stage], row, 0);
        const uint64_t cols = ColStage::tile(ring.cols[stage], set % kChunks * kProductCols, 0);
        wgmma_fence(products);
#pragma unroll
        for (int k = 0; k < kTileK; k += kStepK) {
            wgmma<RowElement, ColElement>(products, advance(rows, k), advance(cols, k), k > 0);
        }
        wgmma_commit();
        if (set < kSets - 1) return;
        given.next();
    }
    // The stage of `added` is read: it may be overwritten, and the next warpgroup may begin, while
    // this one adds.
    DEVICE void release() {
        ring.release(added.place.stage);
        if (kLead > 0 && added.index == turn && threadIdx.x % 128 == 0) {
            ring.turn[work.consumer].arrive();
        }
    }
    DEVICE void add(int set, const float (&products)[kProducts]) {
        BlockFactors factors;
        if (kByBlock) factors = loaded.of(i);
#pragma unroll
        for (int j = 0; j < kProducts; ++j) {
            const int block = set / kChunks, number = set % kChunks * kProducts + j;
            sums[block][number] +=
                kByBlock ? products[j] * factors.of_sum(block, number) : products[j];
        }
        if (set < kSets - 1) return;
        added.next();
        if (!kByBlock) return;
        i = (i + 1) % kAhead;
        if (i == 0) {
            loaded = coming;
            coming.load(work, added.index + kAhead * kStride);
        }
    }
    // `next` are under way while `products` are added.
    DEVICE void step(float (&products)[kProducts], float (&next)[kProducts]) {
        wait();
        give(0, next);
        wgmma_wait<1>(products);
        release();
        add(0, products);
    }
    DEVICE void last(float (&products)[kProducts]) {
        wgmma_wait<0>(products);
        release();
        add(0, products);
    }
    DEVICE void with_two_sets() {
        float even[kProducts], odd[kProducts];
        wait();
        give(0, even);
#pragma unroll 1
        while (given.there() && !given.last()) {
            step(even, odd);
            step(odd, even);
        }
        if (given.there()) {
            step(even, odd);
            before_last();
            last(odd);
        } else {
            before_last();
            last(even);
        }
    }
    DEVICE void with_one_set() {
        wait();
#pragma unroll 1
        while (given.there()) {
            const bool last = given.last();
#pragma unroll
            for (int set = 0; set < kSets; ++set) {
                float products[kProducts];
                give(set, products);
                if (set == 0 && last) before_last();
                wgmma_wait<0>(products);
                if (set == kSets - 1) {
                    release();
                    if (given.there()) wait();
                }
                add(set, products);
            }
        }
    }
    DEVICE void run() {
        if constexpr (kTwoSets) with_two_sets();
        else with_one_set();
    }
};

template <class BeforeLast = Nothing>
DEVICE void multiply(Ring& ring, const TileWork& work, TileSums& sums,
                     const BeforeLast& before_last = BeforeLast()) {
    clear(sums);
    if (!OwnStages(work).there())
        return;  // the only stage is another warpgroup's, or another block's
    if (kLead > 0 && work.count == 0 && work.consumer > 0) ring.turn[work.consumer - 1].wait(0);
    if (work.scales.there()) Promotion<true, BeforeLast>(ring, work, sums, before_last).run();
    else Promotion<false, BeforeLast>(ring, work, sums, before_last).run();
}
