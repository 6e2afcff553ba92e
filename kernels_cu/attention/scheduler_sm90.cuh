// The persistent tile scheduler of Hopper attention: which query tiles a block computes, in which
// order.
//
// Static: the times of all tiles are known.  A block computes the tiles that a schedule assigns, or
// every gridDim.x-th one.
// Dynamic (block masks, varlen): a block takes the next tile from an atomic counter.  Tiles with
// many keys come first where the order is known.
#pragma once
#include "attention/policies_sm90.cuh"

namespace attention {

constexpr int kMaxSequences = 384;  // varlen: one thread of a block per sequence

// Varlen: sequences sorted by their longest tile, descending.
template <bool kVarlen> struct SequenceOrder {
    int count;  // number of all tiles
    uint16_t numbers[kVarlen ? kMaxSequences : 1];
    int first_tiles[kVarlen ? kMaxSequences
                            : 1];  // prefix sum of tiles over the sorted sequences, all heads

    // Called by all threads; scratch: kMaxSequences elements.  The caller synchronises afterwards.
    struct Length { int longest, tiles; };
    template <class Traits, class Params>
    DEVICE void make(const Params& params, const int32_t* cu_seqlens_q, const int32_t* cu_seqlens_k,
                     Length* scratch) {
        constexpr int kTileM = Traits::kTileM, kThreads = Traits::kThreads;
        static_assert(!kVarlen || kMaxSequences <= kThreads, "a thread has one sequence");
        const int batch = int(params.batch), heads = params.heads.divisor;
        for (int i = threadIdx.x; i < batch; i += kThreads) {
            const AttentionHead head =
                Traits::Sequences::head(params, cu_seqlens_q, cu_seqlens_k, i * heads);
            const int end = head.sq > 0 ? head.limit(params, head.sq - 1) : 0;
            scratch[i] = {end, ((head.sq + kTileM - 1) / kTileM) * heads};
        }
        sync_block();
        for (int i = threadIdx.x; i < batch; i += kThreads) {
            const Length own = scratch[i];
            int rank = 0, before = 0;
            for (int j = 0; j < batch; ++j) {
                const Length other = scratch[j];
                const bool earlier =
                    other.longest > own.longest || (other.longest == own.longest && j < i);
                rank += earlier;
                before += earlier ? other.tiles : 0;
            }
            numbers[rank] = uint16_t(i);
            first_tiles[rank] = before;
            if (rank == batch - 1) count = before + own.tiles;
        }
    }
    // Rank of the sequence that a tile belongs to.
    DEVICE int find(int batch, int tile) const {
        int low = 0, high = batch - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (first_tiles[middle] <= tile) low = middle;
            else high = middle - 1;
        }
        return low;
    }
};

// Used by the producer thread.
template <class Traits> struct TileScheduler {
    using Params = typename Traits::Params;
    using Order = SequenceOrder<Traits::kVarlen>;
    const int32_t* schedule;  // null, or gridDim.x tiles per round, -1 after a block's last tile
    uint32_t* counter;        // 0 before and after the launch
    const int32_t *cu_seqlens_q, *cu_seqlens_k;
    int count;       // number of all tiles
    int index;       // next tile; dynamic: the first one
    uint32_t taken;  // value taken from the counter
    bool is_first;

    // Called after SequenceOrder::make.
    DEVICE static TileScheduler of(const Params& params, const Order& order,
                                   const int32_t* schedule, uint32_t* counter,
                                   const int32_t* cu_seqlens_q, const int32_t* cu_seqlens_k) {
        const int count = Traits::kVarlen
                              ? order.count
                              : int(params.order.tiles * params.heads.divisor * params.batch);
        return {schedule, counter, cu_seqlens_q, cu_seqlens_k, count, int(blockIdx.x), 0, true};
    }
    // Finds head and first query of the next tile.  Returns false if no tile is left.
    DEVICE bool next(const Params& params, const Order& order, AttentionHead& head, int& row) {
        int tile = index;
        if constexpr (Traits::kDynamic) {
            if (!is_first) {
                tile = int(gridDim.x + taken);
                // The counter gets one increment per tile: the last one resets it to 0.
                if (taken == uint32_t(count - 1)) atomic_add(counter, 0u - uint32_t(count));
            }
            is_first = false;
            if (tile >= count) return false;
            taken = atomic_add(counter, 1u);  // only the next call depends on it
        } else {
            index += gridDim.x;
            if (schedule) tile = schedule[tile];
            else if (tile >= count) tile = -1;
            if (tile < 0) return false;
        }
        if constexpr (Traits::kVarlen) {
            const int rank = order.find(int(params.batch), tile);
            const int heads = params.heads.divisor, first = order.first_tiles[rank];
            const int end = rank + 1 < int(params.batch) ? order.first_tiles[rank + 1] : count;
            const AttentionWorkTile at = AttentionWorkTile::of(tile - first, (end - first) / heads,
                                                               heads, params.order.heads.divisor);
            head = Traits::Sequences::head(params, cu_seqlens_q, cu_seqlens_k,
                                           order.numbers[rank] * heads + at.head);
            row = at.tile * Traits::kTileM;
        } else {
            const AttentionWorkTile at = AttentionWorkTile::of(params, tile);
            head = Traits::Sequences::head(params, nullptr, nullptr, at.head);
            row = at.tile * Traits::kTileM;
        }
        return true;
    }
};

}  // namespace attention
