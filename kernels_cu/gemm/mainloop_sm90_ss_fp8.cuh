// The mainloop of FP8 operands, both from shared memory.  Hopper's tensor cores keep 13 fractional
// bits of an accumulator of FP8 products: after every stage, 128 of k, the partial accumulators are
// multiplied by their block scales and promoted (added) to FP32 ones.
//
// A warpgroup with registers for two partial accumulators promotes one while the tensor cores
// compute the other: that of the next stage, or, of wide tiles, of the other half of the columns.
// With one they compute another warpgroup's meanwhile.
#include "gemm/mainloop_sm90.cuh"

namespace gemm {

template <class Operands, class Tile, class Stages, class Schedule, class Cluster>
struct MainloopSm90SSFp8 : MainloopSm90<Operands, Tile, Stages, Schedule, Cluster> {
    using Base = MainloopSm90<Operands, Tile, Stages, Schedule, Cluster>;
    using Base::clear;
    using Base::kCols;
    using Base::kConsumers;
    using Base::kMmaK;
    using Base::kMmasM;
    using Base::kStride;
    using Base::kSwapAB;
    using Base::kTileK;
    using typename Base::Accumulator;
    using typename Base::ColElement;
    using typename Base::ConsumerStages;
    using typename Base::RowElement;
    using typename Base::SharedStorage;
    using typename Base::StageCols;
    using typename Base::StageRows;
    using typename Base::WorkTile;
    static_assert(Base::kFp8 && !Base::kMixedInput, "FP8 operands");
    static_assert(kTileK == kBlockK && !Base::kPingPong && kMmasM == 1,
                  "a stage is a block of scales");

    static constexpr bool kHalves = kCols <= 192 && kCols > kBlockK;  // without block scales
    static constexpr int kPartialCols = kHalves ? kCols / 2 : kCols < kBlockK ? kCols : kBlockK;
    static constexpr int kPartialSize = kPartialCols / 2;   // of a thread
    static constexpr int kPartials = kCols / kPartialCols;  // of a stage
    static constexpr bool kTwoStages = kConsumers == 2 && kPartials == 1;
    static_assert(kPartials * kPartialCols == kCols, "partial accumulators have all columns");
    using Partial = float[kPartialSize];

    // The scales of a thread's accumulators in a stage: of its two rows, which are A's, and of
    // every partial accumulator's columns, which are of one block of B's.  With SwapAB of its rows,
    // which are of one block, and of each of its columns.
    static constexpr int kRowScales = kSwapAB ? 1 : 2;
    static constexpr int kColScales = kSwapAB ? kCols / 4 : kPartials;
    struct BlockScaleFragment {
        float rows[kRowScales], cols[kColScales];

        DEVICE float of_accumulator(int i) const {
            if (kSwapAB) return rows[0] * cols[i / 4 * 2 + i % 2];
            return rows[i / 2 % 2] * cols[i / kPartialSize];
        }
    };

    // Those of a warp's rows and columns, loaded by cp.async through kScaleStages stages of shared
    // memory, so that no register waits for one.  Beyond the matrix its last scale is taken.
    static constexpr int kScaleStages = 4, kScales = kSwapAB ? kCols + 1 : 16 + kPartials;
    using ScaleStages = float[kScaleStages][kScales];
    static_assert(sizeof(ScaleStages) <= Base::kBlockScaleBytes,
                  "what a warp has of shared memory");

    struct BlockScalePipeline {
        static constexpr int kCopies = (kScales + 31) / 32;  // of a lane
        ScaleStages& stages;
        const float* from[kCopies];  // null: 1
        int64_t step[kCopies];
        int copied, end;

