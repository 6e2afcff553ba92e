// Fragments, and FP32's.  Matrix units round FP32 to TF32, so each lane multiplies its own rows and
// columns by FMA: the same code on every target.
#pragma once

// A lane's part of 16 rows of A, or 16 columns of B, x kFragmentK<T> of k.
enum Side { kSideA, kSideB };
template <class T, Side kSide> struct Fragment;
template <class T> using FragmentA = Fragment<T, kSideA>;
template <class T> using FragmentB = Fragment<T, kSideB>;
// The k of a lane: kPairs is the matrix unit's order; kFours and kEights, for mixed input, give a
// lane 4 or 8 adjacent elements.  Any order of k is valid that A and B share.
enum class LaneOrder { kPairs, kFours, kEights };
template <class T> constexpr int kFragmentK = 32 / int(sizeof(T));
template <> constexpr int kFragmentK<float> = 4;

// A lane's part of 16 x 16 accumulators of products of T; value i is at row(lane, i), col(lane, i).
template <class T> struct Accumulator;

template <Side kSide> struct Fragment<float, kSide> {
    // A: rows lane / 4 + kStep * i.  B: columns lane % 4 + kStep * i.
    static constexpr int kStep = kSide == kSideA ? kWarpSize / 4 : 4;
    static constexpr int kExtent = 16 / kStep;
    float values[kExtent][4];

    DEVICE static constexpr int mn(int lane, int i) {
        return (kSide == kSideA ? lane / 4 : lane % 4) + kStep * i;
    }
};

template <> struct Accumulator<float> {
    using Scalar = float;
    static constexpr int kCount = 256 / kWarpSize;
    float values[kCount];

    DEVICE static constexpr int row(int lane, int i) { return FragmentA<float>::mn(lane, i / 4); }
    DEVICE static constexpr int col(int lane, int i) { return FragmentB<float>::mn(lane, i % 4); }
};

// Loads elements [first, first + 16) x [k, k + kFragmentK) from shared memory; tile(row, c): the
// address of 16-byte chunk c of a row.  kMnMajor: rows of the tile are k; otherwise rows of A
// (columns of B).
template <bool kMnMajor, Side kSide, class Tile>
DEVICE void load_fragment(Fragment<float, kSide>& f, const Tile& tile, int first, int k) {
#pragma unroll
    for (int i = 0; i < Fragment<float, kSide>::kExtent; ++i) {
        const int mn = first + Fragment<float, kSide>::mn(lane_id(), i);
        if constexpr (kMnMajor) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                f.values[i][j] = static_cast<const float*>(tile(k + j, mn / 4))[mn % 4];
            }
        } else {
            memcpy(f.values[i], tile(mn, k / 4), 16);
        }
    }
}

// acc += a * b for all pairs of fragments, in the order of k.
template <int kM, int kN>
DEVICE void mma(Accumulator<float> (&acc)[kM][kN], const FragmentA<float> (&a)[kM],
                const FragmentB<float> (&b)[kN]) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int i = 0; i < Accumulator<float>::kCount; ++i) {
                float& sum = acc[m][n].values[i];
#pragma unroll
                for (int k = 0; k < 4; ++k) sum += a[m].values[i / 4][k] * b[n].values[i % 4][k];
            }
        }
    }
}
