// The tile scheduler of split-K with a workspace.
#pragma once
#include "gemm/scheduler.cuh"

namespace gemm {

// Each block computes one tile of one split of k, so the grid has a block for each.  The batch is
// of splits: all read the same operands, and each stores its partial accumulators.
template <class Mainloop> struct SplitKScheduler : PersistentScheduler<Mainloop> {
    using Base = PersistentScheduler<Mainloop>;
    static_assert(!Mainloop::kSplitK, "a range of k for each block of a cluster, too");

    template <class Params> DEVICE SplitKScheduler(const Params& params) : Base(params) {
        const int per_split = int(params.k_tiles_per_split), all = int(params.num_k_tiles);
        this->first_k_tile = int(Base::tile(params, this->first).batch) * per_split;
        const int rest = all - this->first_k_tile;
        this->num_k_tiles = rest < per_split ? rest : per_split;
    }
};

}  // namespace gemm
