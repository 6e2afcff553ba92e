// gemm_hopper.cu: gemm.cu's products on Hopper: out = activation(alpha * (A @ B) + bias) +
// residual.
//
// As many blocks as the GPU runs at once walk through the tiles; the loads of a block's next tile
// begin while it finishes one.
// Constants: those of parts/ring_hopper.cuh and of the main loop, parts/mainloop*_hopper.cuh, that
// the variant includes before this file.  kPlain, kGeneral: which ends of a tile the kernel has, the
// short one of parts/plain_epilogue_hopper.cuh, the other one and the short one with more, or all, of
// which params.end picks one.  A kernel with one of them is short, and most of the time its code is not in any cache: the
// instructions that are not run take time too, because those that are lie apart.  FP8's kernel with the
// short end alone is for products without scales of blocks.
// Launch: grid (any; clusters of kClusterSize), block (kNumThreads = 384 or 512), dynamic shared memory
// sizeof(HopperStorage).  Tensor maps:
// (batch, m, k) of A and (batch, n, k) of B, or with their last two dims swapped where kOuterMajor;
// (batch, m, n) of out, boxes of 16 x 64 (FP32: 32), or with kTurned up to 64 x 64; for kBoxedEnd the same
// of the residual.  The maps' batch is BatchLayout's offset of kA, kB, kOut and, there, kResidual.
#include "parts/epilogue_hopper.cuh"
#include "parts/gemm_task.cuh"
#include "parts/plain_epilogue_hopper.cuh"
#include "parts/read_ahead.cuh"
#include "parts/ring_hopper.cuh"
#include "parts/split_sums_hopper.cuh"
#include "parts/turned_epilogue_hopper.cuh"

struct HopperParams {
    BatchLayout batch;
    int64_t batch_size, num_k_tiles, tiles_m, tiles_n;
    MatrixStrides block_scales_a, block_scales_b;
    EpilogueParams epilogue;
    int32_t tma_stores, group_height;  // in tiles (GemmTask::of_block)
    int32_t has_block_scales;  // what scale_a and scale_b then are; they are the main loop's
    int32_t stage_bytes;       // of a stage, without rows of A that do not exist
    int32_t end, padding;      // which one: End
    int64_t num_groups;        // of NVFP4's k
    struct { int64_t block, quarter, row, word; } groups;  // GroupScales
};

// kBoxedEnd: the short end with a residual, FP32 results or scales of 16-bit operands, which kernels with
// kGeneral have: its code, and the barriers, would cost those without them 1% to 5%.
enum End { kGeneralEnd, kPlainEnd, kBoxedEnd };

constexpr bool kSlotsApart = kPromotes && kSplitK;
// Of tiles whose sums are under way; of wide tiles of FP8 also of the next one, whose products may take
// less than its factors.
constexpr int kFactors = kPingPong ? kConsumers : kInRow && kStagedBoxes > 2 ? 2 : 1;
struct HopperStorage {
    Staging staging[4 * kConsumers];
    Ring ring;
    TileFactors factors[kFactors];
    Barrier residual[kGeneral ? 4 * kConsumers : 1][2];  // of the warps' boxes
    // Of scales of blocks on their way, where other blocks write to `staging` at any time.
    alignas(16) unsigned char slots[kSlotsApart ? 4 * kConsumers * kFactorBytes : 1];
};

constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
constexpr int kConsumerRegisters = consumer_registers(kProducerRegisters);

// With kShareK: the first warpgroup's sums, plus those of the other one.
DEVICE void add_shared_sums(HopperStorage& storage, int warpgroup, TileSums& sums) {
    using Slices = SumType[kBlocks * kCols / 2][128];
    static_assert(!kShareK || sizeof(Slices) <= sizeof(storage.staging) / 2, "half of the staging");
    // The second warpgroup's, which stores nothing.
    Slices& slices = *reinterpret_cast<Slices*>(&storage.staging[4]);
#pragma unroll
    for (int i = 0; i < kBlocks * kCols / 2; ++i) {
        if (warpgroup == 1) slices[i][threadIdx.x % 128] = sums[i / (kCols / 2)][i % (kCols / 2)];
    }
    named_barrier(3, 128 * kConsumers);
#pragma unroll
    for (int i = 0; i < kBlocks * kCols / 2; ++i) {
        if (warpgroup == 0) sums[i / (kCols / 2)][i % (kCols / 2)] += slices[i][threadIdx.x % 128];
    }
    named_barrier(3, 128 * kConsumers);  // read, before the next tile's
}

