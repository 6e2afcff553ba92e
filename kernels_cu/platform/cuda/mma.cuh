// Matrix primitives on CUDA: ldmatrix and mma.sync.  FP16, BF16 and int8 from sm_80 on, FP8 from
// sm_89 on.
#pragma once
#include "platform/fragments.cuh"

// --- 8 x 8 matrices of 16-bit elements -------------------------------------------------------
namespace cuda {
template <bool kTransposed, int kCount>
DEVICE void load_matrix_at(uint32_t (&r)[kCount], uint32_t address) {
#define LOAD_MATRIX(count, registers, ...)                                              \
    if constexpr (kTransposed) {                                                        \
        asm volatile("ldmatrix.sync.aligned.m8n8." count ".trans.shared.b16 " registers \
                     : __VA_ARGS__                                                      \
                     : "r"(address)                                                     \
                     : "memory");                                                       \
    } else {                                                                            \
        asm volatile("ldmatrix.sync.aligned.m8n8." count ".shared.b16 " registers       \
                     : __VA_ARGS__                                                      \
                     : "r"(address)                                                     \
                     : "memory");                                                       \
    }
    static_assert(kCount == 1 || kCount == 2 || kCount == 4, "1, 2 or 4 matrices");
    if constexpr (kCount == 1) {
        LOAD_MATRIX("x1", "{%0}, [%1];", "=r"(r[0]))
    } else if constexpr (kCount == 2) {
        LOAD_MATRIX("x2", "{%0, %1}, [%2];", "=r"(r[0]), "=r"(r[1]))
    } else {
        LOAD_MATRIX("x4", "{%0, %1, %2, %3}, [%4];", "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]))
    }
}
#undef LOAD_MATRIX
}  // namespace cuda
template <bool kTransposed = false, int kCount>
DEVICE void load_matrix(uint32_t (&r)[kCount], const void* row) {
    cuda::load_matrix_at<kTransposed>(r, static_cast<uint32_t>(__cvta_generic_to_shared(row)));
}

// --- fragments and MMA -----------------------------------------------------------------------

// words[i] of a warp covers 8 rows x 16 bytes of k; a lane has 4 bytes of row lane / 4.  Words are
// in the order of mma.sync's registers: A's 16 rows x 32 bytes, or B's 8 rows x 32 bytes twice.
template <class T, Side kSide> struct Fragment {
    uint32_t words[4];

    // Index of the word for one half of the rows and one half of k.
    DEVICE static constexpr int word(int row_half, int k_half) {
        return kSide == kSideA ? row_half + 2 * k_half : 2 * row_half + k_half;
    }
    DEVICE static constexpr int row_half(int word) { return kSide == kSideA ? word % 2 : word / 2; }
    DEVICE static constexpr int k_half(int word) { return kSide == kSideA ? word / 2 : word % 2; }
};

template <class T> struct Accumulator {
    using Scalar = float;
    static constexpr int kCount = 8;
    float values[8];

    // values 0-3: columns 0-7, 4-7: columns 8-15.
    DEVICE static constexpr int row(int lane, int i) { return lane / 4 + i % 4 / 2 * 8; }
    DEVICE static constexpr int col(int lane, int i) { return i / 4 * 8 + lane % 4 * 2 + i % 2; }
};
template <> struct Accumulator<int8_t> {
    using Scalar = int;
    static constexpr int kCount = 8;
    int values[8];

    DEVICE static constexpr int row(int lane, int i) { return Accumulator<half>::row(lane, i); }
    DEVICE static constexpr int col(int lane, int i) { return Accumulator<half>::col(lane, i); }
};

namespace cuda {
#define CUDA_MMA(shape_and_types, kind, acc, a, b0, b1)                          \
    asm("mma.sync.aligned." shape_and_types                                      \
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "                        \
        "{%0, %1, %2, %3};"                                                      \
        : "+" kind(acc[0]), "+" kind(acc[1]), "+" kind(acc[2]), "+" kind(acc[3]) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// 16 rows by 8 columns.
template <class A, class B>
DEVICE void mma_16x8(float* acc, const uint32_t* a, uint32_t b0, uint32_t b1) {
    if constexpr (kSame<A, half>) {
        CUDA_MMA("m16n8k16.row.col.f32.f16.f16.f32", "f", acc, a, b0, b1);
    } else if constexpr (kSame<A, bf16>) {
        CUDA_MMA("m16n8k16.row.col.f32.bf16.bf16.f32", "f", acc, a, b0, b1);
    } else if constexpr (kSame<A, e4m3> && kSame<B, e4m3>) {
        CUDA_MMA("m16n8k32.row.col.f32.e4m3.e4m3.f32", "f", acc, a, b0, b1);
    } else if constexpr (kSame<A, e4m3>) {
        CUDA_MMA("m16n8k32.row.col.f32.e4m3.e5m2.f32", "f", acc, a, b0, b1);
    } else if constexpr (kSame<B, e4m3>) {
        CUDA_MMA("m16n8k32.row.col.f32.e5m2.e4m3.f32", "f", acc, a, b0, b1);
    } else {
        CUDA_MMA("m16n8k32.row.col.f32.e5m2.e5m2.f32", "f", acc, a, b0, b1);
    }
}
template <class A, class B>
DEVICE void mma_16x8(int* acc, const uint32_t* a, uint32_t b0, uint32_t b1) {
    CUDA_MMA("m16n8k32.row.col.s32.s8.s8.s32", "r", acc, a, b0, b1);
}
#undef CUDA_MMA
}  // namespace cuda

template <bool kMnMajor, class T, Side kSide, class Tile>
DEVICE void load_fragment(Fragment<T, kSide>& f, const Tile& tile, int first, int k) {
    using F = Fragment<T, kSide>;
    const int r = lane_id() % 8, row_half = F::row_half(lane_id() / 8),
              k_half = F::k_half(lane_id() / 8);
    if constexpr (kMnMajor) {
        static_assert(sizeof(T) == 2, "load_matrix transposes 16-bit numbers");
        load_matrix<true>(f.words, tile(k + k_half * 8 + r, first / 8 + row_half));
    } else {
        constexpr int kPerChunk = 16 / int(sizeof(T));
        load_matrix<false>(f.words, tile(first + row_half * 8 + r, k / kPerChunk + k_half));
    }
}

// Loads 16 of k element by element: a lane calls at(row or column, k) for its own elements.
template <class T, Side kSide, class At>
DEVICE void collect_fragment(Fragment<T, kSide>& f, const At& at) {
    static_assert(sizeof(T) == 2, "pairs of 16-bit numbers");
    const int row = lane_id() / 4, k = lane_id() % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const T pair[] = {at(row + f.row_half(i) * 8, k + f.k_half(i) * 8),
                          at(row + f.row_half(i) * 8, k + f.k_half(i) * 8 + 1)};
        memcpy(&f.words[i], pair, 4);
    }
}

// load_fragment for many fragments of one tile, with one swizzled base address per lane.  first:
// load_fragment's `first` of the first fragment; 0 if kMnMajor.  mn, k: offsets of the other
// fragments, multiples of 16.  Tile has Bytes<16> chunks[], aligned to 128 bytes, index(row, chunk)
// and kChunks chunks per row, a power of two.  Its swizzle permutes groups of eight chunks and
// repeats every eight rows.
template <bool kMnMajor, class T, Side kSide, class Tile>
struct FragmentLoader {
    static_assert(sizeof(T) == 2, "chunks of eight");
    int offset;

