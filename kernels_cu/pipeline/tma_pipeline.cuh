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

// Index of the next stage, and the phase of its barriers.
template <int kStages> struct PipelineState {
    int stage = 0, phase = 0;

    PipelineState() = default;
    // After `count` stages.
    DEVICE explicit PipelineState(uint32_t count)
        : stage(int(count % kStages)), phase(int(count / kStages & 1)) {}
    DEVICE void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
    DEVICE void skip(int count) {
        const int next = stage + count;
        phase ^= next / kStages & 1;
        stage = next % kStages;
    }
};

// full: a stage's bytes have arrived; empty: its consumers have read it.  One of every
// kThreadsPerArrival consumer threads arrives at `empty` in each of the kMulticastSize blocks that
// share their loads; a stage is empty after kArrivals.
template <int kStages, int kThreadsPerArrival, int kArrivals, int kMulticastSize = 1>
struct TmaPipeline {
    using State = PipelineState<kStages>;
    Barrier full[kStages], empty[kStages];

    DEVICE void init() {
        for (int i = 0; i < kStages; ++i) {
            full[i].init(1);
            empty[i].init(kArrivals, kMulticastSize > 1 ? 1 : kThreadsPerArrival);
        }
    }
    // Waits until the consumers, in all blocks of the cluster, have released the stage.
    DEVICE void producer_acquire(const State& state) { empty[state.stage].wait(state.phase ^ 1); }
    DEVICE void consumer_wait(const State& state) { full[state.stage].wait(state.phase); }
    // Called by consumers that have read the stage.
    DEVICE void consumer_release(int stage) {
        if (kThreadsPerArrival == 32) sync_warp();
        if constexpr (kMulticastSize > 1) {
            const int thread = threadIdx.x % kThreadsPerArrival;
            if (thread < kMulticastSize) empty[stage].release_remote(thread);
        } else {
            empty[stage].template arrive_for<kThreadsPerArrival>();
        }
    }
    // Called by the producer after its last load: waits until no other block will arrive at this
    // block's barriers.
    DEVICE void producer_tail(State state) {
#pragma unroll 1
        for (int i = 0; i < kStages; ++i) {
            producer_acquire(state);
            state.advance();
        }
    }
};

}  // namespace pipeline
