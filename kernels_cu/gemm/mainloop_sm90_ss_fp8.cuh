// The FP8 mainloop, both operands from shared memory.  Hopper's tensor cores keep 13 fractional
// bits of an FP8 accumulator: after each stage (128 of k) partial accumulators are multiplied by
// their block scales and promoted to FP32.
//
// With registers for two partial accumulators, a warpgroup promotes one while the tensor cores fill
// the other: the next stage, or, for wide tiles, the other half of the columns.  With one,
// promotion overlaps the other warpgroup's wgmma.
#pragma once
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

    static constexpr bool kHalves = kCols <= 192 && kCols > kBlockK;  // no block scales
    static constexpr int kPartialCols = kHalves ? kCols / 2 : kCols < kBlockK ? kCols : kBlockK;
    static constexpr int kPartialSize = kPartialCols / 2;   // per thread
    static constexpr int kPartials = kCols / kPartialCols;  // per stage
    static constexpr bool kTwoStages = kConsumers <= 2 && kPartials == 1;
    static_assert(kPartials * kPartialCols == kCols, "partial accumulators have all columns");
    using Partial = float[kPartialSize];

    // Block scales of a thread's accumulators in a stage: of its two rows (A's), and of each
    // partial accumulator's columns, which lie in one block of B.  SwapAB: of its rows, which lie
    // in one block, and of each of its columns.
    static constexpr int kRowScales = kSwapAB ? 1 : 2;
    static constexpr int kColScales = kSwapAB ? kCols / 4 : kPartials;
    struct BlockScaleFragment {
        float rows[kRowScales], cols[kColScales];

        DEVICE float of_accumulator(int i) const {
            if (kSwapAB) return rows[0] * cols[i / 4 * 2 + i % 2];
            return rows[i / 2 % 2] * cols[i / kPartialSize];
        }
    };

    // A warp's block scales, loaded by cp.async through kScaleStages stages of shared memory: no
    // registers are held by loads in flight.  Past the matrix the last scale is repeated.
    static constexpr int kScaleStages = 4, kScales = kSwapAB ? kCols + 1 : 16 + kPartials;
    using ScaleStages = float[kScaleStages][kScales];
    static_assert(sizeof(ScaleStages) <= Base::kBlockScaleBytes,
                  "what a warp has of shared memory");

    struct BlockScalePipeline {
        static constexpr int kCopies = (kScales + 31) / 32;  // per lane
        ScaleStages& stages;
        const float* from[kCopies];  // null: 1
        int64_t step[kCopies];
        int copied, end;

        // The stages may be overwritten.
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
        // Issues the copies of the next stage, if any.
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
        // Loads the thread's scales of the next stage.
        DEVICE BlockScaleFragment next() {
            const int lane = threadIdx.x % 32;
            copy_async_wait<kScaleStages - 2>();
            sync_warp();  // all lanes' copies have arrived, and the previous stage has been read
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

    // One tile of a warpgroup.  before_last runs beside the last stage's wgmma.
    template <bool kByBlock, class BeforeLast> struct Promotion {
        using Scales = typename Choose<kByBlock, BlockScalePipeline, NoBlockScales>::Type;
        const BeforeLast& before_last;
        SharedStorage& storage;
        const WorkTile& work;
        Accumulator& accumulator;
        ConsumerStages issued;      // stages of the next wgmma
        BlockScaleFragment scales;  // of the stage being promoted
        Scales source;              // of the stage promoted next

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
        // Issues wgmma of partial accumulator `index` of the next stage, which has arrived.
        DEVICE void issue(int index, Partial& partial) {
            const int stage = issued.state.stage, row = work.row;
            // Descriptors are the first stage's plus an offset: one multiplication each.
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
        // Issues `next`, then promotes `partial` and releases its stage.
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
            } else {  // unreachable: ptxas needs a wait on every path
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
            return;  // no stage: the only one is another warpgroup's, or another block's
        const Nothing nothing;
        if (work.scales.present())
            Promotion<true, Nothing>(storage, work, accumulator, nothing).run();
        else Promotion<false, Nothing>(storage, work, accumulator, nothing).run();
    }

    // A warpgroup's tiles back to back, without block scales.  `finish` is called for each when its
    // accumulators are complete, `before_last` beside its last stage.
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
