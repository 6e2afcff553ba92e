// normalize_stream.cu: layer_norm (kCentered) and rms_norm as in normalize.cu, of rows of whole,
// aligned vectors, without options.  A block or cluster takes a row after the other, by warps of
// different roles (parts/row_stream.cuh); weights and biases stay in the writers' registers.
//   layer_norm  the mean of each warp's elements and the squares about it, then of the block's and
//               the row's (as parts/moments.cuh does, without its second part of the mean).
//   sum         null without a residual; layer_norm has none.
//   counter     zero, and zero again in the end.
// The other arguments are those of normalize.cu, where they are not null there either.
// Constants: Element, kCentered and those of parts/row_stream.cuh.
// Launch: grid (blocks that run at once, or fewer), block (kNumThreads), dynamic shared memory
// params.stages * sizeof(Piece), twice that with a residual.
#include "parts/norm_params.cuh"
#include "parts/row_stream.cuh"
#include "parts/vector_moments.cuh"

static_assert(kPlain, "rows without options");

struct alignas(8) MeanAndSquares { float mean, squares; };
using Statistic = Choose<kCentered != 0, MeanAndSquares, float>::Type;
DEVICE float mean_of(float) { return 0.0f; }
DEVICE float mean_of(const MeanAndSquares& s) { return s.mean; }
DEVICE float squares_of(float squares) { return squares; }
DEVICE float squares_of(const MeanAndSquares& s) { return s.squares; }

// s = x + residual of a vector that is there.
template <bool kHasResidual>
DEVICE void get_sums(const RowRing<1 + kHasResidual>& ring, const RingPlace& at, int vector,
                     float (&values)[kVectorWidth]) {
    const RowVector a = ring.get(at, 0, vector);
#pragma unroll
    for (int j = 0; j < kVectorWidth; ++j) values[j] = a[j];
    if constexpr (kHasResidual) {
        const RowVector b = ring.get(at, 1, vector);
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) values[j] += b[j];
    }
}

// How many elements there are, and one over it: the same in all rows.
struct alignas(8) Count {
    float count, reciprocal;

    DEVICE static Count of(float count) { return {count, count > 0.0f ? 1.0f / count : 0.0f}; }
};
// Of the readers' warps, of the row's blocks, of this block and of the row.
struct Counts {
    const Count *of_warps, *of_blocks, *of_block, *of_row;

    DEVICE static Counts of(int64_t num_cols) {
        SHARED(Count, of_warps, [kReaderWarps]);
        SHARED(Count, of_blocks, [kClusterSize]);
        SHARED(Count, of_all, [2]);
        const int thread = int(threadIdx.x);
        const SlicePlace place = SlicePlace::here(num_cols);
        if (thread < kReaderWarps) {
            int vectors = 0;
            for (int i = 0; i < kVectorsPerThread; ++i) {
                for (int first = 0; first < kWriters; first += kReaders) {
                    const int rest = place.vectors(i) - first - thread * kWarpSize;
                    vectors += rest < 0 ? 0 : rest < kWarpSize ? rest : kWarpSize;
                }
            }
            of_warps[thread] = Count::of(float(vectors * kVectorWidth));
        }
        if (thread < kClusterSize) {
            const SlicePlace other = SlicePlace::of_rank(num_cols, thread);
            of_blocks[thread] = Count::of(float(other.count * kVectorWidth));
        }
        if (thread == 0) {
            of_all[0] = Count::of(float(place.count * kVectorWidth));
            of_all[1] = Count::of(float(num_cols));
        }
        return {of_warps, of_blocks, of_all, of_all + 1};
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
    const float step =
        sum_over<kCount>([&](int i) { return counts[i].count * distance(i); }) * all->reciprocal;
    merged = {origin + step, sum_over<kCount>([&](int i) {
                  const float from_mean = distance(i) - step;
                  return part(i).squares + counts[i].count * (from_mean * from_mean);
              })};
}

// What a thread takes of its vectors, and its warp makes of it.
struct SquaresOfVectors {
    float sum = 0.0f;

