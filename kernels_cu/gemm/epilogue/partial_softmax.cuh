// The partial-softmax epilogue: the first half of y = softmax(A @ (scale_b * B) + bias).
//
// For each row and set of kSetColumns columns (a warpgroup's), `statistics` of (m, sets) gets the
// maximum and the sum.  If TMA stores a 16-bit y, y gets the exponentials relative to the set's
// maximum, and the FP32 logits stay in registers.  Otherwise FP32 `logits` are stored.
#pragma once
#include "gemm/load_tile.cuh"
#include "gemm/mainloop_sm90.cuh"
#include "gemm/epilogue/linear_combination.cuh"
#include "gemm/work_tile.cuh"
#include "logits/statistics.cuh"
#include "common/math.cuh"
#include "common/max_sum.cuh"

namespace gemm {

struct PartialSoftmaxParams {
    TileOrder order;
    int64_t num_k_tiles;
    EpilogueParams epilogue;  // out: logits, or y
};

// Tensor maps: A and B as in MatmulArguments, without batch; 16-bit y in boxes of 64 x 64.  logits:
// FP32, or null.
template <class Mainloop> struct LogitsArguments {
    const TensorMap &a_map, &a_edge, &b_map, &b_edge, &y_map;
    const void* bias;
    const float* scale_b;
    float* logits;
    MaxSum* statistics;
    const PartialSoftmaxParams& params;

    DEVICE static int a_batch(const GemmWorkTile&) { return 0; }
    DEVICE static int b_batch(const GemmWorkTile&) { return 0; }
    DEVICE int64_t m() const { return params.epilogue.m; }
    DEVICE int64_t n() const { return params.epilogue.n; }
};

// Reduces kCount rows over the eight lanes that differ in lane / 4, each with a value of every row:
// values[i] becomes the result of row lane / 4 * kCount / 8 + i.  The lanes share the work.
template <int kCount, class Combine>
DEVICE void merge_rows(float (&values)[kCount], Combine combine) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int level = 1; level <= 3; ++level) {
        const int bit = 32 >> level, rest = kCount >> level;
        const bool upper = (lane & bit) != 0;
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) {
            if (i >= rest) continue;
            const float kept = upper ? values[i + rest] : values[i];
            const float sent = upper ? values[i] : values[i + rest];
            values[i] = combine(kept, shuffle_xor(sent, bit));
        }
    }
}

