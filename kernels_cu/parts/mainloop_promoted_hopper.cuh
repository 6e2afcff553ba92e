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

// The factors of a thread's products in a stage: of its rows, which are A's, two of every block, and of
// every chunk's columns, which are of one block of B's.  With kTurned, of its rows, which are of one
// block, and of each of its columns.
constexpr int kRowScales = kTurned ? 1 : 2 * kBlocks, kColScales = kTurned ? kCols / 4 : kChunks;
struct BlockFactors {
    float rows[kRowScales], cols[kColScales];

    // Of the thread's number `i` of a block of sums.
    DEVICE float of_sum(int block, int i) const {
        if (kTurned) return rows[0] * cols[i / 4 * 2 + i % 2];
        return rows[block * 2 + i / 2 % 2] * cols[i / kProducts];
    }
};

// Where a thread finds them, from stage to stage.  What lies beyond the matrix counts as its last.
struct FactorsOfStages {
    const float *rows[kRowScales], *cols[kColScales];  // null, with steps of 0: 1
    int64_t row_step, col_step;

    DEVICE FactorsOfStages(const TileWork& work, int index)
        : row_step(kStride * (kTurned ? work.scales.b_k : work.scales.a_k)),
          col_step(kStride * (kTurned ? work.scales.a_k : work.scales.b_k)) {
        const BlockScales& scales = work.scales;
        const int row = work.first_row, col = work.first_col;
        const int64_t k = work.first_k_tile + index;
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < kRowScales; ++i) {
            rows[i] = kTurned ? of_b(scales, row, k)
                              : of_a(scales, row + i / 2 * 64 + i % 2 * 8 + lane / 4, k);
        }
#pragma unroll
        for (int i = 0; i < kColScales; ++i) {
            cols[i] = kTurned ? of_a(scales, col + wgmma_col(lane, i % 2 + i / 2 * 4), k)
                              : of_b(scales, col + i * kProductCols, k);
        }
    }
    DEVICE static const float* of_a(const BlockScales& scales, int row, int64_t k) {
        const int64_t there = row < scales.last_row ? row : scales.last_row;
        return scales.a ? scales.a + there * scales.a_row + k * scales.a_k : nullptr;
    }
    DEVICE static const float* of_b(const BlockScales& scales, int col, int64_t k) {
        // Zero, but for all that the compiler knows one of the lane: a factor that it knows to be the same in
        // all lanes goes to a register of the warp, which waits for it as soon as it is asked for.
        const int lane = threadIdx.x % 32, zero = kTwoSets ? shuffle_xor(lane, 1) ^ lane ^ 1 : 0;
        const int block = col / kBlockK + zero;
        const int64_t there = block < scales.last_block ? block : scales.last_block;
        return scales.b ? scales.b + k * scales.b_k + there * scales.b_col : nullptr;
    }
    // Of the next stage, if it is there, whose products those will be.
    DEVICE void load(BlockFactors& factors, bool there) {
#pragma unroll
        for (int i = 0; i < kRowScales; ++i) take(rows[i], row_step, there, factors.rows[i]);
#pragma unroll
        for (int i = 0; i < kColScales; ++i) take(cols[i], col_step, there, factors.cols[i]);
    }
    DEVICE static void take(const float*& from, int64_t step, bool there, float& factor) {
        factor = 1.0f;
        if (from && there) factor = *from;
        from += step;
    }
};

// The products of a stage, or of a part of its rows and columns.  Their factors come to registers of their
// own while the tensor cores compute: a copy would wait for the loads.
struct Products {
    float of[kProducts];
    BlockFactors factors;
};

// What a warpgroup does for the sums of its tile.
template <bool kByBlock, class BeforeLast>
struct Promotion {
    const BeforeLast& before_last;
    Ring& ring;
    const TileWork& work;
    TileSums& sums;
    OwnStages given;         // of the products to be given to the tensor cores next
    FactorsOfStages source;  // of `given`
    int turn;  // the stage of its first tile after which the next warpgroup begins

    DEVICE Promotion(Ring& ring, const TileWork& work, TileSums& sums,
                     const BeforeLast& before_last)
        : before_last(before_last),
          ring(ring),
          work(work),
          sums(sums),
          given(work),
          source(work, given.index) {
        turn = work.count > 0 ? -1 : (kLead < given.end ? kLead : given.end) - 1;
    }
    DEVICE void wait() { ring.full[given.place.stage].wait(given.place.parity); }
    // A stage is read: it may be overwritten, and the next warpgroup may begin, while this one adds.
    DEVICE void release(int stage, int index) {
        ring.release(stage);
        if (kLead > 0 && index == turn && threadIdx.x % 128 == 0) {
            ring.turn[work.consumer].arrive();
        }
    }
    // Set number `set` of the products of the next stage, which is there, is under way.
    DEVICE void give(int set, Products& products) {
        const int stage = given.place.stage, row = work.row + set / kChunks * 64;
        const uint64_t rows = RowStage::tile(ring.rows[stage], row, 0);
        const uint64_t cols = ColStage::tile(ring.cols[stage], set % kChunks * kProductCols, 0);
        wgmma_fence(products.of);
#pragma unroll
        for (int k = 0; k < kTileK; k += kStepK) {
            wgmma<RowElement, ColElement>(products.of, advance(rows, k), advance(cols, k), k > 0);
        }
        wgmma_commit();
        if (set < kSets - 1) return;
        given.next();
    }
    DEVICE void add(int set, const Products& products) {
#pragma unroll
        for (int j = 0; j < kProducts; ++j) {
            const int block = set / kChunks, number = set % kChunks * kProducts + j;
            const float product = products.of[j];
            sums[block][number] +=
                kByBlock ? product * products.factors.of_sum(block, number) : product;
        }
    }
    // `next` are under way while `products` are added.
    DEVICE void step(OwnStages& added, Products& products, Products& next) {
        wait();
        give(0, next);
        wgmma_wait<1>(products.of);
        release(added.place.stage, added.index);
        add(0, products);
        if (kByBlock) source.load(products.factors, added.index + 2 * kStride < added.end);
        added.next();
    }
    DEVICE void last(const OwnStages& added, Products& products) {
        before_last();
        wgmma_wait<0>(products.of);
        release(added.place.stage, added.index);
        add(0, products);
    }
    DEVICE void with_two_sets() {
        OwnStages added(work);
        Products even, odd;
        if (kByBlock) source.load(even.factors, true);
        if (kByBlock) source.load(odd.factors, !given.last());
        wait();
        give(0, even);
#pragma unroll 1
        while (given.there() && !given.last()) {
            step(added, even, odd);
            step(added, odd, even);
        }
        if (given.there()) {
            step(added, even, odd);
            last(added, odd);
        } else {
            last(added, even);
        }
    }
    DEVICE void with_one_set() {
        wait();
#pragma unroll 1
        while (given.there()) {
            const bool last = given.last();
            const int stage = given.place.stage, index = given.index;
            Products products;
#pragma unroll
            for (int set = 0; set < kSets; ++set) {
                give(set, products);
                if (kByBlock && set == 0) source.load(products.factors, true);
                if (set == 0 && last) before_last();
                wgmma_wait<0>(products.of);
                if (set == kSets - 1) {
                    release(stage, index);
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
