// sync_grid of the GPUs.  All blocks of the launch meet, which is a cooperative one
// (Variant.cooperative): what they wrote before is there for all.  counter: of this launch alone, its
// lower 31 bits zero before and after.
DEVICE void sync_grid(uint32_t* counter) {
    sync_block();
    if (threadIdx.x == 0) {
        // All blocks together add 2^31: the upper bit turns over when the last one is here.
        const uint32_t addend = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
        const uint32_t before = atomic_add_acq_rel(counter, addend);
        while ((before ^ load_acquire(counter)) >> 31 == 0) {
        }
    }
    sync_block();
}
