// attention_hopper_paged.cu: attention of varlen queries over paged KV caches on Hopper, plain or
// with the options of GeneralScore (attention/score.cuh).  Only GeneralScore reads slopes and
// sinks.
//
// Persistent and warp-specialised like attention_hopper.cu; TMA loads K and V from pages
// (attention/kv_sm90.cuh).
// Type: Traits, an attention::TraitsSm90 with Paged sequences.
// Launch: grid (any), block (Kernel::kThreads), dynamic shared memory sizeof(Kernel::Storage).
// Tensor maps: varlen (attention/storage_sm90.cuh); the boxes of k and v have pages.box_rows rows.
#include "attention/kernel_sm90.cuh"

using Kernel = attention::KernelSm90<Traits>;

KERNEL void attention_hopper_paged(GRID_CONSTANT TensorMap q_map, GRID_CONSTANT TensorMap k_map,
                                   GRID_CONSTANT TensorMap v_map, GRID_CONSTANT TensorMap out_map,
                                   float* lse, const int32_t* cu_seqlens_q, const int32_t* seq_lens,
                                   const int32_t* block_table, const float* slopes,
                                   const float* sinks, uint32_t* counter,
                                   const Kernel::Params params, const PageParams pages) {
    SHARED_STORAGE(Kernel::Storage, storage);
    const Kernel::Arguments arguments{q_map,
                                      k_map,
                                      v_map,
                                      out_map,
                                      {lse, nullptr, nullptr},
                                      Traits::Score::without_mask(slopes, sinks),
                                      cu_seqlens_q,
                                      seq_lens,
                                      nullptr,
                                      counter,
                                      {block_table, pages}};
    Kernel{params, arguments, storage}.run();
}
