// dequant_softmax_hopper.cu: y = softmax(A @ (scale_b * B) + bias) on Hopper.
//
// The main loop that converts computes the transposed product: a thread's sums are columns of the
// logits.  Where y is of 16 bits and TMA stores it, it gets the logits' exponentials, to be scaled
// (parts/shares_hopper.cuh); else `logits`, of FP32, get them: a warp's 16 columns of a row go through
// shared memory, so that a lane finishes a run of them.  When all blocks have met, they share the
// rows and finish y.
// Constants: those of parts/ring_hopper.cuh and of parts/mainloop_converted_hopper.cuh, which the
// variant includes before this file, without kShareK.
// Launch: cooperative, grid (any), block (kNumThreads = 384), dynamic shared memory
// sizeof(HopperStorage).  Tensor maps as gemm_hopper.cu's of A and B, without a batch; of a 16-bit y
// without logits, boxes of 64 x 64.
// statistics: (m, ceil(n / kColumns)).
#include "parts/epilogue.cuh"
#include "parts/gemm_task.cuh"
#include "parts/normalize_logits.cuh"
#include "parts/read_ahead.cuh"
#include "parts/ring_hopper.cuh"
#include "parts/shares_hopper.cuh"

constexpr int kColumns = kSetColumns;  // what a warpgroup has of the logits
static_assert(kConverts && !kShareK && kConsumerRows == kColumns,
              "a warpgroup has one set of columns");

struct LogitsHopperParams {
    int64_t num_k_tiles, tiles_m, tiles_n, group_height;  // height: in tiles (GemmTask::of_block)
    EpilogueParams epilogue;                              // its `out`: logits, or y
    NormalizeParams normalize;
};

constexpr int kWarpColumns = 16, kRun = 8;
constexpr int kAtOnce = 32;  // rows of the logits that a warp takes through shared memory at once
constexpr int kPitch = 20;   // of a line: what a warp stores at once lies in different banks

// A warp's sums on their way (with kOuterMajorRows the even columns first, as the main loop has
// them), and what it knows of all rows' 16 columns.
struct WarpLogits {
    alignas(16) uint32_t sums[kAtOnce][kPitch];
    MaxSum rows[kCols];
};
union LogitsStaging {
    WarpLogits warps[4 * kConsumers];
    SharesStorage shares[kConsumers];
    MaxSum of_warps[kBlockWarps];
};
struct HopperStorage {
    LogitsStaging staging;
    alignas(1024) Ring ring;
};

constexpr int kRegisters = 168;  // that a thread of a block of 384 begins with
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = (3 * kRegisters - kProducerRegisters) / kConsumers;

// Finishes and stores the warp's logits from column `col` on, and leaves their statistics in
// `to.rows`.
DEVICE void store_logits(WarpLogits& to, const Epilogue& epilogue, int first_row, int first_col,
                         const TileSums& sums) {
    constexpr int kValues = kAtOnce / 2;  // a lane's numbers of kAtOnce rows
    const EpilogueParams& params = epilogue.params;
    const MergeMaxSum merge{kLog2E};
    const int lane = threadIdx.x % 32, run = lane % 2, col = first_col + run * kRun;
    const int64_t rest = params.n - col;
    const int count = rest < 0 ? 0 : rest < kRun ? int(rest) : kRun;
    // Rows share what belongs to columns.
    const bool same_bias = epilogue.bias_of_cols();
    float scales[kRun], added[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
        const bool there = i < count;
        scales[i] =
            epilogue.scale_b && there ? epilogue.scale_b[(col + i) * params.scale_b_stride] : 1.0f;
        added[i] = same_bias && there
                       ? load_number(epilogue.bias, (col + i) * params.bias.col, params.bias_dtype)
                       : 0.0f;
    }
#pragma unroll 1
    for (int part = 0; part < kCols / kAtOnce; ++part) {
        sync_warp();  // what was here has been read
#pragma unroll
        for (int p = 0; p < kCols / kAtOnce; ++p) {
            if (p != part) continue;
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                to.sums[wgmma_col(lane, i)][lane / 4 + i / 2 % 2 * 8] =
                    bit_cast<uint32_t>(sums[0][p * kValues + i]);
            }
        }
        sync_warp();
#pragma unroll 1
        for (int line = lane / 2; line < kAtOnce; line += 16) {
            const int in_tile = part * kAtOnce + line, row = first_row + in_tile;
            MaxSum total{-kInfinity, 0.0f};
            if (row < params.m && count > 0) {
                float values[kRun];
#pragma unroll
                for (int i = 0; i < kRun; i += 4) {
                    const int at = kOuterMajorRows ? run * 4 + i * 2 : run * kRun + i;
                    const Bytes<16> four = *reinterpret_cast<const Bytes<16>*>(&to.sums[line][at]);
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const int column = kOuterMajorRows ? 2 * j + i / 4 : i + j;
                        const float scaled = bit_cast<float>(four.words[j]) * scales[column];
                        values[column] = scaled * params.alpha + added[column];
                    }
                }
                if (epilogue.bias && !same_bias) {
                    Epilogue::add(epilogue.bias, params.bias_dtype, params.bias, row, col, count,
                                  values);
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
            total = merge.across_lanes(total, 1, kWarpColumns / kRun);
            if (run == 0) to.rows[in_tile] = total;
        }
    }
}

