// layer_norm and rms_norm by persistent blocks (rows/persistent.cuh).
//
// layer_norm: each warp computes the mean of its elements and the squares about it.  They are
// merged over blocks and rows (like rows/moments.cuh, without mean_low).
// Constants: those of rows/persistent.cuh, kCentered.
#pragma once
#include "rows/norm_params.cuh"
#include "rows/persistent.cuh"
#include "rows/vector_moments.cuh"

namespace rows {

struct alignas(8) MeanAndSquares { float mean, squares; };
using Statistic = Choose<kCentered != 0, MeanAndSquares, float>::Type;
DEVICE float mean_of(float) { return 0.0f; }
DEVICE float mean_of(const MeanAndSquares& s) { return s.mean; }
DEVICE float squares_of(float squares) { return squares; }
DEVICE float squares_of(const MeanAndSquares& s) { return s.squares; }

// Gets s = x + residual of a vector in a full stage.
template <bool kHasResidual>
DEVICE void get_input(const RowPipeline<1 + kHasResidual>& pipeline, const PipelineState& at,
                      int vector, float (&values)[kVectorWidth]) {
    const RowVector a = pipeline.get(at, 0, vector);
#pragma unroll
    for (int j = 0; j < kVectorWidth; ++j) values[j] = a[j];
    if constexpr (kHasResidual) {
        const RowVector b = pipeline.get(at, 1, vector);
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) values[j] += b[j];
    }
}

// A count of elements and its reciprocal: the same in all rows.
struct alignas(8) Count {
    float count, reciprocal;

    DEVICE static Count of(float count) { return {count, count > 0.0f ? 1.0f / count : 0.0f}; }
};
// Element counts of the reducer warps, the row's blocks, this block and the row.
struct ElementCounts {
    const Count *of_warps, *of_blocks, *of_block, *of_row;

    DEVICE static ElementCounts of(int64_t num_cols) {
        SHARED(Count, of_warps, [kReducerWarps]);
        SHARED(Count, of_blocks, [kClusterSize]);
        SHARED(Count, of_all, [2]);
        const int thread = int(threadIdx.x);
        const Slice slice = Slice::here(num_cols);
        if (thread < kReducerWarps) {
            int vectors = 0;
            for (int i = 0; i < kVectorsPerThread; ++i) {
                for (int first = 0; first < kConsumers; first += kReducers) {
                    const int rest = slice.vectors(i) - first - thread * kWarpSize;
                    vectors += rest < 0 ? 0 : rest < kWarpSize ? rest : kWarpSize;
                }
            }
            of_warps[thread] = Count::of(float(vectors * kVectorWidth));
        }
        if (thread < kClusterSize) {
            const Slice other = Slice::of_rank(num_cols, thread);
            of_blocks[thread] = Count::of(float(other.count * kVectorWidth));
        }
        if (thread == 0) {
            of_all[0] = Count::of(float(slice.count * kVectorWidth));
            of_all[1] = Count::of(float(num_cols));
        }
        return {of_warps, of_blocks, of_all, of_all + 1};
    }
};

// Merges partial(i) for i < kCount.  counts: elements of each partial; all: of all partials.
template <int kCount, class Partial>
DEVICE void merge(Partial partial, const Count*, const Count*, float& merged) {
    merged = sum_over<kCount>(partial);
}
template <int kCount, class Partial>
DEVICE void merge(Partial partial, const Count* counts, const Count* all, MeanAndSquares& merged) {
    // Deviations from one of the means, so that a mean far from zero loses no accuracy.
    const float origin = partial(0).mean;
    const auto distance = [&](int i) { return partial(i).mean - origin; };
    const float step =
        sum_over<kCount>([&](int i) { return counts[i].count * distance(i); }) * all->reciprocal;
    merged = {origin + step, sum_over<kCount>([&](int i) {
                  const float from_mean = distance(i) - step;
                  return partial(i).squares + counts[i].count * (from_mean * from_mean);
              })};
}

// Statistic of a thread, and of its warp.
struct SquaresOfVectors {
    float sum = 0.0f;

