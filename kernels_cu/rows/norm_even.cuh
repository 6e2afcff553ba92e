// layer_norm and rms_norm of even rows without options, read once.
//
// One exchange between warps and blocks: each warp computes the mean of its own elements and the
// squares about it (two passes over registers); all merge them (like rows/moments.cuh, without
// mean_low).
//   kQuantized: rms_norm with FP8 or int8 y, decoded by row_scale.
//     kByRow: one scale per row.  The largest |s * weight| is reduced with the squares; times rstd,
//     it is the largest |y|.
//     kByBlock: one scale per kQuantizedBlock columns, which adjacent lanes have.
// Constants: those of normalize_even.cu.
#pragma once
#include "rows/load_even.cuh"
#include "rows/quantize.cuh"

namespace rows {

enum Quantized { kNotQuantized, kByRow, kByBlock };
constexpr int kQuantizedBlock = 128, kBlockLanes = kQuantizedBlock / kVectorWidth;

static_assert(kEven && !kChunked && !kLanesAcrossRows, "unpredicated rows without options");
static_assert(!(kCentered && kQuantized), "layer_norm does not quantize");
static_assert(!kQuantized || kRowsPerThread <= 2,
              "each row's largest may need an exchange of its own");
static_assert(!kQuantized || kRowsPerBlock == 1 || kWarpsPerRow == 1, "in which all take part");
static_assert(kQuantized != kByBlock || kThreadsPerRow % kBlockLanes == 0, "whole blocks");
static_assert(kQuantized != kByBlock || kBlockLanes <= kWarpSize, "each of one warp");

// A cache policy takes registers; two rows in shared memory with means and biases leave none.
constexpr bool kStoresHavePolicy =
    kInRegisters || kRegisters > 64 || !(kCentered && kRowsPerThread > 1);

// Whether statistics are stored last, merged again from the partials, to take fewer registers.
constexpr bool kStatisticsLast =
    kPartials > 1 && (kInRegisters ? kNumThreads < 1024 : kRowsPerThread == 1 && !kWeightsFirst);

// Statistic of a warp, block or row.  first: the mean, or with kByRow the largest |s * weight|;
// squares: about the mean, or about zero.
struct alignas(8) Statistic { float first, squares; };

// The warp's partial statistic of row r.
template <class EvenInput, bool kUnpredicated>
DEVICE Statistic warp_statistic(EvenInput& s, int r, const EvenTile<kUnpredicated>& at,
                                Affine<kUnpredicated>& columns) {
    float mean = 0.0f, squares = 0.0f;
    if constexpr (kCentered && kInRegisters) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kVectorsPerThread; ++i) {
            float values[kVectorWidth];
            s.get(r, i, values);
            float partials[2] = {0.0f, 0.0f};
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) partials[j % 2] += values[j];
            sum += partials[0] + partials[1];
        }
        mean = reduce_in_warp(sum, Sum()) * at.one_over_count;
#pragma unroll
        for (int i = 0; i < kVectorsPerThread; ++i) {
            if (!at.holds(i)) break;
            float values[kVectorWidth], partials[2] = {0.0f, 0.0f};
            s.get(r, i, values);
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) {
                const float distance = values[j] - mean;
                partials[j % 2] += distance * distance;
            }
            squares += partials[0] + partials[1];
        }
    } else if constexpr (kCentered) {
        VectorMoments<kVectorWidth> mine;
#pragma unroll(kUnrolled<EvenInput::kTight>)
        for (int i = 0; i < kVectorsPerThread; ++i) {
            if (!at.holds(i)) break;
            float values[kVectorWidth];
            s.get(r, i, values);
            mine.template take<kInRegisters>(values);
        }
        mean = reduce_in_warp(mine.sum(), Sum()) * at.one_over_count;
        squares = mine.squares_about(mean);
    } else {
        float largest = 0.0f;  // NaN also where only a product with a weight is
#pragma unroll(kQuantized == kByRow && kWeightsFirst ? kVectorsPerThread \
                                                     : kUnrolled<EvenInput::kTight>)
        for (int i = 0; i < kVectorsPerThread; ++i) {
            float values[kVectorWidth], part = 0.0f;
            s.get(r, i, values);
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) part += values[j] * values[j];
            squares += part;
            if constexpr (kQuantized == kByRow) {
                if (!at.holds(i)) continue;
                const RowVector weights = columns.weights_of(at, i);
#pragma unroll
                for (int j = 0; j < kVectorWidth; ++j) {
                    largest = maximum_or_nan(largest, magnitude(values[j] * weights[j]));
                }
            }
        }
        if constexpr (kQuantized == kByRow) mean = reduce_in_warp(largest, Larger());
    }
    squares = reduce_in_warp(squares, Sum());
    return {mean, squares};
}

