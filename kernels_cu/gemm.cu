// gemm.cu: out = activation(alpha * (A @ B) + bias) + residual for a batch of matrices.
//
// A block computes one tile (parts/mainloop.cuh), puts its fragments in shared memory one after another
// and finishes them in runs of neighbouring columns (parts/epilogue.cuh).
// Split k: where there are fewer tiles than multiprocessors, `splits` blocks share the k of one tile.
// The pass kPartial stores each block's sums as the lanes hold them, the pass kReduce adds those of a
// tile in the order of the splits and finishes it: bitwise the same every time.
// Constants: those of parts/mainloop.cuh.
// Launch: grid (tiles * batch * splits; of kReduce: tiles * batch), block (kNumThreads), dynamic shared
// memory sizeof(GemmStorage).
#include "parts/epilogue.cuh"
#include "parts/gemm_task.cuh"
#include "parts/mainloop.cuh"

enum Pass { kWhole, kPartial, kReduce };

struct GemmParams {
    BatchLayout batch;
    int64_t batch_size, k, k_per_split, tiles_m, tiles_n;
    MatrixStrides a, b;  // a: (m, k), b: (k, n)
    MatrixStrides block_scales_a, block_scales_b;
    EpilogueParams epilogue;
    int32_t a_dtype, b_dtype;
    int64_t splits;
    int64_t has_block_scales;  // what scale_a and scale_b then are; they are the main loop's
};

constexpr int kFragments = kFragmentsM * kFragmentsN;

// Fragments on their way through shared memory: as many at once as the stages' memory holds.
constexpr int kPitch = 20;  // of a row: lanes spread over the banks
constexpr int kStagedFragments = kFragments / kFinishRounds;

struct GemmStorage {
    union {
        Stage stages[kStages];
        SumType slices[kGridK][kGridM * kGridN][kGridK > 1 ? kFragments : 1][Sums::kCount][kWarpSize];
        SumType fragments[kNumWarps][kStagedFragments][16][kPitch];
    };
};

// Adds the sums of the warps that share k, in their order.  Warp k keeps every kGridK-th fragment.
DEVICE void add_slices(GemmStorage& storage, const WarpPlace& warp, AllSums& acc) {
    if constexpr (kGridK > 1) {
        const int place = warp.m * kGridN + warp.n;
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
#pragma unroll
            for (int i = 0; i < Sums::kCount; ++i) {
                storage.slices[warp.k][place][f][i][warp.lane] =
                    acc[f / kFragmentsN][f % kFragmentsN].values[i];
            }
        }
        sync_block();
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
            if (f % kGridK != warp.k) continue;
#pragma unroll
            for (int i = 0; i < Sums::kCount; ++i) {
                SumType sum = storage.slices[0][place][f][i][warp.lane];
#pragma unroll
                for (int k = 1; k < kGridK; ++k) sum += storage.slices[k][place][f][i][warp.lane];
                acc[f / kFragmentsN][f % kFragmentsN].values[i] = sum;
            }
        }
        sync_block();  // the fragments take the slices' place
    }
}

// Calls f(sum, place) for each sum that this lane keeps; place: of the sum among those of the tile.
template <class F>
DEVICE void for_each_sum(const WarpPlace& warp, AllSums& acc, F f) {
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
        if (i % kGridK != warp.k) continue;
        const int fragment = (warp.m * kGridN + warp.n) * kFragments + i;
#pragma unroll
        for (int j = 0; j < Sums::kCount; ++j) {
            f(acc[i / kFragmentsN][i % kFragmentsN].values[j],
              fragment * 256 + j * kWarpSize + warp.lane);
        }
    }
}

