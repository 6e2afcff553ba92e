// The FP32 mainloop by multiply-adds: cp.async copies tiles of A and B to kStages stages in shared
// memory; threads accumulate outer products in registers.
//
// Stages are MN-major for all layouts of the operands: K-major operands are transposed by copies of
// single elements.  A thread computes kThreadM x kThreadN accumulators as blocks of 4 x 4.  Of 32
// threads kLanesM share columns and kLanesN share rows, so that they read 16 kLanesM contiguous
// bytes of A and 16 kLanesN of B.  Each accumulator is one chain of multiply-adds in the order of
// k.
// Constants:
//   kTileM, kTileN, kTileK, kThreadM, kThreadN, kStages
//   kLanesM         4 or 8.
//   kCopyA, kCopyB  Copy.
#pragma once

namespace gemm {

// kVectors: 16 bytes along m or n; rows are aligned and whole vectors.  kAlongMn: single elements
// with any strides, coalesced along m or n.  kAlongK: single elements, contiguous along k.
enum Copy { kVectors, kAlongMn, kAlongK };

constexpr int kLanesN = 32 / kLanesM;
constexpr int kGroupM = kThreadM * kLanesM, kGroupN = kThreadN * kLanesN;  // of 32 threads
constexpr int kGroupsM = kTileM / kGroupM, kGroupsN = kTileN / kGroupN;
static_assert(kLanesM == 4 || kLanesM == 8, "two and three bits of a lane");
static_assert(kThreadM % 4 == 0 && kThreadN % 4 == 0, "fragments are vectors");
static_assert(kGroupsM * kGroupM == kTileM && kGroupsN * kGroupN == kTileN, "whole groups");
static_assert(kNumThreads == 32 * kGroupsM * kGroupsN, "groups share a tile");

DEVICE constexpr int smaller(int a, int b) { return a < b ? a : b; }

// An operand's stage.  kAlongK: with the padding, copies of 8 of k x 4 rows have no bank conflicts.
template <int kExtent_, int kCopy>
struct OperandStage {
    static constexpr int kExtent = kExtent_, kPitch = kExtent + (kCopy == kAlongK ? 4 : 0);
    alignas(16) float elements[kTileK][kPitch];

    // Loads kCount elements at `k`, in blocks of 4 that are kStep apart.
    template <int kStep, int kCount>
    DEVICE void load(float (&values)[kCount], int k, int first) const {
#pragma unroll
        for (int i = 0; i < kCount; i += 4) {
            const Bytes<16> four = load_vector<16>(&elements[k][first + i / 4 * kStep]);
#pragma unroll
            for (int j = 0; j < 4; ++j) values[i + j] = bit_cast<float>(four.words[j]);
        }
    }
};

// A thread's copies of an operand, stage by stage.  Rows past the operand's end repeat its last
// rows: copies need no predicate, and the accumulators of these rows are not stored.
template <class Tile, int kCopy>
struct StageCopier {
    static constexpr int kWidth = kCopy == kVectors ? 4 : 1;  // elements of a copy
    static constexpr int kColumns = Tile::kExtent / kWidth;
    static constexpr int kThreadsMn =
        smaller(kCopy == kAlongK ? kNumThreads / 8 : kNumThreads, kColumns);
    static constexpr int kThreadsK =
        kCopy == kAlongK ? 8 : smaller(kNumThreads / kThreadsMn, kTileK);
    static constexpr int kCountMn = kColumns / kThreadsMn, kCountK = kTileK / kThreadsK;
    static constexpr int kThreads = kThreadsMn * kThreadsK;
    static_assert(kCountMn * kThreadsMn == kColumns && kCountK * kThreadsK == kTileK,
                  "whole copies");
    const float* from[kCountMn];  // sources of the next copies
    int64_t step;
    int k, mn;

