// The mixed-input mainloop: a 16-bit A and narrower weights B, which each thread reads from shared
// memory and converts in registers, kDepth of k ahead of the products under way.  With SwapAB: B^T
// is wgmma's A, which may be in registers, and A^T its B, from shared memory.
//
// Converter<Mainloop> (gemm/convert_*.cuh) says what is read and converted.  With kFetches it reads
// another kDepth ahead, so that products wait for conversions only.  Where conversions take long
// and warpgroups slice k, these take turns instead: one converts all of its stage while the other
// multiplies.
#include "gemm/mainloop_sm90.cuh"

namespace gemm {

template <template <class> class Converter_, class Operands, class Tile, class Stages,
          class Schedule, class Cluster>
struct MainloopSm90RS : MainloopSm90<Operands, Tile, Stages, Schedule, Cluster> {
    using Base = MainloopSm90<Operands, Tile, Stages, Schedule, Cluster>;
    using Converter = Converter_<Base>;
    using Base::clear;
    using Base::kConsumers;
    using Base::kMmaK;
    using Base::kSlicedK;
    using Base::kThreadsPerArrival;
    using Base::kTileK;
    using typename Base::Accumulator;
    using typename Base::ColElement;
    using typename Base::ConsumerStages;
    using typename Base::RowElement;
    using typename Base::SharedStorage;
    using typename Base::StageCols;
    using typename Base::WorkTile;
    static_assert(Base::kMixedInput && Base::kMmasM == 1 && !Base::kPingPong,
                  "64 rows a warpgroup");

    static constexpr int kDepth = Converter::kDepth;
    using Fragment = typename Converter::Fragment;  // of wgmma's A, kDepth of k
    static constexpr int kSteps = kTileK / kDepth;  // of a stage
    static_assert(kSteps % 2 == 0, "the steps alternate between two fragments");
    // Whether warpgroups take turns.  E4M3 becomes FP16 by an instruction, which they do not make
    // faster; the registers of more than two fragments are too many.
    static constexpr bool kOrdered = kSlicedK && Base::kCols == 64 && kSteps == 2 &&
                                     !kSame<RowElement, e2m1x2> &&
                                     !(kSame<RowElement, e4m3> && kSame<ColElement, half>);

    DEVICE static void mma_steps(Converter& converter, SharedStorage& storage,
                                 ConsumerStages stages, Accumulator& accumulator) {
        constexpr int kAhead = Converter::kFetches ? 2 : 1;
        Fragment a[2];
        typename Converter::Fetched fetched;
        const auto load = [&](Fragment& into, const ConsumerStages& from, int k) {
            const unsigned char* stage = storage.rows[from.state.stage];
            if constexpr (Converter::kFetches) converter.fetch(fetched, stage, k);
            else converter.load(into, stage, from.index, k);
        };
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
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                Fragment &now = a[step % 2], &next = a[(step + 1) % 2];
                wgmma_fence(accumulator);
#pragma unroll
                for (int i = 0; i < kDepth / kMmaK; ++i) {
                    wgmma<ColElement, ColElement, kMajorK, StageCols::kMajor>(
                        accumulator[0], now[i],
                        StageCols::descriptor(storage.cols[stage], 0, step * kDepth + i * kMmaK),
                        !first || step > 0 || i > 0);
                }
                wgmma_commit();
                wgmma_wait<1>(next);
                if (step == 0 && !first) storage.pipeline.consumer_release(before);
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
            first = false;
            before = stage;
        }
        wgmma_wait<0>(accumulator);
        storage.pipeline.consumer_release(before);
    }

    // The order of the warpgroups (storage.order): each has as many turns, one after the other, the
    // first one first.
    struct Order {
        SharedStorage& storage;
        int consumer, next, end;

        DEVICE Order(SharedStorage& storage, const WorkTile& work)
            : storage(storage), consumer(work.consumer) {
            const int of_tile = (work.num_k_tiles + kConsumers - 1) / kConsumers;
            next = work.count * of_tile;
            end = next + of_tile;
        }
        DEVICE void wait() { storage.order[consumer].wait((next++ & 1) ^ (consumer == 0 ? 1 : 0)); }
        DEVICE void arrive() {
            sync_warp();
            // Each warp, so that none is a turn behind, where a phase has the same parity again.
            if (threadIdx.x % kThreadsPerArrival == 0)
                storage.order[(consumer + 1) % kConsumers].arrive();
        }
        // The turns that there are no stages for.
        DEVICE void finish() {
            while (next < end) {
                wait();
                arrive();
            }
        }
    };

    DEVICE static void mma_ordered(Converter& converter, SharedStorage& storage, Order& order,
                                   ConsumerStages stages, Accumulator& accumulator) {
#pragma unroll 1
        for (bool first = true; stages.valid(); stages.next(), first = false) {
            const int stage = stages.state.stage;
            Fragment a[kSteps];
            storage.pipeline.consumer_wait(stages.state);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                converter.load(a[step], storage.rows[stage], stages.index, step * kDepth);
            }
            order.wait();
            wgmma_fence(accumulator, a);
#pragma unroll
            for (int i = 0; i < kTileK / kMmaK; ++i) {
                wgmma<ColElement, ColElement, kMajorK, StageCols::kMajor>(
                    accumulator[0], a[i * kMmaK / kDepth][i % (kDepth / kMmaK)],
                    StageCols::descriptor(storage.cols[stage], 0, i * kMmaK), !first || i > 0);
            }
            wgmma_commit();
            order.arrive();  // products under way; the other's come behind them
            wgmma_wait<0>(accumulator, a);
            storage.pipeline.consumer_release(stage);
        }
        order.finish();
    }

    DEVICE static void mma(SharedStorage& storage, const WorkTile& work, Accumulator& accumulator) {
        const int row = work.row + threadIdx.x / 32 % 4 * 16;
        const ConsumerStages stages(work);
        if constexpr (kOrdered) {
            Order order(storage, work);
            if (!stages.valid()) clear(accumulator);
            Converter converter(work, row);
            return mma_ordered(converter, storage, order, stages, accumulator);
        }
        // The only stage is the other warpgroup's, or none is this block's.
        if ((kSlicedK || Base::kSplitK) && !stages.valid()) return clear(accumulator);
        Converter converter(work, row);
        mma_steps(converter, storage, stages, accumulator);
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