    DEVICE void take(const float (&values)[kVectorWidth]) {
        float part = 0.0f;
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) part += values[j] * values[j];
        sum += part;
    }
};
DEVICE float of_warp(const SquaresOfVectors& mine, const Count&) {
    return reduce_in_warp(mine.sum, Sum());
}
DEVICE MeanAndSquares of_warp(const VectorMoments<kVectorWidth>& mine, const Count& count) {
    const float mean = reduce_in_warp(mine.sum(), Sum()) * count.reciprocal;
    return {mean, reduce_in_warp(mine.squares_about(mean), Sum())};
}
using OfVectors = Choose<kCentered != 0, VectorMoments<kVectorWidth>, SquaresOfVectors>::Type;

// What all rows are multiplied by, and what is added.
struct Factors {
    RowVector weights[kVectorsPerThread], biases[kCentered ? kVectorsPerThread : 1];

    DEVICE static void load(const void* from, float otherwise, const SlicePlace& place,
                            RowVector* vectors) {
        const int vector = int(threadIdx.x);
#pragma unroll
        for (int i = 0; i < kVectorsPerThread; ++i) {
            vectors[i].fill(from_float<Element>(otherwise));
            if (from && place.holds(i, vector)) {
                const Element* columns = static_cast<const Element*>(from);
                vectors[i].load_read_only(columns + place.position(i, vector));
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

// What a row's writers are told.  row: -1 after the last one.
struct alignas(16) Task {
    float rstd, shift;
    int row, padding;
};

template <bool kHasResidual>
struct Stream {
    static constexpr int kArrays = 1 + kHasResidual;
    const Element *x, *residual;
    const void *weight, *bias;
    Element *y, *sum;
    const NormParams& params;
    RowRing<kArrays> ring;
    Exchange<Statistic> exchange;
    Counts counts;
    Task* tasks;
    float *mean_out, *rstd_out;  // null: not wanted

    DEVICE void load_rows(uint32_t* counter) const {
        if (lane_id() != 0) return;
        bool names = true;
        if constexpr (kClusterSize > 1) names = cluster_rank() == 0;
        RowOrder<RowRing<kArrays>> order{ring, counter, params.layout.num_rows, !names};
        order.start();
        const LoadPolicy policy = load_policy(params.loads_last);
        RingPlace at{0, 0};
        for (int turn = 0;; ++turn) {
            ring.await_name(turn);
            const int row = ring.row(turn);
            if (row < 0) return;
            const Element* from[kArrays];
            from[0] = x + row_offset(params.layout, kX, row);
            if constexpr (kHasResidual) {
                from[1] = residual + row_offset(params.layout, kResidual, row);
            }
            ring.load(at, from, policy);
            order.advance(turn);
        }
    }
    DEVICE void read_rows() const {
        RingPlace at{0, 0};
        const int first = int(threadIdx.x) - kWriters;
        const Count& count = counts.of_warps[Exchange<Statistic>::reader_warp()];
        for (int turn = 0; ring.row(turn) >= 0; ++turn) {
            OfVectors mine;
#pragma unroll 1
            for (int i = 0; i < kVectorsPerThread; ++i, at.advance(ring.stages)) {
                ring.wait_full(at);
#pragma unroll
                for (int vector = first; vector < first + kWriters; vector += kReaders) {
                    if (!ring.place.holds(i, vector)) continue;
                    float values[kVectorWidth];
                    get_sums<kHasResidual>(ring, at, vector, values);
                    mine.take(values);
                }
            }
            exchange.send(turn, of_warp(mine, count), [&](const Statistic* parts) {
                Statistic merged;
                merge<kReaderWarps>([&](int i) { return parts[i]; }, counts.of_warps,
                                    counts.of_block, merged);
                return merged;
            });
        }
    }
    // All messages are received before a block ends, so that nothing is written into its shared
    // memory then.
    DEVICE void finish_rows() const {
        for (int turn = 0;; ++turn) {
            const int row = ring.row(turn);
            Task task{0.0f, 0.0f, row, 0};
            if (row >= 0) {
                const Statistic* parts = exchange.receive(turn);
                Statistic found;
                merge<kClusterSize>([&](int i) { return parts[i]; }, counts.of_blocks,
                                    counts.of_row, found);
                task.rstd = reciprocal_square_root(squares_of(found) * counts.of_row->reciprocal +
                                                   params.eps);
                task.shift = -mean_of(found) * task.rstd;
                bool writes = rstd_out && lane_id() == 0;
                if constexpr (kClusterSize > 1) writes = writes && cluster_rank() == 0;
                if (writes) {
                    const int64_t to = row_offset(params.layout, kStatistic, row);
                    const float rstd = task.rstd;
                    if constexpr (kCentered) mean_out[to] = rstd != rstd ? rstd : mean_of(found);
                    rstd_out[to] = rstd;
                }
            }
            if (lane_id() == 0) {
                tasks[slot_of(turn)] = task;
                ring.barriers.finished[slot_of(turn)].arrive();
            }
            if (row < 0) return;
        }
    }
    DEVICE void write_rows() const {
        Factors factors;
        Factors::load(weight, 1.0f, ring.place, factors.weights);
        if constexpr (kCentered) Factors::load(bias, 0.0f, ring.place, factors.biases);
        RingPlace at{0, 0};
        const int vector = int(threadIdx.x);
#pragma unroll 1
        for (int turn = 0;; ++turn) {
            ring.barriers.finished[slot_of(turn)].wait(parity_of(turn));
            const Task task = tasks[slot_of(turn)];
            if (task.row < 0) return;
            Element* y_row = y + row_offset(params.layout, kY, task.row);
            const StorePolicy policy = store_policy(task.row >= params.stores_last_from);
#pragma unroll
            for (int i = 0; i < kVectorsPerThread; ++i, at.advance(ring.stages)) {
                ring.wait_full(at);  // as readers have: no wait
                if (ring.place.holds(i, vector)) {
                    const int position = ring.place.position(i, vector);
                    float values[kVectorWidth];
                    get_sums<kHasResidual>(ring, at, vector, values);
                    RowVector out;
                    if constexpr (kHasResidual) {
                        out.from_floats(values);
                        out.store(sum + row_offset(params.layout, kSum, task.row) + position,
                                  policy);
                    }
                    factors.apply(i, task.shift, task.rstd, values);
                    out.from_floats(values);
                    out.store(y_row + position, policy);
                }
                ring.release(at);
            }
        }
    }
};

// A warpgroup's registers where roles have whole ones: writers need more, others less.
constexpr bool kUnevenRegisters = kWriters == 512;

template <bool kHasResidual>
DEVICE void normalize_rows(const Element* x, const Element* residual, const void* weight,
                           const void* bias, Element* y, Element* sum, float* mean_out,
                           float* rstd_out, uint32_t* counter, Piece* pieces,
                           const NormParams& params) {
    SHARED(Task, tasks, [kSlots]);
    const int64_t num_cols = params.layout.num_cols;
    const Counts counts = Counts::of(num_cols);
    const StreamBarriers barriers = StreamBarriers::make(params.stages);
    const SlicePlace place = SlicePlace::here(num_cols);
    const auto ring = RowRing<1 + kHasResidual>::make(pieces, barriers, place, params.stages);
    const auto exchange = Exchange<Statistic>::make(barriers);
    const Stream<kHasResidual> stream{x,    residual, weight, bias,  y,        sum,     params,
                                      ring, exchange, counts, tasks, mean_out, rstd_out};
    const Role role = role_of_warp();
    if (role == kWriter) {
        if constexpr (kUnevenRegisters) increase_registers<96>();
        stream.write_rows();
        return;
    }
    if constexpr (kUnevenRegisters) decrease_registers<40>();
    if (role == kReader) {
        stream.read_rows();
    } else if (role == kLoader) {
        stream.load_rows(counter);
    } else if (role == kFinisher) {
        stream.finish_rows();
    }
}

KERNEL void normalize_stream(const Element* x, const Element* residual, const void* weight,
                             const void* bias, void* y, Element* sum, float* mean_out,
                             float* rstd_out, float*, uint32_t* counter, const NormParams params,
                             int64_t) {
    SHARED_STORAGE(Piece, pieces);
    Element* to = static_cast<Element*>(y);
    if constexpr (!kCentered) {
        if (residual) {
            normalize_rows<true>(x, residual, weight, bias, to, sum, mean_out, rstd_out, counter,
                                 &pieces, params);
            return;
        }
    }
    normalize_rows<false>(x, residual, weight, bias, to, sum, mean_out, rstd_out, counter, &pieces,
                          params);
}
