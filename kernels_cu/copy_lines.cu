// copy_lines.cu: lines of bytes that begin anywhere, to lines that begin at multiples of 16 bytes.
//
// A thread reads the two chunks of 16 bytes, at multiples of 16, that each of its own lies in, and
// shifts.  What is not of the source is not read; behind a line's end the result has anything.
// Constants: kAtOnce, the chunks that a thread loads before it stores the first one.
// Launch: grid (any), block (kNumThreads).
#include "parts/shared_tile.cuh"

struct CopyParams {
    int64_t source_line, result_line, source_bytes;  // from a line to the next; of all of the source
    int64_t num_chunks;                              // of all lines, less than 2^32
    int32_t line_chunks, padding;
};

struct ShiftedChunk {
    Bytes<16> parts[2];
    int phase;
    char* to;

    DEVICE void load(const char* source, char* result, const CopyParams& p, int64_t number) {
        to = nullptr;
        if (number >= p.num_chunks) return;
        const uint32_t line = uint32_t(number) / uint32_t(p.line_chunks);
        const uint32_t chunk = uint32_t(number) - line * uint32_t(p.line_chunks);
        const int64_t from = line * p.source_line + chunk * 16;
        to = result + line * p.result_line + chunk * 16;
        phase = int(uintptr_t(source + from) % 16);
        if (from >= phase && from - phase + 32 <= p.source_bytes) {
            parts[0] = load_vector_read_only<16>(source + from - phase);
            parts[1] = load_vector_read_only<16>(source + from - phase + 16);
            return;
        }
        const int rest = clamp_to(p.source_bytes - from, 16);
#pragma unroll 1
        for (int i = 0; i < rest; ++i) to[i] = source[from + i];
        to = nullptr;
    }
    DEVICE void store() const {
        if (to == nullptr) return;
        uint32_t words[8];
        memcpy(words, parts, 32);
        if (phase & 8) {
#pragma unroll
            for (int i = 0; i < 6; ++i) words[i] = words[i + 2];
        }
        if (phase & 4) {
#pragma unroll
            for (int i = 0; i < 5; ++i) words[i] = words[i + 1];
        }
        Bytes<16> shifted;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            shifted.words[i] = pick_bytes(words[i], words[i + 1], 0x3210 + phase % 4 * 0x1111);
        }
        store_vector<16>(to, shifted);
    }
};

KERNEL void copy_lines(const char* source, char* result, const CopyParams params) {
    const int64_t step = int64_t(gridDim.x) * kNumThreads;
    int64_t first = int64_t(blockIdx.x) * kNumThreads + threadIdx.x;
    for (; first < params.num_chunks; first += kAtOnce * step) {
        ShiftedChunk chunks[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            chunks[i].load(source, result, params, first + i * step);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) chunks[i].store();
    }
}
