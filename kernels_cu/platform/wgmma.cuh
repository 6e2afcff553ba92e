// wgmma.  A warpgroup is 4 adjacent warps, 128 threads; all of them call each primitive.  D (64 x
// N, FP32 or int32) is in registers, B in shared memory, A in either.  A separate header, because
// its many instructions are slow to parse.
//
//     wgmma_fence(d);                            // orders earlier writes of d before wgmma
//     wgmma<half>(d, a_tile, b_tile, true);      // D += A B, asynchronous
//     wgmma_commit();                            // closes a group
//     wgmma_wait<0>(d);                          // d is complete, the tiles may be overwritten
//
// Registers of A also stay in use until the wait.  convert_bytes<Stored, T>(bytes, low, high)
// converts four 8-bit elements to two pairs of T, convert_pair<Stored, T>(bytes) the lower two to
// one.  permute_bytes<0x3210>(bytes) picks one byte per hexadecimal digit.
#pragma once

// Layout of a 16-bit operand in shared memory: K-major or MN-major.  8-bit operands are K-major.
enum Major { kMajorK, kMajorMN };

// Descriptor of an operand's tile at `shared` (aligned to 16 bytes).  kSwizzle: 0, or 32, 64 or 128
// for TMA's swizzle of rows of that many bytes.
// K-major: stride_bytes between groups of 8 rows; without swizzle, leading_bytes between 16-byte
// columns.
// MN-major: stride_bytes between groups of 8 along K, leading_bytes between rows along M or N;
// without swizzle the two are exchanged.
template <int kSwizzle>
DEVICE uint64_t matrix_descriptor(const void* shared, int leading_bytes, int stride_bytes) {
    static_assert(kSwizzle == 0 || kSwizzle == 32 || kSwizzle == 64 || kSwizzle == 128,
                  "swizzles of 0, 32, 64 or 128 bytes");
    constexpr uint64_t kMode = kSwizzle == 128 ? 1 : kSwizzle == 64 ? 2 : kSwizzle == 32 ? 3 : 0;
    return kMode << 62 | uint64_t(stride_bytes >> 4) << 32 | uint64_t(leading_bytes >> 4) << 16 |
           (hopper::shared_address(shared) & 0x3ffff) >> 4;
}
// Descriptor of the tile `bytes` further on.
DEVICE uint64_t advance(uint64_t descriptor, int bytes) {
    // The address has 14 bits of the low word: one 32-bit addition suffices.
    const int low = opaque(int(uint32_t(descriptor))) + (bytes >> 4);
    return (descriptor & 0xffffffff00000000) | uint32_t(low);
}

// Position in D of register i of a thread of the warpgroup (0 to 127).
DEVICE int wgmma_row(int thread, int i) {
    return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
}
DEVICE int wgmma_col(int thread, int i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

#if defined(HOST_WARP_SIZE)
#include "platform/host/wgmma.cuh"
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "platform/cuda/wgmma.cuh"
#else
#error "wgmma is Hopper's (sm_90a) and the host's"
#endif

// Converts only the lower two bytes.
template <class Stored, class T> DEVICE uint32_t convert_pair(uint32_t bytes) {
    uint32_t low, high;
    convert_bytes<Stored, T>(bytes, low, high);
    return low;
}
