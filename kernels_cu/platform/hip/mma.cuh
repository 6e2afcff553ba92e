// Matrix primitives on AMD GPUs: MFMA on gfx9 (wave64), WMMA on gfx11 and gfx12 (wave32).  FP8 is
// multiplied as FP16: gfx942's FP8 formats are not the standard ones.
#pragma once
#include "platform/fragments.cuh"

// A lane has row lane % 16 of A (column of B), and k from lane / 16 % kGroups * kCount on.
#if defined(__GFX9__)
constexpr int kGroups = 4;
#elif defined(__GFX12__)
constexpr int kGroups = 2;
#else
constexpr int kGroups = 1;  // both halves of the warp have the same elements
#endif
template <class T, Side kSide> struct Fragment {
    static constexpr int kCount = kFragmentK<T> / kGroups;
    alignas(16) T values[kCount];
};

namespace hip {
template <class T> struct AccumulatorBase {
    using Scalar = T;
    static constexpr int kCount = 256 / kWarpSize;
    T values[kCount];

    DEVICE static constexpr int row(int lane, int i) {
        return kGroups == 4   ? lane / 16 * 4 + i
               : kGroups == 2 ? lane / 16 * 8 + i
                              : 2 * i + lane / 16;
    }
    DEVICE static constexpr int col(int lane, int) { return lane % 16; }
};

template <class T, int N> struct PackOf { typedef T Type __attribute__((ext_vector_type(N))); };
template <class T, int N> using Pack = typename PackOf<T, N>::Type;

// One instruction, k = 16; a, b: a lane's 16 / kGroups elements.
template <class T>
DEVICE void mma_16x16(float* acc, const void* a, const void* b) {
    constexpr int kElements = 16 / kGroups, kAccumulators = 256 / kWarpSize;
    auto& c = *reinterpret_cast<Pack<float, kAccumulators>*>(acc);
    constexpr bool kIsHalf = kSame<T, half>;
    const auto& half_a = *static_cast<const Pack<_Float16, kElements>*>(a);
    const auto& half_b = *static_cast<const Pack<_Float16, kElements>*>(b);
    const auto& bf16_a = *static_cast<const Pack<short, kElements>*>(a);
    const auto& bf16_b = *static_cast<const Pack<short, kElements>*>(b);
#if defined(__GFX9__)
    if constexpr (kIsHalf) c = __builtin_amdgcn_mfma_f32_16x16x16f16(half_a, half_b, c, 0, 0, 0);
    else c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(bf16_a, bf16_b, c, 0, 0, 0);
#elif defined(__GFX12__)
    if constexpr (kIsHalf) c = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(half_a, half_b, c);
    else c = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(bf16_a, bf16_b, c);
#else
    if constexpr (kIsHalf) c = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(half_a, half_b, c);
    else c = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(bf16_a, bf16_b, c);
#endif
}
template <class T>
DEVICE void mma_16x16(int* acc, const void* a, const void* b) {
    auto& c = *reinterpret_cast<Pack<int, 256 / kWarpSize>*>(acc);
    constexpr int kWords = 4 / kGroups;
    using Words = Pack<int, kWords>;
#if defined(__GFX9__)
    c = __builtin_amdgcn_mfma_i32_16x16x16i8(*static_cast<const int*>(a),
                                             *static_cast<const int*>(b), c, 0, 0, 0);
#elif defined(__GFX12__)
    c = __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32_gfx12(true, *static_cast<const Words*>(a), true,
                                                         *static_cast<const Words*>(b), c, false);
#else
    c = __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32(true, *static_cast<const Words*>(a), true,
                                                   *static_cast<const Words*>(b), c, false);
#endif
}
}  // namespace hip
template <class T> struct alignas(16) Accumulator : hip::AccumulatorBase<float> {};
template <> struct alignas(16) Accumulator<int8_t> : hip::AccumulatorBase<int> {};

template <bool kMnMajor, class T, Side kSide, class Tile>
DEVICE void load_fragment(Fragment<T, kSide>& f, const Tile& tile, int first, int k) {
    constexpr int kPerChunk = 16 / int(sizeof(T)), kCount = Fragment<T, kSide>::kCount;
    const int mn = first + lane_id() % 16;
    k += lane_id() / 16 % kGroups * kCount;
    if constexpr (kMnMajor) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            f.values[i] = static_cast<const T*>(tile(k + i, mn / kPerChunk))[mn % kPerChunk];
        }
    } else {
        constexpr int kPiece = kCount < kPerChunk ? kCount : kPerChunk;
#pragma unroll
        for (int i = 0; i < kCount; i += kPiece) {
            const T* chunk = static_cast<const T*>(tile(mn, (k + i) / kPerChunk));
            memcpy(f.values + i, chunk + (k + i) % kPerChunk, kPiece * sizeof(T));
        }
    }
}

