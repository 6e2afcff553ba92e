// Fragments, and those of FP32.  No matrix unit multiplies FP32 without rounding it to TF32 first,
// so each lane multiplies rows and columns of its own: the same code on every platform.

// 16 rows of A, or 16 columns of B, by kFragmentK<T> of k: the part that one lane holds.
enum Side { kSideA, kSideB };
template <class T, Side kSide> struct Fragment;
template <class T> using FragmentA = Fragment<T, kSideA>;
template <class T> using FragmentB = Fragment<T, kSideB>;
// Which k a lane holds: kPairs as the matrix unit has it; kFours and kEights: where operands are
// converted and a lane has 4 or 8 neighbours of memory.  The order of k is free as long as A and B
// have the same.
enum class LaneOrder { kPairs, kFours, kEights };
template <class T> constexpr int kFragmentK = 32 / int(sizeof(T));
template <> constexpr int kFragmentK<float> = 4;

// The 16 x 16 sums of products of T in a warp; this lane's number i is at row(lane, i), col(lane,
// i).
template <class T> struct Accumulator;

template <Side kSide> struct Fragment<float, kSide> {
    // A: rows lane / 4 + kStep * i.  B: columns lane % 4 + kStep * i.
    static constexpr int kStep = kSide == kSideA ? kWarpSize / 4 : 4;
    static constexpr int kLines = 16 / kStep;
    float values[kLines][4];

    DEVICE static constexpr int line(int lane, int i) {
        return (kSide == kSideA ? lane / 4 : lane % 4) + kStep * i;
    }
};

template <> struct Accumulator<float> {
    using Scalar = float;
    static constexpr int kCount = 256 / kWarpSize;
    float values[kCount];

    DEVICE static constexpr int row(int lane, int i) { return FragmentA<float>::line(lane, i / 4); }
    DEVICE static constexpr int col(int lane, int i) { return FragmentB<float>::line(lane, i % 4); }
};

// From shared memory, whose tile(line, c) is the address of the 16-byte chunk c of a line.
// kMnMajor:
// its lines are k, their elements rows of A (columns of B); otherwise the other way round.
// Elements [first, first + 16) and [k, k + kFragmentK).
template <bool kMnMajor, Side kSide, class Tile>
DEVICE void load_fragment(Fragment<float, kSide>& f, const Tile& tile, int first, int k) {
#pragma unroll
    for (int i = 0; i < Fragment<float, kSide>::kLines; ++i) {
        const int line = first + Fragment<float, kSide>::line(lane_id(), i);
        if constexpr (kMnMajor) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                f.values[i][j] = static_cast<const float*>(tile(k + j, line / 4))[line % 4];
            }
        } else {
            memcpy(f.values[i], tile(line, k / 4), 16);
        }
    }
}

// acc += a * b for all pairs of fragments; sums along k in order.
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
