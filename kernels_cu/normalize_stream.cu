// normalize_stream.cu: layer_norm (kCentered) and rms_norm as in normalize.cu, of rows of whole,
// aligned vectors, without options.  A block or cluster takes a row after the other
// (parts/row_stream.cuh); its weights and biases stay in registers.
//   layer_norm  the mean of each warp's elements, then the squares about it; each warp merges those
//               of all (as parts/moments.cuh does, without its second part of the mean).
//   sum         null without a residual; layer_norm has none.
// The other arguments are those of normalize.cu, where they are not null there either.
// Constants: Element, kCentered and those of parts/row_stream.cuh.
// Launch: grid (blocks that run at once, or fewer), block (kNumThreads), dynamic shared memory
// params.stages * sizeof(Slice), twice that with a residual.
#include "parts/norm_params.cuh"
#include "parts/row_stream.cuh"

static_assert(kPlain && kThreadsPerRow == kNumThreads, "rows without options, one at a time");

struct alignas(8) MeanAndSquares { float mean, squares; };
using Statistic = Choose<kCentered != 0, MeanAndSquares, float>::Type;
DEVICE float mean_of(float) { return 0.0f; }
DEVICE float mean_of(const MeanAndSquares& s) { return s.mean; }
DEVICE float squares_of(float squares) { return squares; }
DEVICE float squares_of(const MeanAndSquares& s) { return s.squares; }

// One thread's part of s = x + residual.
template <bool kHasResidual, bool kWhole>
struct Sums {
    // Vectors whose values are under way at once, where passes take no more registers.
    static constexpr int kUnrolled = kVectorsPerThread <= 2 ? kVectorsPerThread : kCentered ? 1 : 2;
    const RowRing<1 + kHasResidual>& ring;

    DEVICE void get(const RingPlace& at, int i, float (&values)[kVectorWidth]) const {
        const Element zero = from_float<Element>(0.0f);
        const RowVector a = ring.template get<kWhole>(at, i, 0, zero);
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) values[j] = a[j];
        if constexpr (kHasResidual) {
            const RowVector b = ring.template get<kWhole>(at, i, 1, zero);
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) values[j] += b[j];
        }
    }
    // Sums over the warp.
    DEVICE float warp_sum(const RingPlace& at) const {
        float sum = 0.0f;
#pragma unroll(kUnrolled)
        for (int i = 0; i < kVectorsPerThread; ++i) {
            float values[kVectorWidth], part = 0.0f;
            get(at, i, values);
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) part += values[j];
            sum += part;
        }
        return reduce_in_warp(sum, Sum());
    }
    // Of the distances from `mean`.
    DEVICE float warp_squares(const RingPlace& at, float mean) const {
        float sum = 0.0f;
#pragma unroll(kUnrolled)
        for (int i = 0; i < kVectorsPerThread; ++i) {
            float values[kVectorWidth], part = 0.0f;
            get(at, i, values);
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) {
                const float distance = values[j] - mean;
                part += distance * distance;
            }
            sum += kCentered && !kWhole && !ring.place.holds(i) ? 0.0f : part;
        }
        return reduce_in_warp(sum, Sum());
    }
    DEVICE void statistic(const RingPlace& at, float, float& squares) const {
        squares = warp_squares(at, 0.0f);
    }
    DEVICE void statistic(const RingPlace& at, float count, MeanAndSquares& s) const {
        s.mean = warp_sum(at) / (count > 0.0f ? count : 1.0f);
        s.squares = warp_squares(at, s.mean);
    }
};

// The elements of the block's warps, and of the row's parts: the same in all rows.
struct Counts {
    const float *of_warps, *of_parts;

    DEVICE static Counts of(int64_t num_cols) {
        SHARED(float, of_warps, [kWarps]);
        SHARED(float, of_blocks, [kClusterSize]);
        const int thread = int(threadIdx.x);
        if (thread < kWarps) {
            of_warps[thread] = float(SlicePlace::here(num_cols).count_of_warp(thread));
        }
        if (thread < kClusterSize) {
            const SlicePlace place = SlicePlace::of_rank(num_cols, thread);
            of_blocks[thread] = float(place.count * kVectorWidth);
        }
        return {of_warps, kClusterSize > 1 ? of_blocks : of_warps};
    }
};

