// wgmma.cuh on CUDA: one instruction per shape, types and location of A.
#pragma once

DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

namespace hopper {
// Keeps the compiler from moving accesses of d across this point.
DEVICE void pin(float& x) { asm volatile("" : "+f"(x)::"memory"); }
DEVICE void pin(int& x) { asm volatile("" : "+r"(x)::"memory"); }
DEVICE void pin(uint32_t& x) { asm volatile("" : "+r"(x)::"memory"); }
template <class D, int kRegisters>
DEVICE void pin(D (&d)[kRegisters]) {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) pin(d[i]);
}
}  // namespace hopper

// Orders the thread's writes to the accumulators `d` and to A's registers before the following
// wgmma.
template <class... D>
DEVICE void wgmma_fence(D&... d) {
    (hopper::pin(d), ...);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Waits until all but the last N groups are complete; `d`: accumulators that the thread reads next.
template <int N, class... D>
DEVICE void wgmma_wait(D&... d) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
    (hopper::pin(d), ...);
}

// The registers of D after the first four, by N.
#define WGMMA_D_8(_)
#define WGMMA_D_16(_) WGMMA_D_8(_) _(4, 5, 6, 7)
#define WGMMA_D_24(_) WGMMA_D_16(_) _(8, 9, 10, 11)
#define WGMMA_D_32(_) WGMMA_D_24(_) _(12, 13, 14, 15)
#define WGMMA_D_40(_) WGMMA_D_32(_) _(16, 17, 18, 19)
#define WGMMA_D_48(_) WGMMA_D_40(_) _(20, 21, 22, 23)
#define WGMMA_D_56(_) WGMMA_D_48(_) _(24, 25, 26, 27)
#define WGMMA_D_64(_) WGMMA_D_56(_) _(28, 29, 30, 31)
#define WGMMA_D_72(_) WGMMA_D_64(_) _(32, 33, 34, 35)
#define WGMMA_D_80(_) WGMMA_D_72(_) _(36, 37, 38, 39)
#define WGMMA_D_88(_) WGMMA_D_80(_) _(40, 41, 42, 43)
#define WGMMA_D_96(_) WGMMA_D_88(_) _(44, 45, 46, 47)
#define WGMMA_D_104(_) WGMMA_D_96(_) _(48, 49, 50, 51)
#define WGMMA_D_112(_) WGMMA_D_104(_) _(52, 53, 54, 55)
#define WGMMA_D_120(_) WGMMA_D_112(_) _(56, 57, 58, 59)
#define WGMMA_D_128(_) WGMMA_D_120(_) _(60, 61, 62, 63)
#define WGMMA_D_136(_) WGMMA_D_128(_) _(64, 65, 66, 67)
#define WGMMA_D_144(_) WGMMA_D_136(_) _(68, 69, 70, 71)
#define WGMMA_D_152(_) WGMMA_D_144(_) _(72, 73, 74, 75)
#define WGMMA_D_160(_) WGMMA_D_152(_) _(76, 77, 78, 79)
#define WGMMA_D_168(_) WGMMA_D_160(_) _(80, 81, 82, 83)
#define WGMMA_D_176(_) WGMMA_D_168(_) _(84, 85, 86, 87)
#define WGMMA_D_184(_) WGMMA_D_176(_) _(88, 89, 90, 91)
#define WGMMA_D_192(_) WGMMA_D_184(_) _(92, 93, 94, 95)
#define WGMMA_D_200(_) WGMMA_D_192(_) _(96, 97, 98, 99)
#define WGMMA_D_208(_) WGMMA_D_200(_) _(100, 101, 102, 103)
#define WGMMA_D_216(_) WGMMA_D_208(_) _(104, 105, 106, 107)
#define WGMMA_D_224(_) WGMMA_D_216(_) _(108, 109, 110, 111)
#define WGMMA_D_232(_) WGMMA_D_224(_) _(112, 113, 114, 115)
#define WGMMA_D_240(_) WGMMA_D_232(_) _(116, 117, 118, 119)
#define WGMMA_D_248(_) WGMMA_D_240(_) _(120, 121, 122, 123)
#define WGMMA_D_256(_) WGMMA_D_248(_) _(124, 125, 126, 127)

#define WGMMA_TEXT(i, j, k, l) ", %" #i ", %" #j ", %" #k ", %" #l
#define WGMMA_FLOATS(i, j, k, l) , "+f"(d[i]), "+f"(d[j]), "+f"(d[k]), "+f"(d[l])
#define WGMMA_INTS(i, j, k, l) , "+r"(d[i]), "+r"(d[j]), "+r"(d[k]), "+r"(d[l])

