// Warpgroups run a section of code one after another, in a fixed order.
//
//     pipeline::OrderedBarrier<3, 8> order{warpgroup};  // named barriers 8, 9 and 10
//     order.begin();                                    // once; warpgroup 0 is the first
//     order.wait();  ...  order.arrive();
//
// All warpgroups must enter the section equally often.
#pragma once
#include "platform/named_barrier.cuh"

namespace pipeline {

template <int kWarpgroups, int kFirstBarrier> struct OrderedBarrier {
    static constexpr int kThreads = 256;  // the warpgroup that waits and the one that arrives
    int warpgroup;                        // uniform

    DEVICE void begin() const {
        if (warpgroup == kWarpgroups - 1) arrive();
    }
    DEVICE void wait() const { named_barrier(kFirstBarrier + warpgroup, kThreads); }
    // Lets the next warpgroup in.
    DEVICE void arrive() const {
        named_barrier_arrive(kFirstBarrier + (warpgroup + 1) % kWarpgroups, kThreads);
    }
};

}  // namespace pipeline
