// The gated epilogue of a dual GEMM: out = Gate(d1, d2) of the accumulators d1, d2 of both
// products.  Gate is silu(d1) * d2 (gate_silu.cuh) or a user's formula (gate_expression.cuh).
//
// A thread has both accumulators of an element: d1 in registers [0, kOwnCols / 2), d2 from register
// kCols / 4 on, which is column kCols / 2 of the tile.  With mixed input (SwapAB) the output's
// columns are the accumulators' rows: the converters give a warp 8 rows of each matrix, so that a
// thread has both (gated_column.cuh).
#pragma once
#include "gemm/epilogue/gate_silu.cuh"
#include "gemm/epilogue/gated_column.cuh"
#include "gemm/epilogue/gated_scales.cuh"
#include "gemm/epilogue/store_quad.cuh"
#include "gemm/load_pair.cuh"
#include "gemm/reduce.cuh"
#include "gemm/scheduler.cuh"
#include "gemm/epilogue/linear_combination.cuh"
#include "gemm/work_tile.cuh"

namespace gemm {

template <class Mainloop_, class Gate_ = SiluGate> struct GatedEpilogue {
    using Mainloop = Mainloop_;
    using Gate = Gate_;
    template <class Other> using WithGate = GatedEpilogue<Mainloop, Other>;
    using Params = GatedParams;
    using Arguments = typename Gate::Arguments;
    using Loader = PairLoader<Mainloop, Arguments>;
    using Accumulator = typename Mainloop::Accumulator;
    using WorkTile = typename Mainloop::WorkTile;
    static constexpr bool kBackToBack = false, kClears = false;
    static constexpr bool kSwapAB = Mainloop::kSwapAB, kMixedInput = Mainloop::kMixedInput;
    static constexpr bool kSplitK = Mainloop::kSplitK;
    static constexpr bool kByBlock = Mainloop::kBlockScales;  // the mainloop applies all scales
    static constexpr int kConsumers = Mainloop::kConsumers, kMmasM = Mainloop::kMmasM;
    static constexpr int kCols = Mainloop::kCols;
    static_assert(!Mainloop::kSlicedK && kSwapAB == kMixedInput,
                  "few rows are a skinny dual GEMM's");
    // Output columns that this block stores, in slices of a warp.
    static constexpr int kOwnCols = Loader::kColumns / (kSplitK ? Mainloop::kClusterSize : 1);
    static constexpr int kSlice = 16, kSlices = kOwnCols / kSlice;
    // TMA stores a warp's rows in boxes of kBoxCols columns, swizzled by the box's width.
    static constexpr int kBoxCols = kOwnCols % 64 == 0 ? 64 : kOwnCols % 32 == 0 ? 32 : 16;
    static constexpr int kBoxRowBytes = 2 * kBoxCols, kBoxBytes = kWarpRows * kBoxRowBytes;

    using Column = GatedColumn<Mainloop, Gate>;
    static constexpr int kStagingBytes =
        kMixedInput ? Column::kStagingBytes / 4 : kWarpRows * 2 * kOwnCols;  // per warp

    struct Staging { alignas(128) unsigned char warps[4 * kConsumers][kStagingBytes]; };
    struct SharedStorage {
        DEVICE void init() {}
    };
    static constexpr bool kSplitKInStaging = Mainloop::kExchangeBytes <= int(sizeof(Staging));
    using Reduction = SplitKReduction<Mainloop, kSplitKInStaging>;

    const Params& params;
    const Arguments& arguments;

    DEVICE GatedEpilogue(const Params& params, const Arguments& arguments)
        : params(params), arguments(arguments) {}
    DEVICE bool loads() const { return false; }
    DEVICE void load(SharedStorage&, const GemmWorkTile&, int) const {}

    // Stages the 16 x 16 values of slice `slice` by store_matrix.
    DEVICE static void stage_slice(unsigned char* staging, int slice, const uint32_t (&packed)[4]) {
        const int lane = threadIdx.x % 32, row = lane % 16, column = slice * 2 + lane / 16;
        constexpr int kBoxColumns = kBoxRowBytes / 16;
        const int at = row * kBoxRowBytes + column % kBoxColumns * 16;
        store_matrix(
            staging + column / kBoxColumns * kBoxBytes + (at ^ (at >> 3 & (kBoxRowBytes - 16))),
            packed);
    }
    // Called by a warp: stores its 16 staged rows at (row, col) by TMA.
    DEVICE static void store_staged(const TensorMap& map, const unsigned char* staging, int row,
                                    int col, int batch) {
        fence_async_proxy();
        sync_warp();
        if (threadIdx.x % 32 == 0) {
#pragma unroll
            for (int i = 0; i < kOwnCols / kBoxCols; ++i) {
                tma_store(map, staging + i * kBoxBytes, {col + i * kBoxCols, row, batch});
            }
            tma_store_commit();
        }
    }
    // Waits until TMA has read the warp's staging.
    DEVICE static void wait_staged() {
        if (threadIdx.x % 32 == 0) tma_store_wait_read<0>();
        sync_warp();
    }

    // Stores silu(d1) * d2 with one factor per product, in FP32 up to the output.  (row, col): the
    // warp's first accumulator in the output.
    template <class Out>
    DEVICE static void store_scaled(unsigned char* staging, const TensorMap& map,
                                    const float (&factors)[2], int row, int col, int batch,
                                    const Accumulator& accumulator) {
#pragma unroll
        for (int m = 0; m < kMmasM; ++m) {
            wait_staged();
#pragma unroll
            for (int slice = 0; slice < kSlices; ++slice) {
                float gated[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int at = slice * 8 + i;
                    gated[i] = gate(float(accumulator[m][at]) * factors[0],
                                    float(accumulator[m][kCols / 4 + at]) * factors[1], kAllFp32);
                }
                const uint32_t packed[4] = {
                    pack<Out>(gated[0], gated[1]), pack<Out>(gated[2], gated[3]),
                    pack<Out>(gated[4], gated[5]), pack<Out>(gated[6], gated[7])};
                stage_slice(staging, slice, packed);
            }
            store_staged(map, staging, row + 64 * m, col, batch);
        }
    }

    // General: all scales, gates and outputs.  map: null if TMA cannot store the output.
    template <class AccumulatorArray>
    DEVICE static void store_general(unsigned char* staging, const TensorMap* map,
                                     const GatedScales& scales, const Gate& gate, int row, int col,
                                     int batch, const AccumulatorArray& accumulator) {
        const MatrixEpilogue &first = scales.first, &second = scales.second;
        const EpilogueParams& params = first.params;
        const int lane = threadIdx.x % 32;
        typename Gate::Rows reduced[2];
#pragma unroll 1
        for (int number = 0; number < kMmasM * kSlices; ++number) {
            const int m = number / kSlices, slice = number % kSlices;
            float values[8], others[8];
#pragma unroll
            for (int known = 0; known < kMmasM * kSlices; ++known) {
                if (known != number) continue;
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int at = known % kSlices * 8 + i;
                    values[i] = float(accumulator[known / kSlices][at]);
                    others[i] = float(accumulator[known / kSlices][kCols / 4 + at]);
                }
            }
            const int first_row = row + 64 * m + lane / 4, first_col = col + slice * kSlice;
            const float rows[2] = {GatedScales::row(first, first_row),
                                   GatedScales::row(first, first_row + 8)};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int at = first_col + wgmma_col(lane, i);
                const float factor = rows[i / 2 % 2];
                values[i] = values[i] * GatedScales::col(first, at) * factor * params.alpha;
                others[i] = others[i] * GatedScales::col(second, at) * factor * second.params.alpha;
            }
            const auto at = [&](int i) {
                return Element{first_row + i / 2 % 2 * 8, first_col + wgmma_col(lane, i), true};
            };
            gate.apply(values, others, at, reduced);
            if (slice == kSlices - 1 && col < params.n)
                gate.store_rows(reduced, first_row, col / kOwnCols);
            if constexpr (!kSame<typename Gate::Narrow, void>) {
                store_quad(static_cast<typename Gate::Narrow*>(first.out), params, params.out,
                           row + 64 * m, first_col, values);
                continue;
            }
            if (!map) {
#pragma unroll
                for (int i = 0; i < 8; i += 2) {
                    const int at_row = first_row + i / 2 % 2 * 8;
                    const int at_col = first_col + wgmma_col(lane, i);
                    if (at_row >= params.m || at_col >= params.n) continue;
                    const float pair[2] = {values[i], values[i + 1]};
                    first.write(at_row, at_col, at_col + 1 < params.n ? 2 : 1, pair);
                }
                continue;
            }
            uint32_t packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                packed[i] = params.out_dtype == kHalf
                                ? pack<half>(values[2 * i], values[2 * i + 1])
                                : pack<bf16>(values[2 * i], values[2 * i + 1]);
            }
            if (slice == 0) wait_staged();
            stage_slice(staging, slice, packed);
            if (slice == kSlices - 1) store_staged(*map, staging, row + 64 * m, col, batch);
        }
    }

    struct Consumer {
        const GatedEpilogue& epilogue;
        Staging& staging;
        typename Mainloop::SharedStorage& mainloop;
        WorkTile& work;
        int warp, warpgroup;
        float factors[2] = {1, 1};  // mixed input: scale of the thread's column per product

        template <class Storage>
        DEVICE Consumer(const GatedEpilogue& epilogue, Storage& storage, WorkTile& work, int warp,
                        int warpgroup)
            : epilogue(epilogue),
              staging(storage.staging),
              mainloop(storage.mainloop),
              work(work),
              warp(warp),
              warpgroup(warpgroup) {}
        DEVICE bool needs_tile() const { return true; }
        DEVICE int64_t offset(const GemmWorkTile& tile, Operand operand) const {
            return epilogue.params.batch.offset(operand, tile.batch);
        }
        // Mixed input: the thread's output column.
        DEVICE int own_col(const GemmWorkTile& tile) const {
            return int(tile.col) + work.row / 2 + Column::thread() / 4;
        }
        DEVICE RowScales row_scales(const e4m3* scales, Operand operand, int i,
                                    const GemmWorkTile& tile) const {
            const GatedParams& params = epilogue.params;
            const auto& steps = params.groups[i];
            const int col = own_col(tile);
            return scales_of_rows(
                {scales + offset(tile, operand), steps.block, steps.quarter, steps.row, steps.word},
                col, col, int(params.columns()) - 1, int(params.num_groups));
        }
        DEVICE void begin(const GemmWorkTile& tile) {
            if constexpr (kSame<typename Mainloop::ElementB, e2m1x2>) {
                const Arguments& arguments = epilogue.arguments;
                work.row_scales = row_scales(arguments.groups_b1, kGroupsB, 0, tile);
                const RowScales others = row_scales(arguments.groups_b2, kGroupsB2, 1, tile);
                work.row_scales.rows[1] = others.rows[0];
                work.row_scales.steps[1] = others.steps[0];
                work.row_scales.aligned = work.row_scales.aligned && others.aligned;
            }
            if constexpr (kMixedInput && kByBlock) {
                const Arguments& arguments = epilogue.arguments;
                const GemmWorkTile own = BlockScales::of_columns(tile, work.row / 2, arguments.n());
                work.block_scales = arguments.block_scales(own, work.first_k_tile);
            } else if constexpr (kMixedInput) {
                load_factors(tile);  // the mainloop hides these loads
            }
        }
        DEVICE void load_factors(const GemmWorkTile& tile) {
            const GatedParams& params = epilogue.params;
            const float* scales[2] = {epilogue.arguments.scale_b1, epilogue.arguments.scale_b2};
            if (params.batch.num_dims > 0) {  // one branch: fetching the offsets' code takes time
                if (scales[0]) scales[0] += offset(tile, kScaleB);
                if (scales[1]) scales[1] += offset(tile, kScaleB2);
            }
            const int col = own_col(tile);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const bool inside = scales[i] && col < params.columns();
                factors[i] = inside ? scales[i][col * params.epilogues[i].scale_b_stride] : 1.0f;
            }
        }
        DEVICE bool reduce(const GemmWorkTile&, int, Accumulator& accumulator) {
            if constexpr (kSplitK) {
                void* memory = kSplitKInStaging ? static_cast<void*>(&staging) : &mainloop;
                Reduction::add(memory, mainloop.warpgroups[warpgroup], warpgroup, accumulator);
            }
            return true;
        }
        template <class Scheduler>
        DEVICE void store(const typename Scheduler::Tile& tile, int count,
                          const Accumulator& accumulator) {
            if constexpr (kMixedInput) store_column(tile, count, accumulator);
            else store_rows(tile, accumulator);
        }
        DEVICE void store_rows(const GemmWorkTile& tile, const Accumulator& accumulator) const {
            const GatedParams& params = epilogue.params;
            const Arguments& arguments = epilogue.arguments;
            const auto of_product = [&](int product, const float* scale_b, Operand operand) {
                return MatrixEpilogue::of_matrix(
                    params.epilogues[product], arguments.out, nullptr, nullptr,
                    kByBlock ? nullptr : arguments.scale_a, kByBlock ? nullptr : scale_b,
                    offset(tile, kOut), 0, 0, offset(tile, kScaleA), offset(tile, operand));
            };
            const MatrixEpilogue first = of_product(0, arguments.scale_b1, kScaleB);
            const MatrixEpilogue second = of_product(1, arguments.scale_b2, kScaleB2);
            const GatedScales scales{first, second};
            const Gate gate = Gate::of(arguments, tile);
            const int row = work.first_row, batch = int(offset(tile, kOut));
            const int col = work.first_col + (kSplitK ? cluster_rank() * kOwnCols : 0);
            unsigned char* own = staging.warps[warp];
            float factors[2];
            const bool scaled = params.tma_stores && gate.silu_in_fp32() && scales.plain(factors);
            if (scaled && first.params.out_dtype == kHalf) {
                store_scaled<half>(own, arguments.out_map, factors, row, col, batch, accumulator);
            } else if (scaled) {
                store_scaled<bf16>(own, arguments.out_map, factors, row, col, batch, accumulator);
            } else {
                store_general(own, params.tma_stores ? &arguments.out_map : nullptr, scales, gate,
                              row, col, batch, accumulator);
            }
        }
        DEVICE void store_column(const GemmWorkTile& tile, int count,
                                 const Accumulator& accumulator) const {
            const GatedParams& params = epilogue.params;
            const Arguments& arguments = epilogue.arguments;
            int64_t out = 0, scale_a = 0;
            if (params.batch.num_dims > 0) {
                out = offset(tile, kOut);
                scale_a = offset(tile, kScaleA);
            }
            const MatrixEpilogue first = MatrixEpilogue::of_matrix(
                params.epilogues[0], arguments.out, nullptr, nullptr,
                kByBlock ? nullptr : arguments.scale_a, nullptr, out, 0, 0, scale_a, 0);
            const float alphas[2] = {params.epilogues[0].alpha, params.epilogues[1].alpha};
            const Gate gate = Gate::of(arguments, tile);
            const Column column{first, gate, factors, alphas};
            const int row = int(tile.row), col = own_col(tile);
            if (params.tma_stores) {
                column.store_by_tma(staging.warps[4 * warpgroup], arguments.out_map, row, col,
                                    int(out), count, accumulator);
            } else if (col < first.params.n) {
                column.store(row, col, accumulator);
            }
        }
        DEVICE void finish() const {
            if (threadIdx.x % 32 == 0) tma_store_wait_read<0>();
            sync_warp();
        }
    };
};

}  // namespace gemm