    DEVICE void take(const float (&values)[kVectorWidth]) {
        float partial = 0.0f;
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) partial += values[j] * values[j];
        sum += partial;
    }
};
DEVICE float of_warp(const SquaresOfVectors& mine, const Count&) {
    return reduce_in_warp(mine.sum, Sum());
}
DEVICE MeanAndSquares of_warp(const VectorMoments<kVectorWidth>& mine, const Count& count) {
    const float mean = reduce_in_warp(mine.sum(), Sum()) * count.reciprocal;
    return {mean, reduce_in_warp(mine.squares_about(mean), Sum())};
}
using ThreadMoments = Choose<kCentered != 0, VectorMoments<kVectorWidth>, SquaresOfVectors>::Type;

// Weights and biases of a consumer.
struct PersistentAffine {
    RowVector weights[kVectorsPerThread], biases[kCentered ? kVectorsPerThread : 1];

    DEVICE static void load(const void* from, float otherwise, const Slice& slice,
                            RowVector* vectors) {
        const int vector = int(threadIdx.x);
#pragma unroll
        for (int i = 0; i < kVectorsPerThread; ++i) {
            vectors[i].fill(from_float<Element>(otherwise));
            if (from && slice.holds(i, vector)) {
                const Element* columns = static_cast<const Element*>(from);
                vectors[i].load_read_only(columns + slice.position(i, vector));
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

// The merger's message to the consumers.  row: -1 after the last row.
struct alignas(16) RowScalars {
    float rstd, shift;
    int row, padding;
};

template <bool kHasResidual>
struct PersistentNorm {
    static constexpr int kArrays = 1 + kHasResidual;
    const Element *x, *residual;
    const void *weight, *bias;
    Element *y, *sum;
    const NormParams& params;
    RowPipeline<kArrays> pipeline;
    Exchange<Statistic> exchange;
    ElementCounts counts;
    RowScalars* scalars_of_rows;
    float *mean_out, *rstd_out;  // null: not stored

    DEVICE void produce(uint32_t* counter) const {
        if (lane_id() != 0) return;
        bool publishes = true;
        if constexpr (kClusterSize > 1) publishes = cluster_rank() == 0;
        DynamicScheduler<RowPipeline<kArrays>> scheduler{pipeline, counter, params.layout.num_rows,
                                                         !publishes};
        scheduler.start();
        const LoadPolicy policy = load_policy(params.loads_last);
        PipelineState at = pipeline.begin();
        for (int iteration = 0;; ++iteration) {
            pipeline.expect_row(iteration);
            const int row = pipeline.row(iteration);
            if (row < 0) return;
            const Element* from[kArrays];
            from[0] = x + row_offset(params.layout, NormParams::kX, row);
            if constexpr (kHasResidual) {
                from[1] = residual + row_offset(params.layout, NormParams::kResidual, row);
            }
            pipeline.load(at, from, policy);
            scheduler.advance(iteration);
        }
    }
    DEVICE void reduce() const {
        PipelineState at = pipeline.begin();
        const int first = int(threadIdx.x) - kConsumers;
        const Count& count = counts.of_warps[Exchange<Statistic>::reducer_warp()];
        for (int iteration = 0; pipeline.row(iteration) >= 0; ++iteration) {
            ThreadMoments mine;
#pragma unroll 1
            for (int i = 0; i < kVectorsPerThread; ++i, at.advance()) {
                pipeline.wait(at);
#pragma unroll
                for (int vector = first; vector < first + kConsumers; vector += kReducers) {
                    if (!pipeline.slice.holds(i, vector)) continue;
                    float values[kVectorWidth];
                    get_input<kHasResidual>(pipeline, at, vector, values);
                    mine.take(values);
                }
            }
            exchange.send(iteration, of_warp(mine, count), [&](const Statistic* partials) {
                Statistic merged;
                merge<kReducerWarps>([&](int i) { return partials[i]; }, counts.of_warps,
                                     counts.of_block, merged);
                return merged;
            });
        }
    }
    // A block receives all messages before it exits, so that nothing is written to its shared
    // memory afterwards.
    DEVICE void merge_rows() const {
        for (int iteration = 0;; ++iteration) {
            const int row = pipeline.row(iteration);
            RowScalars scalars{0.0f, 0.0f, row, 0};
            if (row >= 0) {
                const Statistic* partials = exchange.receive(iteration);
                Statistic found;
                merge<kClusterSize>([&](int i) { return partials[i]; }, counts.of_blocks,
                                    counts.of_row, found);
                scalars.rstd = reciprocal_square_root(
                    squares_of(found) * counts.of_row->reciprocal + params.eps);
                scalars.shift = -mean_of(found) * scalars.rstd;
                bool writes = rstd_out && lane_id() == 0;
                if constexpr (kClusterSize > 1) writes = writes && cluster_rank() == 0;
                if (writes) {
                    const int64_t to = row_offset(params.layout, NormParams::kStatistic, row);
                    const float rstd = scalars.rstd;
                    if constexpr (kCentered) mean_out[to] = rstd != rstd ? rstd : mean_of(found);
                    rstd_out[to] = rstd;
                }
            }
            if (lane_id() == 0) {
                scalars_of_rows[slot_of(iteration)] = scalars;
                pipeline.barriers.finished[slot_of(iteration)].arrive();
            }
            if (row < 0) return;
        }
    }
    DEVICE void consume() const {
        PersistentAffine factors;
        PersistentAffine::load(weight, 1.0f, pipeline.slice, factors.weights);
        if constexpr (kCentered) PersistentAffine::load(bias, 0.0f, pipeline.slice, factors.biases);
        PipelineState at = pipeline.begin();
        const int vector = int(threadIdx.x);
#pragma unroll 1
        for (int iteration = 0;; ++iteration) {
            pipeline.barriers.finished[slot_of(iteration)].wait(phase_of(iteration));
            const RowScalars scalars = scalars_of_rows[slot_of(iteration)];
            if (scalars.row < 0) return;
            Element* y_row = y + row_offset(params.layout, NormParams::kY, scalars.row);
            const StorePolicy policy = store_policy(scalars.row >= params.stores_last_from);
#pragma unroll
            for (int i = 0; i < kVectorsPerThread; ++i, at.advance()) {
                pipeline.wait(at);  // returns at once: the reducers have waited
                if (pipeline.slice.holds(i, vector)) {
                    const int position = pipeline.slice.position(i, vector);
                    float values[kVectorWidth];
                    get_input<kHasResidual>(pipeline, at, vector, values);
                    RowVector out;
                    if constexpr (kHasResidual) {
                        out.from_floats(values);
                        out.store(sum + row_offset(params.layout, NormParams::kSum, scalars.row) +
                                      position,
                                  policy);
                    }
                    factors.apply(i, scalars.shift, scalars.rstd, values);
                    out.from_floats(values);
                    out.store(y_row + position, policy);
                }
                pipeline.release(at);
            }
        }
    }
};

// setmaxnreg, where roles are whole warpgroups: consumers need more registers, the others fewer.
// 512 threads * 96 + 384 threads * 40 are at most 65536.
constexpr bool kUnevenRegisters = kConsumers == 512;

template <bool kHasResidual>
DEVICE void normalize_rows(const Element* x, const Element* residual, const void* weight,
                           const void* bias, Element* y, Element* sum, float* mean_out,
                           float* rstd_out, uint32_t* counter, StageTile* tiles,
                           const NormParams& params) {
    SHARED(RowScalars, scalars_of_rows, [kSlots]);
    const int64_t num_cols = params.layout.num_cols;
    const ElementCounts counts = ElementCounts::of(num_cols);
    const StageCount stages{params.stages};
    const PersistentBarriers barriers = PersistentBarriers::make(stages);
    const Slice slice = Slice::here(num_cols);
    const auto pipeline = RowPipeline<1 + kHasResidual>::make(tiles, barriers, slice, stages);
    const auto exchange = Exchange<Statistic>::make(barriers);
    const PersistentNorm<kHasResidual> norm{
        x,        residual, weight,          bias,     y,       sum, params, pipeline,
        exchange, counts,   scalars_of_rows, mean_out, rstd_out};
    const Role role = role_of_warp();
    if (role == kConsumer) {
        if constexpr (kUnevenRegisters) increase_registers<96>();
        norm.consume();
        return;
    }
    if constexpr (kUnevenRegisters) decrease_registers<40>();
    if (role == kReducer) {
        norm.reduce();
    } else if (role == kProducer) {
        norm.produce(counter);
    } else if (role == kMerger) {
        norm.merge_rows();
    }
}

}  // namespace rows
