// normalize_stream.cu: layer_norm (kCentered) and rms_norm as in normalize.cu, of rows of whole,
// aligned vectors, without options.  A block or cluster takes a row after the other
// (parts/row_stream.cuh); its weights and biases stay in registers.
//   layer_norm  the mean of each warp's elements, then the squares about it; each warp merges those
//               of all (as parts/moments.cuh does, without its second part of the mean).
//   sum         null without a residual; layer_norm has none.
//   counter     zero, and zero again in the end.
// The other arguments are those of normalize.cu, where they are not null there either.
// Constants: Element, kCentered and those of parts/row_stream.cuh.
// Launch: grid (blocks that run at once, or fewer), block (kNumThreads), dynamic shared memory
// params.stages * sizeof(Slice), twice that with a residual.
#include "parts/norm_params.cuh"
#include "parts/row_stream.cuh"
#include "parts/vector_moments.cuh"

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
    // The warp's squares.
    DEVICE void statistic(const RingPlace& at, float, float& squares) const {
        float sum = 0.0f;
#pragma unroll(kUnrolled)
        for (int i = 0; i < kVectorsPerThread; ++i) {
            float values[kVectorWidth], part = 0.0f;
            get(at, i, values);
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) part += values[j] * values[j];
            sum += part;
        }
        squares = reduce_in_warp(sum, Sum());
    }
    // The warp's mean, and the squares about it.  one_over: one over the number of its elements.
    DEVICE void statistic(const RingPlace& at, float one_over, MeanAndSquares& s) const {
        VectorMoments<kVectorWidth> mine;
#pragma unroll(kUnrolled)
        for (int i = 0; i < kVectorsPerThread; ++i) {
            if (!kWhole && !ring.place.holds(i)) break;
            float values[kVectorWidth];
            get(at, i, values);
            mine.take(values);
        }
        s.mean = reduce_in_warp(mine.sum(), Sum()) * one_over;
        s.squares = reduce_in_warp(mine.squares_about(s.mean), Sum());
    }
};

// How many elements there are, and one over it: the same in all rows.
struct alignas(8) Count {
    float count, reciprocal;

    DEVICE static Count of(float count) { return {count, count > 0.0f ? 1.0f / count : 0.0f}; }
};
// Of the block's warps, of the row's parts, and of the block and the row.
struct Counts {
    const Count *of_warps, *of_parts, *of_block, *of_row;

    DEVICE static Counts of(int64_t num_cols) {
        SHARED(Count, of_warps, [kWarps]);
        SHARED(Count, of_blocks, [kClusterSize]);
        SHARED(Count, of_all, [2]);
        const int thread = int(threadIdx.x);
        const SlicePlace place = SlicePlace::here(num_cols);
        if (thread < kWarps) of_warps[thread] = Count::of(float(place.count_of_warp(thread)));
        if (thread < kClusterSize) {
            const SlicePlace other = SlicePlace::of_rank(num_cols, thread);
            of_blocks[thread] = Count::of(float(other.count * kVectorWidth));
        }
        if (thread == 0) {
            of_all[0] = Count::of(float(place.count * kVectorWidth));
            of_all[1] = Count::of(float(num_cols));
        }
        return {of_warps, kClusterSize > 1 ? of_blocks : of_warps, of_all, of_all + 1};
    }
};

