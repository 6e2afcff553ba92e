// The pipeline between a producer that issues TMA loads and the warps that consume its stages.
//
//     producer                                 consumer
//     pipeline.producer_acquire(state);        pipeline.consumer_wait(state);
//     full[state.stage].arrive_expect_tx(n);   ... multiply ...
//     tma_load(..., full[state.stage], ...);   pipeline.consumer_release(state.stage);
//     state.advance();                         state.advance();
//
// If other blocks of the cluster arrive at the producer's barriers, it must end with producer_tail.
#pragma once

namespace pipeline {

// The number of stages: a compile-time constant, or a launch parameter of at most kMost.
template <int kStages> struct StageCount {
    static constexpr int kMost = kStages;
    DEVICE static constexpr int stages() { return kStages; }
};
template <int kMost_> struct LaunchStageCount {
    static constexpr int kMost = kMost_;
    int number;
    DEVICE int stages() const { return number; }
};

// Index of the next stage, and the phase of its barriers.
template <class Count> struct PipelineStateOf : Count {
    int stage = 0, phase = 0;

    PipelineStateOf() = default;
    DEVICE explicit PipelineStateOf(const Count& count) : Count(count) {}
    // The state after `passed` stages.
    DEVICE explicit PipelineStateOf(uint32_t passed)
        : stage(int(passed % Count::stages())), phase(int(passed / Count::stages() & 1)) {}
    DEVICE void advance() {
        if (++stage == Count::stages()) {
            stage = 0;
            phase ^= 1;
        }
    }
    DEVICE void skip(int count) {
        const int next = stage + count;
        phase ^= next / Count::stages() & 1;
        stage = next % Count::stages();
    }
};
template <int kStages> using PipelineState = PipelineStateOf<StageCount<kStages>>;

// full: a stage's bytes have arrived; empty: its consumers have read it.  Each kThreadsPerArrival
// consumer threads (a warp or a warpgroup) arrive once at `empty` in each of the kMulticastSize
// blocks that share their loads.  A stage is empty after kArrivals.
template <class Count, int kThreadsPerArrival, int kArrivals, int kMulticastSize = 1>
struct TmaPipelineOf {
    using State = PipelineStateOf<Count>;
    Barrier full[Count::kMost], empty[Count::kMost];

    DEVICE void init(const Count& count = {}) {
        for (int i = 0; i < count.stages(); ++i) {
            full[i].init(1);
            empty[i].init(kArrivals, kMulticastSize > 1 ? 1 : kThreadsPerArrival);
        }
    }
    // Waits until the consumers, in all blocks of the cluster, have released the stage.
    DEVICE void producer_acquire(const State& state) { empty[state.stage].wait(state.phase ^ 1); }
    DEVICE void consumer_wait(const State& state) { full[state.stage].wait(state.phase); }
    // Called by all threads of a consumer warp or warpgroup that have read the stage.  A warp
    // synchronises here, because its lanes may read the stage themselves.  A warpgroup does not:
    // wgmma has read the stage, or the caller has synchronised.
    DEVICE void consumer_release(int stage) {
        if (kThreadsPerArrival == 32) sync_warp();
        if constexpr (kMulticastSize > 1) {
            const int thread = threadIdx.x % kThreadsPerArrival;
            if (thread < kMulticastSize) empty[stage].release_remote(thread);
        } else {
            empty[stage].template arrive_for<kThreadsPerArrival>();
        }
    }
    // Called by the producer after its last load: waits until the consumers have released all
    // stages, so that no other block arrives at this block's barriers after it has exited.
    DEVICE void producer_tail(State state) {
#pragma unroll 1
        for (int i = 0; i < state.stages(); ++i) {
            producer_acquire(state);
            state.advance();
        }
    }
};
template <int kStages, int kThreadsPerArrival, int kArrivals, int kMulticastSize = 1>
using TmaPipeline =
    TmaPipelineOf<StageCount<kStages>, kThreadsPerArrival, kArrivals, kMulticastSize>;

}  // namespace pipeline
