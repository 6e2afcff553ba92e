// Stores 8-bit results from wgmma's accumulators.  The four lanes of a quad have pairs of columns;
// they exchange these, so that each lane has a run of contiguous columns.
#pragma once
#include "gemm/epilogue/linear_combination.cuh"

namespace gemm {

// values: accumulators of rows lane / 4 and lane / 4 + 8 in groups of 8 columns (wgmma_col),
// kValues * 2 columns in all.  Lane q of a quad gets row q / 2 of both, from column
// q % 2 * kValues on.
template <class T, int kValues>
DEVICE Bytes<kValues> exchange_quad(const float (&values)[kValues]) {
    constexpr int kGroups = kValues / 8;  // of each lane's run
    static_assert(sizeof(T) == 1 && kGroups > 0 && kValues % 8 == 0, "whole groups of 8 bits");
    const bool second_row = threadIdx.x / 2 % 2, odd = threadIdx.x % 2;
    const auto pair = [&](int group, int half) {
        const int first = group * 4 + half * 2;
        const float two[2] = {values[first], values[first + 1]};
        Vector<T, 2> rounded;
        rounded.from_floats(two);
        return uint32_t(rounded.bytes[0].words[0]);
    };
    Bytes<kValues> run;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
        // Lower half: the groups of even lanes' runs.  Upper half: the groups of odd lanes' runs.
        const uint32_t first = pair(g, 0) | pair(g + kGroups, 0) << 16,
                       second = pair(g, 1) | pair(g + kGroups, 1) << 16;
        const uint32_t theirs = shuffle_xor(second_row ? first : second, 2);
        // The pairs of this lane's row from the quad's first two and last two lanes.
        const uint32_t left = second_row ? theirs : first, right = second_row ? second : theirs;
        const uint32_t of_even = pick_bytes(left, right, 0x5410),
                       of_odd = pick_bytes(left, right, 0x7632);
        const uint32_t others = shuffle_xor(odd ? of_even : of_odd, 1);
        // The pairs of this lane's run from the quad's even and odd lanes.
        const uint32_t from_even = odd ? others : of_even, from_odd = odd ? of_odd : others;
        run.words[2 * g] = pick_bytes(from_even, from_odd, 0x5410);
        run.words[2 * g + 1] = pick_bytes(from_even, from_odd, 0x7632);
    }
    return run;
}

// Called by a warp: stores 16 rows from `row` on, kValues * 2 columns from `col` on.
template <class T, int kValues>
DEVICE void store_quad(T* out, const EpilogueParams& params, const MatrixStrides& strides, int row,
                       int col, const float (&values)[kValues]) {
    const int lane = threadIdx.x % 32;
    const Bytes<kValues> run = exchange_quad<T>(values);
    const int64_t i = row + lane / 4 + lane / 2 % 2 * 8, j = col + lane % 2 * kValues;
    if (i >= params.m) return;
    unsigned char* first =
        reinterpret_cast<unsigned char*>(out + i * strides.row + j * strides.col);
    const uintptr_t address = reinterpret_cast<uintptr_t>(first);
    if (strides.col != 1 || j + kValues > params.n || address % 8 != 0) {
#pragma unroll
        for (int b = 0; b < kValues; ++b) {
            if (j + b < params.n) first[b * strides.col] = uint8_t(run.words[b / 4] >> b % 4 * 8);
        }
    } else if (address % kValues == 0) {
        store_vector<kValues>(first, run);
    } else {
#pragma unroll
        for (int b = 0; b < kValues; b += 8)
            store_vector<8>(first + b, Bytes<8>{run.words[b / 4], run.words[b / 4 + 1]});
    }
}

}  // namespace gemm
