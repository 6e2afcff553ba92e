// dual_gemm_hopper.cu: dual_gemm.cu's out = silu(A @ B1) * (A @ B2) on Hopper.
//
// A tile has kTileN columns: kPair of B1 and the same ones of B2, whose stages lie behind each
// other in shared memory, so that the main loop multiplies A with one matrix of both.  A thread
// then holds the sums of both products at the same place, which meet in registers (parts/gate.cuh).
// Of NVFP4 B1 and B2 the main loop that converts takes them as rows (parts/rows_nvfp4_hopper.cuh),
// 8 of either in a warp.
// Constants and launch: as gemm_hopper.cu's, kTurned, with kConverts, for NVFP4 alone, without
// kShareK; another tensor map for B2, both with boxes of kPair columns.
#include "parts/epilogue_hopper.cuh"
#include "parts/gate.cuh"
#include "parts/gemm_task.cuh"
#include "parts/ring_hopper.cuh"

struct DualHopperParams {
    BatchLayout batch;
    int64_t batch_size, num_k_tiles, tiles_m, tiles_n;
    EpilogueParams epilogues[2];       // of each product; the output is the first one's
    int32_t tma_stores, group_height;  // in tiles (GemmTask::of_block)
    int64_t policy;
    int64_t num_groups;                                       // of NVFP4's k
    struct { int64_t block, quarter, row, word; } groups[2];  // GroupScales
};

struct HopperStorage {
    Staging staging[4 * kConsumers];
    Ring ring;
};

constexpr int kPair = kTileN / 2;
using PairStage = OperandStage<ElementB, kOuterMajorB, kPair>;
static_assert(!kShareK && kPair % kChunk == 0, "whole chunks of either product");
static_assert(kTurned == kConverts && (!kConverts || kSame<ElementB, e2m1x2>),
              "others are of one size");
static_assert(kOuterMajorB || PairStage::kBytes == PairStage::kBoxBytes,
              "two stages behind each other are one of all columns");

constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
constexpr int kConsumerRegisters = consumer_registers(kProducerRegisters);

// By one thread: a tile's stages.
DEVICE void load_pairs(Ring& ring, RingPlace& place, const TensorMap& a_map,
                       const TensorMap& b1_map, const TensorMap& b2_map,
                       const DualHopperParams& params, const GemmTask& task) {
    const int row = int(task.row), col = int(task.col);
    const int a_batch = int(params.batch.offset(kA, task.batch));
    const int b1_batch = int(params.batch.offset(kB, task.batch));
    const int b2_batch = int(params.batch.offset(kB2, task.batch));
#pragma unroll 1
    for (int i = 0; i < int(params.num_k_tiles); ++i) {
        Barrier& full = ring.full[place.stage];
        ring.empty[place.stage].wait(place.parity ^ 1);
        full.arrive_expect_tx(RowStage::kBytes + ColStage::kBytes);
        unsigned char *rows = ring.rows[place.stage], *cols = ring.cols[place.stage];
        unsigned char* pairs = kConverts ? rows : cols;
        OperandStage<ElementA, kOuterMajorA, kTileM>::load(kConverts ? cols : rows, a_map, full,
                                                           i * kTileK, row, a_batch);
        PairStage::load(pairs, b1_map, full, i * kTileK, col, b1_batch);
        PairStage::load(pairs + PairStage::kBytes, b2_map, full, i * kTileK, col, b2_batch);
        place.advance();
    }
}

// The scales of both products' columns, and of the rows, at the warp's first sum.
DEVICE void load_scales(TileVectors& vectors, const Epilogue& first, const Epilogue& second,
                        int row, int col) {
    const EpilogueParams& p = first.params;
    vectors.row_bias = {};
    if (!kScales) return;
    vectors.row_scale.load(first.scale_a, p.scale_a_stride, kFloat, row, p.m);
    constexpr int kChunks = kTileN / kChunk;
#pragma unroll
    for (int i = 0; i < 2 * kChunks; ++i) {
        const int chunk = i / 2;
        const Epilogue& epilogue = chunk < kChunks / 2 ? first : second;
        const int at = col + chunk % (kChunks / 2) * kChunk + 2 * int(threadIdx.x % 32) + i % 2;
        const bool there = epilogue.scale_b && at < p.n;
        vectors.col_scale.pairs[chunk][i % 2] =
            there ? epilogue.scale_b[at * epilogue.params.scale_b_stride] : 1.0f;
    }
}

