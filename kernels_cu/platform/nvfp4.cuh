// NVFP4: e2m1 elements with one e4m3 scale per 16 of k.  T (half or bf16) holds the products of
// elements and scales exactly, also times kScaledUnit<T>.  Only kernels that decode NVFP4 include
// this header.
//
//     decode_scaled<T>(codes, scale, pairs)
//         eight elements, the first in the lowest bits, times the scale
//     scale_factors<T, kUnits>(scales)
//         factors for decode_bytes from the two scales in the lower 16 bits; not on HIP
//     decode_bytes<T, kUnits>(words, byte, factors, pairs)
//         byte `byte` of each of four words (two elements), times one of the two scales (one per
//         two words) and, with kUnits, times kScaledUnit<T>; not on HIP
//     load_scaled(low, high, tile, first, k)
//         32 of k as two fragments in kEights' order, times scales and kScaledUnit<T>;
//         tile.codes(row, k / 32): 16 bytes along k; tile.scale(row, k / 16).  All 64 of k from a
//         multiple of 64 on must be multiplied, in any order
//
// pairs: four pairs of T.  The kernel finally divides the accumulators by kScaledUnit<T>.
#pragma once
#if defined(__CUDA_ARCH__)
#include "platform/cuda/nvfp4.cuh"
#else
template <class T>
DEVICE void decode_scaled(uint32_t codes, e4m3 scale, uint32_t (&pairs)[4]) {
    const float factor = to_float(scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t byte = codes >> 8 * i & 0xff;
        pairs[i] = pack<T>(decode_e2m1(byte & 0xf) * factor, decode_e2m1(byte >> 4) * factor);
    }
}
#if defined(HOST_WARP_SIZE)
#include "platform/host/nvfp4.cuh"
#else
#include "platform/hip/nvfp4.cuh"
#endif
#endif