template <class Mainloop_> struct PartialSoftmaxEpilogue {
    using Mainloop = Mainloop_;
    using Params = PartialSoftmaxParams;
    using Arguments = LogitsArguments<Mainloop>;
    using Loader = TileLoader<Mainloop, Arguments>;
    using Accumulator = typename Mainloop::Accumulator;
    using WorkTile = typename Mainloop::WorkTile;
    static constexpr bool kBackToBack = false, kClears = true;
    static constexpr bool kMnMajorRows = Mainloop::kMnMajorRows;
    static constexpr int kCols = Mainloop::kCols, kConsumers = Mainloop::kConsumers;
    static_assert(Mainloop::kMixedInput && Mainloop::kCooperative && !Mainloop::kMulticast &&
                      !Mainloop::kSplitK && Mainloop::kConsumerRows == kSetColumns,
                  "a warpgroup has one set of columns, with all of k");

    // Staging of logits, kSliceRows rows of a warp at a time, kRun columns per lane.  MN-major
    // weights: the even columns first, as Convert8Bit orders them.  kPitch: free of bank conflicts.
    static constexpr int kSliceRows = 32, kRun = 8, kPitch = 20;
    struct WarpLogits {
        alignas(16) uint32_t logits[kSliceRows][kPitch];
        MaxSum rows[kCols];  // statistics of the warp's 16 columns
    };
    // Staging of exponentials, kPassRows rows of a warpgroup at a time.
    static constexpr int kPassRows = kCols < 128 ? kCols : 128;
    static constexpr int kBoxRows = 64, kBoxBytes = kBoxRows * kSwizzleBytes;
    static constexpr int kBoxes = kPassRows / kBoxRows;
    static constexpr int kPassValues = kPassRows / 2;     // per thread, of two columns
    static constexpr int kOwnRows = kPassValues / 2 / 8;  // per thread after merge_rows
    struct PassStorage {
        alignas(1024) unsigned char boxes[kBoxes][kBoxBytes];
        float warp_max[4][kPassRows], warp_sum[4][kPassRows];
        alignas(128) float max[kPassRows];
    };
    union Staging {
        WarpLogits warps[4 * kConsumers];
        PassStorage passes[kConsumers];
    };
    struct SharedStorage {
        DEVICE void init() {}
    };

    const Params& params;
    const Arguments& arguments;

    DEVICE PartialSoftmaxEpilogue(const Params& params, const Arguments& arguments)
        : params(params), arguments(arguments) {}
    DEVICE bool loads() const { return false; }
    DEVICE void load(SharedStorage&, const GemmWorkTile&, int) const {}

    // Scale and bias of a thread's two columns, loaded during the mainloop.  Columns past the
    // matrix become -inf.
    struct ColumnScales {
        float scale[2], added[2];

        // first_col: the warpgroup's first column.
        DEVICE void load(const MatrixEpilogue& epilogue, int first_col) {
            const EpilogueParams& params = epilogue.params;
            const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int col = first_col + warp * 16 +
                                (kMnMajorRows ? lane / 4 * 2 + half : lane / 4 + half * 8);
                const bool there = col < params.n;
                const bool scaled = there && epilogue.scale_b, biased = there && epilogue.bias;
                const float factor = scaled ? epilogue.scale_b[col * params.scale_b_stride] : 1.0f;
                scale[half] = there ? factor * params.alpha : 0.0f;
                added[half] = there ? 0.0f : -kInfinity;
                if (biased) {
                    added[half] =
                        load_element(epilogue.bias, col * params.bias.col, params.bias_dtype);
                }
            }
        }
    };

    // (first_row, first_col): the warpgroup's first logit.  Overwrites the accumulators.
    template <class Out>
    DEVICE static void store_probabilities(PassStorage& to, const TensorMap& map,
                                           const EpilogueParams& params,
                                           const ColumnScales& columns, MaxSum* statistics,
                                           int64_t num_sets, int first_row, int first_col,
                                           Accumulator& accumulator) {
        const int lane = threadIdx.x % 32, thread = threadIdx.x % 128, warp = thread / 32;
        const int barrier = 1 + threadIdx.x / 128;
        constexpr int kValues = kPassValues / 2;
        // Row of a lane's i-th value: before and after merge_rows.
        const auto begun = [&](int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; };
        const auto merged = [&](int i) { return begun(lane / 4 * kOwnRows + i); };
        const int64_t set = first_col / 64;
#pragma unroll 1
        for (int pass = 0; pass < kCols / kPassRows; ++pass) {
            const int row = first_row + pass * kPassRows;
            float values[kValues];
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                float& one = accumulator[0][i / 2 * 4 + i % 2];
                float& other = accumulator[0][i / 2 * 4 + i % 2 + 2];
                one = one * columns.scale[0] + columns.added[0];
                other = other * columns.scale[1] + columns.added[1];
                values[i] = maximum(one, other);
            }
            merge_rows(values, Max());
#pragma unroll
            for (int i = 0; i < kOwnRows; ++i) to.warp_max[warp][merged(i)] = values[i];
            named_barrier(barrier, 128);
            if (thread < kPassRows) {
                float max = -kLargestFloat;
#pragma unroll
                for (int i = 0; i < 4; ++i) max = maximum(max, to.warp_max[i][thread]);
                to.max[thread] = max;
            }
            if (thread == 0) tma_store_wait_read<0>();  // TMA has read the boxes
            named_barrier(barrier, 128);
#pragma unroll
            for (int i = 0; i < kValues; i += 2) {
                const auto two = *reinterpret_cast<const Bytes<8>*>(&to.max[begun(i)]);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float max = bit_cast<float>(two.words[j]);
                    float& one = accumulator[0][i / 2 * 4 + j];
                    float& other = accumulator[0][i / 2 * 4 + j + 2];
                    one = exp2_approx((one - max) * kLog2E);
                    other = exp2_approx((other - max) * kLog2E);
                    values[i + j] = one + other;
                }
            }
