// A warp's product of a skinny GEMM of FP32 operands, by multiply-adds.
//
// A lane computes 4 x 4 accumulators.  Lanes with the same accumulators alternate over chunks of 4
// of k; their partial accumulators are added at the end.
// Constants: see gemm/skinny.cuh.
#pragma once
#include "common/shared_tile.cuh"

namespace gemm {

template <class T>
struct SkinnyFma {
    using Scalar = T;
    static constexpr int kLanesM = kRows / 4, kLanesN = kTileN / 4, kShared = kLanesM * kLanesN;
    static constexpr int kLanesK = kWarpSize / kShared, kChunks = kDepth * int(sizeof(T)) / 16;
    static_assert(kLanesK * kShared == kWarpSize && kChunks % kLanesK == 0, "whole chunks");
    float acc[4][4] = {};
    int m, n, k;

    // As in mainloop_fma.cuh, lanes that differ in bit 0 or in bit 1 load the same vector of one
    // operand where possible.
    DEVICE SkinnyFma() {
        const int lane = lane_id(), two = (lane >> 1 & 1) | (lane >> 3 & 2),
                  three = (lane & 1) | (lane >> 1 & 6), place = three | two << 3 | (lane & 32);
        n = place % kLanesN;
        m = place / kLanesN % kLanesM;
        k = place / kShared;
    }
    DEVICE int row(int i) const { return m + i * kLanesM; }
    // MN-major: a lane's columns are one vector.
    DEVICE int col(int j) const { return kMnMajorB ? 4 * n + j : n + j * kLanesN; }

    template <class Stage, class Skews>
    DEVICE void multiply(const Stage& stage, const Skews&, const Skews&) {
#pragma unroll 2
        for (int chunk = k; chunk < kChunks; chunk += kLanesK) {
            float a[4][4], b[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                load(a[i], stage.a(row(i), chunk));
                const auto& tile = stage.b[0];
                load(b[i], kMnMajorB ? tile(4 * chunk + i, n) : tile(col(i), chunk));
            }
#pragma unroll
            for (int depth = 0; depth < 4; ++depth) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const float of_b = kMnMajorB ? b[depth][j] : b[j][depth];
                        acc[i][j] = multiply_add(a[i][depth], of_b, acc[i][j]);
                    }
                }
            }
        }
    }
    DEVICE static void load(float (&values)[4], const void* from) {
        const Bytes<16> four = load_vector<16>(from);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = bit_cast<float>(four.words[i]);
    }
    DEVICE void store(float (&to)[kRows][kTileN + 4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float total = acc[i][j];
#pragma unroll
                for (int apart = 1; apart < kLanesK; apart *= 2) {
                    total += shuffle_xor(total, distance(apart));
                }
                if (k == 0) to[row(i)][col(j)] = total;
            }
        }
    }
    // XOR mask of lanes whose k differs in the bit `apart`.
    DEVICE static constexpr int distance(int apart) {
        constexpr int kBits[] = {1, 4, 8, 2, 16, 32};  // the lane's bit for each bit of `place`
        int bit = 0;
        for (int place = apart * kShared; place > 1; place /= 2) ++bit;
        return kBits[bit];
    }
};

}  // namespace gemm