// Where blocks stream 8-bit rows, these are as far apart as they are long, and all blocks go along k
// at the same pace: they would ask for the same few banks of memory.  They begin at different k, of
// which the columns alone decide.
constexpr bool kSpreads = kShareK && kConverts && !kOuterMajorRows && kCols < 64 && !kMulticasts &&
                          !kSame<RowElement, e2m1x2>;
DEVICE int first_of_k(int tile, int num_k_tiles) {
    return kSpreads ? int(uint64_t(uint32_t(tile) * 0x9e3779b9u) * uint32_t(num_k_tiles) >> 32) : 0;
}

// With kSplitK: the other blocks' sums go to the staging, if it is large enough.
constexpr bool kSplitInStaging = sizeof(SplitSums) <= sizeof(Staging) * 4 * kConsumers;

// multiply_all, where the main loop has it.
template <bool kHas, class... Arguments>
DEVICE void multiply_in_row(Arguments&&... arguments) {
    if constexpr (kHas) multiply_all(arguments...);
}

KERNEL void gemm_hopper(GRID_CONSTANT TensorMap a_map, GRID_CONSTANT TensorMap b_map,
                        GRID_CONSTANT TensorMap out_map, GRID_CONSTANT TensorMap residual_map,
                        void* out, const void* bias, const void* residual, const float* scale_a,
                        const float* scale_b, const e4m3* groups_b, const HopperParams params) {
    SHARED_STORAGE(HopperStorage, storage);
    Ring& ring = storage.ring;
    // From one lane, so that the compiler knows that they are alike in all.
    const int warp = shuffle(int(threadIdx.x / 32), 0), warpgroup = warp / 4;
    if ((warp == 4 * kConsumers && elect_one()) || read_lines_ahead(params, warp)) {
        prefetch_tensor_map(a_map);
        prefetch_tensor_map(b_map);
    }
    if (warp == 0 && elect_one()) {
        for (TileFactors& factors : storage.factors) factors.init();
        if constexpr (kGeneral) {
            for (auto& of_warp : storage.residual) {
                for (Barrier& full : of_warp) full.init(1);
            }
        }
        ring.init();
    }
    // Tiles, each kClusterSize times: a cluster's blocks have parts of the same one.
    const int num_parts = int(params.tiles_m * params.tiles_n * params.batch_size) * kClusterSize;
    const int first = blockIdx.x, step = gridDim.x, rank = kSplitK ? cluster_rank() : 0;
    // The block's part of k: at least one tile.
    const int all_k_tiles = int(params.num_k_tiles);
    const int first_k_tile = kSplitK ? rank * all_k_tiles / kClusterSize : 0;
    const int num_k_tiles =
        (kSplitK ? (rank + 1) * all_k_tiles / kClusterSize : all_k_tiles) - first_k_tile;
    constexpr int kBeside = kMulticasts ? kClusterSize : 1;
    const auto task_of = [&](int part) {
        const int tile = part / kClusterSize;
        GemmTask task =
            GemmTask::of_block(tile, uint32_t(params.tiles_m), uint32_t(params.tiles_n),
                               uint32_t(params.batch_size), kTurned ? kTileM : kTileM * kBeside,
                               kTurned ? kTileN * kBeside : kTileN, uint32_t(params.group_height));
        if constexpr (kMulticasts) (kTurned ? task.col : task.row) += cluster_rank() * kRows;
        return task;
    };
    const auto first_row = [](const GemmTask& task) { return int(kTurned ? task.col : task.row); };
    const auto first_col = [](const GemmTask& task) { return int(kTurned ? task.row : task.col); };
    const int turn = kPingPong && warpgroup < kConsumers ? warpgroup : 0;
    // Before the barrier, while another warp makes the ring's.
    const GemmTask first_task = task_of(first + turn * step);
    const TensorMap &row_map = kTurned ? b_map : a_map, &col_map = kTurned ? a_map : b_map;
    const auto row_batch = [&](const GemmTask& task) {
        return int(params.batch.offset(kTurned ? kB : kA, task.batch));
    };
    const auto col_batch = [&](const GemmTask& task) {
        return int(params.batch.offset(kTurned ? kA : kB, task.batch));
    };
    if constexpr (kMulticasts) {
        // Memory answers while the blocks meet.
        if (warp == 4 * kConsumers && elect_one()) {
            RowStage::prefetch(row_map, first_row(first_task), row_batch(first_task));
            ColStage::prefetch(col_map,
                               first_col(first_task) + cluster_rank() * (kCols / kClusterSize),
                               col_batch(first_task));
        }
        sync_warp();
        begin_cluster();
    } else {
        sync_block();
    }
    if constexpr (kSplitK) begin_split_sums<kSplitInStaging>();
    const bool by_block = kPromotes && kGeneral && params.has_block_scales != 0;
    static_assert(kPlain || kGeneral, "an end of a tile");
    const bool plain = kPlain && (!kGeneral || params.end == kPlainEnd);
    const bool boxed = kGeneral && params.end == kBoxedEnd, is_short = plain || boxed;
    const auto epilogue_of = [&](const GemmTask& task) {
        const auto offset = [&](Operand operand) {
            return params.batch.offset(operand, task.batch);
        };
        return Epilogue::of_matrix(params.epilogue, out, bias, residual,
                                   by_block ? nullptr : scale_a, by_block ? nullptr : scale_b,
                                   offset(kOut), offset(kBias), offset(kResidual), offset(kScaleA),
                                   offset(kScaleB));
    };
    if (warpgroup == kConsumers) {
        decrease_registers<kProducerRegisters>();
        const int warp = threadIdx.x / 32;
        if (warp == 4 * kConsumers && elect_one()) {
            RingPlace place;
            for (int part = first; part < num_parts; part += step) {
                const GemmTask task = part == first ? first_task : task_of(part);
                const bool has_rows = !kMulticasts || kTurned || task.row < params.epilogue.m;
                load_tiles(ring, place, row_map, col_map, params.stage_bytes, first_k_tile,
                           num_k_tiles, first_row(task), first_col(task), row_batch(task),
                           col_batch(task), first_of_k(int(task.col) / kTileN, num_k_tiles),
                           has_rows);
            }
            if (kMulticasts) drain(ring, place);
        }
        if (is_short && warp == 4 * kConsumers + 1) {
            int count = 0;
            for (int part = first; part < num_parts; part += step, ++count) {
                storage.factors[count % kFactors].load(
                    params.epilogue, params.batch, task_of(part), by_block ? nullptr : scale_a,
                    by_block ? nullptr : scale_b, bias, count / kFactors);
            }
        }
        sync_warp();
        if constexpr (kSplitK) skip_split_sums<kSplitInStaging>();
    } else {
        increase_registers<kConsumerRegisters>();
        constexpr int turns = kPingPong ? kConsumers : 1;
        TileWork work{};
        work.num_k_tiles = num_k_tiles;
        work.first_k_tile = first_k_tile;
        work.consumer = warpgroup;
        work.row = kShareRows ? warpgroup * kConsumerRows : 0;
        work.place.skip(turn * num_k_tiles);
        int box = 0;
        const int row = work.row + warp % 4 * kWarpRows;
        const int of_boxes = kTurned ? 4 * warpgroup : warp;
        const Residual boxes{residual_map, storage.residual[kGeneral ? of_boxes : 0],
                             &storage.staging[of_boxes]};
        const bool adds = boxed && residual != nullptr;
        const auto store = [&](const TileFactors& factors, const RowFactors& rows, int count,
                               const TileSums& sums) {
            const PlainEnd end{storage.staging[warp], box, out_map, factors, rows,
                               params.epilogue,       row, count,   boxes};
            if (!adds) end.store<false>(sums);
            else if constexpr (kGeneral) end.store<true>(sums);
        };
        const bool in_row = kInRow && is_short && !by_block;
        if (in_row) {
            const int rest = num_parts - first;
            TileSums sums;
            RowFactors rows;
            multiply_in_row<kInRow>(
                ring, work, rest > 0 ? (rest + step - 1) / step : 0, sums,
                [&] {
                    TileFactors& factors = storage.factors[work.count % kFactors];
                    factors.full.wait(work.count / kFactors & 1);
                    rows.load(factors, row);
                    if (adds) {
                        const Bytes<16> place = factors.place;
                        boxes.begin(work.count, int(place.words[0]) + row, int(place.words[1]),
                                    int(place.words[3]));
                    }
                },
                [&] {
                    TileFactors& factors = storage.factors[work.count % kFactors];
                    store(factors, rows, work.count, sums);
                    factors.release();
                });
        }
        if (!in_row) do {
                const int part = first + (turn + work.count * turns) * step;
                if (part >= num_parts) break;
                if (kBlocks * kTileChunks % 2 == 0) box = 0;  // which it is, without a register
                // Where the tile lies takes divisions, which the short epilogue need not wait for.
                const bool finds = kTurned || !is_short || by_block || kConverts || adds;
                GemmTask task{};
                if (finds) task = !kPromotes && work.count == 0 ? first_task : task_of(part);
                const auto offset = [&](Operand operand) {
                    return params.batch.offset(operand, task.batch);
                };
                work.first_row = first_row(task) + work.row + warp % 4 * kWarpRows;
                work.first_col = first_col(task);
                if (kPromotes && by_block) {
                    // What the tile before has there is stored.
                    if (threadIdx.x % (kTurned ? 128 : 32) == 0) tma_store_wait_read<0>();
                    if (kTurned) named_barrier(1 + warpgroup, 128);
                    else sync_warp();
                    work.slots = kSlotsApart
                                     ? static_cast<void*>(storage.slots + warp * kFactorBytes)
                                     : storage.staging[warp].boxes;
                    const MatrixStrides &a = params.block_scales_a, &b = params.block_scales_b;
                    work.scales = {scale_a ? scale_a + offset(kScaleA) : nullptr,
                                   scale_b ? scale_b + offset(kScaleB) : nullptr,
                                   a.row,
                                   a.col,
                                   b.row,
                                   b.col,
                                   int(params.epilogue.m) - 1,
                                   int(params.epilogue.n - 1) / kBlockK};
                }
                if constexpr (kSame<RowElement, e2m1x2>) {
                    const GroupScales groups{groups_b + offset(kGroupsB), params.groups.block,
                                             params.groups.quarter, params.groups.row,
                                             params.groups.word};
                    const int col = work.first_row + int(threadIdx.x) % 32 / 4;
                    work.row_scales = scales_of_rows(
                        groups, col, col + 8, int(params.epilogue.n) - 1, int(params.num_groups));
                }
                TileSums sums;
                TileFactors& factors = storage.factors[kPingPong ? warpgroup : 0];
                if constexpr (!kPlain) {  // beside a short end it costs those without a residual 3%
                    if (!boxed)
                        prefetch_residual(epilogue_of(task), work.first_row, work.first_col);
                }
                const auto begin_residual = [&](int count) {
                    if (!adds) return;
                    boxes.begin(count, work.first_row, work.first_col, int(offset(kResidual)));
                };
                // Where k is split, other sums come to the boxes before.
                if (!kSplitK && !(kShareK && warpgroup > 0)) begin_residual(work.count);
                multiply(ring, work, sums);
                const int count = work.count++;
                work.place.skip(turns * num_k_tiles);
                if (kShareK) {
                    // Scales that lie where sums are to lie are read.  (By both, though only the second one's lie
                    // there: racecheck reports races of what follows a barrier of that one alone.)
                    if (kPromotes && by_block) named_barrier(3, 128 * kConsumers);
                    add_shared_sums(storage, warpgroup, sums);
                    if (warpgroup > 0) continue;
                }
                if constexpr (kSplitK) {
                    void* place = kSplitInStaging ? static_cast<void*>(storage.staging) : &ring;
                    add_split_sums<1, kSplitInStaging>(place, warpgroup, sums);
                    if (adds) fence_async_proxy();
                    begin_residual(count);
                }
                if (is_short) {
                    factors.full.wait(count & 1);
                    if constexpr (kTurned) {
                        const TurnedEnd end{
                            storage.staging,   box,   out_map,        factors,
                            params.epilogue,   row,   work.first_row, work.first_col,
                            int(offset(kOut)), count, boxes};
                        if (!boxed) end.store<false>(sums);
                        else if constexpr (kGeneral) end.store<true>(sums);
                    } else {
                        RowFactors rows;
                        rows.load(factors, row);
                        store(factors, rows, count, sums);
                    }
                    factors.release();
                    continue;
                }
                const Epilogue epilogue = epilogue_of(task);
                if (!params.tma_stores) {
                    store_runs(storage.staging[warp], epilogue, work.first_row, work.first_col,
                               sums);
                    continue;
                }
                TileVectors vectors;
                vectors.load(epilogue, work.first_row, work.first_col);
                store_boxes(storage.staging, box, out_map, epilogue, vectors, work.first_row,
                            work.first_col, int(offset(kOut)), sums);
            } while (!kSplitK);
        if (threadIdx.x % 32 == 0) tma_store_wait_read<0>();
        sync_warp();
    }
}
