// The rows of normalized_rows.cuh: where a thread's vectors are, in registers (kInRegisters) or in
// shared memory, and the weights and biases of its places, which it reads once for all its rows.
// Constants: those of normalized_rows.cuh.
#include "parts/row.cuh"
#include "parts/vector_moments.cuh"

// What the kernel is told of a call (cupykern/rows/norm_plan.py: _PLAIN_PARAMS, _RARE_PARAMS), among its
// arrays (normalize_plain.cu).  Parameters come from memory, too: in lines of 64 bytes, one after the
// other as the code asks for them.  What a row's loads ask for is on the first line, which has room
// for 48 bytes of them; what its stores ask for is on the second.
struct PlainParams {
    int64_t x_stride, residual_stride;  // of rows
    uint16_t whole;       // nonzero: all of a thread's vectors, rows, weights and biases are there
    uint16_t loads_last;  // nonzero: evicted last
    float eps;
    int64_t y_stride, sum_stride;
    int64_t stores_last_from;  // the first row whose results are evicted last
};
// What some calls ask for.
struct RareParams { int64_t statistic_stride, num_rows, num_cols, dtype; };

using RowVector = Vector<Element, kVectorWidth>;
struct Storage { RowVector vectors[kRowsPerThread][kVectorsPerThread][kNumThreads]; };
DEVICE Storage* storage() {
    SHARED_STORAGE(Storage, rows);
    return &rows;
}

// Vectors whose values are under way at once: as registers allow, of which sums for layer_norm take
// the most.  All of those that lie there, and a count above theirs: NVRTC 12.4 takes a count of one,
// where there is one, for the loop over rows inside too.
constexpr int kRegisters = 65536 / (kNumThreads * kMinBlocks);
template <bool kTight>
constexpr int kUnrolled = kInRegisters                        ? 16
                          : kRegisters >= (kTight ? 128 : 64) ? 4
                          : kRegisters >= (kTight ? 64 : 40)  ? 2
                                                              : 1;
constexpr int kParts = kClusterSize * kWarpsPerRow;
// One row in registers whose numbers are unpacked once: those of one warp, and sums, of which there are half
// as many as of what they are made of.
template <bool kHasResidual>
constexpr bool kUnpackedOnce = kInRegisters && kRowsPerThread == 1 && (kParts == 1 || kHasResidual);

// Where a thread's vectors are in all of its rows.  kWhole: all of them are there, of all rows, and
// there are weights and biases, which saves the questions.
template <bool kWhole>
struct Places {
    RowThread t;
    int num_cols;
    float one_over_count;  // of this warp's elements

    DEVICE static Places here(int64_t num_cols) {
        Places at{RowThread::here(), int(num_cols), 0.0f};
        // What follows from it is not worked out before it is known whether rows are whole: of what is
        // the same in both cases a compiler holds too much.
        at.t.lane = opaque(at.t.lane);
        const float count = at.count_of(at.t.rank * kWarpsPerRow + at.warp());
        at.one_over_count = 1.0f / (count > 0.0f ? count : 1.0f);
        return at;
    }

    // Of vector 0, and how much further vector i is: addresses of one base with constant offsets.
    DEVICE int first() const { return t.position(0); }
    DEVICE static constexpr int step(int i) {
        return i * (kClusterSize * kThreadsPerRow * kVectorWidth);
    }
    DEVICE bool holds(int i) const { return kWhole || first() + step(i) < num_cols; }
    DEVICE float one_over_cols() const { return 1.0f / float(kWhole ? kChunk : num_cols); }
    DEVICE int warp() const { return t.lane / kWarpSize; }
    // The elements of part number `part`: of a warp in some block of the cluster.
    DEVICE float count_of(int part) const {
        if (kWhole || num_cols == kChunk) return float(kChunk / kParts);
        if (kParts == 1) return float(num_cols);
        const int total = num_cols / kVectorWidth;
        const int rank = part / kWarpsPerRow, first = part % kWarpsPerRow * kWarpSize;
        int vectors = 0;
#pragma unroll
        for (int i = 0; i < kVectorsPerThread; ++i) {
            const int rest = total - (i * kClusterSize + rank) * kThreadsPerRow - first;
            vectors += rest < 0 ? 0 : rest < kWarpSize ? rest : kWarpSize;
        }
        return float(vectors * kVectorWidth);
    }
};

