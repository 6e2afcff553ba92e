// The sums of a tile whose operands are multiplied as they are: 16-bit numbers, or int8.
#include "parts/ring_hopper.cuh"

// ring.turn: with kPingPong, a warpgroup has begun its last stage of a tile, so that the other
// one's full stages are the next ones.
DEVICE void multiply(Ring& ring, const TileWork& work, TileSums& sums) {
    const int consumer = work.consumer, count = work.count;
    if (kPingPong) ring.turn[consumer ^ 1].wait((consumer ^ 1 ^ count) & 1);
    bool first = true;
    int before = 0;
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
                    ColStage::tile(ring.cols[stage], 0, k), !first || k > 0);
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
    if (kShareK && first) return clear(sums);  // the only stage is the other warpgroup's
    ring.release(before);
}

// The same in two halves of the columns at the end: `finish_left` is called when the left one's sums
// are there, while the right one's last kTailStages stages are multiplied.
// There are so many at least.
template <class FinishLeft>
DEVICE void multiply_in_halves(Ring& ring, const TileWork& work, TileSums& sums,
                               const FinishLeft& finish_left) {
    using Half = SumType[kCols / 4];
    Half &left = reinterpret_cast<Half&>(sums[0][0]),
         &right = reinterpret_cast<Half&>(sums[0][kCols / 4]);
    const auto rows = [&](int stage, int k) {
        return RowStage::tile(ring.rows[stage], work.row, k);
    };
    bool first = true;
    int before = 0;
    OwnStages own(work);
#pragma unroll 1
    for (; own.index + kTailStages < own.end; own.next()) {
        const int stage = own.place.stage;
        ring.full[stage].wait(own.place.parity);
        wgmma_fence(sums[0]);
#pragma unroll
        for (int k = 0; k < kTileK; k += kStepK) {
            wgmma<RowElement, ColElement, RowStage::kMajor, ColStage::kMajor>(
                sums[0], rows(stage, k), ColStage::tile(ring.cols[stage], 0, k), !first || k > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (!first) ring.release(before);
        first = false;
        before = stage;
    }
    wgmma_wait<0>(sums[0]);
    if (!first) ring.release(before);
    const OwnStages tail = own;
    wgmma_fence(left, right);
    const auto give = [&](SumType(&half)[kCols / 4], int col, bool waits) {
        own = tail;
#pragma unroll
        for (int i = 0; i < kTailStages; ++i, own.next()) {
            const int stage = own.place.stage;
            if (waits) ring.full[stage].wait(own.place.parity);
            const uint64_t rows = RowStage::tile(ring.rows[stage], work.row, 0),
                           cols = ColStage::tile(ring.cols[stage], 0, 0);
#pragma unroll
            for (int k = 0; k < kTileK; k += kStepK) {
                wgmma<RowElement, ColElement, RowStage::kMajor, ColStage::kMajor>(
                    half, advance(rows, RowStage::offset(0, k)),
                    advance(cols, ColStage::offset(col, k)), !first || i > 0 || k > 0);
            }
        }
        wgmma_commit();
    };
    give(left, 0, true);
    give(right, kCols / 2, false);
    wgmma_wait<1>(left);
    finish_left();
    wgmma_wait<0>(right);
    own = tail;
#pragma unroll
    for (int i = 0; i < kTailStages; ++i, own.next()) ring.release(own.place.stage);
}