// Operands after D: A (a descriptor, or four registers), B, whether to accumulate, and the
// immediates in `last`: signs of A and B, majors.
#define WGMMA(n, types, a, b, accumulates, last, constraint, registers, ...)                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #accumulates                             \
                 ", 0;\n"                                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #n types                                  \
                 " {%0, %1, %2, %3" WGMMA_D_##n(WGMMA_TEXT) "}, " a ", %" #b ", p" last ";\n}" \
                 : constraint(d[0]), constraint(d[1]), constraint(d[2]),                       \
                   constraint(d[3]) WGMMA_D_##n(registers)                                     \
                 : __VA_ARGS__, "l"(b_tile), "r"(accumulate), "n"(int(kA)), "n"(int(kB)))
#define WGMMA_FLOAT(x) "+f"(x)
#define WGMMA_INT(x) "+r"(x)
#define WGMMA_BY_TYPE(n, a, b, accumulates, majors, ...)                                      \
    if constexpr (kSame<A, half>)                                                             \
        WGMMA(n, "k16.f32.f16.f16", a, b, accumulates, ", 1, 1, " majors, WGMMA_FLOAT,        \
              WGMMA_FLOATS, __VA_ARGS__);                                                     \
    if constexpr (kSame<A, bf16>)                                                             \
        WGMMA(n, "k16.f32.bf16.bf16", a, b, accumulates, ", 1, 1, " majors, WGMMA_FLOAT,      \
              WGMMA_FLOATS, __VA_ARGS__);                                                     \
    if constexpr (kSame<A, e4m3> && kSame<B, e4m3>)                                           \
        WGMMA(n, "k32.f32.e4m3.e4m3", a, b, accumulates, ", 1, 1", WGMMA_FLOAT, WGMMA_FLOATS, \
              __VA_ARGS__);                                                                   \
    if constexpr (kSame<A, e4m3> && kSame<B, e5m2>)                                           \
        WGMMA(n, "k32.f32.e4m3.e5m2", a, b, accumulates, ", 1, 1", WGMMA_FLOAT, WGMMA_FLOATS, \
              __VA_ARGS__);                                                                   \
    if constexpr (kSame<A, e5m2> && kSame<B, e4m3>)                                           \
        WGMMA(n, "k32.f32.e5m2.e4m3", a, b, accumulates, ", 1, 1", WGMMA_FLOAT, WGMMA_FLOATS, \
              __VA_ARGS__);                                                                   \
    if constexpr (kSame<A, e5m2> && kSame<B, e5m2>)                                           \
        WGMMA(n, "k32.f32.e5m2.e5m2", a, b, accumulates, ", 1, 1", WGMMA_FLOAT, WGMMA_FLOATS, \
              __VA_ARGS__);                                                                   \
    if constexpr (kSame<A, int8_t>)                                                           \
    WGMMA(n, "k32.s32.s8.s8", a, b, accumulates, "", WGMMA_INT, WGMMA_INTS, __VA_ARGS__)

