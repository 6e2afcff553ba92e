// The mixed-input mainloop: 16-bit A, narrower weights B.  Consumer threads load B from shared
// memory and dequantise it in registers, kDepth of k ahead of wgmma.  SwapAB: B^T is wgmma's
// register operand A, A^T its shared-memory operand B.
//
// Converter<Mainloop> (gemm/convert_*.cuh) loads and converts.  With kFetches its loads run another
// kDepth ahead, so that wgmma waits for conversions only.  With sliced-K schedules in which
// conversions dominate, the warpgroups alternate: one converts a whole stage while the other
// multiplies.
//
// BlockScaled: a stage is a block of scales (kScaleBlock of k).  Its products form a partial
// accumulator, which is multiplied by the scale of the warpgroup's block of B and promoted.  The
// warpgroups alternate here, too: conversion and promotion of one overlap wgmma of the others.
#pragma once
#include "gemm/mainloop_sm90.cuh"

namespace gemm {

template <template <class> class Converter_, class Scaling, class Operands, class Tile,
          class Stages, class Schedule, class Cluster>
struct MainloopSm90RS : MainloopSm90<Operands, Tile, Stages, Schedule, Cluster> {
    using Base = MainloopSm90<Operands, Tile, Stages, Schedule, Cluster>;
    using Converter = Converter_<Base>;
    using Base::clear;
    using Base::kCols;
    using Base::kConsumers;
    using Base::kMmaK;
    using Base::kSlicedK;
    using Base::kStride;
    using Base::kThreadsPerArrival;
    using Base::kTileK;
    using typename Base::Accumulator;
    using typename Base::ColElement;
    using typename Base::ConsumerStages;
    using typename Base::RowElement;
    using typename Base::SharedStorage;
    using typename Base::StageCols;
    static constexpr bool kBlockScales = kSame<Scaling, BlockScaled>;
    static_assert(kBlockScales || kSame<Scaling, NoScales>, "scales of partial accumulators");
    static_assert(!kBlockScales || kTileK == kScaleBlock, "a stage is a block of scales");

    // block_scales: from the warpgroup's block of each B and the CUDA block's first stage on.
    struct ScaledWorkTile : Base::WorkTile { BlockScales block_scales; };
    using WorkTile = typename Choose<kBlockScales, ScaledWorkTile, typename Base::WorkTile>::Type;
    static_assert(Base::kMixedInput && Base::kMmasM == 1 && !Base::kPingPong,
                  "64 rows a warpgroup");

    static constexpr int kDepth = Converter::kDepth;
    using Fragment = typename Converter::Fragment;  // wgmma's A operand, kDepth of k
    static constexpr int kSteps = kTileK / kDepth;  // conversions per stage
    static_assert(kSteps % 2 == 0, "the steps alternate between two fragments");
    // kOrdered: the warpgroups take turns (Order).  A whole stage is in registers, at most two
    // fragments: more take too many.  Without block scales only where conversions dominate
    // (kConverts; E4M3 to FP16 is one instruction).  With block scales always, so that one
    // warpgroup promotes while another multiplies; but cluster split-K uses the warpgroups'
    // barriers itself.
    static constexpr bool kConverts = kSlicedK && kCols == 64 && !kSame<RowElement, e2m1x2> &&
                                      !(kSame<RowElement, e4m3> && kSame<ColElement, half>);
    static constexpr bool kOrdered =
        kSteps == 2 && (kBlockScales ? kConsumers > 1 && !Base::kSplitK : kConverts);

    using Partial = float[kCols / 2];

    // Descriptor of a stage's columns: the first stage's plus an offset, one multiplication.
    DEVICE static uint64_t descriptor(SharedStorage& storage, int stage) {
        return advance(StageCols::descriptor(storage.cols[0], 0, 0), stage * StageCols::kBytes);
    }

    // Block scales of a warpgroup's stages: one per stage and B.
    struct StageScales {
        static constexpr int kProducts = Base::Operands::B::kCount;
        const BlockScales& scales;
        int end;                // number of stages
        float of_b[kProducts];  // lane i: the scale of the i-th of kWarpSize stages