// The epilogue of this warp's fragments, by way of shared memory.
DEVICE void finish(GemmStorage& storage, const WarpPlace& warp, const AllSums& acc,
                   const Epilogue& epilogue, int64_t tile_row, int64_t tile_col) {
    constexpr int kRun = 256 / kWarpSize, kRuns = 16 / kRun;
    auto& fragments = storage.fragments[int(threadIdx.x) / kWarpSize];
#pragma unroll
    for (int first = 0; first < kFragments; first += kStagedFragments) {
        sync_warp();  // what was here has been read
#pragma unroll
        for (int f = 0; f < kStagedFragments; ++f) {
            const Sums& sums = acc[(first + f) / kFragmentsN][(first + f) % kFragmentsN];
#pragma unroll
            for (int i = 0; i < Sums::kCount; ++i) {
                const int col = stored_column<ElementB, ComputeB, OperandB::kOuterMajor>(
                    Sums::col(warp.lane, i));
                fragments[f][Sums::row(warp.lane, i)][col] = sums.values[i];
            }
        }
        sync_warp();
        const int row = warp.lane / kRuns, col = warp.lane % kRuns * kRun;
#pragma unroll 1
        for (int f = 0; f < kStagedFragments; ++f) {
            const int number = first + f;
            if (number % kGridK != warp.k) continue;
            SumType run[kRun];
#pragma unroll
            for (int i = 0; i < kRun; ++i) run[i] = fragments[f][row][col + i];
            epilogue.store(tile_row + warp.row(number / kFragmentsN) + row,
                           tile_col + warp.col(number % kFragmentsN) + col, run);
        }
    }
}

KERNEL void gemm(const void* a, const void* b, void* out, const void* bias, const void* residual,
                 const float* scale_a, const float* scale_b, SumType* partials, const GemmParams params,
                 int64_t pass) {
    SHARED_STORAGE(GemmStorage, storage);
    const WarpPlace warp = WarpPlace::here();
    const GemmTask task =
        GemmTask::of_block(blockIdx.x, uint32_t(params.tiles_m), uint32_t(params.tiles_n),
                           uint32_t(params.batch_size), kTileM, kTileN);
    const auto offset = [&](Operand operand) { return params.batch.offset(operand, task.batch); };
    AllSums acc{};
    if (pass != kReduce) {
        const EpilogueParams& sizes = params.epilogue;
        const int64_t first_k = task.split * params.k_per_split, last_k = first_k + params.k_per_split;
        const OperandSource a_source{
            element_address(a, offset(kA) + task.row * params.a.row, params.a_dtype), params.a.row,
            params.a.col, sizes.m - task.row, params.a_dtype};
        const OperandSource b_source{
            element_address(b, offset(kB) + task.col * params.b.col, params.b_dtype), params.b.col,
            params.b.row, sizes.n - task.col, params.b_dtype};
        BlockScales scales{};
        if (kPromoteK > 0 && params.has_block_scales) {
            const MatrixStrides &scales_a = params.block_scales_a, &scales_b = params.block_scales_b;
            scales = {scale_a ? scale_a + offset(kScaleA) + task.row * scales_a.row : nullptr,
                      scale_b ? scale_b + offset(kScaleB) : nullptr,
                      scales_a.row,
                      scales_a.col,
                      scales_b.row,
                      scales_b.col,
                      sizes.m - task.row,
                      sizes.n - task.col,
                      task.col};
        }
        multiply(storage.stages, a_source, b_source, scales, first_k,
                 last_k < params.k ? last_k : params.k, warp, acc);
        add_slices(storage, warp, acc);
    }
    if (pass != kWhole) {
        constexpr int64_t kTileSize = kTileM * kTileN;
        const int64_t split_size = params.tiles_m * params.tiles_n * params.batch_size * kTileSize;
        SumType* mine = partials + task.split * split_size + task.tile * kTileSize;
        if (pass == kPartial) {
            for_each_sum(warp, acc, [&](SumType& sum, int place) { mine[place] = sum; });
            return;
        }
        for (int64_t split = 0; split < params.splits; ++split) {
            for_each_sum(warp, acc, [&](SumType& sum, int place) { sum += mine[place]; });
            mine += split_size;
        }
    }
    const bool by_block = params.has_block_scales != 0;
    const Epilogue epilogue = Epilogue::of_matrix(
        params.epilogue, out, bias, residual, by_block ? nullptr : scale_a,
        by_block ? nullptr : scale_b, offset(kOut), offset(kBias),
        offset(kResidual), offset(kScaleA), offset(kScaleB));
    finish(storage, warp, acc, epilogue, task.row, task.col);
}
