// Matrix words on the host: each lane reads its own elements, and the last lane to arrive
// multiplies for the warp.  Products are exact, sums are rounded to FP32 one after another along k.
#include "platform/mma_float.cuh"

// --- 8 x 8 matrices of 16-bit numbers --------------------------------------------------------
namespace host {
// One lane's part; lanes work in groups of 32.
template <bool kTransposed, int kCount, bool kStore>
struct MoveMatrix {
    static_assert(kCount == 1 || kCount == 2 || kCount == 4, "1, 2 or 4 matrices");
    uint16_t* row;
    uint32_t* registers;

    static void combine(void** payloads) {
        for (int lane = 0; lane < kWarpSize; ++lane) {
            for (int n = 0; payloads[lane] && n < 2 * kCount; ++n) {
                const int matrix = n / 2, from = lane % 32 / 4, to = lane % 4 * 2 + n % 2;
                const int source = lane / 32 * 32 + matrix * 8 + (kTransposed ? to : from);
                if (!payloads[source]) continue;
                uint16_t* number =
                    static_cast<MoveMatrix*>(payloads[source])->row + (kTransposed ? from : to);
                uint32_t& r = static_cast<MoveMatrix*>(payloads[lane])->registers[matrix];
                if (kStore) *number = uint16_t(r >> n % 2 * 16);
                else r = n % 2 ? uint32_t(*number) << 16 | (r & 0xffff) : *number;
            }
        }
    }
};
}  // namespace host

template <bool kTransposed = false, int kCount>
DEVICE void load_matrix(uint32_t (&r)[kCount], const void* row, HOST_PLACE) {
    const bool has_row = lane_id() % 32 < 8 * kCount;
    if (has_row) host::check_alignment(row, 16, place);
    if (has_row) host::touch(row, 16);
    host::MoveMatrix<kTransposed, kCount, false> mine{(uint16_t*)row, r};
    host::runtime->exchange("load_matrix", &mine, mine.combine, place);
}

// --- fragments and their products ------------------------------------------------------------

// Row (of A; column of B) lane % 16, k from (lane / 16) * kCount on.
template <class T, Side kSide> struct Fragment {
    static constexpr int kCount = 16 * kFragmentK<T> / kWarpSize;
    T values[kCount];
};

namespace host {
// As mma.sync has it in a warp of 32, as MFMA has it in one of 64.
template <class T> struct Sums {
    using Sum = T;
    static constexpr int kCount = 256 / kWarpSize;
    T values[kCount];

    DEVICE static constexpr int row(int lane, int i) {
        return kWarpSize == 32 ? lane / 4 + i % 4 / 2 * 8 : lane / 16 * 4 + i;
    }
    DEVICE static constexpr int col(int lane, int i) {
        return kWarpSize == 32 ? i / 4 * 8 + lane % 4 * 2 + i % 2 : lane % 16;
    }
};
}  // namespace host
template <class T> struct Accumulator : host::Sums<float> {};
template <> struct Accumulator<int8_t> : host::Sums<int> {};

template <bool kOuterMajor, class T, Side kSide, class Tile>
DEVICE void load_fragment(Fragment<T, kSide>& f, const Tile& tile, int first, int k) {
    constexpr int kPerChunk = 16 / int(sizeof(T)), kCount = Fragment<T, kSide>::kCount;
    const int outer = first + lane_id() % 16;
    k += lane_id() / 16 * kCount;
    if constexpr (kOuterMajor) {
        for (int i = 0; i < kCount; ++i) {
            f.values[i] = static_cast<const T*>(tile(k + i, outer / kPerChunk))[outer % kPerChunk];
        }
    } else {
        const T* chunk = static_cast<const T*>(tile(outer, k / kPerChunk));
        memcpy(f.values, chunk + k % kPerChunk, sizeof(f.values));
    }
}

// load_fragment for many fragments of one tile (see mma_cuda.cuh).
template <bool kOuterMajor, class T, Side kSide, class Tile>
struct FragmentLoader {
    int first;