        DEVICE StageScales(const WorkTile& work)
            : scales(work.block_scales), end(work.num_k_tiles) {}
        // Called before the products of stage `index`, which hide the loads.
        DEVICE void prefetch(int index) {
            if (index / kStride % kWarpSize != 0) return;
            const int k = index + int(threadIdx.x) % kWarpSize * kStride;
#pragma unroll
            for (int p = 0; p < kProducts; ++p) {
                const float* of_block = scales.b_at(p, k);
                of_b[p] = of_block && k < end ? *of_block : 1.0f;
            }
        }
        DEVICE void promote(Partial& partial, int index, Accumulator& accumulator) const {
            if (scales.a) {  // rare: 16-bit activations have no block scales
                const int thread = opaque(threadIdx.x % 32);  // no addresses across the mainloop
#pragma unroll
                for (int i = 0; i < kCols / 2; ++i) {
                    if (i / 2 % 2 != 0) continue;
                    const float of_a = *scales.a_at(wgmma_col(thread, i), index);
                    partial[i] *= of_a;
                    partial[i + 2] *= of_a;
                }
            }
            float factors[2];  // of wgmma's rows 0-7 and 8-15: a pair has a different B in each
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                factors[half] = shuffle(of_b[half % kProducts], index / kStride % kWarpSize);
            }
#pragma unroll
            for (int i = 0; i < kCols / 2; ++i)
                accumulator[0][i] += partial[i] * factors[i / 2 % 2];
        }
    };
    // Without block scales wgmma adds to the accumulators directly.
    struct NoStageScales {
        DEVICE NoStageScales(const WorkTile&) {}
        DEVICE void prefetch(int) {}
        DEVICE void promote(Partial&, int, Accumulator&) const {}
    };
    using Scales = typename Choose<kBlockScales, StageScales, NoStageScales>::Type;

