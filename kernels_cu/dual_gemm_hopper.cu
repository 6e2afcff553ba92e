// dual_gemm_hopper.cu: dual_gemm.cu's out = silu(A @ B1) * (A @ B2) on Hopper.
//
// A tile has kTileN columns: kPair of B1 and the same ones of B2, whose stages lie behind each
// other in shared memory, so that the main loop multiplies A with one matrix of both.  A thread
// then holds the sums of both products at the same place, which meet in registers
// (parts/gated_epilogue_hopper.cuh).  Turned, the columns are the rows of the sums:
//   - of NVFP4 B1 and B2 the main loop that converts takes 8 of either in a warp
//     (parts/rows_nvfp4_hopper.cuh), so that a thread has both as well;
//   - for few rows of A, with kShareK, they are in different warps and meet in shared memory.  The
//     time is that of reading B1 and B2: all blocks have as many columns, but for kUnit.
// Constants and launch: as gemm_hopper.cu's; another tensor map for B2, both with boxes of kPair
// columns (few rows: kUnit), of the output with boxes of 16 x kBoxCols.
#include "parts/gated_epilogue_hopper.cuh"
#include "parts/gemm_task.cuh"
#include "parts/read_ahead.cuh"
#include "parts/ring_hopper.cuh"
#include "parts/split_sums_hopper.cuh"

struct DualHopperParams {
    BatchLayout batch;
    int64_t batch_size, num_k_tiles, tiles_m, tiles_n;
    EpilogueParams epilogues[2];       // of each product; the output is the first one's
    int32_t tma_stores, group_height;  // in tiles (GemmTask::of_block)
    int64_t policy;
    int64_t num_groups;                                       // of NVFP4's k
    struct { int64_t block, quarter, row, word; } groups[2];  // GroupScales
};

constexpr bool kFewRows = kTurned && !kConverts;
static_assert(kShareK == kFewRows && (!kConverts || kSame<ElementB, e2m1x2>),
              "others are of one size");
constexpr int kUnit = kFewRows ? 16 : kPair;  // columns of a box
constexpr int kUnits = kPair / kUnit;
using PairStage = OperandStage<ElementB, kOuterMajorB, kUnit>;
// A stage has both products' columns in every line of k, as if they were one matrix's.
constexpr int kBothBoxBytes = kTurned ? RowStage::kBoxBytes : ColStage::kBoxBytes;
constexpr int kPairStep = kOuterMajorB ? PairStage::kBoxBytes : kBothBoxBytes;
constexpr int kSecondPair = kOuterMajorB ? PairStage::kBytes : kBothBoxBytes / 2;
static_assert(PairStage::kLine == (kTurned ? RowStage::kLine : ColStage::kLine), "the same lines");
static_assert(!kMulticasts || kLines == 1, "a cluster's blocks load parts of one line");

// What a thread of kFewRows has of a tile, and where all threads leave it, for every second tile.
constexpr int kFewSums = kCols / 2;
using FewSums = SumType[kFewSums][128 * kConsumers];
union HopperStaging {
    Staging warps[kTurned ? 1 : 4 * kConsumers];
    alignas(128) unsigned char few[kFewRows ? 2 * sizeof(FewSums) : 128];
};
struct HopperStorage {
    HopperStaging staging;
    alignas(1024) Ring ring;
};

constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
constexpr int kConsumerRegisters = consumer_registers(kProducerRegisters);

