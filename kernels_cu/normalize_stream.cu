// normalize_stream.cu: layer_norm (kCentered) and rms_norm as in normalize.cu, of rows of whole, aligned
// vectors, without options.  A block or cluster takes a row after the other (parts/row_stream.cuh); its
// weights and biases stay in registers.
//   layer_norm  the mean of the block's slice, then the squares about it; parts/moments.cuh merges those
//               of a cluster's blocks.
//   sum         null without a residual.
// The other arguments are those of normalize.cu, where they are not null there either.
// Constants: Element, kCentered and those of parts/row_stream.cuh.
// Launch: grid (blocks that run at once, or fewer), block (kNumThreads), dynamic shared memory
// params.stages * sizeof(Slice), twice that with a residual.
#include "parts/moments.cuh"
#include "parts/norm_params.cuh"
#include "parts/row_stream.cuh"

static_assert(kPlain && kThreadsPerRow == kNumThreads, "rows without options, one at a time");

// One thread's part of s = x + residual.
template <bool kHasResidual>
struct Sums {
    // In registers from the first pass on, where they leave room for the rest.
    static constexpr bool kKept = kVectorsPerThread <= 2 && !kHasResidual;
    static constexpr int kUnrolled = kKept ? kVectorsPerThread : 1;
    const RowRing<1 + kHasResidual>& ring;
    const SlicePlace& place;
    RowVector kept[kKept ? kVectorsPerThread : 1];

    DEVICE void take() {
        if constexpr (kKept) {
#pragma unroll
            for (int i = 0; i < kVectorsPerThread; ++i) kept[i] = read(i, 0);
        }
    }
    DEVICE RowVector read(int i, int array) const {
        RowVector vector;
        vector.fill(from_float<Element>(0.0f));
        if (place.holds(i)) vector = ring.slice(array).vectors[i][threadIdx.x];
        return vector;
    }
    // Zeros where the row has no elements.
    DEVICE void get(int i, float (&values)[kVectorWidth]) {
        if constexpr (kKept) {
            keep_packed(kept[i]);
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) values[j] = kept[i][j];
        } else {
            const RowVector a = read(i, 0);
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) values[j] = a[j];
        }
        if constexpr (kHasResidual) {
            const RowVector b = read(i, 1);
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) values[j] += b[j];
        }
    }

    DEVICE float sum() {
        float sum = 0.0f;
#pragma unroll(kUnrolled)
        for (int i = 0; i < kVectorsPerThread; ++i) {
            float values[kVectorWidth], part = 0.0f;
            get(i, values);
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) part += values[j];
            sum += part;
        }
        return sum;
    }
    // Of the distances from `mean`.
    DEVICE float squares(float mean) {
        float sum = 0.0f;
#pragma unroll(kUnrolled)
        for (int i = 0; i < kVectorsPerThread; ++i) {
            float values[kVectorWidth], part = 0.0f;
            get(i, values);
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) {
                const float distance = values[j] - mean;
                part += distance * distance;
            }
            sum += kCentered && !place.holds(i) ? 0.0f : part;
        }
        return sum;
    }
};

// What all rows are multiplied by, and what is added.
struct Factors {
    RowVector weights[kVectorsPerThread], biases[kCentered ? kVectorsPerThread : 1];

    DEVICE static void load(const void* from, float otherwise, const SlicePlace& place,
                            RowVector* vectors) {
#pragma unroll
        for (int i = 0; i < kVectorsPerThread; ++i) {
            vectors[i].fill(from_float<Element>(otherwise));
            if (from && place.holds(i)) {
                vectors[i].load_read_only(static_cast<const Element*>(from) + place.position(i));
            }
        }
    }
    DEVICE void apply(int i, float mean, float rstd, float (&values)[kVectorWidth]) {
        const float shift = -mean * rstd;
        keep_packed(weights[i]);
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            const float y = kCentered ? values[j] * rstd + shift : values[j] * rstd;
            values[j] = y * weights[i][j];
        }
        if constexpr (kCentered) {
            keep_packed(biases[i]);
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) values[j] += biases[i][j];
        }
    }
};