DEVICE void keep_packed(RowVector& vector) {
#pragma unroll
    for (auto& access : vector.bytes) {
#pragma unroll
        for (uint32_t& word : access.words) word = uint32_t(opaque(int(word)));
    }
}

// This thread's part of an array's rows; zeros where they have no elements.
struct Held {
    RowVector registers[kInRegisters ? kRowsPerThread : 1][kInRegisters ? kVectorsPerThread : 1];
    Storage* shared;

    // p: the first row's at the first place; rows from `live` on are not there.  policy: a LoadPolicy
    // or none.
    template <bool kWhole, class... Policy>
    DEVICE void start(const Element* p, int64_t stride, const Places<kWhole>& at, int live,
                      Policy... policy) {
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r, p += stride) {
#pragma unroll
            for (int i = 0; i < kVectorsPerThread; ++i) {
                const bool there = kWhole || (r < live && at.holds(i));
                if constexpr (kInRegisters) {
                    registers[r][i].fill(from_float<Element>(0.0f));
                    if (there) registers[r][i].load(p + at.step(i), policy...);
                } else if (there) {
                    copy_async<16>(&shared->vectors[r][i][threadIdx.x], p + at.step(i), policy...);
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
            // Packed until it is used again, instead of as twice the registers.
            if constexpr (!kOnce) keep_packed(registers[r][i]);
            return registers[r][i];
        } else {
            return shared->vectors[r][i][threadIdx.x];
        }
    }
};

template <bool kHasResidual>
struct Sums {
    static constexpr bool kTight = kCentered && kHasResidual;
    Held x, residual;

    DEVICE void get(int r, int i, float (&values)[kVectorWidth]) {
        constexpr bool kOnce = kUnpackedOnce<kHasResidual>;
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

// Those of vector i, or else `otherwise`.
template <bool kWhole>
DEVICE RowVector load_columns(const void* from, const Places<kWhole>& at, int i, float otherwise) {
    RowVector vector;
    if constexpr (!kWhole) vector.fill(from_float<Element>(otherwise));
    if (kWhole || from) {
        const Element* p = static_cast<const Element*>(from) + at.first() + at.step(i);
        if constexpr (kFilled) {
            vector.load(p);  // stays before sync_warp
        } else {
            vector.load_read_only(p);
        }
    }
    return vector;
}

// A thread's weights and biases, which it asks for with the row (kWeightsFirst) or where it uses them.
template <bool kWhole>
struct Columns {
    static constexpr int kHeld = kWeightsFirst ? kVectorsPerThread : 1;
    const void *weight, *bias;
    RowVector weights[kHeld], biases[kCentered ? kHeld : 1];

    DEVICE void start(const Places<kWhole>& at) {
        if constexpr (kWeightsFirst) {
#pragma unroll
            for (int i = 0; i < kVectorsPerThread; ++i) load(i, at, i);
        }
    }
    // They are here now, and stay as they are in memory.
    DEVICE void finish() {
        if constexpr (kWeightsFirst) {
#pragma unroll
            for (int i = 0; i < kVectorsPerThread; ++i) keep(i);
        }
    }
    DEVICE void load(int to, const Places<kWhole>& at, int i) {
        const bool there = at.holds(i);
        weights[to] = load_columns<kWhole>(there ? weight : nullptr, at, i, 1.0f);
        if constexpr (kCentered) {
            biases[to] = load_columns<kWhole>(there ? bias : nullptr, at, i, 0.0f);
        }
    }
    // Of vector i alone.
    DEVICE RowVector weights_of(const Places<kWhole>& at, int i) {
        if constexpr (kWeightsFirst) {
            keep_packed(weights[i]);
            return weights[i];
        } else {
            return load_columns<kWhole>(weight, at, i, 1.0f);
        }
    }
    DEVICE void keep(int i) {
        keep_packed(weights[i]);
        if constexpr (kCentered) keep_packed(biases[i]);
    }
};