    DEVICE explicit FragmentLoader(int first) : first(first) {}
    DEVICE void forget() {}
    DEVICE void load(Fragment<T, kSide>& f, const Tile& tile, int outer, int k) const {
        load_fragment<kOuterMajor>(f, tile, first + outer, k);
    }
};

namespace host {
template <class T> struct Product { using Type = float; };
template <> struct Product<int8_t> { using Type = int; };

template <class A, class B, int kM, int kN> struct Multiply {
    using Sum = typename Product<A>::Type;
    Accumulator<A> (*acc)[kN];
    const FragmentA<A>* a;
    const FragmentB<B>* b;

    template <class Number, class Fragment>
    static void gather(Sum* out, const Fragment& f, int lane, int outer_stride, int k_stride) {
        Sum* p = out + lane % 16 * outer_stride + lane / 16 * Fragment::kCount * k_stride;
        for (int i = 0; i < Fragment::kCount; ++i) {
            if constexpr (kSame<Sum, int>) p[i * k_stride] = f.values[i];
            else p[i * k_stride] = to_float(f.values[i]);
        }
    }
    static void combine(void** payloads) {
        constexpr int kDepth = kFragmentK<A>, kColumns = 16 * kN;
        Sum a_rows[kM * 16][kDepth], b_rows[kDepth][kColumns], sums[16][kColumns];
        for (int lane = 0; lane < kWarpSize; ++lane) {
            const Multiply& mine = *static_cast<const Multiply*>(payloads[lane]);
            for (int m = 0; m < kM; ++m) gather<A>(a_rows[m * 16], mine.a[m], lane, kDepth, 1);
            for (int n = 0; n < kN; ++n)
                gather<B>(&b_rows[0][n * 16], mine.b[n], lane, 1, kColumns);
        }
        for (int m = 0; m < kM; ++m) {
            exchange_sums<true>(payloads, m, sums);
            for (int row = 0; row < 16; ++row) {
                for (int k = 0; k < kDepth; ++k) {
                    const Sum factor = a_rows[m * 16 + row][k];
                    for (int col = 0; col < kColumns; ++col)
                        sums[row][col] += factor * b_rows[k][col];
                }
            }
            exchange_sums<false>(payloads, m, sums);
        }
    }
    template <bool kGather>
    static void exchange_sums(void** payloads, int m, Sum (*sums)[16 * kN]) {
        for (int lane = 0; lane < kWarpSize; ++lane) {
            const Multiply& mine = *static_cast<const Multiply*>(payloads[lane]);
            for (int n = 0; n < kN; ++n) {
                for (int i = 0; i < Accumulator<A>::kCount; ++i) {
                    Sum& here =
                        sums[Accumulator<A>::row(lane, i)][n * 16 + Accumulator<A>::col(lane, i)];
                    Sum& there = mine.acc[m][n].values[i];
                    if constexpr (kGather) here = there;
                    else there = here;
                }
            }
        }
    }
};
}  // namespace host

template <class A, class B, int kM, int kN>
DEVICE void mma(Accumulator<A> (&acc)[kM][kN], const FragmentA<A> (&a)[kM],
                const FragmentB<B> (&b)[kN], HOST_PLACE) {
    host::Multiply<A, B, kM, kN> payload{acc, a, b};
    host::runtime->exchange("mma", &payload, host::Multiply<A, B, kM, kN>::combine, place);
}

