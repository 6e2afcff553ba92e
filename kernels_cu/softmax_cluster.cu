// softmax_cluster.cu: y = softmax(x) or log_softmax(x) of long rows of any length with one row
// stride, without options but a positive scale.
//
// A cluster computes a row (rows/load_cluster.cuh).  Other arguments: see softmax_shared.cu.
// Constants: Element, kScaled; see also rows/tile.cuh.  kNumThreads and kClusterSize are upper
// limits.
// Launch: grid (rows * params.blocks), block (up to kNumThreads, whole warps), clusters of
// params.blocks, dynamic shared memory sizeof(RowVector) times the block's vectors of a row,
// rounded up to whole threads.
#include "rows/softmax_cluster.cuh"

KERNEL void softmax_cluster(const Element* x, const uint8_t*, void* y, MaxSum*,
                            const rows::SoftmaxParams params, int64_t) {
    wait_for_previous_grid();
    rows::init_exchange_barriers();
    SHARED_STORAGE(rows::RowVector, tile);
    const int rank = cluster_rank(), blocks = params.blocks;
    const int64_t row = int(blockIdx.x) / blocks;
    const Element* x_row = x + row * params.layout.outer_strides[0][rows::SoftmaxParams::kX];
    const rows::ClusterRow part(tile, x_row, int(params.layout.num_cols), rank, blocks);
    // Issued before the vector loads; after them, it would arrive last.
    float single = -kInfinity;
    if (part.column >= 0) single = to_float(x_row[part.column]);
    part.load(x_row, load_policy(params.loads_last));

    const MergeMaxSum merge{rows::exponent_scale(params)};
    const MaxSum of_warp = rows::warp_max_sum(part, single, merge.exponent_scale);
    const MaxSum total =
        rows::merge_cluster(of_warp, MaxSum{-kLargestFloat, 0.0f}, rank, blocks, merge);
    Element* y_row =
        static_cast<Element*>(y) + row * params.layout.outer_strides[0][rows::SoftmaxParams::kY];
    const StorePolicy policy = store_policy(row >= params.stores_last_from);
    if (params.log) {
        rows::store<true>(y_row, part, single, total, params, policy);
    } else {
        rows::store<false>(y_row, part, single, total, params, policy);
    }
}