// Number of lanes that share the partial statistics, a power of two.
constexpr int kAllLanes = kPartials > 32   ? 64
                          : kPartials > 16 ? 32
                          : kPartials > 8  ? 16
                          : kPartials > 4  ? 8
                          : kPartials > 2  ? 4
                                           : kPartials;
constexpr int kPartialLanes = kAllLanes < kWarpSize ? kAllLanes : kWarpSize;
// Whether some of these lanes' partial statistics do not exist.
constexpr bool kSomeAbsent = kFewerBlocks || kPartials % kPartialLanes != 0;

// Combines the statistics of a row's warps and blocks.
template <bool kUnpredicated>
DEVICE Statistic merge_row_partials(const Statistic* partials, const EvenTile<kUnpredicated>& at) {
    const int lane = lane_id() % kPartialLanes, count = at.partials();
    Statistic s{0.0f, 0.0f};
    float origin = 0.0f;
    if constexpr (kCentered) {
        // Deviations from one of the means, so that a mean far from zero loses no accuracy.
        origin = partials[0].first;
#pragma unroll
        for (int i = lane; i - lane < kPartials; i += kPartialLanes) {
            if (kSomeAbsent && i >= count) break;
            s.first += at.count_of(i) * (partials[i].first - origin);
        }
        s.first = MergeFloats<Sum>().across_lanes(s.first, 1, kPartialLanes) * at.one_over_cols();
    }
#pragma unroll
    for (int i = lane; i - lane < kPartials; i += kPartialLanes) {
        if (kSomeAbsent && i >= count) break;
        s.squares += partials[i].squares;
        if constexpr (kCentered) {
            const float distance = (partials[i].first - origin) - s.first;
            s.squares += at.count_of(i) * (distance * distance);
        }
        if constexpr (kQuantized == kByRow) s.first = maximum_or_nan(s.first, partials[i].first);
    }
    s.squares = MergeFloats<Sum>().across_lanes(s.squares, 1, kPartialLanes);
    if constexpr (kQuantized == kByRow)
        s.first = MergeFloats<Larger>().across_lanes(s.first, 1, kPartialLanes);
    s.first += origin;
    return s;
}

// Partial statistics of a block's rows.
using RowPartials = Statistic[kRowsPerThread][kPartials];
DEVICE RowPartials* row_partials() {
    SHARED(RowPartials, partials, [kRowsPerBlock]);
    return partials;
}

// Combines the rows' statistics across warps and blocks, in place.
template <bool kUnpredicated>
DEVICE void exchange(Statistic (&s)[kRowsPerThread], const EvenTile<kUnpredicated>& at) {
    if constexpr (kPartials > 1) {
        RowPartials& mine = row_partials()[at.t.row_in_block];
        if constexpr (kClusterSize > 1) {
            Barrier& full = exchange_barriers()[0];
            if (threadIdx.x == 0) {
                full.arrive_expect_tx(kRowsPerThread * at.partials() * int(sizeof(Statistic)));
            }
            cluster_wait();  // all blocks have started (init_exchange_barriers)
            if (lane_id() < at.t.blocks) {
#pragma unroll
                for (int r = 0; r < kRowsPerThread; ++r) {
                    Statistic* to = &mine[r][at.t.rank * kWarpsPerRow + at.warp()];
                    store_async(to, s[r], full, lane_id());
                }
            }
            full.wait(0);
        } else {
            if (lane_id() == 0) {
#pragma unroll
                for (int r = 0; r < kRowsPerThread; ++r) mine[r][at.warp()] = s[r];
            }
            sync_block();
        }
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) s[r] = merge_row_partials(mine[r], at);
    }
}

// Computes the largest |y| of row r again, from y: without products that overflow or underflow.
template <class EvenInput, bool kUnpredicated>
DEVICE float largest_result(EvenInput& s, int r, const EvenTile<kUnpredicated>& at, float rstd,
                            Affine<kUnpredicated>& columns) {
    Largest largest;
#pragma unroll(kInRegisters || kWeightsFirst ? kVectorsPerThread : 1)
    for (int i = 0; i < kVectorsPerThread; ++i) {
        if (!at.holds(i)) continue;
        float values[kVectorWidth];
        s.get(r, i, values);
        const RowVector weights = columns.weights_of(at, i);
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) largest.take(values[j] * rstd * weights[j]);
    }
    return reduce_in_warp(largest.value(), Larger());
}

// FP32 outputs per row; null: not stored.
struct StatisticOutputs { float *mean, *rstd, *scale; };

// y = (s * rstd + shift) * weight + bias, times `encode` where quantized.
struct RowFactors { float rstd, shift, encode; };