    DEVICE explicit FragmentLoader(int first) {
        using F = Fragment<T, kSide>;
        const int r = lane_id() % 8, q = lane_id() / 8;
        offset = 16 * (kMnMajor ? Tile::index(F::k_half(q) * 8 + r, F::row_half(q))
                                : Tile::index(first + F::row_half(q) * 8 + r, F::k_half(q)));
    }
    // Ends the live ranges of addresses that the compiler would keep per fragment.
    DEVICE void forget() { offset = opaque(offset); }
    DEVICE void load(Fragment<T, kSide>& f, const Tile& tile, int mn, int k) const {
        const int row = kMnMajor ? k : mn, chunk = (kMnMajor ? mn : k) / 8;
        // Only the low three bits of the chunk are swizzled; the rest is a constant.
        const uint32_t start = uint32_t(__cvta_generic_to_shared(tile.chunks)) + offset;
        cuda::load_matrix_at<kMnMajor>(
            f.words, (start ^ 16 * (chunk % 8)) + 16 * (row * Tile::kChunks + chunk / 8 * 8));
    }
};

template <class A, class B, int kM, int kN>
DEVICE void mma(Accumulator<A> (&acc)[kM][kN], const FragmentA<A> (&a)[kM],
                const FragmentB<B> (&b)[kN]) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
            auto* d = acc[m][n].values;
            cuda::mma_16x8<A, B>(d, a[m].words, b[n].words[0], b[n].words[1]);
            cuda::mma_16x8<A, B>(d + 4, a[m].words, b[n].words[2], b[n].words[3]);
        }
    }
}

