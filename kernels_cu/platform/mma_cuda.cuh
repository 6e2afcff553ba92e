// Matrix words on CUDA: ldmatrix and mma.sync.  FP16, BF16 and int8 from sm_80 on, FP8 from sm_89 on.
#include "platform/mma_float.cuh"

// words: (rows 0-7, k low), (rows 8-15, k low), (rows 0-7, k high), (rows 8-15, k high), 16 bytes of k
// in each half; a lane holds 4 bytes of row lane / 4.
template <class T, Side kSide> struct Fragment {
    uint32_t words[4];
};

template <class T> struct Accumulator {
    using Sum = float;
    static constexpr int kCount = 8;
    float values[8];

    // values 0-3: columns 0-7, 4-7: columns 8-15.
    DEVICE static int row(int lane, int i) { return lane / 4 + i % 4 / 2 * 8; }
    DEVICE static int col(int lane, int i) { return i / 4 * 8 + lane % 4 * 2 + i % 2; }
};
template <> struct Accumulator<int8_t> {
    using Sum = int;
    static constexpr int kCount = 8;
    int values[8];

    DEVICE static int row(int lane, int i) { return Accumulator<half>::row(lane, i); }
    DEVICE static int col(int lane, int i) { return Accumulator<half>::col(lane, i); }
};

namespace cuda {
// Four 8 x 8 matrices of 16-bit numbers; lane 8 q + r gives the address of matrix q's line r.
template <bool kTransposed>
DEVICE void ldmatrix(uint32_t (&words)[4], const void* line) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(line));
    if constexpr (kTransposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(address)
                     : "memory");
    }
}

#define CUDA_MMA(shape_and_types, kind, acc, a, b0, b1)                                        \
    asm("mma.sync.aligned." shape_and_types " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "  \
        "{%0, %1, %2, %3};"                                                                    \
        : "+" kind(acc[0]), "+" kind(acc[1]), "+" kind(acc[2]), "+" kind(acc[3])               \
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

template <bool kOuterMajor, class T, Side kSide, class Tile>
DEVICE void load_matrix(Fragment<T, kSide>& f, const Tile& tile, int first, int k) {
    const int r = lane_id() % 8, q = lane_id() / 8;
    if constexpr (kOuterMajor) {
        static_assert(sizeof(T) == 2, "ldmatrix transposes 16-bit numbers");
        cuda::ldmatrix<true>(f.words, tile(k + q / 2 * 8 + r, first / 8 + q % 2));
    } else {
        constexpr int kPerChunk = 16 / int(sizeof(T));
        cuda::ldmatrix<false>(f.words, tile(first + q % 2 * 8 + r, k / kPerChunk + q / 2));
    }
}

template <class A, class B, int kM, int kN>
DEVICE void mma(Accumulator<A> (&acc)[kM][kN], const FragmentA<A> (&a)[kM],
                const FragmentB<B> (&b)[kN]) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
            auto* sums = acc[m][n].values;
            cuda::mma_16x8<A, B>(sums, a[m].words, b[n].words[0], b[n].words[2]);
            cuda::mma_16x8<A, B>(sums + 4, a[m].words, b[n].words[1], b[n].words[3]);
        }
    }
}

// The column of B that stands at column `col` of a fragment.
template <class Stored, class T, bool kOuterMajor>
DEVICE int stored_column(int col) {
    return col;
}
