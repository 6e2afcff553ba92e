// The matrix products of a warpgroup on Hopper.  A warpgroup is 4 warps, 128 threads that are
// neighbours; all of them call each word here.  D (64 x N, FP32 or int32) lies in registers, B in
// shared memory, A in either.  Included by the kernels that multiply so, because its many
// instructions take long to parse.
//
//     wgmma_fence(d);                            // what has been stored to d comes first
//     wgmma<half>(d, a_tile, b_tile, true);      // D += A B, under way
//     wgmma_commit();                            // the ones so far are a group
//     wgmma_wait<0>(d);                          // d is there, the tiles may be overwritten
//
// A's registers are the products' until the wait, too.  convert_bytes<Stored, T>(bytes, low, high)
// makes pairs of T of four 8-bit numbers, permute_bytes<0x3210>(bytes) picks a byte by each
// hexadecimal digit.

// Which way a 16-bit operand lies in shared memory: its rows (of A, or columns of B) one after the
// other along K, or the other way round.  8-bit operands are K-major.
enum Major { kMajorK, kMajorMN };

// An operand's tile as wgmma finds it, from `shared` on (16-byte aligned).  kSwizzle: 0, 32, 64 or
// 128 bytes; the tile's lines of so many bytes are swizzled as TMA writes them.
// K-major: groups of 8 rows lie `stride_bytes` apart; without swizzle, 16-byte columns
// `leading_bytes`.
// MN-major: groups of 8 along K lie `stride_bytes` apart, lines along M or N `leading_bytes`;
//     without swizzle it is the other way round.
template <int kSwizzle>
DEVICE uint64_t matrix_descriptor(const void* shared, int leading_bytes, int stride_bytes) {
    static_assert(kSwizzle == 0 || kSwizzle == 32 || kSwizzle == 64 || kSwizzle == 128,
                  "swizzles of 0, 32, 64 or 128 bytes");
    constexpr uint64_t kMode = kSwizzle == 128 ? 1 : kSwizzle == 64 ? 2 : kSwizzle == 32 ? 3 : 0;
    return kMode << 62 | uint64_t(stride_bytes >> 4) << 32 | uint64_t(leading_bytes >> 4) << 16 |
           (hopper::shared_address(shared) & 0x3ffff) >> 4;
}
// The tile that begins `bytes` further on.
DEVICE uint64_t advance(uint64_t descriptor, int bytes) {
    // Addresses end below the first word's 14 bits of them: one addition instead of two.
    const int low = opaque(int(uint32_t(descriptor))) + (bytes >> 4);
    return (descriptor & 0xffffffff00000000) | uint32_t(low);
}

// Where register i of a thread of the warpgroup (0 to 127) lies in D.
DEVICE int wgmma_row(int thread, int i) {
    return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
}
DEVICE int wgmma_col(int thread, int i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

#if defined(HOST_WARP_SIZE)
#include "platform/wgmma_host.cuh"
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "platform/wgmma_cuda.cuh"
#else
#error "wgmma is Hopper's (sm_90a) and the host's"
#endif
