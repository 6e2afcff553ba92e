// The epilogues of matmul and scaled_mm on Hopper: which are compiled in, and their work before and
// after a tile's mainloop.
#pragma once
#include "gemm/epilogue/broadcast.cuh"
#include "gemm/epilogue/ops.cuh"
#include "gemm/epilogue/residual.cuh"
#include "gemm/epilogue/store_global.cuh"
#include "gemm/epilogue/store_partials.cuh"
#include "gemm/epilogue/store_tma.cuh"
#include "gemm/epilogue/store_tma_swap_ab.cuh"
#include "gemm/load_tile.cuh"
#include "gemm/reduce.cuh"
#include "gemm/epilogue/linear_combination.cuh"
#include "gemm/work_tile.cuh"

namespace gemm {

// The epilogue of a kernel.  A kernel has only one, to avoid instruction cache misses.
// TmaStore: 16-bit outputs without residual and activation.
// Activate: 16-bit outputs with an activation, without residual.  Activations are half of its code.
// AddResidual: 16-bit outputs and a residual of their dtype, which TMA loads.
// Floats: FP32 outputs without residual and activation.
// General: all others.  There kTmaEpilogue selects a TMA store too: with scales of both 16-bit
// matrices, and of parts of FP32; of a formula, that TMA loads an operand.
// Partials: the FP32 accumulators as they are, without staging, for split-K with a workspace.
struct TmaStore {};
struct Activate {};
struct AddResidual {};
struct Floats {};
struct General {};
struct Partials {};
enum EpilogueKind { kGeneralEpilogue, kTmaEpilogue };

struct MatmulParams {
    BatchLayout batch;
    TileOrder order;
    int64_t num_k_tiles, k_tiles_per_split;        // per split: SplitKScheduler
    MatrixStrides block_scales_a, block_scales_b;  // strides of scale_a and scale_b, if kByBlock
    EpilogueParams epilogue;
    int64_t tma_stores, epilogue_kind;
    int64_t num_groups;                                    // scale groups of NVFP4 along k
    struct { int64_t block, quarter, row, word; } groups;  // strides of GroupScales
};

// Tensor maps: A is (batch, m, k) and B (batch, n, k), with the last two dims swapped if MN-major;
// boxes of a_edge and b_edge have only the last rows (StageOperand::map).  The output is
// (batch, m, n), in boxes of 16 x 64, with SwapAB up to 64 x 64, in FP32 always of 16 x 32.  The
// residual, or a formula's operand, is like the output.  The batch index is BatchLayout's offset.
struct MatmulArguments {
    const TensorMap &a_map, &a_edge, &b_map, &b_edge, &out_map, &residual_map;
    void* out;
    const void* bias;
    const void* residual;
    const float* scale_a;
    const float* scale_b;
    const e4m3* groups_b;
    const MatmulParams& params;

