// The epilogue of Hopper attention: normalises the outputs and stores them by TMA through the
// queries' shared memory; threads store log-sum-exp and row statistics.
#pragma once
#include "attention/mask_sm90.cuh"
#include "attention/softmax_sm90.cuh"

namespace attention {

struct RowArrays {
    float* lse;
    float* row_max;
    float* row_sum;

    DEVICE bool wanted() const { return lse || row_max || row_sum; }
};

template <class Traits> struct EpilogueSm90 {
    using Element = typename Traits::Element;
    using Layout = FragmentLayout;
    using Softmax = SoftmaxSm90<Element, Layout>;
    using Outputs = float[Traits::kHeadDimV / 2];
    static constexpr int kBoxDims = Traits::kBoxDims, kRowBytes = Traits::kSwizzleBytes;
    static constexpr int kBoxes = Traits::kHeadDimV / kBoxDims;
    const AttentionParams& params;
    SharedStorage<Traits>& storage;
    const TensorMap& out_map;
    const RowArrays& statistics;

    // Stores the warp's 16 rows.  top: the largest scores of this lane in its rows.
    DEVICE void store(int query_stage, const QueryTile& tile, const Softmax& softmax,
                      const float (&top)[2], const Outputs& outputs) const {
        const int lane = opaque(lane_id());
        const AttentionHead& head = tile.head;
        const int row = tile.row + warp_row(), sq = head.sq;
        float inverse[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float total = softmax.total(r);
            inverse[r] = total == 0.0f ? 0.0f : 1.0f / total;
            const int own = row + Layout::row(lane, 2 * r);
            if (!statistics.wanted()) continue;
            const float largest = Softmax::Rows::across_lanes(top[r], Max());
            if (lane % 4 == 0 && own < sq) {
                const RowStatistics found =
                    RowStatistics::of(largest, softmax.exponent(r, largest, params.exponent_scale),
                                      total, params.unit);
                const int64_t i = head.q_offset(params.stats) + own * params.stats.row;
                if (statistics.lse) statistics.lse[i] = found.log_sum_exp;
                if (statistics.row_max) statistics.row_max[i] = found.top;
                if (statistics.row_sum) statistics.row_sum[i] = found.sum;
            }
        }
        named_barrier(1 + threadIdx.x / 128, 128);  // the warpgroup has read its queries
        // Lane l addresses row l % 8 of the l / 8-th matrix: rows 0-7 and 8-15 of 8 dims, then of
        // the next 8.
        auto& staging = storage.queries[query_stage];
        const int box_row = warp_row() + lane % 16;
#pragma unroll
        for (int dim = 0; dim < Traits::kHeadDimV; dim += 16) {
            uint32_t packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = outputs + dim / 2 + 2 * i;
                packed[i] = pack<Element>(pair[0] * inverse[i % 2], pair[1] * inverse[i % 2]);
            }
            const int chunk = dim % kBoxDims / 8 + lane / 16;
            store_matrix(staging.bytes + dim / kBoxDims * staging.kBoxBytes + box_row * kRowBytes +
                             (chunk ^ box_row % 8) * 16,
                         packed);
        }
        fence_async_proxy();
        sync_warp();
        if (lane == 0) {
            if (row < sq) {
                const RowRange to{row, head.head, head.batch, int(head.q_first), sq};
#pragma unroll
                for (int i = 0; i < kBoxes; ++i) {
                    if (i * kBoxDims < int(params.head_dim_v)) {
                        const auto coordinates = Coordinates<Traits::kVarlen>::of(to, i * kBoxDims);
                        tma_store(out_map,
                                  staging.bytes + i * staging.kBoxBytes + warp_row() * kRowBytes,
                                  coordinates.at);
                    }
                }
            }
            tma_store_commit();
        }
    }
    // Releases the query stage once TMA has read what `store` wrote there.
    DEVICE void release_queries(int query_stage) const {
        if (threadIdx.x % 32 == 0) {
            tma_store_wait_read<0>();
            if (!kEveryThreadArrives) storage.query_pipeline.empty[query_stage].arrive();
        }
        sync_warp();
        if (kEveryThreadArrives) storage.query_pipeline.empty[query_stage].arrive();
    }
};

}  // namespace attention