    // data: the operand's element (0, 0); extent: its rows of A or columns of B.
    DEVICE StageCopier(const float* data, int64_t mn_stride, int64_t k_stride, int64_t first_mn,
                       int64_t extent)
        : step(kThreadsK * k_stride) {
        const int thread = int(threadIdx.x);
        k = kCopy == kAlongK ? thread % kThreadsK : thread / kThreadsMn;
        mn = (kCopy == kAlongK ? thread / kThreadsK : thread % kThreadsMn) * kWidth;
#pragma unroll
        for (int i = 0; i < kCountMn; ++i) {
            const int64_t row = first_mn + mn + i * kThreadsMn * kWidth, last = extent - kWidth;
            from[i] = data + (row < last ? row : last) * mn_stride + k * k_stride;
        }
    }
    // Issues the copies of the next stage; num_k of its k are valid, the rest becomes zero.
    DEVICE void start(Tile& tile, int num_k) {
        if (kThreads < kNumThreads && int(threadIdx.x) >= kThreads) return;
#pragma unroll
        for (int i = 0; i < kCountMn; ++i) {
#pragma unroll
            for (int j = 0; j < kCountK; ++j) {
                copy_async<4 * kWidth>(
                    &tile.elements[k + j * kThreadsK][mn + i * kThreadsMn * kWidth], from[i],
                    k + j * kThreadsK < num_k);
                from[i] += kCopy == kAlongK ? kThreadsK : step;
            }
        }
    }
};

struct Stage {
    OperandStage<kTileM, kCopyA> a;
    OperandStage<kTileN, kCopyB> b;
};
using CopierA = StageCopier<OperandStage<kTileM, kCopyA>, kCopyA>;
using CopierB = StageCopier<OperandStage<kTileN, kCopyB>, kCopyB>;
using Accumulators = float[kThreadM][kThreadN];

// Coordinates of this thread's accumulators in the tile.  Lanes that differ in bit 0 or in bit 1
// load the same vector of one operand, so that a half warp's 16-byte loads take one pass over the
// banks.
struct ThreadCoord {
    int first_m, first_n;

    DEVICE static ThreadCoord here() {
        const int lane = int(threadIdx.x) % 32, group = int(threadIdx.x) / 32;
        const int two = (lane >> 1 & 1) | (lane >> 3 & 2);
        const int three = (lane & 1) | (lane >> 1 & 6);
        return {group / kGroupsN * kGroupM + (kLanesM == 4 ? two : three) * 4,
                group % kGroupsN * kGroupN + (kLanesM == 4 ? three : two) * 4};
    }
    // Coordinates in the tile of accumulator i along m and j along n.
    DEVICE int row(int i) const { return first_m + i / 4 * (4 * kLanesM) + i % 4; }
    DEVICE int col(int j) const { return first_n + j / 4 * (4 * kLanesN) + j % 4; }
};

struct Fragments {
    float a[kThreadM], b[kThreadN];

    DEVICE void load(const Stage& stage, const ThreadCoord& thread, int k) {
        stage.a.template load<4 * kLanesM>(a, k, thread.first_m);
        stage.b.template load<4 * kLanesN>(b, k, thread.first_n);
    }
    // Rows alternate in direction, so that consecutive instructions share an operand's register.
    DEVICE void multiply(Accumulators& acc) const {
#pragma unroll
        for (int n = 0; n < kThreadN; ++n) {
#pragma unroll
            for (int i = 0; i < kThreadM; ++i) {
                const int m = n % 2 == 0 ? i : kThreadM - 1 - i;
                acc[m][n] = multiply_add(a[m], b[n], acc[m][n]);
            }
        }
    }
};

// acc += A * B over num_k of k.  Called by all threads of the block.
DEVICE void multiply(Stage (&stages)[kStages], CopierA& a, CopierB& b, int num_k,
                     const ThreadCoord& thread, Accumulators& acc) {
    int to_copy = num_k;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
        a.start(stages[i].a, to_copy);
        b.start(stages[i].b, to_copy);
        copy_async_commit();
        to_copy -= kTileK;
    }
    copy_async_wait<kStages - 2>();
    sync_block();
    Fragments fragments[2];
    fragments[0].load(stages[0], thread, 0);
    int stage = 0, next = kStages - 1;  // the stage to read, and the one to copy to
#pragma unroll 1
    for (int left = num_k; left > 0; left -= kTileK) {
#pragma unroll
        for (int k = 0; k < kTileK; ++k) {
            if (k == kTileK - 1) {
                copy_async_wait<kStages - 2>();
                sync_block();  // the next stage has arrived, and all have read this one
                next = stage;
                stage = stage + 1 < kStages ? stage + 1 : 0;
            }
            fragments[(k + 1) % 2].load(stages[stage], thread, (k + 1) % kTileK);
            if (k == 0) {
                a.start(stages[next].a, to_copy);
                b.start(stages[next].b, to_copy);
                copy_async_commit();
                to_copy -= kTileK;
            }
            fragments[k % 2].multiply(acc);
        }
    }
    copy_async_wait<0>();
    sync_block();  // the stages' memory is free
}

}  // namespace gemm