#pragma unroll
            for (int i = 0; i < kPassValues; i += 8) {
                const float* eight = &accumulator[0][i];
                unsigned char* box = to.boxes[i * 2 / kBoxRows];
                const int top = i * 2 % kBoxRows;
                if constexpr (kMnMajorRows) {  // two columns of a row are adjacent
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const int box_row = top + wgmma_col(lane, j / 2 * 4 + j % 2);
                        const int column = (warp * 2 + lane / 16) ^ box_row % 8;
                        const float* two = eight + j / 2 * 4 + j % 2;
                        unsigned char* at =
                            box + box_row * kSwizzleBytes + column * 16 + lane / 4 % 4 * 4;
                        *reinterpret_cast<uint32_t*>(at) = pack<Out>(two[0], two[2]);
                    }
                } else {
                    const uint32_t packed[4] = {
                        pack<Out>(eight[0], eight[1]), pack<Out>(eight[2], eight[3]),
                        pack<Out>(eight[4], eight[5]), pack<Out>(eight[6], eight[7])};
                    const int box_row = top + lane / 16 * 8 + lane % 8;
                    const int column = (warp * 2 + lane / 8 % 2) ^ box_row % 8;
                    store_matrix<true>(box + box_row * kSwizzleBytes + column * 16, packed);
                }
            }
            fence_async_proxy();
            merge_rows(values, Sum());
#pragma unroll
            for (int i = 0; i < kOwnRows; ++i) to.warp_sum[warp][merged(i)] = values[i];
            named_barrier(barrier, 128);
            if (thread == 0) {
#pragma unroll
                for (int i = 0; i < kBoxes; ++i) {
                    tma_store(map, to.boxes[i], {first_col, row + i * kBoxRows, 0});
                }
                tma_store_commit();
            }
            if (thread < kPassRows && row + thread < params.m && set < num_sets) {
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < 4; ++i) sum += to.warp_sum[i][thread];
                statistics[(row + thread) * num_sets + set] = {to.max[thread], sum};
            }
            // Moves the next pass's accumulators to this pass's registers.  An unrolled loop over
            // passes would not need that, but is long.
#pragma unroll
            for (int i = 0; i < kCols / 2 - kPassValues; ++i)
                accumulator[0][i] = accumulator[0][i + kPassValues];
        }
    }

    // Stores the warp's FP32 logits at (first_row, first_col), and their statistics in to.rows.
    DEVICE static void store_logits(WarpLogits& to, const MatrixEpilogue& epilogue, int first_row,
                                    int first_col, const Accumulator& accumulator) {
        constexpr int kValues = kSliceRows / 2;  // per lane, of kSliceRows rows
        const EpilogueParams& params = epilogue.params;
        const MergeMaxSum merge{kLog2E};
        const int lane = threadIdx.x % 32, run = lane % 2, col = first_col + run * kRun;
        const int64_t rest = params.n - col;
        const int count = rest < 0 ? 0 : rest < kRun ? int(rest) : kRun;
        // Whether the bias is per column, the same in all rows.
        const bool same_bias = epilogue.bias_of_cols();
        float scales[kRun], added[kRun];
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
            const bool there = i < count;
            scales[i] = epilogue.scale_b && there
                            ? epilogue.scale_b[(col + i) * params.scale_b_stride]
                            : 1.0f;
            added[i] = same_bias && there ? load_element(epilogue.bias, (col + i) * params.bias.col,
                                                         params.bias_dtype)
                                          : 0.0f;
        }