// --- accumulators as an operand --------------------------------------------------------------
constexpr Side kAccumulatorSide = kSideA;
template <class T>
DEVICE void accumulator_to_fragment(Fragment<T, kAccumulatorSide>& f, const Accumulator<T>& d) {
#pragma unroll
    for (int i = 0; i < 4; ++i) f.words[i] = pack<T>(d.values[2 * i], d.values[2 * i + 1]);
}

// --- 8 columns of B --------------------------------------------------------------------------
template <class T> struct NarrowFragment { uint32_t words[2]; };
template <class T> struct NarrowAccumulator {
    static constexpr int kCount = 4;
    float values[4];

    DEVICE static constexpr int row(int lane, int i) { return Accumulator<T>::row(lane, i); }
    DEVICE static constexpr int col(int lane, int i) { return Accumulator<T>::col(lane, i); }
};
template <class T, class Tile>
DEVICE void load_fragment(NarrowFragment<T>& f, const Tile& tile, int first, int k) {
    load_matrix<false>(f.words, tile(first + lane_id() % 8, k / 8 + lane_id() / 8 % 2));
}
template <class T, int kM>
DEVICE void mma(NarrowAccumulator<T> (&acc)[kM][1], const FragmentA<T> (&a)[kM],
                const NarrowFragment<T> (&b)[1]) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
        cuda::mma_16x8<T, T>(acc[m][0].values, a[m].words, b[0].words[0], b[0].words[1]);
}
// The accumulators' rows become k.
template <class T>
DEVICE void accumulator_to_fragment(NarrowFragment<T>& f, const NarrowAccumulator<T>& d) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
            : "=r"(f.words[i])
            : "r"(pack<T>(d.values[2 * i], d.values[2 * i + 1])));
    }
}

// --- FP16 accumulators -----------------------------------------------------------------------
constexpr bool kHasHalfAccumulator = true;
struct HalfAccumulator {
    static constexpr int kCount = 8;
    uint32_t words[4];

    DEVICE float value(int i) const {
        return i % 2 ? cuda::high_float(words[i / 2]) : cuda::low_float(words[i / 2]);
    }
};
template <int kM, int kN>
DEVICE void mma(HalfAccumulator (&acc)[kM][kN], const FragmentA<half> (&a)[kM],
                const FragmentB<half> (&b)[kN]) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint32_t* d = acc[m][n].words + 2 * i;
                asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, "
                    "{%6, %7}, {%0, %1};"
                    : "+r"(d[0]), "+r"(d[1])
                    : "r"(a[m].words[0]), "r"(a[m].words[1]), "r"(a[m].words[2]),
                      "r"(a[m].words[3]), "r"(b[n].words[2 * i]), "r"(b[n].words[2 * i + 1]));
            }
        }
    }
}

