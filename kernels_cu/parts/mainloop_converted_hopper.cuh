// The sums of a tile of a 16-bit A and an 8-bit B.  The transposed product is computed: B^T is wgmma's A,
// whose numbers each thread reads from shared memory and converts in registers, 32 of k ahead of the
// products under way; A^T is wgmma's B and is read from shared memory as it is.
#include "parts/ring_hopper.cuh"

static_assert(kConverts && kBlocks == 1 && !kPingPong && kLead == 0, "64 rows a warpgroup");

constexpr int kDepth = 32, kSteps = kTileK / kDepth;  // of k that are converted at once; of a stage
static_assert(kSteps % 2 == 0, "the steps alternate between two sets of registers");
using RowRegisters = uint32_t[kDepth / kStepK][4];

// B^T's numbers of the warp's 16 rows from `row` of the tile on, of k from `k` on.
DEVICE void load_rows(RowRegisters& a, const unsigned char* stage, int row, int k) {
    const int lane = threadIdx.x % 32;
    if constexpr (kOuterMajorRows) {
        // A 16-bit number of the transposed matrices is two rows' numbers at one k: the even rows become
        // wgmma's first 8 rows, the odd ones the others (epilogue_hopper.cuh: row_of_half).
        static_assert(kRows <= kLineBytes, "a line has all rows");
        uint32_t bytes[4];  // k 0-7, 8-15, 16-23, 24-31
        load_matrix<true>(bytes, stage + RowStage::place(k + lane, row));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            convert_bytes<RowElement, ColElement>(permute_bytes<0x3120>(bytes[i]), a[i / 2][i % 2 * 2],
                                                  a[i / 2][i % 2 * 2 + 1]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kDepth / kStepK; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const unsigned char* p =
                    stage + RowStage::place(row + lane / 4, k + i * kStepK + lane % 4 * 2) +
                    half * 8 * RowStage::kLine;
                const uint32_t low = *reinterpret_cast<const uint16_t*>(p);
                const uint32_t high = *reinterpret_cast<const uint16_t*>(p + 8);
                convert_bytes<RowElement, ColElement>(low | high << 16, a[i][half], a[i][half + 2]);
            }
        }
    }
}

DEVICE void multiply(Ring& ring, const TileWork& work, TileSums& sums) {
    const int row = work.row + threadIdx.x / 32 % 4 * 16;
    OwnStages own(work);
    if (kShareK && !own.there()) return clear(sums);  // the only stage is the other warpgroup's
    RowRegisters a[2];
    ring.full[own.place.stage].wait(own.place.parity);
    load_rows(a[0], ring.rows[own.place.stage], row, 0);
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
                    sums[0], now[i], ColStage::tile(ring.cols[stage], 0, step * kDepth + i * kStepK),
                    !first || step > 0 || i > 0);
            }
            wgmma_commit();
            wgmma_wait<1>(next);
            if (step == 0 && !first) ring.release(before);
            if (step + 1 < kSteps) {
                load_rows(next, ring.rows[stage], row, (step + 1) * kDepth);
            } else if (!own.last()) {
                OwnStages then = own;
                then.next();
                ring.full[then.place.stage].wait(then.place.parity);
                load_rows(next, ring.rows[then.place.stage], row, 0);
            }
        }
        first = false;
        before = stage;
    }
    wgmma_wait<0>(sums);
    ring.release(before);
}