// kCount parts, part(i), become one.  all: their elements; counts: those of each.
template <int kCount, class Part>
DEVICE void merge(Part part, const Count*, const Count*, float& merged) {
    merged = sum_over<kCount>(part);
}
template <int kCount, class Part>
DEVICE void merge(Part part, const Count* counts, const Count* all, MeanAndSquares& merged) {
    // Distances from one of the means, so that a mean far from zero loses nothing.
    const float origin = part(0).mean;
    const auto distance = [&](int i) { return part(i).mean - origin; };
    const float step = sum_over<kCount>([&](int i) { return counts[i].count * distance(i); }) *
                       all->reciprocal;
    merged = {origin + step, sum_over<kCount>([&](int i) {
                  const float from_mean = distance(i) - step;
                  return part(i).squares + counts[i].count * (from_mean * from_mean);
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
                           uint32_t* counter, const NormParams& params) {
    constexpr int kArrays = 1 + kHasResidual;
    const auto& layout = params.layout;
    const int stages = params.stages;
    const auto ring = RowRing<kArrays>::make(slices, barriers, place, stages);
    const RowOrder order = RowOrder::of(counter, layout.num_rows, stages);
    const auto start = [&](int stage, int row) {
        if (row < 0) {
            ring.end(stage);
            return;
        }
        const Element* from[kArrays];
        from[0] = x + row_offset(layout, kX, row);
        if constexpr (kHasResidual) from[1] = residual + row_offset(layout, kResidual, row);
        ring.start(stage, row, from);
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) start(i, order.first(i));
    }

    const auto exchange = Exchange<Statistic>::make(barriers, order);
    const Sums<kHasResidual, kWhole> s{ring};
    // The statistics of the row of turn number `turn`, if there is one, which is written in that turn.
    // All of them are received before a block ends, so that nothing is written into its shared memory
    // then.
    const auto send = [&](int turn, const RingPlace& at) {
        ring.wait_full(at);
        if (ring.row(at) < 0) return;
        const uint32_t taken = exchange.ask();
        Statistic statistic;
        s.statistic(at, counts.of_warps[threadIdx.x / kWarpSize].reciprocal, statistic);
        exchange.send(turn, taken, statistic, [&](const Statistic* parts) {
            Statistic merged;
            merge<kWarps>([&](int i) { return parts[i]; }, counts.of_warps, counts.of_block,
                          merged);
            return merged;
        });
    };
    SHARED(int, to_start, [1]);  // the row that comes to the stage that is empty next: the first thread's
    RingPlace at{0, 0};
    send(0, at);
#pragma unroll 1
    for (int turn = 0; ring.row(at) >= 0; ++turn, at = at.next(stages)) {
        if (stages > 2) send(turn + 1, at.next(stages));
        if (threadIdx.x == 0 && turn > 0) {
            const RingPlace before = at.previous(stages);
            ring.wait_empty(before);
            start(before.stage, to_start[0]);
        }
        if (stages == 2) send(turn + 1, at.next(stages));  // which was brought just now

        exchange.receive(turn);
        if (threadIdx.x == 0) to_start[0] = exchange.next_row(turn);
        Statistic found;
        merge<kParts>([&](int i) { return exchange.part(turn, i); }, counts.of_parts, counts.of_row,
                      found);
        const float rstd = reciprocal_square_root(squares_of(found) * counts.of_row->reciprocal + params.eps);
        const float shift = -mean_of(found) * rstd;
        const int row = ring.row(at);
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
    }
}

template <bool kHasResidual>
DEVICE void normalize_any_rows(const Element* x, const Element* residual, const void* weight,
                               const void* bias, Element* y, Element* sum, uint32_t* counter,
                               Slice* slices, const NormParams& params) {
    const int64_t num_cols = params.layout.num_cols;
    const Counts counts = Counts::of(num_cols);
    const StreamBarriers barriers = StreamBarriers::make(params.stages);
    const SlicePlace place = SlicePlace::here(num_cols);
    Factors factors;
    Factors::load(weight, 1.0f, place, factors.weights);
    if constexpr (kCentered) Factors::load(bias, 0.0f, place, factors.biases);
    if (num_cols == kChunk) {
        normalize_rows<kHasResidual, true>(x, residual, y, sum, factors, slices, place, barriers,
                                           counts, counter, params);
    } else {
        normalize_rows<kHasResidual, false>(x, residual, y, sum, factors, slices, place, barriers,
                                            counts, counter, params);
    }
}

KERNEL void normalize_stream(const Element* x, const Element* residual, const void* weight,
                             const void* bias, void* y, Element* sum, float*, float*, float*,
                             uint32_t* counter, const NormParams params, int64_t) {
    SHARED_STORAGE(Slice, slices);
    Element* to = static_cast<Element*>(y);
    if constexpr (!kCentered) {
        if (residual) {
            normalize_any_rows<true>(x, residual, weight, bias, to, sum, counter, &slices, params);
            return;
        }
    }
    normalize_any_rows<false>(x, residual, weight, bias, to, sum, counter, &slices, params);
}