        // Nothing reads the stages any more.
        DEVICE BlockScalePipeline(const WorkTile& work, int first)
            : stages(*reinterpret_cast<ScaleStages*>(work.scale_stages)), copied(0) {
            end = (work.num_k_tiles - first + kStride - 1) / kStride;
            const BlockScales& scales = work.scales;
            const int64_t k = work.first_k_tile + first;
#pragma unroll
            for (int i = 0; i < kCopies; ++i) {
                const int index = threadIdx.x % 32 + 32 * i;
                const bool of_a = index < (kSwapAB ? kCols : 16);
                const int64_t row = kSwapAB ? work.first_col + index
                                            : work.first_row + index / 16 * 64 + index % 16;
                const int64_t col =
                    (kSwapAB ? work.first_row : work.first_col + (index - 16) * kPartialCols) /
                    kBlockK;
                from[i] = nullptr;
                if (index >= kScales) continue;
                if (of_a && scales.a) {
                    from[i] = scales.a +
                              (row < scales.last_row ? row : scales.last_row) * scales.a_row +
                              k * scales.a_k;
                } else if (!of_a && scales.b) {
                    from[i] = scales.b +
                              (col < scales.last_block ? col : scales.last_block) * scales.b_col +
                              k * scales.b_k;
                } else {
                    for (int stage = 0; stage < kScaleStages; ++stage) stages[stage][index] = 1.0f;
                }
                step[i] = kStride * (of_a ? scales.a_k : scales.b_k);
            }
            for (int i = 0; i < kScaleStages - 1; ++i) copy();
        }
        // Issues the copies of the next stage, if there is one.
        DEVICE void copy() {
#pragma unroll
            for (int i = 0; i < kCopies; ++i) {
                if (from[i] == nullptr || copied >= end) continue;
                copy_async<4>(&stages[copied % kScaleStages][threadIdx.x % 32 + 32 * i], from[i]);
                from[i] += step[i];
            }
            copy_async_commit();
            ++copied;
        }
        // The thread's own of the next stage.
        DEVICE BlockScaleFragment next() {
            const int lane = threadIdx.x % 32;
            copy_async_wait<kScaleStages - 2>();
            sync_warp();  // all lanes' copies are there, and the stage before is read
            const float* stage = stages[(copied + 1) % kScaleStages];
            BlockScaleFragment scales;
#pragma unroll
            for (int i = 0; i < kRowScales; ++i) {
                scales.rows[i] = stage[kSwapAB ? kCols : i / 2 * 16 + i % 2 * 8 + lane / 4];
            }
#pragma unroll
            for (int i = 0; i < kColScales; ++i) {
                scales.cols[i] = stage[kSwapAB ? wgmma_col(lane, i % 2 + i / 2 * 4) : 16 + i];
            }
            copy();
            return scales;
        }
    };
    struct NoBlockScales {
        DEVICE NoBlockScales(const WorkTile&, int) {}
        DEVICE BlockScaleFragment next() { return {}; }
    };
    struct Nothing {
        DEVICE void operator()() const {}
    };

