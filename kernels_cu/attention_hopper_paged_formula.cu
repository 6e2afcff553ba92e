// attention_hopper_paged_formula.cu: attention of varlen queries over paged KV caches on Hopper,
// with user formulas for the score and the mask (attention/formula.cuh).
//
// Persistent and warp-specialised like attention_hopper.cu; TMA loads K and V from pages
// (attention/kv_sm90.cuh).
// Type: Traits, an attention::TraitsSm90 with Paged sequences.
// Launch: grid (any), block (Kernel::kThreads), dynamic shared memory sizeof(Kernel::Storage).
// Tensor maps: varlen (attention/storage_sm90.cuh); the boxes of k and v have pages.box_rows rows.
#include "attention/kernel_sm90.cuh"

using Kernel = attention::KernelSm90<Traits>;

KERNEL void attention_hopper_paged_formula(
    GRID_CONSTANT TensorMap q_map, GRID_CONSTANT TensorMap k_map, GRID_CONSTANT TensorMap v_map,
    GRID_CONSTANT TensorMap out_map, float* lse, const int32_t* cu_seqlens_q,
    const int32_t* seq_lens, const int32_t* block_table, const float* slopes, const float* sinks,
    const void* x0, const void* x1, const void* x2, const void* x3, const void* x4, const void* x5,
    const void* x6, const void* x7, uint32_t* counter, const Kernel::Params params,
    const PageParams pages) {
    SHARED_STORAGE(Kernel::Storage, storage);
    const Kernel::Arguments arguments{q_map,
                                      k_map,
                                      v_map,
                                      out_map,
                                      {lse, nullptr, nullptr},
                                      {{{}, slopes, sinks}, {{x0, x1, x2, x3, x4, x5, x6, x7}}},
                                      cu_seqlens_q,
                                      seq_lens,
                                      nullptr,
                                      counter,
                                      {block_table, pages}};
    Kernel{params, arguments, storage}.run();
}
