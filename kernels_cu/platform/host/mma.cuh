// Matrix primitives on the host.  Each lane loads its own elements; the last lane to arrive
// multiplies for the warp (warp_mma.h), bit for bit like Hopper's tensor cores.
#pragma once
#include "platform/fragments.cuh"

// --- 8 x 8 matrices of 16-bit elements -------------------------------------------------------
template <bool kTransposed = false, int kCount>
DEVICE void load_matrix(uint32_t (&r)[kCount], const void* row, HOST_LOCATION) {
    static_assert(kCount == 1 || kCount == 2 || kCount == 4, "1, 2 or 4 matrices");
    const bool has_row = lane_id() % 32 < 8 * kCount;
    if (has_row) host::check_alignment(row, 16, location);
    if (has_row) host::touch(row, 16);
    host::MoveMatrix mine{false, kTransposed, kCount, (uint16_t*)row, r};
    host::runtime->move_matrix(&mine, location);
}

// --- fragments and MMA -----------------------------------------------------------------------

// A lane has row lane % 16 of A (column of B), and k from lane / 16 * kCount on.
template <class T, Side kSide> struct Fragment {
    static constexpr int kCount = 16 * kFragmentK<T> / kWarpSize;
    T values[kCount];
};

namespace host {
template <class T> struct AccumulatorBase {
    using Scalar = T;
    static constexpr int kCount = 256 / kWarpSize;
    T values[kCount];

    DEVICE static constexpr int row(int lane, int i) { return accumulator_row(kWarpSize, lane, i); }
    DEVICE static constexpr int col(int lane, int i) { return accumulator_col(kWarpSize, lane, i); }
};
}  // namespace host
template <class T> struct Accumulator : host::AccumulatorBase<float> {};
template <> struct Accumulator<int8_t> : host::AccumulatorBase<int> {};

template <bool kMnMajor, class T, Side kSide, class Tile>
DEVICE void load_fragment(Fragment<T, kSide>& f, const Tile& tile, int first, int k) {
    constexpr int kPerChunk = 16 / int(sizeof(T)), kCount = Fragment<T, kSide>::kCount;
    const int mn = first + lane_id() % 16;
    k += lane_id() / 16 * kCount;
    if constexpr (kMnMajor) {
        for (int i = 0; i < kCount; ++i) {
            f.values[i] = static_cast<const T*>(tile(k + i, mn / kPerChunk))[mn % kPerChunk];
        }
    } else {
        const T* chunk = static_cast<const T*>(tile(mn, k / kPerChunk));
        memcpy(f.values, chunk + k % kPerChunk, sizeof(f.values));
    }
}

// Loads 16 of k element by element with at(row or column, k) (see cuda/mma.cuh).
template <class T, Side kSide, class At>
DEVICE void collect_fragment(Fragment<T, kSide>& f, const At& at) {
    constexpr int kCount = Fragment<T, kSide>::kCount;
    for (int i = 0; i < kCount; ++i) {
        f.values[i] = at(lane_id() % 16, lane_id() / 16 * kCount + i);
    }
}

// load_fragment for many fragments of one tile (see cuda/mma.cuh).
template <bool kMnMajor, class T, Side kSide, class Tile>
struct FragmentLoader {
    int first;

    DEVICE explicit FragmentLoader(int first) : first(first) {}
    DEVICE void forget() {}
    DEVICE void load(Fragment<T, kSide>& f, const Tile& tile, int mn, int k) const {
        load_fragment<kMnMajor>(f, tile, first + mn, k);
    }
};

namespace host {
template <class T> constexpr ElementType kElementType = kSame<T, half>   ? kHalf
                                                        : kSame<T, bf16> ? kBf16
                                                        : kSame<T, e4m3> ? kE4m3
                                                        : kSame<T, e5m2> ? kE5m2
                                                                         : kInt8;
}  // namespace host

