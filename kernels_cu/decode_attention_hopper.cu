// decode_attention_hopper.cu: decode_attention.cu on Hopper, where TMA brings keys and values.
//
// Threads that copy wait for each other's place in the queue to memory, and with them what is to be done
// with the tile that is there; TMA leaves them alone.
// Constants, launch: as there, dynamic shared memory sizeof(DecodeStorage); the maps: see
// parts/decode_source_hopper.cuh.

KERNEL void decode_attention_hopper(const Element* q, GRID_CONSTANT TensorMap k_map,
                                    GRID_CONSTANT TensorMap v_map, const int* seq_lens,
                                    const int* block_table, Element* out, float* lse,
                                    void* partial_results, uint32_t* counters,
                                    const DecodeParams params) {
    SHARED_STORAGE(DecodeStorage, storage);
    const DecodeTask task(params, seq_lens);
    if (task.idle) return;
    const KeyArrays caches = {k_map, v_map};
    attend_rows(storage, params, task, caches, block_table, q, out, lse, partial_results, counters);
}
