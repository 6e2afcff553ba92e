// The FP8 mainloop, both operands from shared memory.  Hopper's tensor cores keep 13 fractional
// bits of an FP8 accumulator.  Therefore, after each stage (128 of k), partial accumulators are
// multiplied by their block scales and promoted to FP32.
//
// With registers for two partial accumulators, a warpgroup promotes one while the tensor cores fill
// the other: the next stage, or, for wide tiles, the other half of the columns.  With one partial
// accumulator, promotion overlaps the other warpgroup's wgmma.
#pragma once
#include "gemm/mainloop_sm90.cuh"

namespace gemm {

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
    using typename Base::PipelineState;
    using typename Base::RowElement;
    using typename Base::StageCols;
    using typename Base::StageRows;
    using typename Base::WorkTile;
    static_assert(Base::kFp8 && !Base::kMixedInput, "FP8 operands");
    static_assert(kTileK == kScaleBlock && !Base::kPingPong && kMmasM == 1,
                  "a stage is a block of scales");

    static constexpr bool kBlockScales = kSame<Scaling, BlockScaled>, kLoadsScales = kBlockScales;
    static_assert(kBlockScales || kSame<Scaling, NoScales>, "scales of partial accumulators");

    // Two partial accumulators: of the halves of a stage's columns (kHalves), or of two stages
    // (kTwoStages).  Otherwise one.
    static constexpr bool kHalves = kCols <= 192 && kCols > kScaleBlock;
    static_assert(!(kHalves && kBlockScales), "columns of a partial accumulator are of one block");
    static constexpr int kPartialCols = kHalves               ? kCols / 2
                                        : kCols < kScaleBlock ? kCols
                                                              : kScaleBlock;
    static constexpr int kPartialSize = kPartialCols / 2;   // per thread
    static constexpr int kPartials = kCols / kPartialCols;  // per stage
    static constexpr bool kTwoStages = kConsumers <= 2 && kPartials == 1;
    static_assert(kPartials * kPartialCols == kCols, "partial accumulators have all columns");
    using Partial = float[kPartialSize];

    // Block scales of kScaleK stages: for each B and each of the tile's rows of A, the row's scale
    // times the scale of the block of B.  Two warps of the producer warpgroup store them through a
    // separate pipeline, which runs ahead, also across tiles: beside the operands' TMA loads, a
    // global load takes as long as all stages of their pipeline.
    static constexpr int kScaleK = 8, kScaleStages = 2, kScaleWarps = 2;
    static constexpr int kProducts = Base::Operands::B::kCount;
    static_assert(!kBlockScales || kScaleBlock % ((kSwapAB ? kRows : kCols) / kProducts) == 0,
                  "one block of each B");
    static_assert(!kSwapAB || kProducts == 1, "a pair's halves are columns");
    using ScaleStage = float[kScaleK][kProducts * Base::kTileM];
    using ScaleState = pipeline::PipelineState<kScaleStages>;
    struct ScaledStorage : Base::SharedStorage {
        alignas(16) ScaleStage scales[kScaleStages];
        Barrier scales_full[kScaleStages], scales_empty[kScaleStages];

        DEVICE void init() {
            for (int i = 0; i < kScaleStages; ++i) {
                scales_full[i].init(kScaleWarps, 32);
                scales_empty[i].init(4 * kConsumers, 32);
            }
            Base::SharedStorage::init();
        }
    };
    using SharedStorage =
        typename Choose<kBlockScales, ScaledStorage, typename Base::SharedStorage>::Type;
    // Position of the scale of a row of A.  SwapAB: the scales of a lane's columns are adjacent.
    DEVICE static int scale_index(int row) {
        return kSwapAB ? row % 8 / 2 * (Base::kTileM / 4) + row / 8 * 2 + row % 2 : row;
    }

