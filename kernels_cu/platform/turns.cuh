// Turns of warpgroups, by named barriers at which one warpgroup waits and another only arrives.
//
//     Turns<3, 8> turns{warpgroup};  // barriers 8, 9 and 10
//     turns.begin();                 // once; the first turn is warpgroup 0's
//     turns.take();  ...  turns.pass();
//
// All warpgroups take equally many turns.  A header of its own: only attention takes turns.
#pragma once

#if defined(HOST_WARP_SIZE)
#include "platform/host/arrive.cuh"
#else
#include "platform/cuda/arrive.cuh"
#endif

template <int kWarpgroups, int kFirstBarrier> struct Turns {
    static constexpr int kThreads = 256;  // those that wait, and those that pass the turn to them
    int warpgroup;                        // uniform

    DEVICE void begin() const {
        if (warpgroup == kWarpgroups - 1) pass();
    }
    DEVICE void take() const { named_barrier(kFirstBarrier + warpgroup, kThreads); }
    DEVICE void pass() const {
        named_barrier_arrive(kFirstBarrier + (warpgroup + 1) % kWarpgroups, kThreads);
    }
};