// One thread of the row stores its statistics.
template <bool kUnpredicated>
DEVICE void store_statistic(const Statistic& s, int64_t row, const EvenTile<kUnpredicated>& at,
                            const StatisticOutputs& outputs, const EvenParams& params,
                            const RareParams& cold) {
    if (at.t.lane != 0 || at.t.rank != 0 || (!kUnpredicated && row >= cold.num_rows)) return;
    const float rstd = reciprocal_square_root(s.squares * at.one_over_cols() + params.eps);
    const int64_t to = row * cold.statistic_stride;
    // The mean of a row with an infinity is NaN, whatever its sums are.
    if constexpr (kCentered) outputs.mean[to] = rstd != rstd ? rstd : s.first;
    outputs.rstd[to] = rstd;
}

// The scale of a block of columns, of which this lane has `values`.  Called by all lanes of a warp.
DEVICE QuantizeScale block_scale(const float (&values)[kVectorWidth], int32_t dtype) {
    Largest largest;
#pragma unroll
    for (const float value : values) largest.take(value);
    const float of_block = MergeFloats<Larger>().across_lanes(largest.value(), 1, kBlockLanes);
    return QuantizeScale(of_block, largest_finite(dtype));
}

template <class Code>
DEVICE void store_codes(void* y, int64_t offset, const float (&values)[kVectorWidth]) {
    Vector<Code, kVectorWidth> codes;
    codes.from_floats(values);
    codes.store(static_cast<Code*>(y) + offset);
}

template <bool kHasResidual, bool kUnpredicated>
DEVICE void normalize_rows(const Element* x, const Element* residual, const void* weight,
                           const void* bias, void* y, Element* sum, const StatisticOutputs& outputs,
                           const EvenParams& params, const RareParams& cold) {
    const auto at = EvenTile<kUnpredicated>::here(cold.num_cols, params.blocks_log2);
    const int64_t cluster =
        kFewerBlocks ? blockIdx.x >> params.blocks_log2 : blockIdx.x / kClusterSize;
    const int64_t group = cluster * kRowsPerBlock + at.t.row_in_block;
    const int64_t row = group * kRowsPerThread, rest = cold.num_rows - row;
    const int live = rest < kRowsPerThread ? int(rest) : kRowsPerThread;
    EvenInput<kHasResidual> s;
    if constexpr (!kInRegisters) {
        s.x.shared = storage();
        s.residual.shared = storage() + 1;
    }
    const auto start = [&](EvenRows& loaded, const Element* p, int64_t stride) {
        p += row * stride + at.first();
        if constexpr (kQuantized && kRegisters <= 64) {  // no registers are left
            loaded.start(p, stride, at, live);
        } else if constexpr (kInRegisters && kThreadsPerRow < 512) {
            // Loads without a policy are faster for few short rows.  With more threads there are no
            // registers for this branch.
            if (params.loads_last) {
                loaded.start(p, stride, at, live, load_policy(true));
            } else {
                loaded.start(p, stride, at, live);
            }
        } else {
            loaded.start(p, stride, at, live, load_policy(params.loads_last));
        }
    };
    Affine<kUnpredicated> columns{weight, bias};
    // Before the rows' loads: their policy is a branch, behind which ptxas would sink these loads
    // to their first use.
    if constexpr (kInRegisters) columns.start(at);
    start(s.x, x, params.x_stride);
    if constexpr (kHasResidual) start(s.residual, residual, params.residual_stride);
    if constexpr (!kInRegisters) columns.start(at);
    if constexpr (!kInRegisters) copy_async_wait<0>();

    Statistic statistics[kRowsPerThread];
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
        statistics[r] = warp_statistic(s, r, at, columns);
    }
    // A uniform policy takes no registers, but with several rows per thread ptxas spills.
    const int64_t first_row = kRowsPerThread > 1 ? row : cluster * kRowsPerBlock;
    const auto store = [&](const RowVector& vector, Element* to) {
        if constexpr (kStoresHavePolicy) {
            store_vector_of_row(vector, to, store_policy(first_row >= params.stores_last_from));
        } else {
            vector.store(to);
        }
    };
    // Storing the sum first overlaps the barrier.  With predicates, which would take registers, it
    // is stored at the end.
    constexpr bool kStoreSumFirst = kHasResidual && kUnpredicated && kInRegisters && !kQuantized;
    const auto store_sum = [&](int r, int i, const float (&values)[kVectorWidth]) {
        RowVector vector;
        vector.from_floats(values);
        store(vector, sum + (row + r) * params.sum_stride + at.first() + at.step(i));
    };
    if constexpr (kStoreSumFirst) {
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
#pragma unroll
            for (int i = 0; i < kVectorsPerThread; ++i) {
                float values[kVectorWidth];
                s.get(r, i, values);
                store_sum(r, i, values);
            }
        }
    }
    columns.finish();
    exchange(statistics, at);
    RowFactors factors[kRowsPerThread];
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
        const float mean = kCentered ? statistics[r].first : 0.0f;
        const float variance = statistics[r].squares * at.one_over_cols();
        const float rstd = reciprocal_square_root(variance + params.eps);
        factors[r] = {rstd, -mean * rstd, 1.0f};
        if (!kStatisticsLast && outputs.rstd) {
            store_statistic(statistics[r], row + r, at, outputs, params, cold);
        }
        if constexpr (kQuantized == kByRow) {
            const float product = statistics[r].first;
            // Otherwise a product with a weight can have overflowed or underflowed.
            const bool safe = product >= 0x1p-60f && product < kInfinity;
            float largest = product * rstd;
            // Uniform over a row's threads, and over a warp that several rows share.
            if (kWarpsPerRow == 1 && kClusterSize == 1 ? vote_any(!safe) : !safe) {
                const float of_warp = largest_result(s, r, at, rstd, columns);
                const MergeFloats<Larger> merge;
                const float anew = r == 0 ? merge_across_warps<1>(of_warp, at.t, merge)
                                          : merge_across_warps<2>(of_warp, at.t, merge);
                largest = safe ? largest : anew;
            }
            const QuantizeScale scale(largest, largest_finite(cold.dtype));
            factors[r].encode = scale.encode;
            if ((kUnpredicated || row + r < cold.num_rows) && at.t.lane == 0 && at.t.rank == 0) {
                outputs.scale[(row + r) * cold.statistic_stride] = scale.decode;
            }
        }
    }

    columns.start_turns(at);
