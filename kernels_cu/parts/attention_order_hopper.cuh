// Attention on Hopper: which tiles of queries a block computes, and in which order.
//
// Without a mask of blocks and packed sequences the host knows how long every tile takes: a block
// has those that a schedule gives it, or every gridDim.x-th one.  Else a block takes the next one
// as soon as it can, by a counter; the long ones come first as far as the order can tell.
#include "parts/attention_task.cuh"

constexpr bool kBlocks = kMaskMode == 2, kArray = kMaskMode == 1;
static_assert(kCounts || (!kBlocks && !kPacked), "the host does not know how long tiles take");
constexpr int kConsumers = kNumThreads / 128 - 1;
constexpr int kTileM = 64 * kConsumers;
constexpr int kMostSequences = 384;  // of packed ones
static_assert(!kPacked || kMostSequences <= 3 * 128, "a thread has one sequence");

// Packed sequences, those with the longest tiles first.
struct SequenceOrder {
    int count;  // of all tiles
    uint16_t numbers[kPacked ? kMostSequences : 1];
    int first_tiles[kPacked ? kMostSequences : 1];  // of all heads, before those of a sequence

    // By all threads; `scratch` has kMostSequences of {longest, tiles}.  They meet afterwards.
    struct Length { int longest, tiles; };
    DEVICE void make(const AttentionParams& params, const int32_t* cu_seqlens_q,
                     const int32_t* cu_seqlens_k, Length* scratch) {
        const int batch = int(params.batch), heads = int(params.heads);
        for (int i = threadIdx.x; i < batch; i += kNumThreads) {
            const AttentionHead head =
                AttentionHead::of(params, cu_seqlens_q, cu_seqlens_k, i * heads);
            const int end = head.sq > 0 ? head.limit(params, head.sq - 1) : 0;
            scratch[i] = {end, ((head.sq + kTileM - 1) / kTileM) * heads};
        }
        sync_block();
        for (int i = threadIdx.x; i < batch; i += kNumThreads) {
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
    // The place in the order of the sequence that a tile belongs to.
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

// By the thread that loads.
struct TileOrder {
    const int32_t* schedule;  // gridDim.x numbers a round, a -1 after a block's last one; or null
    uint32_t* counter;        // 0 before and after the launch
    const int32_t *cu_seqlens_q, *cu_seqlens_k;
    int count;       // of all tiles
    int index;       // of the next tile; where tiles are taken by the counter, of the first one
    uint32_t taken;  // from the counter, after the first one
    bool is_first;

    // After SequenceOrder::make.
    DEVICE static TileOrder of(const AttentionParams& params, const SequenceOrder& sequences,
                               const int32_t* schedule, uint32_t* counter,
                               const int32_t* cu_seqlens_q, const int32_t* cu_seqlens_k) {
        const int count =
            kPacked ? sequences.count : int(params.tiles * params.heads * params.batch);
        return {schedule, counter, cu_seqlens_q, cu_seqlens_k, count, int(blockIdx.x), 0, true};
    }
    // Where the tile after the last one lies; false: there is none.
    DEVICE bool next(const AttentionParams& params, const SequenceOrder& sequences,
                     AttentionHead& head, int& row) {
        int tile = index;
        if constexpr (kCounts) {
            if (!is_first) {
                tile = int(gridDim.x + taken);
                // For every tile one number is taken: this was the last one.
                if (taken == uint32_t(count - 1)) atomic_add(counter, 0u - uint32_t(count));
            }
            is_first = false;
            if (tile >= count) return false;
            taken = atomic_add(counter, 1u);  // only the next call waits for it
        } else {
            index += gridDim.x;
            if (schedule) tile = schedule[tile];
            else if (tile >= count) tile = -1;
            if (tile < 0) return false;
        }
        if constexpr (kPacked) {
            const int place = sequences.find(int(params.batch), tile);
            const int heads = int(params.heads), first = sequences.first_tiles[place];
            const int end =
                place + 1 < int(params.batch) ? sequences.first_tiles[place + 1] : count;
            const AttentionPlace at = AttentionPlace::of(tile - first, (end - first) / heads, heads,
                                                         params.heads_per_section);
            head = AttentionHead::of(params, cu_seqlens_q, cu_seqlens_k,
                                     sequences.numbers[place] * heads + at.head);
            row = at.tile * kTileM;
        } else {
            const AttentionPlace at = AttentionPlace::of(params, tile);
            head = AttentionHead::of(params, nullptr, nullptr, at.head);
            row = at.tile * kTileM;
        }
        return true;
    }
};
