// The sums of a tile of a 16-bit A and a narrower B.  The transposed product is computed: B^T is
// wgmma's A, whose numbers each thread reads from shared memory and converts in registers, kDepth of
// k ahead of the products under way; A^T is wgmma's B and is read from shared memory as it is.
// What is read and converted is the Rows of parts/rows_*_hopper.cuh, which the variant includes
// before.
#include "parts/ring_hopper.cuh"

static_assert(kConverts && kBlocks == 1 && !kPingPong && kLead == 0, "64 rows a warpgroup");

constexpr int kSteps = kTileK / kDepth;  // of a stage
static_assert(kSteps % 2 == 0, "the steps alternate between two sets of registers");

DEVICE void multiply(Ring& ring, const TileWork& work, TileSums& sums) {
    const int row = work.row + threadIdx.x / 32 % 4 * 16;
    OwnStages own(work);
    // The only stage is the other warpgroup's, or none is this block's.
    if ((kShareK || kSplitK) && !own.there()) return clear(sums);
    Rows rows(work, row);
    RowRegisters a[2];
    ring.full[own.place.stage].wait(own.place.parity);
    rows.load(a[0], ring.rows[own.place.stage], own.index, 0);
    bool first = true;
    int before = 0;
#pragma unroll 1
    for (; own.there(); own.next()) {
        const int stage = own.place.stage;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            RowRegisters &now = a[step % 2], &next = a[(step + 1) % 2];
            wgmma_fence(sums);
#pragma unroll
            for (int i = 0; i < kDepth / kStepK; ++i) {
                wgmma<ColElement, ColElement, kMajorK, ColStage::kMajor>(
                    sums[0], now[i],
                    ColStage::tile(ring.cols[stage], 0, step * kDepth + i * kStepK),
                    !first || step > 0 || i > 0);
            }
            wgmma_commit();
            wgmma_wait<1>(next);
            if (step == 0 && !first) ring.release(before);
            if (step + 1 < kSteps) {
                rows.load(next, ring.rows[stage], own.index, (step + 1) * kDepth);
            } else if (!own.last()) {
                OwnStages then = own;
                then.next();
                ring.full[then.place.stage].wait(then.place.parity);
                rows.load(next, ring.rows[then.place.stage], then.index, 0);
            }
        }
        first = false;
        before = stage;
    }
    wgmma_wait<0>(sums);
    ring.release(before);
}