    // Run by each of kScaleWarps warps.  Two lanes load a row's kScaleK scales, a 32-byte sector.
    // With two B, four lanes do, and at most four rows at once, because there are fewer registers.
    struct ScaleLoader {
        static constexpr int kLanes = 2 * kProducts, kOfLane = kScaleK / kLanes;
        static constexpr int kRowsOfWarp = 32 / kLanes, kRowsAtOnce = kRowsOfWarp * kScaleWarps;
        static constexpr int kRowsOfLane = (Base::kTileM + kRowsAtOnce - 1) / kRowsAtOnce;
        static constexpr int kInFlight = kProducts == 1 ? kRowsOfLane : 4;
        static_assert(kRowsOfLane % kInFlight == 0, "whole steps");
        using Scales = float[kOfLane];
        SharedStorage& storage;
        int warp;
        ScaleState state;

        // Loads the first `there` scales, `step` apart; the rest, or all without `from`, become 1.
        DEVICE static void load(Scales& to, const float* from, int64_t step, int there) {
            using Vector = Bytes<4 * kOfLane>;
            if (from && step == 1 && reinterpret_cast<uint64_t>(from) % sizeof(Vector) == 0 &&
                there >= kOfLane) {
                const Vector bits = *reinterpret_cast<const Vector*>(from);
#pragma unroll
                for (int k = 0; k < kOfLane; ++k) to[k] = bit_cast<float>(bits.words[k]);
                return;
            }
#pragma unroll
            for (int k = 0; k < kOfLane; ++k) to[k] = from && k < there ? from[k * step] : 1.0f;
        }
        DEVICE void load(const BlockScales& scales, int num_k_tiles) {
            const int lane = threadIdx.x % 32, part = lane % kLanes * kOfLane;
            const int first_row = kRowsOfWarp * warp + lane / kLanes;
#pragma unroll 1
            for (int first = 0; first < num_k_tiles; first += kScaleK) {
                Scales of_a[kInFlight], of_b[kProducts];
                const int k = first + part, there = num_k_tiles - k;
#pragma unroll
                for (int p = 0; p < kProducts; ++p)
                    load(of_b[p], scales.b_at(p, k), scales.b_k[p], there);
#pragma unroll 1
                for (int rows = 0; rows < kRowsOfLane; rows += kInFlight) {
                    const int row_of_lane = first_row + kRowsAtOnce * rows;
#pragma unroll
                    for (int i = 0; i < kInFlight; ++i) {
                        const float* of_row = scales.a_at(row_of_lane + kRowsAtOnce * i, k);
                        load(of_a[i], of_row, scales.a_k, there);
                    }
                    if (rows == 0) storage.scales_empty[state.stage].wait(state.phase ^ 1);
                    ScaleStage& stage = storage.scales[state.stage];
#pragma unroll
                    for (int i = 0; i < kInFlight; ++i) {
                        const int row = row_of_lane + kRowsAtOnce * i;
                        if (row >= Base::kTileM) continue;
#pragma unroll
                        for (int j = 0; j < kProducts * kOfLane; ++j) {
                            const int p = j / kOfLane, of_k = j % kOfLane;
                            stage[part + of_k][p * Base::kTileM + scale_index(row)] =
                                of_a[i][of_k] * of_b[p][of_k];
                        }
                    }
                }
                sync_warp();
                storage.scales_full[state.stage].template arrive_for<32>();
                state.advance();
            }
        }
    };

    // A thread's block scales of a stage and a B: one for each of its two rows.  SwapAB: one for
    // each of its columns.
    static constexpr int kScalesOfThread = kSwapAB ? kCols / 4 : 2;
    struct BlockScaleFragment {
        float values[kScalesOfThread];