// --- mixed input: 8-bit operands multiplied as 16-bit elements -------------------------------
namespace cuda {
// Converts each half of the register with one instruction, where the architecture has it.
DEVICE void convert_e4m3(uint32_t bytes, uint32_t& low, uint32_t& high) {
#if __CUDA_ARCH__ >= 890
    asm("{ .reg .b16 first, second;\n"
        "mov.b32 {first, second}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, first;\n"
        "cvt.rn.f16x2.e4m3x2 %1, second; }"
        : "=r"(low), "=r"(high)
        : "r"(bytes));
#else
    low = halves_of<e4m3>(bytes);
    high = halves_of<e4m3>(bytes >> 16);
#endif
}
// Converts four adjacent bytes to two pairs.
template <class Stored, class T>
DEVICE void convert_bytes(uint32_t bytes, uint32_t& low, uint32_t& high) {
    if constexpr (kSame<Stored, int8_t> && kSame<T, half>) {
        // FP16 code 0x6400 + u is 1024 + u; u = x + 128 is the byte with its sign bit flipped.
        bytes ^= 0x80808080u;
        low = subtract_halves(__byte_perm(bytes, 0x64646464u, 0x4140), 0x64806480u);
        high = subtract_halves(__byte_perm(bytes, 0x64646464u, 0x4342), 0x64806480u);
    } else if constexpr (kSame<Stored, int8_t>) {
        // BF16 code 0x4300 + u is 128 + u, where u is the byte without its sign bit; 0x4380 is 256.
        // x is 128 + u minus 128, or minus 256 if x is negative.
        const auto subtract = [](uint32_t pair) {
            return subtract_bf16s(pair & 0xff7fff7fu, pair & 0xff80ff80u);
        };
        low = subtract(__byte_perm(bytes, 0x43434343u, 0x4140));
        high = subtract(__byte_perm(bytes, 0x43434343u, 0x4342));
    } else if constexpr (kSame<T, half>) {
        if constexpr (kSame<Stored, e5m2>) {  // the upper half of an FP16 code
            low = __byte_perm(bytes, 0, 0x1404);
            high = __byte_perm(bytes, 0, 0x3424);
        } else {
            convert_e4m3(bytes, low, high);
        }
    } else {
        convert_bytes<Stored, half>(bytes, low, high);
        low = pack<T>(low_float(low), high_float(low));
        high = pack<T>(low_float(high), high_float(high));
    }
}
// Converts a register of a transposed 16-bit matrix: two columns of two adjacent k each.
template <class Stored, class T>
DEVICE void convert_columns(uint32_t bytes, uint32_t& even, uint32_t& odd) {
    convert_bytes<Stored, T>(__byte_perm(bytes, 0, 0x3120), even, odd);
}
}  // namespace cuda