template <class A, class B, int kM, int kN>
DEVICE void mma(Accumulator<A> (&acc)[kM][kN], const FragmentA<A> (&a)[kM],
                const FragmentB<B> (&b)[kN], HOST_LOCATION) {
    static_assert(sizeof(A) == sizeof(B), "fragments have the same of k");
    static_assert(kM <= host::kMaxFragments && kN <= host::kMaxFragments, "warp_mma.h has room");
    host::Mma mine{{host::kElementType<A>, host::kElementType<B>}, {kM, kN}, {a, b}, acc};
    host::runtime->mma(&mine, location);
}

// --- accumulators as an operand (see cuda/mma.cuh) -------------------------------------------
constexpr Side kAccumulatorSide = kWarpSize == 32 ? kSideA : kSideB;
namespace host {
template <class T> struct AccumulatorToFragment {
    Fragment<T, kAccumulatorSide>* fragment;
    const Accumulator<T>* accumulators;

    static void combine(void** payloads) {
        float all[16][16];  // [row or column][k]
        constexpr int kCount = Fragment<T, kAccumulatorSide>::kCount;
        for (int lane = 0; lane < kWarpSize; ++lane) {
            const auto& mine = *static_cast<const AccumulatorToFragment*>(payloads[lane]);
            for (int i = 0; i < Accumulator<T>::kCount; ++i) {
                const int row = Accumulator<T>::row(lane, i), col = Accumulator<T>::col(lane, i);
                (kAccumulatorSide == kSideA ? all[row][col] : all[col][row]) =
                    mine.accumulators->values[i];
            }
        }
        for (int lane = 0; lane < kWarpSize; ++lane) {
            const auto& mine = *static_cast<const AccumulatorToFragment*>(payloads[lane]);
            for (int i = 0; i < kCount; ++i) {
                mine.fragment->values[i] = from_float<T>(all[lane % 16][lane / 16 * kCount + i]);
            }
        }
    }
};
}  // namespace host
template <class T>
DEVICE void accumulator_to_fragment(Fragment<T, kAccumulatorSide>& f,
                                    const Accumulator<T>& accumulators, HOST_LOCATION) {
    host::AccumulatorToFragment<T> payload{&f, &accumulators};
    host::runtime->exchange("accumulator_to_fragment", &payload, payload.combine, location);
}

// --- 8 columns of B: a fragment's first 8 columns; the others are zeros ----------------------
template <class T> struct NarrowFragment { FragmentB<T> fragment; };
template <class T> struct NarrowAccumulator {
    static constexpr int kCount = 128 / kWarpSize;
    float values[kCount];

    DEVICE static constexpr int row(int lane, int i) {
        return kWarpSize == 32 ? Accumulator<T>::row(lane, i) : lane / 8 + 8 * i;
    }
    DEVICE static constexpr int col(int lane, int i) {
        return kWarpSize == 32 ? Accumulator<T>::col(lane, i) : lane % 8;
    }
};
namespace host {
// Moves all lanes' accumulators from one layout to another.
template <class From, class To> struct MoveAccumulators {
    const From* from;
    To* to;

    static void combine(void** payloads) {
        float all[16][16] = {};
        for (int lane = 0; lane < kWarpSize; ++lane) {
            const auto& mine = *static_cast<const MoveAccumulators*>(payloads[lane]);
            for (int i = 0; i < From::kCount; ++i)
                all[From::row(lane, i)][From::col(lane, i)] = mine.from->values[i];
        }
        for (int lane = 0; lane < kWarpSize; ++lane) {
            const auto& mine = *static_cast<const MoveAccumulators*>(payloads[lane]);
            for (int i = 0; i < To::kCount; ++i)
                mine.to->values[i] = all[To::row(lane, i)][To::col(lane, i)];
        }
    }
};
template <class From, class To>
DEVICE void move_accumulators(const From& from, To& to, const Location& location) {
    MoveAccumulators<From, To> payload{&from, &to};
    runtime->exchange("move_accumulators", &payload, payload.combine, location);
}
// Accumulators in the layout of a B operand: a lane's elements are k of its column.
template <class T> struct Transposed {
    static constexpr int kCount = FragmentB<T>::kCount;
    float values[kCount];

    static int row(int lane, int i) { return lane / 16 * kCount + i; }
    static int col(int lane, int) { return lane % 16; }
};
}  // namespace host
// Lanes of the other columns load elements of the first 8 columns and replace them by zeros.
template <class T, class Tile>
DEVICE void load_fragment(NarrowFragment<T>& f, const Tile& tile, int first, int k) {
    const int col = lane_id() % 16;
    load_fragment<false>(f.fragment, tile, first - col + col % 8, k);
    if (col >= 8) f.fragment = {};
}
template <class T, int kM>
DEVICE void mma(NarrowAccumulator<T> (&acc)[kM][1], const FragmentA<T> (&a)[kM],
                const NarrowFragment<T> (&b)[1], HOST_LOCATION) {
    Accumulator<T> full[kM][1];
    for (int m = 0; m < kM; ++m) host::move_accumulators(acc[m][0], full[m][0], location);
    const FragmentB<T> columns[1] = {b[0].fragment};
    mma(full, a, columns, location);
    for (int m = 0; m < kM; ++m) host::move_accumulators(full[m][0], acc[m][0], location);
}
// The accumulators' rows become k.
template <class T>
DEVICE void accumulator_to_fragment(NarrowFragment<T>& f, const NarrowAccumulator<T>& d,
                                    HOST_LOCATION) {
    host::Transposed<T> found;
    host::move_accumulators(d, found, location);
    for (int i = 0; i < found.kCount; ++i) f.fragment.values[i] = from_float<T>(found.values[i]);
}