        // row: the warp's first row in the tile.
        DEVICE void load(const float* scales, int row) {
            const int lane = threadIdx.x % 32;
            if constexpr (kSwapAB) {
#pragma unroll
                for (int i = 0; i < kScalesOfThread; i += 2) {
                    const Bytes<8> pair =
                        *reinterpret_cast<const Bytes<8>*>(&scales[lane % 4 * kScalesOfThread + i]);
                    values[i] = bit_cast<float>(pair.words[0]);
                    values[i + 1] = bit_cast<float>(pair.words[1]);
                }
            } else {
#pragma unroll
                for (int i = 0; i < 2; ++i) values[i] = scales[row + lane / 4 + 8 * i];
            }
        }
        DEVICE float of_accumulator(int i) const {
            return values[kSwapAB ? i / 4 * 2 + i % 2 : i / 2 % 2];
        }
    };
    // Reads a warp's block scales of a tile, stage by stage.
    struct ScaleReader {
        SharedStorage& storage;
        ScaleState state;
        int k, end;  // the next stage, and the tile's number of stages
        int row;     // the warp's first row in the tile

        DEVICE ScaleReader(SharedStorage& storage, const WorkTile& work, int first_stage)
            : storage(storage),
              k(first_stage),
              end(work.num_k_tiles),
              row(work.row + int(threadIdx.x) / 32 % 4 * kWarpRows) {
            state.skip(work.count * ((end + kScaleK - 1) / kScaleK));
            if (kStride > 1 && k >= end) release();
        }
        DEVICE void release() {
            sync_warp();
            storage.scales_empty[state.stage].template arrive_for<32>();
            state.advance();
        }
        // Loads the scales of the next stage and B `product`.  Releases a stage of scales after its
        // last use.
        DEVICE void next(BlockScaleFragment& scales, int product) {
            const int at = k % kScaleK;
            if (product == 0 && at < kStride) storage.scales_full[state.stage].wait(state.phase);
            scales.load(storage.scales[state.stage][at] + product * Base::kTileM, row);
            if (product < kProducts - 1) return;
            k += kStride;
            if (k >= end || k % kScaleK < kStride) release();
            // The last stage of scales is only for the other warpgroup's stage.
            if (kStride > 1 && k == end && k % kScaleK == 1) release();
        }
    };
    struct NoScaleReader {
        DEVICE NoScaleReader(SharedStorage&, const WorkTile&, int) {}
        DEVICE void next(BlockScaleFragment&, int) {}
    };
    using ScaleSource = typename Choose<kBlockScales, ScaleReader, NoScaleReader>::Type;
    struct Nothing {
        DEVICE void operator()() const {}
    };

    // One tile of a warpgroup.  before_last runs during the last stage's wgmma.
    template <class BeforeLast> struct Promotion {
        const BeforeLast& before_last;
        SharedStorage& storage;
        const WorkTile& work;
        Accumulator& accumulator;
        ConsumerStages issued;      // stages of the next wgmma
        BlockScaleFragment scales;  // of the stage being promoted
        ScaleSource source;         // of the stages that follow

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
        // A pair's columns are half of one B, half of the other, whose scales take registers in
        // turn.
        DEVICE void promote(int index, const Partial& partial) {
#pragma unroll
            for (int j = 0; j < kPartialSize; ++j) {
                const int i = index % kPartials * kPartialSize + j;
                if (kProducts > kPartials && j == kPartialSize / 2) source.next(scales, 1);
                accumulator[0][i] +=
                    kBlockScales ? partial[j] * scales.of_accumulator(i) : partial[j];
            }
        }
        // Issues `next`, then promotes `partial` and releases its stage.
        DEVICE void step(ConsumerStages& promoted, Partial& partial, Partial& next) {
            wait();
            issue(0, next);
            source.next(scales, 0);
            wgmma_wait<1>(partial);
            release(promoted.state.stage);
            promote(0, partial);
            promoted.next();
        }
        DEVICE void last(const ConsumerStages& promoted, Partial& partial) {
            before_last();
            source.next(scales, 0);
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
                    if (index < kProducts) source.next(scales, index);
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
        const Nothing nothing;
        Promotion<Nothing> promotion(storage, work, accumulator, nothing);
        // Without a stage: the tile's only stage is another warpgroup's or another block's.
        if (promotion.issued.valid()) promotion.run();
    }

    // Computes a warpgroup's tiles back to back.  For each tile `before_last` is called during its
    // last stage, and `finish` when its accumulators are complete.
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
