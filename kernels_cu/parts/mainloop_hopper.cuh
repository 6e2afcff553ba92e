// Hopper's main loop: a producer brings tiles of A and B by TMA through a ring of kStages stages, two
// warpgroups multiply them by wgmma.
//
//   ElementA, ElementB   16-bit operands of one type.
//   kOuterMajorA, -B     false: neighbours along k are neighbours in memory, true: along m (of A) or n
//                        (of B).
//   kTileM, kTileN       the sums of a tile; a stage has 128 bytes of k.
//   kPingPong            false: the warpgroups share the rows of every tile.  true: they take turns, so
//                        that one finishes its tile while the other multiplies.
//   kLead                stages that the first warpgroup is ahead of the other one where they share tiles:
//                        each finishes its rows while the other one still, or already, multiplies.
#include "platform/wgmma.cuh"

constexpr int kLineBytes = 128;  // of shared memory, swizzled
constexpr int kTileK = kLineBytes / int(sizeof(ElementA));
constexpr int kStepK = 32 / int(sizeof(ElementA));
constexpr int kConsumers = 2;  // warpgroups; the producer is one more
constexpr int kConsumerRows = kPingPong ? kTileM : kTileM / kConsumers;
constexpr int kBlocks = kConsumerRows / 64;  // of rows, each an instruction's
static_assert(kBlocks * 64 == kConsumerRows && kBlocks * kTileN <= 256, "sums fit into registers");
static_assert(kLead <= kStages && !(kPingPong && kLead > 0), "a lead within the ring");
static_assert(kNumThreads == 128 * (kConsumers + 1), "two warpgroups multiply, one loads");

// An operand's part of a stage, kOuter rows of A or columns of B.
template <class Element, bool kOuterMajor, int kOuter>
struct OperandStage {
    static constexpr Major kMajor = kOuterMajor ? kMajorMN : kMajorK;
    static constexpr int kBytes = kOuter * kLineBytes;
    // Along the outer dimension, of one box.
    static constexpr int kLine = kLineBytes / int(sizeof(Element));

    DEVICE static void load(unsigned char* stage, const TensorMap& map, Barrier& full, int k,
                            int outer, int batch) {
        constexpr int kBox = kOuterMajor ? kLine : kOuter;
        static_assert(kOuter % kBox == 0, "an operand's part is whole boxes");
#pragma unroll
        for (int i = 0; i < kOuter; i += kBox) {
            tma_load(stage + i * kLineBytes, map, full,
                     {kOuterMajor ? outer + i : k, kOuterMajor ? k : outer + i, batch});
        }
    }
    // Of the numbers from (outer, k) on, for one wgmma.
    DEVICE static uint64_t tile(const unsigned char* stage, int outer, int k) {
        if constexpr (kOuterMajor) {
            const unsigned char* p = stage + outer * kLineBytes + k * kLineBytes;
            return matrix_descriptor<128>(p, kLine * kLineBytes, 8 * kLineBytes);
        } else {
            const unsigned char* p = stage + outer * kLineBytes + k * int(sizeof(Element));
            return matrix_descriptor<128>(p, 0, 8 * kLineBytes);
        }
    }
};
using StageA = OperandStage<ElementA, kOuterMajorA, kTileM>;
using StageB = OperandStage<ElementB, kOuterMajorB, kTileN>;

// full: a stage's bytes are there; empty: its consumers are done; turn: with kPingPong, a warpgroup has
// begun its last stage of a tile, so that the other one's full stages are the next ones; else, the first
// one is kLead stages ahead.
struct Ring {
    unsigned char a[kStages][StageA::kBytes];
    unsigned char b[kStages][StageB::kBytes];
    Barrier full[kStages], empty[kStages], turn[kConsumers];

    DEVICE void init() {
        for (int i = 0; i < kStages; ++i) {
            full[i].init(1);
            empty[i].init(kPingPong ? 1 : kConsumers);
        }
        for (int i = 0; i < kConsumers; ++i) turn[i].init(1);
        fence_barrier_init();
    }
};
struct RingPlace {
    int stage = 0, parity = 0;

    DEVICE void advance() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
    DEVICE void skip(int count) {
        const int next = stage + count;
        parity ^= next / kStages & 1;
        stage = next % kStages;
    }
};

// By one thread: brings the tiles of A from row `row` on and of B from column `col` on.
DEVICE void load_tiles(Ring& ring, RingPlace& place, const TensorMap& a_map, const TensorMap& b_map,
                       int num_k_tiles, int row, int col, int batch_a, int batch_b) {
#pragma unroll 1
    for (int i = 0; i < num_k_tiles; ++i) {
        Barrier& full = ring.full[place.stage];
        ring.empty[place.stage].wait(place.parity ^ 1);
        full.arrive_expect_tx(StageA::kBytes + StageB::kBytes);
        StageA::load(ring.a[place.stage], a_map, full, i * kTileK, row, batch_a);
        StageB::load(ring.b[place.stage], b_map, full, i * kTileK, col, batch_b);
        place.advance();
    }
}

// By warpgroup `consumer`: the sums of its `count`-th tile, from row `row` on.
DEVICE void multiply(Ring& ring, RingPlace& place, int num_k_tiles, int consumer, int count, int row,
                     float (&sums)[kBlocks][kTileN / 2]) {
    const auto release = [&](int stage) {
        if (threadIdx.x % 128 == 0) ring.empty[stage].arrive();
    };
    // Then the first warpgroup gives no turn twice before the other one has taken it: the stage that it
    // gives the next one at is free only when the other one has released one of this tile.
    const bool leads = kLead > 0 && num_k_tiles >= kStages;
    if (kPingPong) ring.turn[consumer ^ 1].wait((consumer ^ 1 ^ count) & 1);
    if (leads && consumer == 1) ring.turn[0].wait(count & 1);
    int before = 0;
#pragma unroll 1
    for (int i = 0; i < num_k_tiles; ++i) {
        ring.full[place.stage].wait(place.parity);
        wgmma_fence(sums);
#pragma unroll
        for (int k = 0; k < kTileK; k += kStepK) {
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                wgmma<ElementA, ElementB, StageA::kMajor, StageB::kMajor>(
                    sums[block], StageA::tile(ring.a[place.stage], row + 64 * block, k),
                    StageB::tile(ring.b[place.stage], 0, k), i > 0 || k > 0);
            }
        }
        wgmma_commit();
        if (leads && consumer == 0 && i == kLead - 1 && threadIdx.x % 128 == 0) ring.turn[0].arrive();
        wgmma_wait<1>();
        if (i > 0) release(before);
        before = place.stage;
        place.advance();
    }
    if (kPingPong && threadIdx.x % 128 == 0) ring.turn[consumer].arrive();
    wgmma_wait<0>(sums);
    release(before);
}