// Loads 32 of k as two fragments, converted from Stored.  The k of lane t of four:
// - kPairs, mma.sync's order: 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of each 16.
// - kFours, for K-major bytes: 4 t to 4 t + 3 of each 16.
// - kEights, for K-major half bytes: of 64, 16 t to 16 t + 7 in the first 32 and the next 8 in the
//   second, as pairs of elements 0 and 4, 2 and 6 (low), 1 and 5, 3 and 7 (high).
template <class Stored, bool kMnMajor, LaneOrder kOrder, class T, Side kSide, class Tile>
DEVICE void load_mixed_input(Fragment<T, kSide>& low, Fragment<T, kSide>& high, const Tile& tile,
                             int first, int k) {
    const int r = lane_id() % 8, q = lane_id() / 8;
    if constexpr (kSame<Stored, T> && kOrder == LaneOrder::kPairs) {
        load_fragment<kMnMajor>(low, tile, first, k);
        load_fragment<kMnMajor>(high, tile, first, k + 16);
    } else if constexpr (kSame<Stored, T> && kOrder == LaneOrder::kEights) {
        static_assert(!kMnMajor, "k is contiguous");
        const int row = lane_id() / 4, chunk = k / 64 * 8 + lane_id() % 4 * 2 + k / 32 % 2;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const auto eight = *static_cast<const Bytes<16>*>(tile(first + row + 8 * i, chunk));
            const uint32_t (&pairs)[4] = eight.words;
            low.words[low.word(i, 0)] = __byte_perm(pairs[0], pairs[2], 0x5410);
            low.words[low.word(i, 1)] = __byte_perm(pairs[1], pairs[3], 0x5410);
            high.words[high.word(i, 0)] = __byte_perm(pairs[0], pairs[2], 0x7632);
            high.words[high.word(i, 1)] = __byte_perm(pairs[1], pairs[3], 0x7632);
        }
    } else if constexpr (kSame<Stored, T>) {
        static_assert(!kMnMajor, "k is contiguous");
        const int row = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const char* chunk =
                    static_cast<const char*>(tile(first + row + 8 * i, k / 8 + 2 * j + t / 2));
                uint32_t (&words)[4] = (j == 0 ? low : high).words;
                if constexpr (kSide == kSideB) {
                    const auto two = *reinterpret_cast<const Bytes<8>*>(chunk + t % 2 * 8);
                    words[low.word(i, 0)] = two.words[0];
                    words[low.word(i, 1)] = two.words[1];
                } else {
                    // Two 32-bit loads: a 64-bit load fills adjacent registers, and mma.sync would
                    // need copies.
                    const auto* two = reinterpret_cast<const volatile uint32_t*>(chunk + t % 2 * 8);
                    words[low.word(i, 0)] = two[0];
                    words[low.word(i, 1)] = two[1];
                }
            }
        }
    } else if constexpr (!kMnMajor) {
        static_assert(kOrder == LaneOrder::kFours, "bytes of k keep their order");
        uint32_t bytes[4];
        load_matrix<false>(bytes, tile(first + q % 2 * 8 + r, k / 16 + q / 2));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            cuda::convert_bytes<Stored, T>(bytes[i], low.words[low.word(i, 0)],
                                           low.words[low.word(i, 1)]);
            cuda::convert_bytes<Stored, T>(bytes[i + 2], high.words[high.word(i, 0)],
                                           high.words[high.word(i, 1)]);
        }
    } else {
        // A 16-bit element of the transposed matrix holds two columns.  Even columns become the
        // fragment's first 8 columns, odd columns the last 8 (stored_column).
        static_assert(kOrder == LaneOrder::kPairs, "mn is contiguous");
        uint32_t bytes[4];  // k 0-7, 8-15, 16-23, 24-31
        load_matrix<true>(bytes, tile(k + q * 8 + r, first / 16));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            cuda::convert_columns<Stored, T>(bytes[i], low.words[low.word(0, i)],
                                             low.words[low.word(1, i)]);
            cuda::convert_columns<Stored, T>(bytes[i + 2], high.words[high.word(0, i)],
                                             high.words[high.word(1, i)]);
        }
    }
}
template <class Stored, bool kMnMajor, LaneOrder kOrder, class T, class Tile>
DEVICE void load_mixed_input(NarrowFragment<T>& low, NarrowFragment<T>& high, const Tile& tile,
                             int first, int k) {
    static_assert(kSame<Stored, T> && !kMnMajor && kOrder == LaneOrder::kFours);
    const int row = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const char* chunk = static_cast<const char*>(tile(first + row, k / 8 + 2 * j + t / 2));
        const auto two = *reinterpret_cast<const Bytes<8>*>(chunk + t % 2 * 8);
        NarrowFragment<T>& f = j == 0 ? low : high;
        f.words[0] = two.words[0];
        f.words[1] = two.words[1];
    }
}

// The column of B that a fragment holds at column `col`.
template <class Stored, class T, bool kMnMajor>
DEVICE constexpr int stored_column(int col) {
    constexpr bool kPairs = sizeof(Stored) < sizeof(T) && kMnMajor;
    return kPairs ? col % 8 * 2 + col / 8 : col;
}