    DEVICE int a_batch(const GemmWorkTile& tile) const {
        return int(params.batch.offset(kA, tile.batch));
    }
    DEVICE int b_batch(const GemmWorkTile& tile) const {
        return int(params.batch.offset(kB, tile.batch));
    }
    DEVICE BlockScales block_scales(const GemmWorkTile& tile, int first_k_tile) const {
        const MatrixStrides &a = params.block_scales_a, &b = params.block_scales_b;
        const int64_t of_a = params.batch.offset(kScaleA, tile.batch) + tile.row * a.row,
                      of_b =
                          params.batch.offset(kScaleB, tile.batch) + tile.col / kScaleBlock * b.col;
        return {scale_a ? scale_a + of_a + first_k_tile * a.col : nullptr,
                {scale_b ? scale_b + of_b + first_k_tile * b.row : nullptr, nullptr},
                a.row,
                a.col,
                {b.row, 0},
                int(m() - 1 - tile.row)};
    }
    DEVICE int64_t m() const { return params.epilogue.m; }
    DEVICE int64_t n() const { return params.epilogue.n; }
};

template <class Mainloop_, class Kind> struct MatmulEpilogue {
    using Mainloop = Mainloop_;
    using Params = MatmulParams;
    using Arguments = MatmulArguments;
    using Loader = TileLoader<Mainloop, Arguments>;
    using Accumulator = typename Mainloop::Accumulator;
    using WorkTile = typename Mainloop::WorkTile;
    static constexpr bool kGeneral = kSame<Kind, General>, kFloats = kSame<Kind, Floats>;
    static constexpr bool kPartials = kSame<Kind, Partials>, kAdds = kSame<Kind, AddResidual>;
    static_assert(kGeneral || kFloats || kPartials || kAdds || kSame<Kind, TmaStore> ||
                      kSame<Kind, Activate>,
                  "an epilogue");
    static constexpr bool kSwapAB = Mainloop::kSwapAB, kFp8 = Mainloop::kFp8;
    // Row and column scales leave no registers for activations.
    static constexpr bool kActivates =
        (kGeneral || kAdds || kSame<Kind, Activate>) && sizeof(typename Mainloop::ElementA) == 2;
    static constexpr bool kScaledParts = Mainloop::kScaledParts;
    static constexpr bool kByBlock = kScaledParts || Mainloop::kBlockScales;
    static constexpr bool kSlicedK = Mainloop::kSlicedK, kSplitK = Mainloop::kSplitK;
    static constexpr bool kPingPong = Mainloop::kPingPong, kClears = false;
    static constexpr int kConsumers = Mainloop::kConsumers;

    using Tile = EpilogueTile<Mainloop, kGeneral || kPartials || kAdds>;
    using Broadcast = TileBroadcast<Tile>;
    using Staging = typename Tile::Staging[4 * kConsumers];
    static constexpr bool kLoadsResidual =
        kGeneral || kAdds;  // a residual or a formula's operand by TMA
    // The epilogue runs inside the mainloop's loop over tiles (mma_tiles).
    static constexpr bool kBackToBack =
        kFp8 && Mainloop::kCooperative && !kSplitK && !kSwapAB && !kPartials;
    // One set of broadcasts per concurrent tile; FP8's wide tiles have another for the next tile,
    // whose mainloop can be shorter than its loads.
    static constexpr int kBroadcasts = kPingPong                         ? kConsumers
                                       : kBackToBack && Tile::kBoxes > 2 ? 2
                                                                         : 1;
    struct SharedStorage {
        Broadcast broadcasts[kBroadcasts];
        Barrier residual[kLoadsResidual ? 4 * kConsumers : 1][2];  // per warp and box

        DEVICE void init() {
            for (Broadcast& broadcast : broadcasts) broadcast.init();
            if constexpr (kLoadsResidual) {
                for (auto& of_warp : residual) {
                    for (Barrier& full : of_warp) full.init(1);
                }
            }
        }
    };
    // Cluster split-K: accumulators are exchanged through the staging if it is large enough.
    static constexpr bool kSplitKInStaging = Mainloop::kExchangeBytes <= int(sizeof(Staging));
    using Reduction = SplitKReduction<Mainloop, kSplitKInStaging>;

    const Params& params;
    const Arguments& arguments;
    bool is_tma_store;  // one of the TMA-store epilogues

    DEVICE MatmulEpilogue(const Params& params, const Arguments& arguments)
        : params(params),
          arguments(arguments),
          is_tma_store(!kPartials && (!kGeneral || params.epilogue_kind == kTmaEpilogue)) {}

    DEVICE int64_t offset(const GemmWorkTile& tile, Operand operand) const {
        return params.batch.offset(operand, tile.batch);
    }
    DEVICE bool loads() const { return is_tma_store; }
    DEVICE void load(SharedStorage& shared, const GemmWorkTile& tile, int count) const {
        shared.broadcasts[count % kBroadcasts].load(
            params.epilogue, params.batch, tile, kByBlock ? nullptr : arguments.scale_a,
            kByBlock ? nullptr : arguments.scale_b, arguments.bias, count / kBroadcasts);
    }
    DEVICE MatrixEpilogue of_matrix(const GemmWorkTile& tile) const {
        return MatrixEpilogue::of_matrix(params.epilogue, arguments.out, arguments.bias,
                                         arguments.residual, kByBlock ? nullptr : arguments.scale_a,
                                         kByBlock ? nullptr : arguments.scale_b, offset(tile, kOut),
                                         offset(tile, kBias), offset(tile, kResidual),
                                         offset(tile, kScaleA), offset(tile, kScaleB));
    }

    struct Consumer {
        int box = 0;  // next box to fill
        const MatmulEpilogue& epilogue;
        Staging& staging;
        typename Mainloop::SharedStorage& mainloop;
        SharedStorage& shared;
        WorkTile& work;
        int warp, warpgroup;
        int row;  // the warp's first row in the tile
        Residual<Tile> residual;
        bool adds;

        template <class Storage>
        DEVICE Consumer(const MatmulEpilogue& epilogue, Storage& storage, WorkTile& work, int warp,
                        int warpgroup)
            : epilogue(epilogue),
              staging(storage.staging),
              mainloop(storage.mainloop),
              shared(storage.epilogue),
              work(work),
              warp(warp),
              warpgroup(warpgroup),
              row(work.row + warp % 4 * kWarpRows),
              residual{epilogue.arguments.residual_map,
                       storage.epilogue.residual[kLoadsResidual ? first_warp(warp, warpgroup) : 0],
                       &storage.staging[first_warp(warp, warpgroup)]},
              adds(kAdds) {}
        // First of the warps that share this warp's boxes.
        DEVICE static int first_warp(int warp, int warpgroup) {
            return kSwapAB ? 4 * warpgroup : warp;
        }

        DEVICE void store_tma(const Broadcast& broadcast, const RowScaleFragment<Tile>& scales,
                              int count, const Accumulator& accumulator) {
            const StoreTma<Tile> store{staging[warp], box,    epilogue.arguments.out_map,
                                       broadcast,     scales, epilogue.params.epilogue,
                                       row,           count,  residual};
            if constexpr (kFloats) store.store_floats(accumulator);
            else store.template store<kAdds, kActivates>(accumulator);
        }
        // Runs all tiles of the block if epilogue and mainloop allow it; otherwise returns false.
        template <class Scheduler>
        DEVICE bool run_back_to_back(const Scheduler& scheduler) {
            if (!epilogue.is_tma_store) return false;
            const int rest = scheduler.end - scheduler.first;
            Accumulator accumulator;
            RowScaleFragment<Tile> scales;
            Mainloop::mma_tiles(
                mainloop, work, rest > 0 ? (rest + scheduler.step - 1) / scheduler.step : 0,
                accumulator,
                [&] {
                    Broadcast& broadcast = shared.broadcasts[work.count % kBroadcasts];
                    broadcast.full.wait(work.count / kBroadcasts & 1);
                    scales.load(broadcast, row);
                    if (adds) {
                        const Bytes<16> origin = broadcast.origin;
                        residual.begin(work.count, int(origin.words[0]) + row, int(origin.words[1]),
                                       int(origin.words[3]));
                    }
                },
                [&] {
                    Broadcast& broadcast = shared.broadcasts[work.count % kBroadcasts];
                    store_tma(broadcast, scales, work.count, accumulator);
                    broadcast.release();
                });
            return true;
        }

        // Whether tile coordinates are needed; they take divisions, which the TMA-store epilogue
        // avoids.
        DEVICE bool needs_tile() {
            constexpr int of_floats = kSwapAB ? Tile::kSlices : StoreTma<Tile>::kFloatBoxes;
            constexpr int boxes = kFloats ? of_floats : Tile::kChunks;
            if (Tile::kMmasM * boxes % 2 == 0) box = 0;  // a constant: saves a register
            return kSwapAB || !epilogue.is_tma_store || kByBlock || Mainloop::kMixedInput || adds;
        }
        DEVICE void begin_residual(const GemmWorkTile& tile, int count) const {
            if (!adds) return;
            residual.begin(count, work.first_row, work.first_col,
                           int(epilogue.offset(tile, kResidual)));
        }
        DEVICE void begin(const GemmWorkTile& tile) {
            const MatmulParams& params = epilogue.params;
            const MatmulArguments& arguments = epilogue.arguments;
            if constexpr (kScaledParts) {
                const int64_t row = tile.row / Mainloop::kTileM * params.block_scales_a.row;
                const int64_t col = tile.col / Mainloop::kTileN * params.block_scales_b.col;
                const float* scales_a = arguments.scale_a + epilogue.offset(tile, kScaleA);
                const float* scales_b = arguments.scale_b + epilogue.offset(tile, kScaleB);
                work.scales_a = scales_a + row + work.first_k_tile;
                work.scales_b = scales_b + col + work.first_k_tile;
            }
            if constexpr (Mainloop::kMixedInput && Mainloop::kBlockScales) {
                const GemmWorkTile own = BlockScales::of_columns(tile, work.row, arguments.n());
                work.block_scales = arguments.block_scales(own, work.first_k_tile);
            }
            if constexpr (kSame<typename Mainloop::RowElement, e2m1x2>) {
                const GroupScales groups{arguments.groups_b + epilogue.offset(tile, kGroupsB),
                                         params.groups.block, params.groups.quarter,
                                         params.groups.row, params.groups.word};
                const int col = work.first_row + int(threadIdx.x) % 32 / 4;
                work.row_scales = scales_of_rows(groups, col, col + 8, int(params.epilogue.n) - 1,
                                                 int(params.num_groups));
            }
            if constexpr (kGeneral) {
                if (arguments.residual)
                    EpilogueOps<Tile>::prefetch_residual(epilogue.of_matrix(tile), work.first_row,
                                                         work.first_col);
            }
            // Not with split-K, where the boxes first receive other blocks' accumulators.
            if (!kSplitK && !(kSlicedK && warpgroup > 0)) begin_residual(tile, work.count);
        }
        // Reduces over warpgroups and blocks.  Returns false if this warpgroup stores nothing.
        DEVICE bool reduce(const GemmWorkTile& tile, int count, Accumulator& accumulator) {
            if constexpr (kSlicedK) {
                using Reduction = SlicedKReduction<Mainloop>;
                static_assert(sizeof(typename Reduction::Slices) <= sizeof(Staging) / 2,
                              "half of the staging: the second warpgroup's, which stores nothing");
                Reduction::add(&staging[4], warpgroup, accumulator);
                if (warpgroup > 0) return false;
            }
            if constexpr (kSplitK) {
                void* memory = kSplitKInStaging ? static_cast<void*>(staging) : &mainloop;
                MatmulEpilogue::Reduction::add(memory, mainloop.warpgroups[warpgroup], warpgroup,
                                               accumulator);
                if (adds) fence_async_proxy();  // TMA overwrites what the exchange read
                begin_residual(tile, count);
            }
            return true;
        }
        template <class Scheduler>
        DEVICE void store(const GemmWorkTile& tile, int count, const Accumulator& accumulator) {
            if constexpr (kPartials) {
                const EpilogueParams& p = epilogue.params.epilogue;
                float* out =
                    static_cast<float*>(epilogue.arguments.out) + epilogue.offset(tile, kOut);
                StorePartials<Tile>::store(out, int(p.m), int(p.n), work.first_row, work.first_col,
                                           accumulator);
            } else {
                store_result(tile, count, accumulator);
            }
        }
        DEVICE void store_result(const GemmWorkTile& tile, int count,
                                 const Accumulator& accumulator) {
            const MatmulParams& params = epilogue.params;
            if (epilogue.is_tma_store) {
                Broadcast& broadcast = shared.broadcasts[kPingPong ? warpgroup : 0];
                broadcast.full.wait(count & 1);
                if constexpr (kSwapAB) {
                    const StoreTmaSwapAB<Tile> store{staging,
                                                     box,
                                                     epilogue.arguments.out_map,
                                                     broadcast,
                                                     params.epilogue,
                                                     row,
                                                     work.first_row,
                                                     work.first_col,
                                                     int(epilogue.offset(tile, kOut)),
                                                     count,
                                                     residual};
                    if constexpr (kFloats) store.store_floats(accumulator);
                    else store.template store<kAdds, kActivates>(accumulator);
                } else {
                    RowScaleFragment<Tile> scales;
                    scales.load(broadcast, row);
                    store_tma(broadcast, scales, count, accumulator);
                }
                broadcast.release();
                return;
            }
            const MatrixEpilogue matrix = epilogue.of_matrix(tile);
            if (!params.tma_stores) {
                StoreGlobal<Tile>::store(staging[warp], matrix, work.first_row, work.first_col,
                                         accumulator);
                return;
            }
            typename EpilogueOps<Tile>::Broadcasts broadcasts;
            broadcasts.load(matrix, work.first_row, work.first_col);
            EpilogueOps<Tile>::store_boxes(staging, box, epilogue.arguments.out_map, matrix,
                                           broadcasts, work.first_row, work.first_col,
                                           int(epilogue.offset(tile, kOut)), accumulator);
        }
        DEVICE void finish() const {
            if (threadIdx.x % 32 == 0) tma_store_wait_read<0>();
            sync_warp();
        }
    };
};

}  // namespace gemm