// --- FP16 accumulators: rounded once per fragment of k ---------------------------------------
constexpr bool kHasHalfAccumulator = true;
struct HalfAccumulator : host::AccumulatorBase<float> {
    DEVICE float value(int i) const { return values[i]; }
};
template <int kM, int kN>
DEVICE void mma(HalfAccumulator (&acc)[kM][kN], const FragmentA<half> (&a)[kM],
                const FragmentB<half> (&b)[kN], HOST_LOCATION) {
    Accumulator<half> accumulators[kM][kN];
    memcpy(accumulators, acc, sizeof(accumulators));
    mma(accumulators, a, b, location);
    for (int m = 0; m < kM; ++m) {
        for (int n = 0; n < kN; ++n) {
            for (int i = 0; i < HalfAccumulator::kCount; ++i) {
                acc[m][n].values[i] = to_float(from_float<half>(accumulators[m][n].values[i]));
            }
        }
    }
}

// Loads 32 of k as two fragments, converted from Stored.  kOrder has no effect: k keeps its order.
template <class Stored, bool kMnMajor, LaneOrder kOrder, class T, Side kSide, class Tile>
DEVICE void load_mixed_input(Fragment<T, kSide>& low, Fragment<T, kSide>& high, const Tile& tile,
                             int first, int k) {
    constexpr int kPerChunk = 16 / int(sizeof(Stored)), kCount = Fragment<T, kSide>::kCount;
    const int mn = first + lane_id() % 16;
    k += lane_id() / 16 * kCount;
    for (int i = 0; i < 2 * kCount; ++i) {
        const int at = k + i % kCount + i / kCount * 16;
        const int row = kMnMajor ? at : mn, element = kMnMajor ? mn : at;
        const Stored x =
            static_cast<const Stored*>(tile(row, element / kPerChunk))[element % kPerChunk];
        (i < kCount ? low : high).values[i % kCount] = from_float<T>(to_float(x));
    }
}
template <class Stored, bool kMnMajor, LaneOrder kOrder, class T, class Tile>
DEVICE void load_mixed_input(NarrowFragment<T>& low, NarrowFragment<T>& high, const Tile& tile,
                             int first, int k) {
    static_assert(kSame<Stored, T> && !kMnMajor, "rows of k");
    const int col = lane_id() % 16;
    load_mixed_input<Stored, kMnMajor, kOrder>(low.fragment, high.fragment, tile,
                                               first - col + col % 8, k);
    if (col >= 8) low.fragment = high.fragment = {};
}

// The column of B that a fragment holds at column `col`.
template <class Stored, class T, bool kMnMajor>
DEVICE constexpr int stored_column(int col) {
    return col;
}