// By one thread: a tile's stages, `num_k_tiles` of k from tile `first` on; `units` of its columns.
DEVICE void load_pairs(Ring& ring, RingPlace& place, const TensorMap& a_map,
                       const TensorMap& b1_map, const TensorMap& b2_map,
                       const DualHopperParams& params, const GemmTask& task, int units, int first,
                       int num_k_tiles) {
    const int row = int(task.row), col = int(task.col);
    const int a_batch = int(params.batch.offset(kA, task.batch));
    const int b1_batch = int(params.batch.offset(kB, task.batch));
    const int b2_batch = int(params.batch.offset(kB2, task.batch));
#pragma unroll 1
    for (int i = first; i < first + num_k_tiles; ++i) {
        Barrier& full = ring.full[place.stage];
        const int k = i * kTileK;
        const auto load_pair = [&](unsigned char* to, const TensorMap& map, int batch) {
            if constexpr (kMulticasts) {
                PairStage::load_for_all(to, map, full, k, col, batch, cluster_rank());
            } else {
                for (int i = 0; i < units; ++i) {
                    PairStage::load(to + i * PairStage::kBoxBytes, map, full, k, col + i * kUnit,
                                    batch, kPairStep);
                }
            }
        };
        ring.empty[place.stage].wait(place.parity ^ 1);
        const int missing = 2 * (kUnits - units) * PairStage::kBytes;
        full.arrive_expect_tx(RowStage::kBytes + ColStage::kBytes - missing);
        unsigned char *rows = ring.rows[place.stage], *cols = ring.cols[place.stage];
        unsigned char* pairs = kTurned ? rows : cols;
        OperandStage<ElementA, kOuterMajorA, kTileM>::load(kTurned ? cols : rows, a_map, full, k,
                                                           row, a_batch);
        load_pair(pairs, b1_map, b1_batch);
        load_pair(pairs + kSecondPair, b2_map, b2_batch);
        place.advance();
    }
}

// With kConverts: a thread's numbers are of one column `col` of the output, those of both products
// by turns, from row `row` on.
DEVICE void store_gated_column(const GateScales& scales, int policy, int row, int col,
                               const TileSums& sums) {
    const EpilogueParams& params = scales.first.params;
    constexpr int kNumbers = 16;  // of both products, that are finished at once
    const int lane = threadIdx.x % 32;
    if (col >= params.n) return;
    const float factors[2] = {GateScales::col(scales.first, col),
                              GateScales::col(scales.second, col)};
#pragma unroll 1
    for (int part = 0; part < kCols / 2 / kNumbers; ++part) {
        float products[2][kNumbers / 2];
#pragma unroll
        for (int p = 0; p < kCols / 2 / kNumbers; ++p) {
            if (p != part) continue;
#pragma unroll
            for (int i = 0; i < kNumbers; ++i) {
                products[i / 2 % 2][i / 4 * 2 + i % 2] = float(sums[0][p * kNumbers + i]);
            }
        }
        const auto row_of = [&](int i) {
            return row + part * kNumbers * 2 + i / 2 * 8 + lane % 4 * 2 + i % 2;
        };
#pragma unroll
        for (int i = 0; i < kNumbers / 2; ++i) {
            const float factor = GateScales::row(scales.first, row_of(i));
            products[0][i] = products[0][i] * factors[0] * factor * params.alpha;
            products[1][i] = products[1][i] * factors[1] * factor * scales.second.params.alpha;
        }
        gate_all(products[0], products[1], policy);
#pragma unroll
        for (int i = 0; i < kNumbers / 2; ++i) {
            const float one[1] = {products[0][i]};
            if (row_of(i) < params.m) scales.first.write(row_of(i), col, 1, one);
        }
    }
}

// With kFewRows: both warpgroups have sums of every second stage; the first half of a warpgroup's
// warps has those of B1's columns, the other one those of B2's.
// last_col: the tile's last column, and one more.
DEVICE void store_few_rows(FewSums& of_tile, const GateScales& scales, int policy, int row, int col,
                           int last_col, const TileSums& sums) {
    const EpilogueParams& params = scales.first.params;
    const int thread = threadIdx.x, lane = thread % 32;
    const bool finishes = thread < 64;
#pragma unroll
    for (int i = 0; i < kFewSums; ++i) {
        if (!finishes) of_tile[i][thread] = sums[0][i];
    }
    named_barrier(3, 128 * kConsumers);
    if (finishes) {
        float values[kFewSums], others[kFewSums];
#pragma unroll
        for (int i = 0; i < kFewSums; ++i) {
            const int at_row = row + wgmma_col(lane, i);
            const int at_col = col + thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
            const float factor = GateScales::row(scales.first, at_row);
            values[i] = float(sums[0][i] + of_tile[i][128 + thread]) *
                        GateScales::col(scales.first, at_col) * factor * params.alpha;
            others[i] = float(of_tile[i][64 + thread] + of_tile[i][192 + thread]) *
                        GateScales::col(scales.second, at_col) * factor *
                        scales.second.params.alpha;
        }
        gate_all(values, others, policy);
#pragma unroll
        for (int i = 0; i < kFewSums; ++i) {
            const int at_row = row + wgmma_col(lane, i);
            const int at_col = col + thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
            const float one[1] = {values[i]};
            if (at_row < params.m && at_col < last_col) scales.first.write(at_row, at_col, 1, one);
        }
    }
}

