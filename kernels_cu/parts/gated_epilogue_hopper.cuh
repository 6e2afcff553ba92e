// The way of both products' sums (dual_gemm_hopper.cu) to memory: out = silu(d1) * d2.
// A thread's sums are of the same places in both: of kOwnCols columns of the first product from
// number 0 on, and of the second one from number kCols / 4 on.
#include "parts/epilogue.cuh"
#include "parts/gate.cuh"
#include "parts/ring_hopper.cuh"

constexpr int kPair = kTileN / 2;                               // columns of either product
constexpr int kOwnCols = kPair / (kSplitK ? kClusterSize : 1);  // that the block finishes
constexpr int kWarpRows = 16;
constexpr int kPart = 16, kParts = kOwnCols / kPart;  // columns that a warp finishes at once
// TMA stores a warp's rows in boxes of kBoxCols columns, swizzled by their lines.
constexpr int kBoxCols = kOwnCols % 64 == 0 ? 64 : kOwnCols % 32 == 0 ? 32 : 16;
constexpr int kBoxLine = 2 * kBoxCols, kBoxBytes = kWarpRows * kBoxLine;

// A warp's results on their way.
using Staging = unsigned char[kWarpRows * 2 * kOwnCols];

// Scales of both products: of rows and of columns from the warp's first one on.
struct GateScales {
    const Epilogue &first, &second;

    // What all sums of a product are multiplied with, if that is one number and the order of the
    // factors does not matter to it.
    DEVICE bool plain(float (&factors)[2]) const {
        const EpilogueParams& p = first.params;
        bool fits = true;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Epilogue& e = i == 0 ? first : second;
            fits = fits && (!e.scale_a || p.scale_a_stride == 0) &&
                   (!e.scale_b || e.params.scale_b_stride == 0);
            const float a = e.scale_a ? *e.scale_a : 1.0f, b = e.scale_b ? *e.scale_b : 1.0f;
            factors[i] = b * a * e.params.alpha;
            fits = fits && normal(b * a) && normal(factors[i]);
        }
        return fits;
    }
    DEVICE static bool normal(float x) {
        return magnitude(x) >= kSmallestNormal && magnitude(x) < kInfinity;
    }
    DEVICE static float row(const Epilogue& e, int at) {
        const EpilogueParams& p = e.params;
        return e.scale_a && at < p.m ? e.scale_a[at * p.scale_a_stride] : 1.0f;
    }
    DEVICE static float col(const Epilogue& e, int at) {
        const EpilogueParams& p = e.params;
        return e.scale_b && at < p.n ? e.scale_b[at * p.scale_b_stride] : 1.0f;
    }
};

// Four numbers of either product's columns as store_matrix has them, at part `part` of `staging`.
DEVICE void stage_part(unsigned char* staging, int part, const uint32_t (&packed)[4]) {
    const int lane = threadIdx.x % 32, line = lane % 16, place = part * 2 + lane / 16;
    constexpr int kPlaces = kBoxLine / 16;
    const int at = line * kBoxLine + place % kPlaces * 16;
    store_matrix(staging + place / kPlaces * kBoxBytes + (at ^ (at >> 3 & (kBoxLine - 16))),
                 packed);
}
// By the warp: 16 rows that it has staged, from (row, col) on.
DEVICE void store_staged(const TensorMap& map, const unsigned char* staging, int row, int col,
                         int batch) {
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
// Until TMA has read what the warp has staged before.
DEVICE void wait_staged() {
    if (threadIdx.x % 32 == 0) tma_store_wait_read<0>();
    sync_warp();
}

// The warp's sums with one factor for each product, in FP32 up to the result.  (row, col): of the
// first one in the output.
template <class Out>
DEVICE void store_gated_plain(unsigned char* staging, const TensorMap& map,
                              const float (&factors)[2], int row, int col, int batch,
                              const TileSums& sums) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
        wait_staged();
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            float gated[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int at = part * 8 + i;
                gated[i] = gate(float(sums[block][at]) * factors[0],
                                float(sums[block][kCols / 4 + at]) * factors[1], kAllFp32);
            }
            const uint32_t packed[4] = {
                pack<Out>(gated[0], gated[1]), pack<Out>(gated[2], gated[3]),
                pack<Out>(gated[4], gated[5]), pack<Out>(gated[6], gated[7])};
            stage_part(staging, part, packed);
        }
        store_staged(map, staging, row + 64 * block, col, batch);
    }
}

// The same for all scales, policies and outputs; map: null where TMA cannot store the output.
template <class Sums>
DEVICE void store_gated(unsigned char* staging, const TensorMap* map, const GateScales& scales,
                        int policy, int row, int col, int batch, const Sums& sums) {
    const Epilogue &first = scales.first, &second = scales.second;
    const EpilogueParams& params = first.params;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int number = 0; number < kBlocks * kParts; ++number) {
        const int block = number / kParts, part = number % kParts;
        float values[8], others[8];
#pragma unroll
        for (int known = 0; known < kBlocks * kParts; ++known) {
            if (known != number) continue;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int at = known % kParts * 8 + i;
                values[i] = float(sums[known / kParts][at]);
                others[i] = float(sums[known / kParts][kCols / 4 + at]);
            }
        }
        const int first_row = row + 64 * block + lane / 4, first_col = col + part * kPart;
        const float rows[2] = {GateScales::row(first, first_row),
                               GateScales::row(first, first_row + 8)};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int at = first_col + wgmma_col(lane, i);
            const float factor = rows[i / 2 % 2];
            values[i] = values[i] * GateScales::col(first, at) * factor * params.alpha;
            others[i] = others[i] * GateScales::col(second, at) * factor * second.params.alpha;
        }
        gate_all(values, others, policy);
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
            packed[i] = params.out_dtype == kHalf ? pack<half>(values[2 * i], values[2 * i + 1])
                                                  : pack<bf16>(values[2 * i], values[2 * i + 1]);
        }
        if (part == 0) wait_staged();
        stage_part(staging, part, packed);
        if (part == kParts - 1) store_staged(*map, staging, row + 64 * block, col, batch);
    }
}
