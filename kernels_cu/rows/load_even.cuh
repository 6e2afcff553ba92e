// Even rows in registers (kInRegisters) or shared memory.  A thread has the same columns of
// kRowsPerThread adjacent rows, and loads their weights and biases once.
// Constants: those of normalize_even.cu.
#pragma once
#include "rows/reduce.cuh"
#include "rows/vector_moments.cuh"

namespace rows {

// Parameters, interleaved with the arrays of normalize_even.cu.  The constant bank is fetched in
// 64-byte lines, one after another.  Row loads need only the first line, which has room for 48
// bytes of arguments; row stores need the second.
struct EvenParams {
    int64_t x_stride, residual_stride;  // row strides
    uint8_t unpredicated;               // nonzero: all vectors, rows, weights and biases exist
    uint8_t blocks_log2;                // per cluster
    uint16_t loads_last;                // nonzero: evict_last
    float eps;
    int64_t y_stride, sum_stride;
    int64_t stores_last_from;  // the first row that is stored with evict_last
};
// Rarely used parameters.
struct RareParams { int64_t statistic_stride, num_rows, num_cols, dtype; };

using RowVector = Vector<Element, kVectorWidth>;
struct EvenStorage { RowVector vectors[kRowsPerThread][kVectorsPerThread][kNumThreads]; };
DEVICE EvenStorage* storage() {
    SHARED_STORAGE(EvenStorage, rows);
    return &rows;
}

// Unroll factors of loops over vectors, as registers allow; layer_norm with a residual takes the
// most registers.  Loops over register-resident rows are fully unrolled, by a factor above their
// count: NVRTC 12.4 applies a factor of one to the inner loop over rows, too.
constexpr int kRegisters = 65536 / (kNumThreads * kMinBlocks);
template <bool kTight>
constexpr int kUnrolled = kInRegisters                        ? 16
                          : kRegisters >= (kTight ? 128 : 64) ? 4
                          : kRegisters >= (kTight ? 64 : 40)  ? 2
                                                              : 1;
// Whether clusters of fewer than kClusterSize blocks are launched, too.
constexpr bool kFewerBlocks = kClusterSize > 2;
constexpr int kPartials = kClusterSize * kWarpsPerRow;  // at most
constexpr int kBlockChunk = kChunk / kClusterSize;
// Whether a register-resident row is unpacked to FP32 once: if one warp has it, and with a
// residual, because the sum takes half the registers of its terms.
template <bool kHasResidual>
constexpr bool kUnpackOnce =
    kInRegisters && kRowsPerThread == 1 && (kPartials == 1 || kHasResidual);

// The columns of a thread's vectors, in all of its rows.  kUnpredicated: all vectors, rows, weights
// and biases exist.
template <bool kUnpredicated>
struct EvenTile {
    RowThread t;
    int num_cols;
    float one_over_count;  // 1 / elements of this warp

    DEVICE static EvenTile here(int64_t num_cols, int blocks_log2) {
        EvenTile at{RowThread::here(), int(num_cols), 0.0f};
        if constexpr (kFewerBlocks) at.t.blocks = 1 << blocks_log2;
        // Keeps the compiler from hoisting dependent values above the branch on `unpredicated`,
        // where they would hold registers.
        at.t.lane = opaque(at.t.lane);
        const float count = at.count_of(at.t.rank * kWarpsPerRow + at.warp());
        at.one_over_count = 1.0f / (count > 0.0f ? count : 1.0f);
        return at;
    }

    // Column of vector 0, and offset of vector i: one base address with constant offsets.
    DEVICE int first() const { return t.position(0); }
    DEVICE int step(int i) const { return i * (t.blocks * kThreadsPerRow * kVectorWidth); }
    DEVICE bool holds(int i) const { return kUnpredicated || first() + step(i) < num_cols; }
    DEVICE float one_over_cols() const { return 1.0f / float(kUnpredicated ? chunk() : num_cols); }
    DEVICE int chunk() const { return t.blocks * kBlockChunk; }
    DEVICE int partials() const { return t.blocks * kWarpsPerRow; }
    DEVICE int warp() const { return t.lane / kWarpSize; }
    // Number of elements of partial statistic `part`, which one warp of the cluster computes.
    DEVICE float count_of(int part) const {
        if (kUnpredicated || num_cols == chunk()) return float(kBlockChunk / kWarpsPerRow);
        if (kPartials == 1) return float(num_cols);
        // All threads of the row have `full` vectors, the first `rest` one more.
        const unsigned total = unsigned(num_cols) / kVectorWidth;
        const unsigned threads = unsigned(t.blocks * kThreadsPerRow), full = total / threads;
        const int rank = part / kWarpsPerRow, first = part % kWarpsPerRow * kWarpSize;
        const int rest = int(total - full * threads) - (rank * kThreadsPerRow + first);
        const int more = rest < 0 ? 0 : rest < kWarpSize ? rest : kWarpSize;
        return float((int(full) * kWarpSize + more) * kVectorWidth);
    }
};

// Keeps the vector packed until its next use: unpacked it takes twice the registers.
DEVICE void keep_packed(RowVector& vector) {
#pragma unroll
    for (auto& access : vector.bytes) {
#pragma unroll
        for (auto& packed : access.words) packed = opaque(int(packed));
    }
}

// A thread's vectors of an array's rows, in registers or shared memory; zeros outside of the rows.
struct EvenRows {
    RowVector registers[kInRegisters ? kRowsPerThread : 1][kInRegisters ? kVectorsPerThread : 1];
    EvenStorage* shared;