namespace hopper {
template <int kN> struct WgmmaShape {
    static_assert(kAlwaysFalse<WgmmaShape>, "N is a multiple of 8 from 8 to 256");
};
// i0 to i7: numbers of the asm operands after D.
#define WGMMA_SHAPE(n, i0, i1, i2, i3, i4, i5, i6, i7)                                            \
    template <> struct WgmmaShape<n> {                                                            \
        template <class A, class B, Major kA, Major kB, class D>                                  \
        DEVICE static void multiply(D (&d)[n / 2], uint64_t a, uint64_t b_tile, int accumulate) { \
            WGMMA_BY_TYPE(n, "%" #i0, i1, i2, "%" #i3 ", %" #i4, "l"(a));                         \
        }                                                                                         \
        template <class A, class B, Major kA, Major kB, class D>                                  \
        DEVICE static void multiply(D (&d)[n / 2], const uint32_t (&a)[4], uint64_t b_tile,       \
                                    int accumulate) {                                             \
            WGMMA_BY_TYPE(n, "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}", i4, i5, "%" #i7,         \
                          "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));                            \
        }                                                                                         \
    };
WGMMA_SHAPE(8, 4, 5, 6, 7, 8, 9, 10, 11)
WGMMA_SHAPE(16, 8, 9, 10, 11, 12, 13, 14, 15)
WGMMA_SHAPE(24, 12, 13, 14, 15, 16, 17, 18, 19)
WGMMA_SHAPE(32, 16, 17, 18, 19, 20, 21, 22, 23)
WGMMA_SHAPE(40, 20, 21, 22, 23, 24, 25, 26, 27)
WGMMA_SHAPE(48, 24, 25, 26, 27, 28, 29, 30, 31)
WGMMA_SHAPE(56, 28, 29, 30, 31, 32, 33, 34, 35)
WGMMA_SHAPE(64, 32, 33, 34, 35, 36, 37, 38, 39)
WGMMA_SHAPE(72, 36, 37, 38, 39, 40, 41, 42, 43)
WGMMA_SHAPE(80, 40, 41, 42, 43, 44, 45, 46, 47)
WGMMA_SHAPE(88, 44, 45, 46, 47, 48, 49, 50, 51)
WGMMA_SHAPE(96, 48, 49, 50, 51, 52, 53, 54, 55)
WGMMA_SHAPE(104, 52, 53, 54, 55, 56, 57, 58, 59)
WGMMA_SHAPE(112, 56, 57, 58, 59, 60, 61, 62, 63)
WGMMA_SHAPE(120, 60, 61, 62, 63, 64, 65, 66, 67)
WGMMA_SHAPE(128, 64, 65, 66, 67, 68, 69, 70, 71)
WGMMA_SHAPE(136, 68, 69, 70, 71, 72, 73, 74, 75)
WGMMA_SHAPE(144, 72, 73, 74, 75, 76, 77, 78, 79)
WGMMA_SHAPE(152, 76, 77, 78, 79, 80, 81, 82, 83)
WGMMA_SHAPE(160, 80, 81, 82, 83, 84, 85, 86, 87)
WGMMA_SHAPE(168, 84, 85, 86, 87, 88, 89, 90, 91)
WGMMA_SHAPE(176, 88, 89, 90, 91, 92, 93, 94, 95)
WGMMA_SHAPE(184, 92, 93, 94, 95, 96, 97, 98, 99)
WGMMA_SHAPE(192, 96, 97, 98, 99, 100, 101, 102, 103)
WGMMA_SHAPE(200, 100, 101, 102, 103, 104, 105, 106, 107)
WGMMA_SHAPE(208, 104, 105, 106, 107, 108, 109, 110, 111)
WGMMA_SHAPE(216, 108, 109, 110, 111, 112, 113, 114, 115)
WGMMA_SHAPE(224, 112, 113, 114, 115, 116, 117, 118, 119)
WGMMA_SHAPE(232, 116, 117, 118, 119, 120, 121, 122, 123)
WGMMA_SHAPE(240, 120, 121, 122, 123, 124, 125, 126, 127)
WGMMA_SHAPE(248, 124, 125, 126, 127, 128, 129, 130, 131)
WGMMA_SHAPE(256, 128, 129, 130, 131, 132, 133, 134, 135)
}  // namespace hopper

// D = A B, plus D if `accumulate`.  A is a descriptor or this thread's four registers.  Register i
// of A holds row wgmma_row(thread, 2 (i % 2)), elements 2 (thread % 4) and the next one (8-bit: 4
// (thread % 4) and the next three), half of K further on for i >= 2.
template <class A, class B = A, Major kA = kMajorK, Major kB = kMajorK, class Operand, class D,
          int kRegisters>
DEVICE void wgmma(D (&d)[kRegisters], const Operand& a, uint64_t b, bool accumulate) {
    static_assert(kSame<Operand, uint64_t> || kA == kMajorK, "A in registers has no major");
    static_assert(kSame<D, int> == kSame<A, int8_t>, "int8 has int32 accumulators, others float");
    static_assert(sizeof(A) == 1 ? kA == kMajorK && kB == kMajorK : kSame<A, B>,
                  "16-bit operands are of one type, 8-bit ones K-major");
    hopper::WgmmaShape<2 * kRegisters>::template multiply<A, B, kA, kB>(d, a, b, accumulate);
}

// --- elements of A's registers ---------------------------------------------------------------
template <class Stored, class T>
DEVICE void convert_bytes(uint32_t bytes, uint32_t& low, uint32_t& high) {
    cuda::convert_bytes<Stored, T>(bytes, low, high);
}
template <int kSelect>
DEVICE uint32_t permute_bytes(uint32_t bytes) {
    return __byte_perm(bytes, 0, kSelect);
}