// Loads 16 of k element by element with at(row or column, k) (see cuda/mma.cuh).
template <class T, Side kSide, class At>
DEVICE void collect_fragment(Fragment<T, kSide>& f, const At& at) {
    constexpr int kCount = Fragment<T, kSide>::kCount;
    for (int i = 0; i < kCount; ++i) {
        f.values[i] = at(lane_id() % 16, lane_id() / 16 % kGroups * kCount + i);
    }
}

// load_fragment for many fragments of one tile (see cuda/mma.cuh).
template <bool kMnMajor, class T, Side kSide, class Tile>
struct FragmentLoader {
    int first;

    DEVICE explicit FragmentLoader(int first) : first(first) {}
    DEVICE void forget() {}
    DEVICE void load(Fragment<T, kSide>& f, const Tile& tile, int mn, int k) const {
        // Without opaque the compiler would keep every element's address.
        load_fragment<kMnMajor>(f, tile, opaque(first) + mn, k);
    }
};

template <class A, class B, int kM, int kN>
DEVICE void mma(Accumulator<A> (&acc)[kM][kN], const FragmentA<A> (&a)[kM],
                const FragmentB<B> (&b)[kN]) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#if defined(__gfx942__) || defined(__gfx950__)
            if constexpr (kSame<A, int8_t>) {
                auto& c = *reinterpret_cast<hip::Pack<int, 4>*>(acc[m][n].values);
                c = __builtin_amdgcn_mfma_i32_16x16x32_i8(bit_cast<long>(a[m].values),
                                                          bit_cast<long>(b[n].values), c, 0, 0, 0);
                continue;
            }
#endif
#pragma unroll
            for (int i = 0; i < kFragmentK<A> / 16; ++i) {
                constexpr int kElements = 16 / kGroups;
                hip::mma_16x16<A>(acc[m][n].values, a[m].values + i * kElements,
                                  b[n].values + i * kElements);
            }
        }
    }
}

// Accumulators as an operand (see cuda/mma.cuh).  Columns stay columns.  On gfx9 and gfx12 a lane
// already has the rows that it needs as k, on gfx11 every second one.
constexpr Side kAccumulatorSide = kSideB;
template <class T>
DEVICE void accumulator_to_fragment(Fragment<T, kAccumulatorSide>& f, const Accumulator<T>& acc) {
    if constexpr (kGroups > 1) {
        static_assert(Fragment<T, kAccumulatorSide>::kCount == Accumulator<T>::kCount, "16 of k");
#pragma unroll
        for (int i = 0; i < Accumulator<T>::kCount; ++i) f.values[i] = from_float<T>(acc.values[i]);
    } else {
        const bool upper = lane_id() >= 16;
#pragma unroll
        for (int i = 0; i < Accumulator<T>::kCount; ++i) {
            const float mine = acc.values[i], other = shuffle_xor(mine, 16);
            f.values[2 * i] = from_float<T>(upper ? other : mine);
            f.values[2 * i + 1] = from_float<T>(upper ? mine : other);
        }
    }
}
// The matrix units accumulate FP16 products in FP32.
constexpr bool kHasHalfAccumulator = false;
struct HalfAccumulator {
    DEVICE float value(int) const { return 0.0f; }
};

// Loads 32 of k as two fragments, converted from Stored.  kOrder has no effect: k keeps its order.
template <class Stored, bool kMnMajor, LaneOrder kOrder, class T, Side kSide, class Tile>
DEVICE void load_mixed_input(Fragment<T, kSide>& low, Fragment<T, kSide>& high, const Tile& tile,
                             int first, int k) {
    constexpr int kPerChunk = 16 / int(sizeof(Stored)), kCount = Fragment<T, kSide>::kCount;
    const int mn = first + lane_id() % 16;
    k += lane_id() / 16 % kGroups * kCount;
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) {
        const int at = k + i % kCount + i / kCount * 16;
        const int row = kMnMajor ? at : mn, element = kMnMajor ? mn : at;
        const Stored x =
            static_cast<const Stored*>(tile(row, element / kPerChunk))[element % kPerChunk];
        (i < kCount ? low : high).values[i % kCount] = from_float<T>(to_float(x));
    }
}

// The column of B that a fragment holds at column `col`.
template <class Stored, class T, bool kMnMajor>
DEVICE constexpr int stored_column(int col) {
    return col;
}