// --- sums as an operand of the next product (see mma_cuda.cuh) --------------------------------
constexpr Side kSumsSide = kWarpSize == 32 ? kSideA : kSideB;
namespace host {
template <class T> struct SumsToFragment {
    Fragment<T, kSumsSide>* fragment;
    const Accumulator<T>* sums;

    static void combine(void** payloads) {
        float all[16][16];  // [row or column][k]
        constexpr int kCount = Fragment<T, kSumsSide>::kCount;
        for (int lane = 0; lane < kWarpSize; ++lane) {
            const auto& mine = *static_cast<const SumsToFragment*>(payloads[lane]);
            for (int i = 0; i < Accumulator<T>::kCount; ++i) {
                const int row = Accumulator<T>::row(lane, i), col = Accumulator<T>::col(lane, i);
                (kSumsSide == kSideA ? all[row][col] : all[col][row]) = mine.sums->values[i];
            }
        }
        for (int lane = 0; lane < kWarpSize; ++lane) {
            const auto& mine = *static_cast<const SumsToFragment*>(payloads[lane]);
            for (int i = 0; i < kCount; ++i) {
                mine.fragment->values[i] = from_float<T>(all[lane % 16][lane / 16 * kCount + i]);
            }
        }
    }
};
}  // namespace host
template <class T>
DEVICE void sums_to_fragment(Fragment<T, kSumsSide>& f, const Accumulator<T>& sums, HOST_PLACE) {
    host::SumsToFragment<T> payload{&f, &sums};
    host::runtime->exchange("sums_to_fragment", &payload, payload.combine, place);
}

// --- products of FP16 summed in FP16: rounded once for every fragment of k ---------------------
constexpr bool kHasHalfSums = true;
struct HalfAccumulator : host::Sums<float> {
    DEVICE float value(int i) const { return values[i]; }
};
template <int kM, int kN>
DEVICE void mma(HalfAccumulator (&acc)[kM][kN], const FragmentA<half> (&a)[kM],
                const FragmentB<half> (&b)[kN], HOST_PLACE) {
    Accumulator<half> sums[kM][kN];
    memcpy(sums, acc, sizeof(sums));
    mma(sums, a, b, place);
    for (int m = 0; m < kM; ++m) {
        for (int n = 0; n < kN; ++n) {
            for (int i = 0; i < HalfAccumulator::kCount; ++i) {
                acc[m][n].values[i] = to_float(from_float<half>(sums[m][n].values[i]));
            }
        }
    }
}

// 32 of k as two fragments, each number converted from Stored.  kOrder: here k keeps its order.
template <class Stored, bool kOuterMajor, LaneOrder kOrder, class T, Side kSide, class Tile>
DEVICE void load_converted(Fragment<T, kSide>& low, Fragment<T, kSide>& high, const Tile& tile,
                           int first, int k) {
    constexpr int kPerChunk = 16 / int(sizeof(Stored)), kCount = Fragment<T, kSide>::kCount;
    const int outer = first + lane_id() % 16;
    k += lane_id() / 16 * kCount;
    for (int i = 0; i < 2 * kCount; ++i) {
        const int at = k + i % kCount + i / kCount * 16;
        const int line = kOuterMajor ? at : outer, element = kOuterMajor ? outer : at;
        const Stored x =
            static_cast<const Stored*>(tile(line, element / kPerChunk))[element % kPerChunk];
        (i < kCount ? low : high).values[i % kCount] = from_float<T>(to_float(x));
    }
}

// 32 of k of e2m1 numbers as two fragments, each times the e4m3 scale of its 16 of k: a product
// that T holds exactly.  tile.codes: lines of bytes along k, two numbers in each; tile.scale(line,
// k / 16).
template <class T, Side kSide, class Tile>
DEVICE void load_scaled(Fragment<T, kSide>& low, Fragment<T, kSide>& high, const Tile& tile,
                        int first, int k) {
    constexpr int kCount = Fragment<T, kSide>::kCount;
    const int outer = first + lane_id() % 16;
    k += lane_id() / 16 * kCount;
    for (int i = 0; i < 2 * kCount; ++i) {
        const int at = k + i % kCount + i / kCount * 16;
        const uint8_t* chunk = static_cast<const uint8_t*>(tile.codes(outer, at / 32));
        const uint32_t code = chunk[at % 32 / 2] >> at % 2 * 4 & 0xf;
        const float x = decode_e2m1(code) * to_float(tile.scale(outer, at / 16));
        (i < kCount ? low : high).values[i % kCount] = from_float<T>(x);
    }
}

// The column of B that stands at column `col` of a fragment.
template <class Stored, class T, bool kOuterMajor>
DEVICE int stored_column(int col) {
    return col;
}
