// Copies misaligned rows to aligned ones, which mainloops can load by vectors.  Each 16-byte chunk
// is assembled from the two aligned chunks that it overlaps.
#pragma once
#include "common/shared_tile.cuh"

struct CopyParams {
    int64_t source_row, result_row,
        source_bytes;    // row strides and size of the source, in bytes
    int64_t num_chunks;  // 16-byte chunks of the result, less than 2^32
    int32_t row_chunks, padding;
};

// Bytes [first, first + 16) of the 32 bytes low, high; first: 0 to 15.
DEVICE Bytes<16> shifted(const Bytes<16>& low, const Bytes<16>& high, int first) {
    uint32_t words[8];
    memcpy(words, &low, 16);
    memcpy(words + 4, &high, 16);
    if (first & 8) {
#pragma unroll
        for (int i = 0; i < 6; ++i) words[i] = words[i + 2];
    }
    if (first & 4) {
#pragma unroll
        for (int i = 0; i < 5; ++i) words[i] = words[i + 1];
    }
    Bytes<16> found;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        found.words[i] = pick_bytes(words[i], words[i + 1], 0x3210 + first % 4 * 0x1111);
    }
    return found;
}

// Copies chunk `number` of the result.  Reads stay inside the source.
DEVICE void copy_chunk(const char* source, char* result, CopyParams params, int64_t number) {
    const uint32_t row = uint32_t(number) / uint32_t(params.row_chunks);
    const uint32_t chunk = uint32_t(number) - row * uint32_t(params.row_chunks);
    const int64_t from = row * params.source_row + int64_t(chunk) * 16;
    char* to = result + row * params.result_row + int64_t(chunk) * 16;
    const int first = int(uintptr_t(source + from) % 16);
    if (from >= first && from - first + 32 <= params.source_bytes) {
        const char* chunks = source + from - first;
        store_vector<16>(to, shifted(load_vector_read_only<16>(chunks),
                                     load_vector_read_only<16>(chunks + 16), first));
    } else {
        const int rest = clamp_to(params.source_bytes - from, 16);
        for (int i = 0; i < rest; ++i) to[i] = source[from + i];
    }
}
