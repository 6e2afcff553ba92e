// Warpgroups take turns at named barriers: at each, one warpgroup waits and another only arrives.
//
//     Turns<3, 8> turns{warpgroup};  // barriers 8, 9 and 10
//     turns.begin();                 // once; the first turn is warpgroup 0's
//     turns.take();  ...  turns.pass();
//
// All warpgroups must take equally many turns.  A separate header, because only attention uses it.
#pragma once

#if defined(HOST_WARP_SIZE)
#include "platform/host/arrive.cuh"
#else
#include "platform/cuda/arrive.cuh"
#endif

template <int kWarpgroups, int kFirstBarrier> struct Turns {
    static constexpr int kThreads = 256;  // the warpgroup that waits and the one that passes
    int warpgroup;                        // uniform

    DEVICE void begin() const {
        if (warpgroup == kWarpgroups - 1) pass();
    }
    DEVICE void take() const { named_barrier(kFirstBarrier + warpgroup, kThreads); }
    DEVICE void pass() const {
        named_barrier_arrive(kFirstBarrier + (warpgroup + 1) % kWarpgroups, kThreads);
    }
};
