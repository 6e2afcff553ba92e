// The mainloop with both operands from shared memory: 16-bit elements, or int8.
#pragma once
#include "gemm/mainloop_sm90.cuh"

namespace gemm {

template <class Operands, class Tile, class Stages, class Schedule, class Cluster>
struct MainloopSm90SS : MainloopSm90<Operands, Tile, Stages, Schedule, Cluster> {
    using Base = MainloopSm90<Operands, Tile, Stages, Schedule, Cluster>;
    using Base::kMmaK;
    using Base::kMmasM;
    using Base::kPingPong;
    using Base::kSlicedK;
    using Base::kTileK;
    using typename Base::Accumulator;
    using typename Base::ColElement;
    using typename Base::ConsumerStages;
    using typename Base::RowElement;
    using typename Base::SharedStorage;
    using typename Base::StageCols;
    using typename Base::StageRows;
    using typename Base::WorkTile;
    static_assert(!Base::kMixedInput && !Base::kFp8,
                  "mixed input and FP8 have their own mainloops");

    // storage.warpgroups: with PingPong, a warpgroup arrives when it has issued its last stage of a
    // tile; the next full stages are the other's.
    DEVICE static void mma(SharedStorage& storage, const WorkTile& work, Accumulator& accumulator) {
        const int consumer = work.consumer, count = work.count;
        // Warpgroup 0 waits for the other's previous tile, warpgroup 1 for the other's tile of the
        // same count.
        if (kPingPong) storage.warpgroups[consumer ^ 1].wait((consumer ^ 1 ^ count) & 1);
        bool first = true;
        int before = 0;
        // Sliced-K: the only stage can be the other warpgroup's.  With a clear after the loop
        // instead, every stage would wait for its own wgmma (ptxas: C7517).
        if (kSlicedK) Base::clear(accumulator);
#pragma unroll 1
        for (ConsumerStages stages(work); stages.valid(); stages.next()) {
            const int stage = stages.state.stage;
            storage.pipeline.consumer_wait(stages.state);
            wgmma_fence(accumulator);
#pragma unroll
            for (int k = 0; k < kTileK; k += kMmaK) {
#pragma unroll
                for (int m = 0; m < kMmasM; ++m) {
                    wgmma<RowElement, ColElement, StageRows::kMajor, StageCols::kMajor>(
                        accumulator[m],
                        StageRows::descriptor(storage.rows[stage], work.row + 64 * m, k),
                        StageCols::descriptor(storage.cols[stage], 0, k),
                        kSlicedK || !first || k > 0);
                }
            }
            wgmma_commit();
            wgmma_wait<1>();
            if (!first) storage.pipeline.consumer_release(before);
            first = false;
            before = stage;
        }
        if (kPingPong && threadIdx.x % 128 == 0) storage.warpgroups[consumer].arrive();
        wgmma_wait<0>(accumulator);
        if (!kSlicedK || !first) storage.pipeline.consumer_release(before);
    }
};

}  // namespace gemm
