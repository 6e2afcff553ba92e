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

// What multiplies partial accumulators.
struct NoScales {};
struct BlockScaled {};

template <class Scaling, class Operands, class Tile, class Stages, class Schedule, class Cluster>
struct MainloopSm90SSFp8 : MainloopSm90<Operands, Tile, Stages, Schedule, Cluster> {
    using Base = MainloopSm90<Operands, Tile, Stages, Schedule, Cluster>;
    using Base::clear;
    using Base::kCols;
    using Base::kConsumers;
    using Base::kMmaK;
    using Base::kMmasM;
    using Base::kRows;
    using Base::kStride;
    using Base::kSwapAB;
    using Base::kTileK;
    using typename Base::Accumulator;
    using typename Base::ColElement;
    using typename Base::ConsumerStages;
    using typename Base::RowElement;
    using typename Base::StageCols;
    using typename Base::StageRows;
    using typename Base::WorkTile;
    static_assert(Base::kFp8 && !Base::kMixedInput, "FP8 operands");
    static_assert(kTileK == kBlockK && !Base::kPingPong && kMmasM == 1,
                  "a stage is a block of scales");

    static constexpr bool kBlockScales = kSame<Scaling, BlockScaled>;
    static_assert(kBlockScales || kSame<Scaling, NoScales>, "scales of partial accumulators");

    static constexpr bool kHalves = kCols <= 192 && kCols > kBlockK;
    static_assert(!(kHalves && kBlockScales), "columns of a partial accumulator are of one block");
    static constexpr int kPartialCols = kHalves ? kCols / 2 : kCols < kBlockK ? kCols : kBlockK;
    static constexpr int kPartialSize = kPartialCols / 2;   // per thread
    static constexpr int kPartials = kCols / kPartialCols;  // per stage
    static constexpr bool kTwoStages = kConsumers <= 2 && kPartials == 1;
    static_assert(kPartials * kPartialCols == kCols, "partial accumulators have all columns");
    using Partial = float[kPartialSize];

    // Block scales of a stage: of the tile's rows of A, and of its blocks of B's columns.  A warp of
    // the producer warpgroup loads them through a pipeline of their own, which stays ahead of the
    // consumers from one tile to the next.  Past the matrix the last scale is repeated.
    static constexpr int kScaleStages = 4, kScalesB = kSwapAB ? 1 : kPartials;
    static_assert(!kBlockScales || !kSwapAB || kRows <= kBlockK, "a tile has one block of rows");
    struct ScaleStage { alignas(16) float a[Base::kTileM], b[kScalesB]; };
    static constexpr int kScaleArrivals = 4 * (Base::kCooperative ? kConsumers : 1);
    using ScalePipeline = pipeline::TmaPipeline<kScaleStages, 32, kScaleArrivals, 1>;
    using ScaleState = typename ScalePipeline::State;
    struct ScaledStorage : Base::SharedStorage {
        ScaleStage scale_stages[kScaleStages];
        ScalePipeline scale_pipeline;

        DEVICE void init() {
            scale_pipeline.init();
            Base::SharedStorage::init();
        }
    };
    using SharedStorage =
        typename Choose<kBlockScales, ScaledStorage, typename Base::SharedStorage>::Type;

    // By the warp that loads block scales.  Copies are asynchronous: a stage is full when those of
    // the next kAhead stages are under way.
    class ScaleLoader {
        static constexpr int kAhead = 2, kCopies = (Base::kTileM + 31) / 32;  // per lane
        static_assert(kAhead < kScaleStages - 1, "consumers have a stage to read");
        SharedStorage& storage;
        ScaleState loaded, full;  // the next stage to load, and the next to become full
        int under_way = 0;

        DEVICE void fill() {
            sync_warp();  // all lanes' copies have arrived
            if (threadIdx.x % 32 == 0) storage.scale_pipeline.full[full.stage].arrive();
            full.advance();
            --under_way;
        }
        // Copies *from, or sets 1 if there are no scales.
        DEVICE static void copy(float& to, const float* from) {
            if (from) copy_async<4>(&to, from);
            else to = 1.0f;
        }