    // p: this thread's vector 0 of its first row; rows from `live` on do not exist.  policy: a
    // LoadPolicy or none.
    template <bool kUnpredicated, class... Policy>
    DEVICE void start(const Element* p, int64_t stride, const EvenTile<kUnpredicated>& at, int live,
                      Policy... policy) {
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r, p += stride) {
#pragma unroll
            for (int i = 0; i < kVectorsPerThread; ++i) {
                const bool there = kUnpredicated || (r < live && at.holds(i));
                if constexpr (kInRegisters) {
                    registers[r][i].fill(from_float<Element>(0.0f));
                    if (there) load_vector_of_row(registers[r][i], p + at.step(i), policy...);
                } else if (there) {
                    RowVector* to = &shared->vectors[r][i][threadIdx.x];
                    if constexpr (sizeof(RowVector) == 16) {
                        copy_async<16>(to, p + at.step(i), policy...);
                    } else {
                        copy_async<sizeof(RowVector)>(to, p + at.step(i));
                    }
                } else {
                    shared->vectors[r][i][threadIdx.x].fill(from_float<Element>(0.0f));
                }
            }
        }
        if constexpr (!kInRegisters) copy_async_commit();
    }
    template <bool kOnce>
    DEVICE RowVector get(int r, int i) {
        if constexpr (kInRegisters) {
            if constexpr (!kOnce) keep_packed(registers[r][i]);
            return registers[r][i];
        } else {
            return shared->vectors[r][i][threadIdx.x];
        }
    }
};

template <bool kHasResidual>
struct EvenInput {
    static constexpr bool kTight = kCentered && kHasResidual;
    EvenRows x, residual;

    DEVICE void get(int r, int i, float (&values)[kVectorWidth]) {
        constexpr bool kOnce = kUnpackOnce<kHasResidual>;
        const RowVector a = x.template get<kOnce>(r, i);
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) values[j] = a[j];
        if constexpr (kHasResidual) {
            const RowVector b = residual.template get<kOnce>(r, i);
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) values[j] += b[j];
        }
    }
};

// Weights or biases of vector i; `otherwise` without them.
template <bool kUnpredicated>
DEVICE RowVector load_columns(const void* from, const EvenTile<kUnpredicated>& at, int i,
                              float otherwise) {
    RowVector vector;
    if constexpr (!kUnpredicated) vector.fill(from_float<Element>(otherwise));
    if (kUnpredicated || from) {
        const Element* p = static_cast<const Element*>(from) + at.first() + at.step(i);
        vector.load_read_only(p);
    }
    return vector;
}

// A thread's weights and biases, loaded with the row (kWeightsFirst) or at their use.  Where the
// compiler may not move these loads above the stores of the previous vector, they are loaded one
// vector ahead (kWeightsAhead), unless registers would spill.
constexpr bool kWeightsAhead = !kWeightsFirst && !kReadOnlyLoadsMove &&
                               !(kCentered && (kRowsPerThread > 1 || kRegisters < 48));
template <bool kUnpredicated>
struct Affine {
    static constexpr int kRegisterVectors = kWeightsFirst   ? kVectorsPerThread
                                            : kWeightsAhead ? 2
                                                            : 1;
    const void *weight, *bias;
    RowVector weights[kRegisterVectors], biases[kCentered ? kRegisterVectors : 1];

    DEVICE void start(const EvenTile<kUnpredicated>& at) {
        if constexpr (kWeightsFirst) {
#pragma unroll
            for (int i = 0; i < kVectorsPerThread; ++i) load(i, at, i);
        }
    }
    // Keeps the loaded vectors packed.
    DEVICE void finish() {
        if constexpr (kWeightsFirst) {
#pragma unroll
            for (int i = 0; i < kVectorsPerThread; ++i) keep(i);
        }
    }
    DEVICE void load(int to, const EvenTile<kUnpredicated>& at, int i) {
        const bool there = at.holds(i);
        weights[to] = load_columns<kUnpredicated>(there ? weight : nullptr, at, i, 1.0f);
        if constexpr (kCentered) {
            biases[to] = load_columns<kUnpredicated>(there ? bias : nullptr, at, i, 0.0f);
        }
    }
    // Called for vectors i = 0, 1, ... in turn: vector i is then at index 0, unless all are loaded
    // at index i.  start_turns comes first.
    DEVICE void start_turns(const EvenTile<kUnpredicated>& at) {
        if constexpr (kWeightsAhead) load(1, at, 0);
    }
    DEVICE void next_turn(const EvenTile<kUnpredicated>& at, int i) {
        if constexpr (kWeightsAhead) {
            weights[0] = weights[1];
            if constexpr (kCentered) biases[0] = biases[1];
            if (i + 1 < kVectorsPerThread) load(1, at, i + 1);
        } else if constexpr (!kWeightsFirst) {
            load(0, at, i);
        }
    }
    // The weights of vector i, without its biases.
    DEVICE RowVector weights_of(const EvenTile<kUnpredicated>& at, int i) {
        if constexpr (kWeightsFirst) {
            keep_packed(weights[i]);
            return weights[i];
        } else {
            return load_columns<kUnpredicated>(weight, at, i, 1.0f);
        }
    }
    DEVICE void keep(int i) {
        keep_packed(weights[i]);
        if constexpr (kCentered) keep_packed(biases[i]);
    }
};

}  // namespace rows