// kCount parts become one.  count: of all their elements; counts: of each.
template <int kCount>
DEVICE float merge(const float* parts, const float*, float) {
    return sum_over<kCount>([&](int i) { return parts[i]; });
}
template <int kCount>
DEVICE MeanAndSquares merge(const MeanAndSquares* parts, const float* counts, float count) {
    // Distances from one of the means, so that a mean far from zero loses nothing.
    const float origin = parts[0].mean;
    const auto distance = [&](int i) { return parts[i].mean - origin; };
    const float step = sum_over<kCount>([&](int i) { return counts[i] * distance(i); }) /
                       (count > 0.0f ? count : 1.0f);
    return {origin + step, sum_over<kCount>([&](int i) {
                const float from_mean = distance(i) - step;
                return parts[i].squares + counts[i] * (from_mean * from_mean);
            })};
}

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
    DEVICE void apply(int i, float shift, float rstd, float (&values)[kVectorWidth]) {
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

// kWhole: the row has all of the vectors that its blocks have room for.
template <bool kHasResidual, bool kWhole>
DEVICE void normalize_rows(const Element* x, const Element* residual, Element* y, Element* sum,
                           Factors& factors, Slice* slices, const SlicePlace& place,
                           const StreamBarriers& barriers, const Counts& counts,
                           const NormParams& params) {
    constexpr int kArrays = 1 + kHasResidual;
    const auto& layout = params.layout;
    const int step = int(gridDim.x) / kClusterSize, first = int(blockIdx.x) / kClusterSize;
    // Which row a turn is for.
    const auto row_of = [&](int turn) { return first + int64_t(turn) * step; };
    const int turns = first < layout.num_rows ? int((layout.num_rows - first - 1) / step) + 1 : 0;
    const RowRing<kArrays> ring{slices, barriers, place, params.stages};
    const auto start = [&](int stage, int turn) {
        if (turn >= turns) return;
        const int64_t next = row_of(turn);
        const Element* rows[kArrays];
        rows[0] = x + row_offset(layout, kX, next);
        if constexpr (kHasResidual) rows[1] = residual + row_offset(layout, kResidual, next);
        ring.start(stage, rows);
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < params.stages; ++i) start(i, i);
    }

    const auto exchange = Exchange<Statistic>::make(barriers);
    const Sums<kHasResidual, kWhole> s{ring};
    RingPlace at{0, 0}, before{0, 0}, ahead{0, 0};
    // The statistics of row number `turn`, which is written in that turn.  All of them are received
    // before a block ends, so that nothing is written into its shared memory then.
    const auto send = [&](int turn) {
        ring.wait_full(ahead);
        Statistic statistic;
        s.statistic(ahead, counts.of_warps[threadIdx.x / kWarpSize], statistic);
        exchange.send(turn, statistic, [&](const Statistic* parts) {
            const float count = float(place.count * kVectorWidth);
            return merge<kWarps>(parts, counts.of_warps, count);
        });
        ahead.advance(params.stages);
    };
    if (turns > 0) send(0);
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        const bool last = turn + 1 == turns;
        if (!last && params.stages > 2) send(turn + 1);
        const int next = turn + params.stages - 1;
        if (threadIdx.x == 0 && turn > 0 && next < turns) {
            ring.wait_empty(before);
            start(before.stage, next);
        }
        if (!last && params.stages == 2) send(turn + 1);  // which was brought just now

        const float count = float(layout.num_cols);
        const Statistic found = merge<kParts>(exchange.receive(turn), counts.of_parts, count);
        const float rstd = reciprocal_square_root(squares_of(found) / count + params.eps);
        const float shift = -mean_of(found) * rstd;
        const int64_t row = row_of(turn);
        Element* y_row = y + row_offset(layout, kY, row);
#pragma unroll
        for (int i = 0; i < kVectorsPerThread; ++i) {
            if (!kWhole && !place.holds(i)) continue;
            float values[kVectorWidth];
            s.get(at, i, values);
            RowVector vector;
            if constexpr (kHasResidual) {
                vector.from_floats(values);
                vector.store(sum + row_offset(layout, kSum, row) + place.position(i));
            }
            factors.apply(i, shift, rstd, values);
            vector.from_floats(values);
            vector.store(y_row + place.position(i));
        }
        ring.release(at);
        before = at;
        at.advance(params.stages);
    }
}

template <bool kHasResidual>
DEVICE void normalize_any_rows(const Element* x, const Element* residual, const void* weight,
                               const void* bias, Element* y, Element* sum, Slice* slices,
                               const NormParams& params) {
    const int64_t num_cols = params.layout.num_cols;
    const Counts counts = Counts::of(num_cols);
    const StreamBarriers barriers = StreamBarriers::make(params.stages);
    const SlicePlace place = SlicePlace::here(num_cols);
    Factors factors;
    Factors::load(weight, 1.0f, place, factors.weights);
    if constexpr (kCentered) Factors::load(bias, 0.0f, place, factors.biases);
    if (num_cols == kChunk) {
        normalize_rows<kHasResidual, true>(x, residual, y, sum, factors, slices, place, barriers,
                                           counts, params);
    } else {
        normalize_rows<kHasResidual, false>(x, residual, y, sum, factors, slices, place, barriers,
                                            counts, params);
    }
}

KERNEL void normalize_stream(const Element* x, const Element* residual, const void* weight,
                             const void* bias, void* y, Element* sum, float*, float*, float*, void*,
                             const NormParams params, int64_t) {
    SHARED_STORAGE(Slice, slices);
    Element* to = static_cast<Element*>(y);
    if constexpr (!kCentered) {
        if (residual) {
            normalize_any_rows<true>(x, residual, weight, bias, to, sum, &slices, params);
            return;
        }
    }
    normalize_any_rows<false>(x, residual, weight, bias, to, sum, &slices, params);
}