    DEVICE static void mma_steps(Converter& converter, SharedStorage& storage, Scales scales,
                                 ConsumerStages stages, Accumulator& accumulator) {
        constexpr int kAhead = Converter::kFetches ? 2 : 1;
        Fragment a[2];
        typename Converter::Fetched fetched;
        Partial partial;
        Partial& target = kBlockScales ? partial : accumulator[0];
        const auto load = [&](Fragment& into, const ConsumerStages& from, int k) {
            const unsigned char* stage = storage.rows[from.state.stage];
            if constexpr (Converter::kFetches) converter.fetch(fetched, stage, k);
            else converter.load(into, stage, from.index, k);
        };
        scales.prefetch(stages.index);
        storage.pipeline.consumer_wait(stages.state);
        load(a[0], stages, 0);
        if constexpr (Converter::kFetches) {
            converter.convert(fetched, a[0]);
            load(a[1], stages, kDepth);
        }
        bool first = true;
        int before = 0;
#pragma unroll 1
        for (; stages.valid(); stages.next()) {
            const int stage = stages.state.stage;
            const uint64_t cols = descriptor(storage, stage);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                Fragment &now = a[step % 2], &next = a[(step + 1) % 2];
                wgmma_fence(target);
#pragma unroll
                for (int i = 0; i < kDepth / kMmaK; ++i) {
                    wgmma<ColElement, ColElement, kMajorK, StageCols::kMajor>(
                        target, now[i], advance(cols, StageCols::step(step * kDepth + i * kMmaK)),
                        (!kBlockScales && !first) || step > 0 || i > 0);
                }
                wgmma_commit();
                wgmma_wait<1>(next);  // the previous step's wgmma has read `next` and its stage
                if (!kBlockScales && step == 0 && !first) storage.pipeline.consumer_release(before);
                if constexpr (Converter::kFetches) {
                    if (step + 1 < kSteps || !stages.last()) converter.convert(fetched, next);
                }
                if (step + kAhead < kSteps) {
                    load(next, stages, (step + kAhead) * kDepth);
                } else if (!stages.last()) {
                    ConsumerStages then = stages;
                    then.next();
                    if (step + kAhead == kSteps) storage.pipeline.consumer_wait(then.state);
                    load(next, then, (step + kAhead - kSteps) * kDepth);
                }
            }
            if constexpr (kBlockScales) {
                wgmma_wait<0>(partial);
                storage.pipeline.consumer_release(stage);
                scales.promote(partial, stages.index, accumulator);
                if (!stages.last()) scales.prefetch(stages.index + kStride);
            }
            first = false;
            before = stage;
        }
        if constexpr (kBlockScales) return;
        wgmma_wait<0>(accumulator);
        storage.pipeline.consumer_release(before);
    }

    // Ordered barrier of the warpgroups (storage.warpgroups): they take turns, warpgroup 0 first,
    // and all have the same number of turns.
    struct Order {
        SharedStorage& storage;
        int consumer, next, end;

        DEVICE Order(SharedStorage& storage, const WorkTile& work)
            : storage(storage), consumer(work.consumer) {
            const int of_tile = (work.num_k_tiles + kStride - 1) / kStride;
            next = work.count * of_tile;
            end = next + of_tile;
        }
        // Waits for turn `next` of the warpgroup before; warpgroup 0 waits for turn next - 1 of the
        // last warpgroup.
        DEVICE void wait() {
            storage.warpgroups[consumer].wait((next++ & 1) ^ (consumer == 0 ? 1 : 0));
        }
        DEVICE void arrive() {
            sync_warp();
            // Every warp waits: a warp that fell a phase behind would see the same parity again.
            if (threadIdx.x % kThreadsPerArrival == 0)
                storage.warpgroups[(consumer + 1) % kConsumers].arrive();
        }
        // Takes the turns of stages that this warpgroup does not have.
        DEVICE void finish() {
            while (next < end) {
                wait();
                arrive();
            }
        }
    };

    DEVICE static void mma_ordered(Converter& converter, SharedStorage& storage, Order& order,
                                   Scales scales, ConsumerStages stages, Accumulator& accumulator) {
        Partial partial;
        Partial& target = kBlockScales ? partial : accumulator[0];
#pragma unroll 1
        for (bool first = true; stages.valid(); stages.next(), first = false) {
            const int stage = stages.state.stage;
            scales.prefetch(stages.index);
            Fragment a[kSteps];
            storage.pipeline.consumer_wait(stages.state);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                converter.load(a[step], storage.rows[stage], stages.index, step * kDepth);
            }
            const uint64_t cols = descriptor(storage, stage);
            order.wait();
            wgmma_fence(target, a);
#pragma unroll
            for (int i = 0; i < kTileK / kMmaK; ++i) {
                wgmma<ColElement, ColElement, kMajorK, StageCols::kMajor>(
                    target, a[i * kMmaK / kDepth][i % (kDepth / kMmaK)],
                    advance(cols, StageCols::step(i * kMmaK)), (!kBlockScales && !first) || i > 0);
            }
            wgmma_commit();
            order.arrive();  // wgmma is issued; the next warpgroup's is queued behind it
            wgmma_wait<0>(target, a);
            storage.pipeline.consumer_release(stage);
            scales.promote(partial, stages.index, accumulator);
        }
        order.finish();
    }

    DEVICE static void mma(SharedStorage& storage, const WorkTile& work, Accumulator& accumulator) {
        const int row = work.row + threadIdx.x / 32 % 4 * 16;
        const ConsumerStages stages(work);
        if constexpr (kOrdered) {
            Order order(storage, work);
            if (kBlockScales || !stages.valid()) clear(accumulator);
            Converter converter(work, row);
            return mma_ordered(converter, storage, order, Scales(work), stages, accumulator);
        }
        // No stage: the tile's only stage is the other warpgroup's, or this block has none.
        if ((kSlicedK || Base::kSplitK) && !stages.valid()) return clear(accumulator);
        if constexpr (kBlockScales) clear(accumulator);
        Converter converter(work, row);
        mma_steps(converter, storage, Scales(work), stages, accumulator);
        if constexpr (Converter::kUnit != 1.0f) {
#pragma unroll
            for (auto& row : accumulator) {
#pragma unroll
                for (auto& value : row) value *= Converter::kUnit;
            }
        }
    }
};

}  // namespace gemm