#pragma unroll 1
        for (int slice = 0; slice < kCols / kSliceRows; ++slice) {
            sync_warp();  // the staging has been read
#pragma unroll
            for (int p = 0; p < kCols / kSliceRows; ++p) {
                if (p != slice) continue;
#pragma unroll
                for (int i = 0; i < kValues; ++i) {
                    to.logits[wgmma_col(lane, i)][lane / 4 + i / 2 % 2 * 8] =
                        bit_cast<uint32_t>(accumulator[0][p * kValues + i]);
                }
            }
            sync_warp();
#pragma unroll 1
            for (int slice_row = lane / 2; slice_row < kSliceRows; slice_row += 16) {
                const int in_tile = slice * kSliceRows + slice_row, row = first_row + in_tile;
                MaxSum total{-kInfinity, 0.0f};
                if (row < params.m && count > 0) {
                    float values[kRun];
#pragma unroll
                    for (int i = 0; i < kRun; i += 4) {
                        const int at = kMnMajorRows ? run * 4 + i * 2 : run * kRun + i;
                        const Bytes<16> four =
                            *reinterpret_cast<const Bytes<16>*>(&to.logits[slice_row][at]);
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            const int column = kMnMajorRows ? 2 * j + i / 4 : i + j;
                            const float scaled = bit_cast<float>(four.words[j]) * scales[column];
                            values[column] = scaled * params.alpha + added[column];
                        }
                    }
                    if (epilogue.bias && !same_bias) {
                        MatrixEpilogue::add(epilogue.bias, params.bias_dtype, params.bias, row, col,
                                            count, values);
                    }
                    epilogue.write(row, col, count, values);
                    total.max = -kLargestFloat;
#pragma unroll
                    for (int i = 0; i < kRun; ++i) {
                        total.max = i < count ? maximum(total.max, values[i]) : total.max;
                    }
#pragma unroll
                    for (int i = 0; i < kRun; ++i) {
                        if (i < count) total.sum += exp2_approx((values[i] - total.max) * kLog2E);
                    }
                }
                total = merge.across_lanes(total, 1, kWarpRows / kRun);
                if (run == 0) to.rows[in_tile] = total;
            }
        }
    }

    struct Consumer {
        const PartialSoftmaxEpilogue& epilogue;
        Staging& staging;
        WorkTile& work;
        int warp, warpgroup;
        int64_t num_sets;
        MatrixEpilogue matrix;
        ColumnScales columns{};

        template <class Storage>
        DEVICE Consumer(const PartialSoftmaxEpilogue& epilogue, Storage& storage, WorkTile& work,
                        int warp, int warpgroup)
            : epilogue(epilogue),
              staging(storage.staging),
              work(work),
              warp(warp),
              warpgroup(warpgroup),
              num_sets((epilogue.params.epilogue.n + kSetColumns - 1) / kSetColumns),
              matrix(MatrixEpilogue::of_matrix(epilogue.params.epilogue, epilogue.arguments.logits,
                                               epilogue.arguments.bias, nullptr, nullptr,
                                               epilogue.arguments.scale_b, 0, 0, 0, 0, 0)) {}
        DEVICE bool needs_tile() const { return true; }
        DEVICE int first_col(const GemmWorkTile& tile) const { return int(tile.col) + work.row; }
        DEVICE void begin(const GemmWorkTile& tile) {
            if (!epilogue.arguments.logits) columns.load(matrix, first_col(tile));
        }
        DEVICE bool reduce(const GemmWorkTile&, int, Accumulator&) const { return true; }
        template <class Scheduler>
        DEVICE void store(const GemmWorkTile& tile, int, Accumulator& accumulator) {
            if (epilogue.arguments.logits) return store_with_statistics(tile, accumulator);
            if (epilogue.params.epilogue.out_dtype == kHalf) store_y<half>(tile, accumulator);
            else store_y<bf16>(tile, accumulator);
        }
        template <class Out> DEVICE void store_y(const GemmWorkTile& tile,
                                                 Accumulator& accumulator) {
            store_probabilities<Out>(staging.passes[warpgroup], epilogue.arguments.y_map,
                                     epilogue.params.epilogue, columns,
                                     epilogue.arguments.statistics, num_sets, int(tile.row),
                                     first_col(tile), accumulator);
        }
        DEVICE void store_with_statistics(const GemmWorkTile& tile,
                                          const Accumulator& accumulator) {
            const int first_row = int(tile.row);
            store_logits(staging.warps[warp], matrix, first_row,
                         first_col(tile) + warp % 4 * kWarpRows, accumulator);
            named_barrier(1 + warpgroup, 128);
            const MergeMaxSum merge{kLog2E};
            const int64_t set = first_col(tile) / kSetColumns;
#pragma unroll 1
            for (int i = threadIdx.x % 128; i < kCols && set < num_sets; i += 128) {
                if (first_row + i >= epilogue.params.epilogue.m) break;
                const WarpLogits* warps = &staging.warps[4 * warpgroup];
                MaxSum total = warps[0].rows[i];
#pragma unroll
                for (int j = 1; j < 4; ++j) total = merge(total, warps[j].rows[i]);
                epilogue.arguments.statistics[(first_row + i) * num_sets + set] = total;
            }
            named_barrier(1 + warpgroup, 128);  // before the next tile overwrites it
        }
        DEVICE void finish() const {
            if (threadIdx.x % 128 == 0) tma_store_wait<0>();
            sync_warp();
        }
    };
};

}  // namespace gemm