template <bool kHasResidual>
DEVICE void normalize_rows(const Element* x, const Element* residual, Element* y, Element* sum,
                           const SlicePlace& place, Factors& factors, Slice* slices, Barrier* full,
                           Barrier* exchanges, const NormParams& params) {
    constexpr int kArrays = 1 + kHasResidual;
    const auto& layout = params.layout;
    const int64_t step = gridDim.x / kClusterSize;
    RowRing<kArrays> ring{slices, full, params.stages, 0, 0};
    const auto start = [&](int stage, int64_t row) {
        if (row >= layout.num_rows) return;
        const Element* rows[kArrays];
        rows[0] = x + row_offset(layout, kX, row);
        if constexpr (kHasResidual) rows[1] = residual + row_offset(layout, kResidual, row);
        ring.start(stage, rows, place);
    };
    int64_t row = blockIdx.x / kClusterSize;
    if (threadIdx.x == 0) {
        for (int i = 0; i < ring.stages; ++i) start(i, row + i * step);
    }

    const float count = float(layout.num_cols), here = float(place.count * kVectorWidth);
    Sums<kHasResidual> s{ring, place};
#pragma unroll 1
    for (int turn = 0; row < layout.num_rows; row += step, ++turn) {
        ring.wait();
        s.take();
        float mean = 0.0f;
        if constexpr (kCentered) {
            mean = sum_in_block<0>(s.sum(), turn) / (here > 0.0f ? here : 1.0f);
        }
        float squares = sum_in_block<1>(s.squares(mean), turn);
        // All have met: no one needs this row in shared memory any more, or the one before it.
        if (threadIdx.x == 0) {
            if constexpr (s.kKept) {
                start(ring.stage, row + ring.stages * step);
            } else if (turn > 0) {
                start(ring.previous(), row + (ring.stages - 1) * step);
            }
        }
        if constexpr (kCentered) {
            const Moments mine{here, mean, 0.0f, squares};
            const Moments all = merge_in_cluster(mine, turn, MergeMoments(), exchanges);
            mean = all.mean;
            squares = all.m2;
        } else {
            squares = merge_in_cluster(squares, turn, MergeFloats<Sum>(), exchanges);
        }
        const float rstd = reciprocal_square_root(squares / count + params.eps);
        Element* y_row = y + row_offset(layout, kY, row);
#pragma unroll
        for (int i = 0; i < kVectorsPerThread; ++i) {
            if (!place.holds(i)) continue;
            float values[kVectorWidth];
            s.get(i, values);
            RowVector vector;
            if constexpr (kHasResidual) {
                vector.from_floats(values);
                vector.store(sum + row_offset(layout, kSum, row) + place.position(i));
            }
            factors.apply(i, mean, rstd, values);
            vector.from_floats(values);
            vector.store(y_row + place.position(i));
        }
        ring.advance();
    }
}

KERNEL void normalize_stream(const Element* x, const Element* residual, const void* weight,
                             const void* bias, void* y, Element* sum, float*, float*, float*, void*,
                             const NormParams params, int64_t) {
    SHARED_STORAGE(Slice, slices);
    SHARED(Barrier, full, [kMaxStages]);
    SHARED(Barrier, exchanges, [2]);
    if (threadIdx.x == 0) {
        for (int i = 0; i < params.stages; ++i) full[i].init(1);
        for (int i = 0; i < 2; ++i) exchanges[i].init(1);
        fence_barrier_init();
    }
    if constexpr (kClusterSize > 1) {
        // All have started before one writes into another's shared memory.
        cluster_arrive();
        cluster_wait();
    } else {
        sync_block();
    }
    const SlicePlace place = SlicePlace::here(params.layout.num_cols);
    Factors factors;
    Factors::load(weight, 1.0f, place, factors.weights);
    if constexpr (kCentered) Factors::load(bias, 0.0f, place, factors.biases);
    Element* to = static_cast<Element*>(y);
    if (residual) {
        normalize_rows<true>(x, residual, to, sum, place, factors, &slices, full, exchanges, params);
    } else {
        normalize_rows<false>(x, residual, to, sum, place, factors, &slices, full, exchanges, params);
    }
}