KERNEL void dequant_softmax_hopper(GRID_CONSTANT TensorMap a_map, GRID_CONSTANT TensorMap b_map,
                                   GRID_CONSTANT TensorMap y_map, void* y, const void* bias,
                                   const float* scale_b, float* logits, MaxSum* statistics,
                                   uint32_t* barrier, const LogitsHopperParams params) {
    SHARED_STORAGE(HopperStorage, storage);
    Ring& ring = storage.ring;
    // From one lane, so that the compiler knows that they are alike in all.
    const int warp = shuffle(int(threadIdx.x / 32), 0), warpgroup = warp / 4;
    prefetch_maps(params, warp, 4 * kConsumers, a_map, b_map);
    if (threadIdx.x == 0) ring.init();
    sync_block();
    const int num_tiles = int(params.tiles_m * params.tiles_n),
              num_k_tiles = int(params.num_k_tiles);
    const int step = gridDim.x;
    const auto task_of = [&](int tile) {
        return GemmTask::of_block(tile, uint32_t(params.tiles_m), uint32_t(params.tiles_n), 1,
                                  kTileM, kTileN, uint32_t(params.group_height));
    };
    if (warpgroup == kConsumers) {
        decrease_registers<kProducerRegisters>();
        if (threadIdx.x / 32 == 4 * kConsumers && elect_one()) {
            RingPlace place;
            for (int tile = blockIdx.x; tile < num_tiles; tile += step) {
                const GemmTask task = task_of(tile);
                load_tiles(ring, place, b_map, a_map, RowStage::kBytes + ColStage::kBytes, 0,
                           num_k_tiles, int(task.col), int(task.row), 0, 0);
            }
        }
        sync_warp();
        increase_registers<kRegisters>();
    } else {
        increase_registers<kConsumerRegisters>();
        const Epilogue epilogue = Epilogue::of_matrix(params.epilogue, logits, bias, nullptr,
                                                      nullptr, scale_b, 0, 0, 0, 0, 0);
        const MergeMaxSum merge{kLog2E};
        const int64_t num_sets = (params.epilogue.n + kColumns - 1) / kColumns;
        TileWork work{};
        work.num_k_tiles = num_k_tiles;
        work.consumer = warpgroup;
        work.row = warpgroup * kConsumerRows;
        for (int tile = blockIdx.x; tile < num_tiles; tile += step) {
            const GemmTask task = task_of(tile);
            const int first_row = int(task.row), first_col = int(task.col) + work.row;
            ShareColumns columns{};
            if (!logits) columns.load(epilogue, first_col);
            TileSums sums;
            clear(sums);
            multiply(ring, work, sums);
            work.place.skip(num_k_tiles);
            SharesStorage& shares = storage.staging.shares[warpgroup];
            if (!logits && params.epilogue.out_dtype == kHalf) {
                store_shares<half>(shares, y_map, params.epilogue, columns, statistics, num_sets,
                                   first_row, first_col, sums);
                continue;
            }
            if (!logits) {
                store_shares<bf16>(shares, y_map, params.epilogue, columns, statistics, num_sets,
                                   first_row, first_col, sums);
                continue;
            }
            store_logits(storage.staging.warps[warp], epilogue, first_row,
                         first_col + warp % 4 * kWarpColumns, sums);
            named_barrier(1 + warpgroup, 128);
            const int64_t set = first_col / kColumns;
#pragma unroll 1
            for (int i = threadIdx.x % 128; i < kCols && set < num_sets; i += 128) {
                if (first_row + i >= params.epilogue.m) break;
                const WarpLogits* warps = &storage.staging.warps[4 * warpgroup];
                MaxSum total = warps[0].rows[i];
#pragma unroll
                for (int j = 1; j < 4; ++j) total = merge(total, warps[j].rows[i]);
                statistics[(first_row + i) * num_sets + set] = total;
            }
            named_barrier(1 + warpgroup, 128);  // read, before the next tile's
        }
        if (threadIdx.x % 128 == 0) tma_store_wait<0>();
        sync_warp();
        decrease_registers<kRegisters>();
    }
    sync_grid(barrier);
    const NormalizeParams& p = params.normalize;
    if (logits) {
        normalize_rows(logits, statistics, y, p, storage.staging.of_warps);
    } else if (p.dtype == kHalf) {
        scale_shares(static_cast<half*>(y), statistics, p, storage.staging.of_warps);
    } else {
        scale_shares(static_cast<bf16*>(y), statistics, p, storage.staging.of_warps);
    }
}