      public:
        DEVICE ScaleLoader(SharedStorage& storage) : storage(storage) {}
        DEVICE void load(const BlockScales& scales, int num_k_tiles) {
            const int lane = threadIdx.x % 32;
            const float *a[kCopies], *b = scales.b_at(lane);
#pragma unroll
            for (int i = 0; i < kCopies; ++i) a[i] = scales.a_at(lane + 32 * i);
#pragma unroll 1
            for (int k = 0; k < num_k_tiles; ++k) {
                storage.scale_pipeline.producer_acquire(loaded);
                ScaleStage& stage = storage.scale_stages[loaded.stage];
#pragma unroll
                for (int i = 0; i < kCopies; ++i) {
                    if (lane + 32 * i < Base::kTileM) copy(stage.a[lane + 32 * i], a[i]);
                    if (scales.a) a[i] += scales.a_k;
                }
                if (lane < kScalesB) copy(stage.b[lane], b);
                if (scales.b) b += scales.b_k;
                copy_async_commit();
                loaded.advance();
                if (++under_way > kAhead) {
                    copy_async_wait<kAhead>();
                    fill();
                }
            }
        }
        DEVICE void finish() {
            copy_async_wait<0>();
            while (under_way > 0) fill();
        }
    };

    // A thread's block scales of a stage: of its two rows (A's), and of each partial accumulator's
    // columns, which lie in one block of B.  SwapAB: of its rows, which lie in one block, and of
    // each of its columns.
    static constexpr int kRowScales = kSwapAB ? 1 : 2;
    static constexpr int kColScales = kSwapAB ? kCols / 4 : kPartials;
    struct BlockScaleFragment {
        float rows[kRowScales], cols[kColScales];

        DEVICE void load(const ScaleStage& stage, int row) {
            const int lane = threadIdx.x % 32;
#pragma unroll
            for (int i = 0; i < kRowScales; ++i)
                rows[i] = kSwapAB ? stage.b[0] : stage.a[row + lane / 4 + 8 * i];
#pragma unroll
            for (int i = 0; i < kColScales; ++i)
                cols[i] = kSwapAB ? stage.a[wgmma_col(lane, i % 2 + i / 2 * 4)] : stage.b[i];
        }
        DEVICE float of_accumulator(int i) const {
            if (kSwapAB) return rows[0] * cols[i / 4 * 2 + i % 2];
            return rows[i / 2 % 2] * cols[i / kPartialSize];
        }
    };
    // A warp's block scales of a tile, stage after stage.
    struct ScaleReader {
        SharedStorage& storage;
        ScaleState state;
        int row;  // the warp's first in the tile

        DEVICE ScaleReader(SharedStorage& storage, const WorkTile& work, int first_stage)
            : storage(storage), row(work.row + threadIdx.x / 32 % 4 * kWarpRows) {
            state.skip(work.count * work.num_k_tiles + first_stage);
        }
        DEVICE BlockScaleFragment next() {
            BlockScaleFragment scales;
            storage.scale_pipeline.consumer_wait(state);
            scales.load(storage.scale_stages[state.stage], row);
            storage.scale_pipeline.consumer_release(state.stage);
#pragma unroll
            for (int i = 0; i < kStride; ++i) state.advance();
            return scales;
        }
    };
    struct NoScaleReader {
        DEVICE NoScaleReader(SharedStorage&, const WorkTile&, int) {}
        DEVICE BlockScaleFragment next() { return {}; }
    };
    using Scales = typename Choose<kBlockScales, ScaleReader, NoScaleReader>::Type;
    struct Nothing {
        DEVICE void operator()() const {}
    };

    // One tile of a warpgroup.  before_last runs beside the last stage's wgmma.
    template <class BeforeLast> struct Promotion {
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
              source(storage, work, issued.index) {}
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
            if (kBlockScales && index == 0) scales = source.next();
#pragma unroll
            for (int j = 0; j < kPartialSize; ++j) {
                const int i = index % kPartials * kPartialSize + j;
                accumulator[0][i] +=
                    kBlockScales ? partial[j] * scales.of_accumulator(i) : partial[j];
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
        Promotion<Nothing>(storage, work, accumulator, nothing).run();
    }

    // A warpgroup's tiles back to back.  `before_last` is called for each beside its last stage,
    // `finish` when its accumulators are complete.
    template <class BeforeLast, class Finish>
    DEVICE static void mma_tiles(SharedStorage& storage, WorkTile& work, int num_tiles,
                                 Accumulator& accumulator, const BeforeLast& before_last,
                                 const Finish& finish) {
#pragma unroll 1
        for (; work.count < num_tiles; ++work.count) {
            clear(accumulator);
            Promotion<BeforeLast> promotion(storage, work, accumulator, before_last);
            promotion.run();
            work.state = promotion.issued.state;
            finish();
        }
    }
};

}  // namespace gemm