KERNEL void dual_gemm_hopper(GRID_CONSTANT TensorMap a_map, GRID_CONSTANT TensorMap b1_map,
                             GRID_CONSTANT TensorMap b2_map, GRID_CONSTANT TensorMap out_map,
                             void* out, const float* scale_a, const float* scale_b1,
                             const float* scale_b2, const e4m3* groups_b1, const e4m3* groups_b2,
                             const DualHopperParams params) {
    SHARED_STORAGE(HopperStorage, storage);
    Ring& ring = storage.ring;
    // From one lane, so that the compiler knows that they are alike in all.
    const int warp = shuffle(int(threadIdx.x / 32), 0), warpgroup = warp / 4;
    if ((warp == 4 * kConsumers && elect_one()) || read_lines_ahead(params, warp)) {
        prefetch_tensor_map(a_map);
        prefetch_tensor_map(b1_map);
        prefetch_tensor_map(b2_map);
    }
    if (threadIdx.x == 0) ring.init();
    // Tiles, each kClusterSize times: a cluster's blocks have parts of the same one.
    const int num_parts = int(params.tiles_m * params.tiles_n * params.batch_size) * kClusterSize;
    const int rank = kClusterSize > 1 ? cluster_rank() : 0;
    // Or units of columns, of which all blocks have as many.
    const bool even = kFewRows && params.tiles_m * params.batch_size == 1;
    const int64_t num_units = (params.epilogues[0].n + kUnit - 1) / kUnit;
    const int begin = even ? int(blockIdx.x * num_units / gridDim.x) : int(blockIdx.x);
    const int end = even ? int((blockIdx.x + 1) * num_units / gridDim.x) : num_parts;
    const int step = even ? kUnits : int(gridDim.x);
    const auto units_of = [&](int part) {
        return even && end - part < kUnits ? end - part : kUnits;
    };
    // The block's part of k: at least one tile.
    const int all_k_tiles = int(params.num_k_tiles);
    const int first_k_tile = kSplitK ? rank * all_k_tiles / kClusterSize : 0;
    const int num_k_tiles =
        (kSplitK ? (rank + 1) * all_k_tiles / kClusterSize : all_k_tiles) - first_k_tile;
    const auto task_of = [&](int part) {
        GemmTask task = GemmTask::of_block(part / kClusterSize, uint32_t(params.tiles_m),
                                           uint32_t(params.tiles_n), uint32_t(params.batch_size),
                                           kMulticasts ? kTileM * kClusterSize : kTileM, kPair,
                                           uint32_t(params.group_height));
        if constexpr (kMulticasts) task.row += rank * kTileM;
        if (even) {
            task.row = 0;
            task.col = int64_t(part) * kUnit;
        }
        return task;
    };
    // The divisions for the first loads, while another warp initialises the barriers.
    GemmTask first_task{};
    if (warp == 4 * kConsumers) first_task = task_of(begin);
    if constexpr (kClusterSize > 1) begin_cluster();
    else sync_block();
    if (warpgroup == kConsumers) {
        decrease_registers<kProducerRegisters>();
        if (threadIdx.x / 32 == 4 * kConsumers && elect_one()) {
            RingPlace place;
            for (int part = begin; part < end; part += step) {
                const GemmTask task = part == begin ? first_task : task_of(part);
                load_pairs(ring, place, a_map, b1_map, b2_map, params, task, units_of(part),
                           first_k_tile, num_k_tiles);
            }
            if (kMulticasts) drain(ring, place);
        }
        sync_warp();
        if constexpr (kSplitK) skip_split_sums<false>();
    } else {
        increase_registers<kConsumerRegisters>();
        const int turn = kPingPong ? warpgroup : 0, turns = kPingPong ? kConsumers : 1;
        TileWork work{};
        work.num_k_tiles = num_k_tiles;
        work.first_k_tile = first_k_tile;
        work.consumer = warpgroup;
        work.row = kShareRows ? warpgroup * kConsumerRows : 0;
        work.place.skip(turn * num_k_tiles);
        do {
            const int part = begin + (turn + work.count * turns) * step;
            if (part >= end) break;
            const GemmTask task = task_of(part);
            const auto offset = [&](Operand operand) {
                return params.batch.offset(operand, task.batch);
            };
            work.first_row = int(task.row) + work.row + warp % 4 * kWarpRows;
            work.first_col = int(task.col);
            const int own_col =
                int(task.col) + work.row / 2 + warp % 4 * 8 + int(threadIdx.x) % 32 / 4;
            if constexpr (kConverts) {
                const auto groups = [&](const e4m3* scales, Operand operand, int i) {
                    const auto& steps = params.groups[i];
                    return scales_of_rows({scales + offset(operand), steps.block, steps.quarter,
                                           steps.row, steps.word},
                                          own_col, own_col, int(params.epilogues[0].n) - 1,
                                          int(params.num_groups));
                };
                work.row_scales = groups(groups_b1, kGroupsB, 0);
                const RowScales others = groups(groups_b2, kGroupsB2, 1);
                work.row_scales.rows[1] = others.rows[0];
                work.row_scales.steps[1] = others.steps[0];
                work.row_scales.aligned = work.row_scales.aligned && others.aligned;
            }
            TileSums sums;
            multiply(ring, work, sums);
            const int count = work.count++;
            work.place.skip(turns * num_k_tiles);
            if constexpr (kSplitK) add_split_sums<2, false>(&ring, warpgroup, sums);
            const auto epilogue = [&](int product, const float* scale_b, Operand operand) {
                return Epilogue::of_matrix(params.epilogues[product], out, nullptr, nullptr,
                                           scale_a, scale_b, offset(kOut), 0, 0, offset(kScaleA),
                                           offset(operand));
            };
            const Epilogue first = epilogue(0, scale_b1, kScaleB);
            const Epilogue second = epilogue(1, scale_b2, kScaleB2);
            const GateScales scales{first, second};
            const int policy = int(params.policy), row = work.first_row,
                      col = work.first_col + (kSplitK ? rank * kOwnCols : 0);
            if constexpr (kConverts) {
                store_gated_column(scales, policy, int(task.row), own_col, sums);
            } else if constexpr (kFewRows) {
                FewSums* shared = reinterpret_cast<FewSums*>(storage.staging.few);
                const int n = int(params.epilogues[0].n),
                          last = int(task.col) + units_of(part) * kUnit;
                store_few_rows(shared[count % 2], scales, policy, int(task.row), int(task.col),
                               last < n ? last : n, sums);
            } else {
                unsigned char* staging = storage.staging.warps[warp];
                const int batch = int(offset(kOut));
                float factors[2];
                const bool plain = params.tma_stores && policy == kAllFp32 && scales.plain(factors);
                if (plain && first.params.out_dtype == kHalf) {
                    store_gated_plain<half>(staging, out_map, factors, row, col, batch, sums);
                } else if (plain) {
                    store_gated_plain<bf16>(staging, out_map, factors, row, col, batch, sums);
                } else {
                    store_gated(staging, params.tma_stores ? &out_map : nullptr, scales, policy,
                                row, col, batch, sums);
                }
            }
        } while (!kSplitK);
        if (threadIdx.x % 32 == 0) tma_store_wait_read<0>();
        sync_warp();
    }
}
