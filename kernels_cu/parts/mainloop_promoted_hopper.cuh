// The sums of a tile of FP8 operands.  Hopper's tensor cores keep 13 fractional bits of a sum of
// FP8 products: after every stage, 128 of k, it is multiplied by the scales of its blocks and added
// to others in FP32.
//
// A warpgroup with registers for two sets of products adds one to the sums while the tensor cores
// compute the other: that of the next stage, or, of wide tiles, of the other half of the columns.
// With one set they compute another warpgroup's meanwhile.
#include "parts/ring_hopper.cuh"

static_assert(kTileK == kBlockK && !kPingPong && kBlocks == 1, "a stage is a block of scales");
constexpr bool kHalves = kCols <= 192 && kCols > kBlockK;  // without scales of blocks
constexpr int kProductCols = kHalves ? kCols / 2 : kCols < kBlockK ? kCols : kBlockK;
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

// Those of a warp's rows and columns, on their way through shared memory: copies of kSlots - 1 stages are
// under way, so that no register waits for one.  What lies beyond the matrix counts as its last.
constexpr int kSlots = 4, kNumbers = kTurned ? kCols + 1 : 16 + kChunks;
using FactorSlots = float[kSlots][kNumbers];
static_assert(sizeof(FactorSlots) <= kFactorBytes, "the place that TileWork has");

struct FactorsOfStages {
    static constexpr int kCopies = (kNumbers + 31) / 32;  // of a lane
    FactorSlots& slots;
    const float* from[kCopies];  // null: 1
    int64_t step[kCopies];
    int copied, end;

    // Nothing reads the slots any more.
    DEVICE FactorsOfStages(const TileWork& work, int first)
        : slots(*reinterpret_cast<FactorSlots*>(work.slots)), copied(0) {
        end = (work.num_k_tiles - first + kStride - 1) / kStride;
        const BlockScales& scales = work.scales;
        const int64_t k = work.first_k_tile + first;
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            const int number = threadIdx.x % 32 + 32 * i;
            const bool of_a = number < (kTurned ? kCols : 16);
            const int64_t row =
                kTurned ? work.first_col + number : work.first_row + number / 16 * 64 + number % 16;
            const int64_t col =
                (kTurned ? work.first_row : work.first_col + (number - 16) * kProductCols) /
                kBlockK;
            from[i] = nullptr;
            if (number >= kNumbers) continue;
            if (of_a && scales.a) {
                from[i] = scales.a +
                          (row < scales.last_row ? row : scales.last_row) * scales.a_row +
                          k * scales.a_k;
            } else if (!of_a && scales.b) {
                from[i] = scales.b +
                          (col < scales.last_block ? col : scales.last_block) * scales.b_col +
                          k * scales.b_k;
            } else {
                for (int slot = 0; slot < kSlots; ++slot) slots[slot][number] = 1.0f;
            }
            step[i] = kStride * (of_a ? scales.a_k : scales.b_k);
        }
        for (int i = 0; i < kSlots - 1; ++i) copy();
    }
    // The next stage's are under way, if there is one.
    DEVICE void copy() {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            if (from[i] == nullptr || copied >= end) continue;
            copy_async<4>(&slots[copied % kSlots][threadIdx.x % 32 + 32 * i], from[i]);
            from[i] += step[i];
        }
        copy_async_commit();
        ++copied;
    }
    // The thread's own in the next stage.
    DEVICE BlockFactors next() {
        const int lane = threadIdx.x % 32;
        copy_async_wait<kSlots - 2>();
        sync_warp();  // all lanes' have come, and those of the stage before are read
        const float* slot = slots[(copied + 1) % kSlots];
        BlockFactors factors;
#pragma unroll
        for (int i = 0; i < kRowScales; ++i) {
            factors.rows[i] = slot[kTurned ? kCols : i / 2 * 16 + i % 2 * 8 + lane / 4];
        }
#pragma unroll
        for (int i = 0; i < kColScales; ++i) {
            factors.cols[i] = slot[kTurned ? wgmma_col(lane, i % 2 + i / 2 * 4) : 16 + i];
        }
        copy();
        return factors;
    }
};

struct NoFactors {
    DEVICE NoFactors(const TileWork&, int) {}
    DEVICE BlockFactors next() { return {}; }
};
struct Nothing {
    DEVICE void operator()() const {}
};

// What a warpgroup does for the sums of its tile, and, before_last, while its last stage is multiplied.
template <bool kByBlock, class BeforeLast>
struct Promotion {
    using Source = typename Choose<kByBlock, FactorsOfStages, NoFactors>::Type;
    const BeforeLast& before_last;
    Ring& ring;
    const TileWork& work;
    TileSums& sums;
    OwnStages given;       // of the products to be given to the tensor cores next
    BlockFactors factors;  // of the stage that is added
    Source source;         // of the stage that is added next

