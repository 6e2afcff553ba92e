// normalize_stream.cu: layer_norm (kCentered) and rms_norm as in normalize.cu, of rows of whole,
// aligned vectors, without options.  A block or cluster takes a row after the other
// (parts/row_stream.cuh); its weights and biases stay in registers.
//   layer_norm  the mean of the block's slice, then the squares about it; parts/moments.cuh merges
//               those of a cluster's blocks.
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
    using Row = RowOfRing<1 + kHasResidual>;
    Row row;

    DEVICE void get(int i, float (&values)[kVectorWidth]) {
        const RowVector a = row.get(i, 0);
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) values[j] = a[j];
        if constexpr (kHasResidual) {
            const RowVector b = row.get(i, 1);
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) values[j] += b[j];
        }
    }
    // Sums over the warp.
    DEVICE float warp_sum() {
        float sum = 0.0f;
#pragma unroll(Row::kUnrolled)
        for (int i = 0; i < kVectorsPerThread; ++i) {
            float values[kVectorWidth], part = 0.0f;
            get(i, values);
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) part += values[j];
            sum += part;
        }
        return reduce_in_warp(sum, Sum());
    }
    // Of the distances from `mean`.
    DEVICE float warp_squares(float mean) {
        float sum = 0.0f;
#pragma unroll(Row::kUnrolled)
        for (int i = 0; i < kVectorsPerThread; ++i) {
            float values[kVectorWidth], part = 0.0f;
            get(i, values);
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) {
                const float distance = values[j] - mean;
                part += distance * distance;
            }
            sum += kCentered && !row.ring.place.holds(i) ? 0.0f : part;
        }
        return reduce_in_warp(sum, Sum());
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
                           Factors& factors, Slice* slices, const SlicePlace& place,
                           const StreamBarriers& barriers, const NormParams& params) {
    constexpr int kArrays = 1 + kHasResidual;
    const auto& layout = params.layout;
    const int64_t step = gridDim.x / kClusterSize;
    int64_t row = blockIdx.x / kClusterSize;
    RowRing<kArrays> ring{slices, barriers.full, place, params.stages, 0, 0};
    const auto start = [&](int stage, int turns) {
        const int64_t next = row + turns * step;
        if (next >= layout.num_rows) return;
        const Element* rows[kArrays];
        rows[0] = x + row_offset(layout, kX, next);
        if constexpr (kHasResidual) rows[1] = residual + row_offset(layout, kResidual, next);
        ring.start(stage, rows);
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < params.stages; ++i) start(i, i);
    }

    const float count = float(layout.num_cols), here = float(place.count * kVectorWidth);
    const MergeFloats<Sum> add;
    Sums<kHasResidual> s{{ring, from_float<Element>(0.0f)}};
#pragma unroll 1
    for (int turn = 0; row < layout.num_rows; row += step, ++turn) {
        s.row.take();
        float mean = 0.0f;
        if constexpr (kCentered) {
            mean = merge_in_block<0>(s.warp_sum(), turn, add) / (here > 0.0f ? here : 1.0f);
        }
        float squares = merge_in_block<1>(s.warp_squares(mean), turn, add);
        if (threadIdx.x == 0) s.row.refill(turn, start);
        if constexpr (kCentered) {
            const Moments mine{here, mean, 0.0f, squares};
            const Moments all = merge_in_cluster(mine, turn, MergeMoments(), barriers.exchanges);
            mean = all.mean;
            squares = all.m2;
        } else {
            squares = merge_in_cluster(squares, turn, add, barriers.exchanges);
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
    const StreamBarriers barriers = StreamBarriers::make(params.stages);
    const SlicePlace place = SlicePlace::here(params.layout.num_cols);
    Factors factors;
    Factors::load(weight, 1.0f, place, factors.weights);
    if constexpr (kCentered) Factors::load(bias, 0.0f, place, factors.biases);
    Element* to = static_cast<Element*>(y);
    if (residual) {
        normalize_rows<true>(x, residual, to, sum, factors, &slices, place, barriers, params);
    } else {
        normalize_rows<false>(x, residual, to, sum, factors, &slices, place, barriers, params);
    }
}