// The gate of the warp's sums and its way to memory: by TMA in boxes of 16 x 64, or in pairs of
// columns.
DEVICE void store_gated(Staging* warps, int& box, const TensorMap* map, const Epilogue& first,
                        const Epilogue& second, const TileVectors& vectors, int policy, int row,
                        int col, int batch, const TileSums& sums) {
    constexpr int kParts = kTileN / kPart, kOwnParts = kPair / kPart;
    const EpilogueParams& params = first.params;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = 0; i < kBlocks * kOwnParts; ++i) {
        const int block = i / kOwnParts, part = i % kOwnParts, number = block * kParts + part;
        const int first_row = row + 64 * block, first_col = col + part * kPart;
        float values[kValues], factors[kValues];
        finish_part(first, vectors, number, first_row, first_col, sums, values);
        finish_part(second, vectors, number + kOwnParts, first_row, first_col, sums, factors);
        gate_all(values, factors, policy);
        if (!map) {
#pragma unroll
            for (int j = 0; j < kValues; j += 2) {
                const int at_row = first_row + row_of_half(lane, j / 2 % 2);
                const int at_col = first_col + wgmma_col(lane, j);
                if (at_row >= params.m || at_col >= params.n) continue;
                const float pair[2] = {values[j], values[j + 1]};
                first.write(at_row, at_col, at_col + 1 < params.n ? 2 : 1, pair);
            }
            continue;
        }
        store_part(warps, box, *map, part, first_row, first_col, batch, params.out_dtype, values);
    }
}

// The same with kConverts: a thread's numbers are of one column `col` of the output, those of both
// products by turns, from row `row` on.
DEVICE void store_gated_column(const Epilogue& first, const Epilogue& second, int policy, int row,
                               int col, const TileSums& sums) {
    const EpilogueParams& params = first.params;
    const int lane = threadIdx.x % 32;
    if (col >= params.n) return;
    const float scales[2] = {
        first.scale_b ? first.scale_b[col * params.scale_b_stride] : 1.0f,
        second.scale_b ? second.scale_b[col * second.params.scale_b_stride] : 1.0f};
#pragma unroll 1
    for (int part = 0; part < kCols / kPart; ++part) {
        float products[2][kValues / 2];
#pragma unroll
        for (int p = 0; p < kCols / kPart; ++p) {
            if (p != part) continue;
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                products[i / 2 % 2][i / 4 * 2 + i % 2] = float(sums[0][p * kValues + i]);
            }
        }
#pragma unroll
        for (int j = 0; j < kValues / 2; ++j) {
            const int at = row + part * kPart + j / 2 * 8 + lane % 4 * 2 + j % 2;
            const bool scaled = first.scale_a && at < params.m;
            const float factor = scaled ? first.scale_a[at * params.scale_a_stride] : 1.0f;
            products[0][j] = products[0][j] * scales[0] * factor * params.alpha;
            products[1][j] = products[1][j] * scales[1] * factor * second.params.alpha;
        }
        gate_all(products[0], products[1], policy);
#pragma unroll
        for (int j = 0; j < kValues / 2; ++j) {
            const int at = row + part * kPart + j / 2 * 8 + lane % 4 * 2 + j % 2;
            const float one[1] = {products[0][j]};
            if (at < params.m) first.write(at, col, 1, one);
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
    if (threadIdx.x == 0) ring.init();
    sync_block();
    const int num_tiles = int(params.tiles_m * params.tiles_n * params.batch_size);
    const int num_k_tiles = int(params.num_k_tiles), step = gridDim.x;
    const auto task_of = [&](int tile) {
        return GemmTask::of_block(tile, uint32_t(params.tiles_m), uint32_t(params.tiles_n),
                                  uint32_t(params.batch_size), kTileM, kPair,
                                  uint32_t(params.group_height));
    };
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32;
    if (warpgroup == kConsumers) {
        decrease_registers<kProducerRegisters>();
        if (warp == 4 * kConsumers && elect_one()) {
            RingPlace place;
            for (int tile = blockIdx.x; tile < num_tiles; tile += step) {
                load_pairs(ring, place, a_map, b1_map, b2_map, params, task_of(tile));
            }
        }
        sync_warp();
    } else {
        increase_registers<kConsumerRegisters>();
        const int turn = kPingPong ? warpgroup : 0, turns = kPingPong ? kConsumers : 1;
        TileWork work{};
        work.num_k_tiles = num_k_tiles;
        work.consumer = warpgroup;
        work.row = kShareRows ? warpgroup * kConsumerRows : 0;
        work.place.skip(turn * num_k_tiles);
        int box = 0;
        for (int tile = blockIdx.x + turn * step; tile < num_tiles; tile += turns * step) {
            const GemmTask task = task_of(tile);
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
            ++work.count;
            work.place.skip(turns * num_k_tiles);
            const auto epilogue = [&](int product, const float* scale_b, Operand operand) {
                return Epilogue::of_matrix(params.epilogues[product], out, nullptr, nullptr,
                                           scale_a, scale_b, offset(kOut), 0, 0, offset(kScaleA),
                                           offset(operand));
            };
            const Epilogue first = epilogue(0, scale_b1, kScaleB);
            const Epilogue second = epilogue(1, scale_b2, kScaleB2);
            if constexpr (kConverts) {
                store_gated_column(first, second, int(params.policy), int(task.row), own_col, sums);
                continue;
            }
            TileVectors vectors;
            load_scales(vectors, first, second, work.first_row, work.first_col);
            store_gated(storage.staging, box, params.tma_stores ? &out_map : nullptr, first, second,
                        vectors, int(params.policy), work.first_row, work.first_col,
                        int(offset(kOut)), sums);
        }
        if (threadIdx.x % 32 == 0) tma_store_wait_read<0>();
        sync_warp();
    }
}
