// A grid barrier for launches whose blocks need not be co-resident.
//
// A grid barrier that spins until the last block arrives deadlocks when some blocks are not
// resident: two launches in different streams can each hold a part of the GPU and wait for ever.
// Therefore a block stops waiting after kMostPolls polls and leaves its work to the block that
// arrives last.  That block never waits for a block that has yet to start.
#pragma once

// All words are zero before and after a launch, except the upper bit of state.
struct GridBarrier {
    static constexpr int kMostBlocks = 4096;
    uint64_t
        state;  // upper half: arrivals, top bit flips every launch; lower half: blocks that left
    uint32_t padding[2];
    uint32_t left[kMostBlocks / 32];  // one bit per block that has left
};

// Waits for all blocks of the launch (gridDim.x <= kMostBlocks), then calls work(block) for this
// block.  The block that arrives last also calls it for the blocks that left.  All threads of a
// block call this function once per launch.  `work` sees the earlier writes of all blocks; its
// results must not depend on the block that computes them.
template <class F> DEVICE void after_all_blocks(GridBarrier* barrier, F work) {
    sync_block();
    bool leaves = false;
    uint32_t num_left = 0;
    if (threadIdx.x == 0) {
        // All blocks together add 2^63: the upper bit flips with the last arrival.
        const uint32_t addend = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
        const uint64_t before = atomic_add_acq_rel(&barrier->state, uint64_t(addend) << 32);
        uint64_t now = before + (uint64_t(addend) << 32);
        if ((before ^ now) >> 63) num_left = uint32_t(now);
        for (int polls = 0; (before ^ now) >> 63 == 0 && !leaves; ++polls) {
            yield();
            now = load_acquire(&barrier->state);
            // The swap fails if the last block has arrived: it has counted the blocks that left.
            leaves = polls >= kMostPolls && (before ^ now) >> 63 == 0 &&
                     compare_and_swap(&barrier->state, now, now + 1);
        }
        if (leaves) atomic_add(&barrier->left[blockIdx.x / 32], 1u << blockIdx.x % 32);
        for (uint32_t seen = 0; seen < num_left;) {  // until all that left have set their bits
            seen = 0;
            for (uint32_t i = 0; i * 32 < gridDim.x; ++i) {
                seen += count_bits(load_acquire(&barrier->left[i]));
            }
        }
    }
    if (sync_block_or(leaves)) return;
    constexpr uint32_t kForOther = 1u << 31;
    // The only value live across `work`, which is inlined at one call.
    uint32_t block = blockIdx.x | (sync_block_or(num_left != 0) ? kForOther : 0);
#pragma unroll 1
    while (true) {
        work(block & ~kForOther);
        if (block < kForOther) return;
        sync_block();  // shared memory is free; no thread still searches the bits
        if (threadIdx.x == 0 && block != (blockIdx.x | kForOther)) {
            atomic_add(&barrier->left[block % kForOther / 32], 0u - (1u << block % 32));
            atomic_add(&barrier->state, uint64_t(0) - 1);
        }
        sync_block();
        block = 0;
        while (block < gridDim.x && !(load_acquire(&barrier->left[block / 32]) >> block % 32 & 1)) {
            ++block;
        }
        if (block == gridDim.x) return;
        block |= kForOther;
    }
}