    DEVICE Promotion(Ring& ring, const TileWork& work, TileSums& sums,
                     const BeforeLast& before_last)
        : before_last(before_last),
          ring(ring),
          work(work),
          sums(sums),
          given(work),
          source(work, given.index) {}
    DEVICE void wait() { ring.full[given.place.stage].wait(given.place.parity); }
    // Set number `set` of the products of the next stage, which is there, is under way.
    DEVICE void give(int set, float (&products)[kProducts]) {
        const int stage = given.place.stage, row = work.row + set / kChunks * 64;
        // From the first stage's, which stay the same, by one multiplication each.
        const uint64_t rows =
            advance(RowStage::tile(ring.rows[0], row, 0), stage * RowStage::kBytes);
        const uint64_t cols = advance(ColStage::tile(ring.cols[0], set % kChunks * kProductCols, 0),
                                      stage * ColStage::kBytes);
        wgmma_fence(products);
#pragma unroll
        for (int k = 0; k < kTileK; k += kStepK) {
            wgmma<RowElement, ColElement>(products, advance(rows, k), advance(cols, k), k > 0);
        }
        wgmma_commit();
        if (set < kSets - 1) return;
        given.next();
    }
    DEVICE void add(int set, const float (&products)[kProducts]) {
        if (kByBlock && set == 0) factors = source.next();
#pragma unroll
        for (int j = 0; j < kProducts; ++j) {
            const int block = set / kChunks, number = set % kChunks * kProducts + j;
            sums[block][number] +=
                kByBlock ? products[j] * factors.of_sum(block, number) : products[j];
        }
    }
    // `next` are under way while `products`, whose stage may then be overwritten, are added.
    DEVICE void step(OwnStages& added, float (&products)[kProducts], float (&next)[kProducts]) {
        wait();
        give(0, next);
        wgmma_wait<1>(products);
        ring.release(added.place.stage);
        add(0, products);
        added.next();
    }
    DEVICE void last(const OwnStages& added, float (&products)[kProducts]) {
        before_last();
        wgmma_wait<0>(products);
        ring.release(added.place.stage);
        add(0, products);
    }
    DEVICE void with_two_sets() {
        OwnStages added(work);
        float even[kProducts], odd[kProducts];
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
    DEVICE void with_halves() {
        float left[kProducts], right[kProducts];
        wait();
        give(0, left);
#pragma unroll 1
        while (given.there() && !given.last()) {
            const int stage = given.place.stage;
            give(1, right);
            wgmma_wait<1>(left);
            add(0, left);
            wait();
            give(0, left);
            wgmma_wait<1>(right);
            ring.release(stage);
            add(1, right);
        }
        const int stage = given.place.stage;
        if (given.there()) {
            give(1, right);
            wgmma_wait<1>(left);
            add(0, left);
            before_last();
            wgmma_wait<0>(right);
            ring.release(stage);
            add(1, right);
        } else {  // never: ptxas takes a wait for everything on the only way for the end of all products
            before_last();
            wgmma_wait<0>(left);
            add(0, left);
        }
    }
    DEVICE void with_one_set() {
        wait();
#pragma unroll 1
        while (given.there()) {
            const bool last = given.last();
            const int stage = given.place.stage;
#pragma unroll
            for (int set = 0; set < kSets; ++set) {
                float products[kProducts];
                give(set, products);
                if (set == 0 && last) before_last();
                wgmma_wait<0>(products);
                if (set == kSets - 1) {
                    ring.release(stage);
                    if (given.there()) wait();
                }
                add(set, products);
            }
        }
    }
    DEVICE void run() {
        if constexpr (kHalves) with_halves();
        else if constexpr (kTwoSets) with_two_sets();
        else with_one_set();
    }
};

DEVICE void multiply(Ring& ring, const TileWork& work, TileSums& sums) {
    clear(sums);
    if (!OwnStages(work).there())
        return;  // the only stage is another warpgroup's, or another block's
    const Nothing nothing;
    if (work.scales.there()) Promotion<true, Nothing>(ring, work, sums, nothing).run();
    else Promotion<false, Nothing>(ring, work, sums, nothing).run();
}

// A warpgroup's tiles one after another, with little between them.  `finish` is called for each, when
// `sums` are there, and `before_last` while its last stage is multiplied.
template <class BeforeLast, class Finish>
DEVICE void multiply_all(Ring& ring, TileWork& work, int num_tiles, TileSums& sums,
                         const BeforeLast& before_last, const Finish& finish) {
#pragma unroll 1
    for (; work.count < num_tiles; ++work.count) {
        clear(sums);
        Promotion<false, BeforeLast> promotion(ring, work, sums, before_last);
        promotion.run();
        work.place = promotion.given.place;
        finish();
    }
}
