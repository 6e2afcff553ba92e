// The sums of a tile of a 16-bit A and a narrower B.  The transposed product is computed: B^T is
// wgmma's A, whose numbers each thread reads from shared memory and converts in registers, kDepth of
// k ahead of the products under way; A^T is wgmma's B and is read from shared memory as it is.
// What is read and converted is the Rows of parts/rows_*_hopper.cuh, which the variant includes
// before.  With Rows::kFetches they are read another kDepth ahead: products wait for conversions
// only.  Where conversions take long and warpgroups share k, these take turns instead: one converts
// all of its stage while the other multiplies.
#include "parts/ring_hopper.cuh"

static_assert(kConverts && kBlocks == 1 && !kPingPong, "64 rows a warpgroup");

constexpr int kSteps = kTileK / kDepth;  // of a stage
static_assert(kSteps % 2 == 0, "the steps alternate between two sets of registers");
// E4M3 becomes FP16 by an instruction, which turns do not make faster; two steps' registers are few.
constexpr bool kTurns = kShareK && kCols == 64 && kSteps == 2 && !kSame<RowElement, e2m1x2> &&
                        !(kSame<RowElement, e4m3> && kSame<ColElement, half>);

template <class AnyRows>
DEVICE void multiply_rows(AnyRows& rows, Ring& ring, OwnStages own, TileSums& sums) {
    constexpr int kAhead = AnyRows::kFetches ? 2 : 1;
    RowRegisters a[2];
    typename AnyRows::Fetched fetched;
    const auto take = [&](RowRegisters& into, const OwnStages& from, int k) {
        const unsigned char* stage = ring.rows[from.place.stage];
        if constexpr (AnyRows::kFetches) rows.fetch(fetched, stage, k);
        else rows.load(into, stage, from.index, k);
    };
    ring.full[own.place.stage].wait(own.place.parity);
    take(a[0], own, 0);
    if constexpr (AnyRows::kFetches) {
        rows.convert(fetched, a[0]);
        take(a[1], own, kDepth);
    }
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
            if constexpr (AnyRows::kFetches) {
                if (step + 1 < kSteps || !own.last()) rows.convert(fetched, next);
            }
            if (step + kAhead < kSteps) {
                take(next, own, (step + kAhead) * kDepth);
            } else if (!own.last()) {
                OwnStages then = own;
                then.next();
                if (step + kAhead == kSteps) {
                    ring.full[then.place.stage].wait(then.place.parity);
                }
                take(next, then, (step + kAhead - kSteps) * kDepth);
            }
        }
        first = false;
        before = stage;
    }
    wgmma_wait<0>(sums);
    ring.release(before);
}

// Every warpgroup has as many turns, one after the other, the first one first.
struct Turns {
    Ring& ring;
    int consumer, next, end;

    DEVICE Turns(Ring& ring, const TileWork& work) : ring(ring), consumer(work.consumer) {
        const int of_tile = (work.num_k_tiles + kConsumers - 1) / kConsumers;
        next = work.count * of_tile;
        end = next + of_tile;
    }
    DEVICE void take() { ring.turn[consumer].wait((next++ & 1) ^ (consumer == 0 ? 1 : 0)); }
    DEVICE void pass() {
        sync_warp();
        // Each warp, so that none is a turn behind, where a phase has the same parity again.
        if (threadIdx.x % kReleasing == 0) ring.turn[(consumer + 1) % kConsumers].arrive();
    }
    // Those that there are no stages for.
    DEVICE void pass_rest() {
        while (next < end) {
            take();
            pass();
        }
    }
};

DEVICE void multiply_in_turns(Rows& rows, Ring& ring, Turns& turns, OwnStages own, TileSums& sums) {
#pragma unroll 1
    for (bool first = true; own.there(); own.next(), first = false) {
        const int stage = own.place.stage;
        RowRegisters a[kSteps];
        ring.full[stage].wait(own.place.parity);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            rows.load(a[step], ring.rows[stage], own.index, step * kDepth);
        }
        turns.take();
        wgmma_fence(sums, a);
#pragma unroll
        for (int i = 0; i < kTileK / kStepK; ++i) {
            wgmma<ColElement, ColElement, kMajorK, ColStage::kMajor>(
                sums[0], a[i * kStepK / kDepth][i % (kDepth / kStepK)],
                ColStage::tile(ring.cols[stage], 0, i * kStepK), !first || i > 0);
        }
        wgmma_commit();
        turns.pass();  // products under way; the other's come behind them
        wgmma_wait<0>(sums, a);
        ring.release(stage);
    }
    turns.pass_rest();
}

DEVICE void multiply(Ring& ring, const TileWork& work, TileSums& sums) {
    const int row = work.row + threadIdx.x / 32 % 4 * 16;
    const OwnStages own(work);
    if constexpr (kTurns) {
        Turns turns(ring, work);
        if (!own.there()) clear(sums);
        Rows rows(work, row);
        return multiply_in_turns(rows, ring, turns, own, sums);
    }
    // The only stage is the other warpgroup's, or none is this block's.
    if ((kShareK || kSplitK) && !own.there()) return clear(sums);
    Rows rows(work, row);
    multiply_rows(rows, ring, own, sums);
    if constexpr (Rows::kInUnits != 1.0f) {
#pragma unroll
        for (auto& of_rows : sums) {
#pragma unroll
            for (auto& sum : of_rows) sum *= Rows::kInUnits;
        }
    }
}