#pragma unroll(kWeightsFirst ? kVectorsPerThread : kUnrolled<EvenInput<kHasResidual>::kTight>)
    for (int i = 0; i < kVectorsPerThread; ++i) {
        if (kQuantized != kByBlock && !at.holds(i)) continue;
        const int loaded = kWeightsFirst ? i : 0;
        columns.next_turn(at, i);
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
            const bool exists = kUnpredicated || row + r < cold.num_rows;
            if (kQuantized != kByBlock && !exists) continue;
            if constexpr ((kHasResidual && kCentered) || kWeightsFirst) columns.keep(loaded);
            const int64_t to_y = (row + r) * params.y_stride + at.first();
            float values[kVectorWidth];
            s.get(r, i, values);
            const bool stores = kQuantized != kByBlock || (exists && at.holds(i));
            if constexpr (kHasResidual && !kStoreSumFirst) {
                if (stores) store_sum(r, i, values);
            }
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) {
                if constexpr (kCentered) {
                    const float z = values[j] * factors[r].rstd + factors[r].shift;
                    values[j] = z * columns.weights[loaded][j] + columns.biases[loaded][j];
                } else {
                    values[j] = values[j] * factors[r].rstd * columns.weights[loaded][j];
                }
            }
            if constexpr (kQuantized == kByBlock) {
                const QuantizeScale scale = block_scale(values, cold.dtype);
                factors[r].encode = scale.encode;
                if (stores && lane_id() % kBlockLanes == 0) {
                    const int64_t of_row = (row + r) * cold.statistic_stride,
                                  blocks = cold.num_cols / kQuantizedBlock;
                    outputs.scale[of_row * blocks + (at.first() + at.step(i)) / kQuantizedBlock] =
                        scale.decode;
                }
                if (!stores) continue;
            }
            if constexpr (kQuantized) {
#pragma unroll
                for (int j = 0; j < kVectorWidth; ++j) values[j] *= factors[r].encode;
                if (cold.dtype == kE4m3) {
                    store_codes<e4m3>(y, to_y + at.step(i), values);
                } else if (cold.dtype == kE5m2) {
                    store_codes<e5m2>(y, to_y + at.step(i), values);
                } else {
                    store_codes<int8_t>(y, to_y + at.step(i), values);
                }
            } else {
                RowVector vector;
                vector.from_floats(values);
                store(vector, static_cast<Element*>(y) + to_y + at.step(i));
            }
        }
    }
    if (kStatisticsLast && outputs.rstd) {
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
            // Merged again, so that the statistic takes no registers before this point.
            const int row_in_block = opaque(at.t.row_in_block);
            const Statistic s = merge_row_partials(row_partials()[row_in_block][r], at);
            store_statistic(s, row + r, at, outputs, params, cold);
        }
    }
}

template <bool kHasResidual>
DEVICE void normalize_any_rows(const Element* x, const Element* residual, const void* weight,
                               const void* bias, void* y, Element* sum,
                               const StatisticOutputs& outputs, const EvenParams& params,
                               const RareParams& cold) {
    if (params.unpredicated) {
        normalize_rows<kHasResidual, true>(x, residual, weight, bias, y, sum, outputs, params,
                                           cold);
    } else {
        normalize_rows<kHasResidual, false>(x, residual, weight, bias, y, sum, outputs, params,
                                            cold);
    }
}

}  // namespace rows
