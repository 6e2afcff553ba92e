// The sums of a tile whose operands are multiplied as they are: 16-bit numbers, or int8.
#include "parts/ring_hopper.cuh"

// ring.turn: with kPingPong, a warpgroup has begun its last stage of a tile, so that the other
// one's full stages are the next ones.
DEVICE void multiply(Ring& ring, const TileWork& work, TileSums& sums) {
    const int consumer = work.consumer, count = work.count;
    if (kPingPong) ring.turn[consumer ^ 1].wait((consumer ^ 1 ^ count) & 1);
    bool first = true;
    int before = 0;
    // The only stage may be the other warpgroup's.  Sums that are cleared after the loop would make
    // every stage wait for its own products (ptxas: C7517).
    if (kShareK) clear(sums);
#pragma unroll 1
    for (OwnStages own(work); own.there(); own.next()) {
        const int stage = own.place.stage;
        ring.full[stage].wait(own.place.parity);
        wgmma_fence(sums);
#pragma unroll
        for (int k = 0; k < kTileK; k += kStepK) {
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                wgmma<RowElement, ColElement, RowStage::kMajor, ColStage::kMajor>(
                    sums[block], RowStage::tile(ring.rows[stage], work.row + 64 * block, k),
                    ColStage::tile(ring.cols[stage], 0, k), kShareK || !first || k > 0);
            }
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (!first) ring.release(before);
        first = false;
        before = stage;
    }
    if (kPingPong && threadIdx.x % 128 == 0) ring.turn[consumer].arrive();
    wgmma_wait<0>(sums);
    if (!kShareK || !first) ring.release(before);
}