    // One tile of a warpgroup.  before_last is called while the last stage is multiplied.
    template <bool kByBlock, class BeforeLast> struct Promotion {
        using Scales = typename Choose<kByBlock, BlockScalePipeline, NoBlockScales>::Type;
        const BeforeLast& before_last;
        SharedStorage& storage;
        const WorkTile& work;
        Accumulator& accumulator;
        ConsumerStages issued;      // whose products are issued next
        BlockScaleFragment scales;  // of the stage that is promoted
        Scales source;              // of the stage that is promoted next

        DEVICE Promotion(SharedStorage& storage, const WorkTile& work, Accumulator& accumulator,
                         const BeforeLast& before_last)
            : before_last(before_last),
              storage(storage),
              work(work),
              accumulator(accumulator),
              issued(work),
              source(work, issued.index) {}
        DEVICE void wait() { storage.pipeline.consumer_wait(issued.state); }
        DEVICE void release(int stage) { storage.pipeline.consumer_release(stage); }
        // Issues the products of partial accumulator `index` of the next stage, which has come.
        DEVICE void issue(int index, Partial& partial) {
            const int stage = issued.state.stage, row = work.row;
            // Advanced from the first stage's, which stay the same, by one multiplication each.
            const uint64_t rows =
                advance(StageRows::descriptor(storage.rows[0], row, 0), stage * StageRows::kBytes);
            const uint64_t cols =
                advance(StageCols::descriptor(storage.cols[0], index % kPartials * kPartialCols, 0),
                        stage * StageCols::kBytes);
            wgmma_fence(partial);
#pragma unroll
            for (int k = 0; k < kTileK; k += kMmaK) {
                wgmma<RowElement, ColElement>(partial, advance(rows, k), advance(cols, k), k > 0);
            }
            wgmma_commit();
            if (index < kPartials - 1) return;
            issued.next();
        }
        DEVICE void promote(int index, const Partial& partial) {
            if (kByBlock && index == 0) scales = source.next();
#pragma unroll
            for (int j = 0; j < kPartialSize; ++j) {
                const int i = index % kPartials * kPartialSize + j;
                accumulator[0][i] += kByBlock ? partial[j] * scales.of_accumulator(i) : partial[j];
            }
        }
        // Issues `next`, then promotes `partial`, whose stage is released.
        DEVICE void step(ConsumerStages& promoted, Partial& partial, Partial& next) {
            wait();
            issue(0, next);
            wgmma_wait<1>(partial);
            release(promoted.state.stage);
            promote(0, partial);
            promoted.next();
        }
        DEVICE void last(const ConsumerStages& promoted, Partial& partial) {
            before_last();
            wgmma_wait<0>(partial);
            release(promoted.state.stage);
            promote(0, partial);
        }
        DEVICE void run_two_stages() {
            ConsumerStages promoted(work);
            Partial even, odd;
            wait();
            issue(0, even);
#pragma unroll 1
            while (issued.valid() && !issued.last()) {
                step(promoted, even, odd);
                step(promoted, odd, even);
            }
            if (issued.valid()) {
                step(promoted, even, odd);
                last(promoted, odd);
            } else {
                last(promoted, even);
            }
        }
        DEVICE void run_halves() {
            Partial left, right;
            wait();
            issue(0, left);
#pragma unroll 1
            while (issued.valid() && !issued.last()) {
                const int stage = issued.state.stage;
                issue(1, right);
                wgmma_wait<1>(left);
                promote(0, left);
                wait();
                issue(0, left);
                wgmma_wait<1>(right);
                release(stage);
                promote(1, right);
            }
            const int stage = issued.state.stage;
            if (issued.valid()) {
                issue(1, right);
                wgmma_wait<1>(left);
                promote(0, left);
                before_last();
                wgmma_wait<0>(right);
                release(stage);
                promote(1, right);
            } else {  // never: ptxas ends all products only at a wait that every path takes
                before_last();
                wgmma_wait<0>(left);
                promote(0, left);
            }
        }
        DEVICE void run_one_partial() {
            wait();
#pragma unroll 1
            while (issued.valid()) {
                const bool last = issued.last();
                const int stage = issued.state.stage;
#pragma unroll
                for (int index = 0; index < kPartials; ++index) {
                    Partial partial;
                    issue(index, partial);
                    if (index == 0 && last) before_last();
                    wgmma_wait<0>(partial);
                    if (index == kPartials - 1) {
                        release(stage);
                        if (issued.valid()) wait();
                    }
                    promote(index, partial);
                }
            }
        }
        DEVICE void run() {
            if constexpr (kHalves) run_halves();
            else if constexpr (kTwoStages) run_two_stages();
            else run_one_partial();
        }
    };

    DEVICE static void mma(SharedStorage& storage, const WorkTile& work, Accumulator& accumulator) {
        clear(accumulator);
        if (!ConsumerStages(work).valid())
            return;  // the only stage is another warpgroup's, or another block's
        const Nothing nothing;
        if (work.scales.present())
            Promotion<true, Nothing>(storage, work, accumulator, nothing).run();
        else Promotion<false, Nothing>(storage, work, accumulator, nothing).run();
    }

    // A warpgroup's tiles back to back, without block scales.  `finish` is called for each when the
    // accumulators are complete, `before_last` while its last stage is multiplied.
    template <class BeforeLast, class Finish>
    DEVICE static void mma_tiles(SharedStorage& storage, WorkTile& work, int num_tiles,
                                 Accumulator& accumulator, const BeforeLast& before_last,
                                 const Finish& finish) {
#pragma unroll 1
        for (; work.count < num_tiles; ++work.count) {
            clear(accumulator);
            Promotion<false, BeforeLast> promotion(storage, work, accumulator, before_last);
            promotion.run();
            work.state = promotion.issued.state;
            finish();
        }
    }
};

}  // namespace gemm
