// wgmma.cuh on the host (warpgroup_mma.h).  Accumulators are poison until the wait, which also
// reports tiles that changed while wgmma read them.
#pragma once

namespace hopper {
DEVICE void touch_sources(const host::Wgmma* op, int groups) {
#ifdef __SANITIZE_THREAD__
    for (int i = 0; const void* p = host::runtime->wgmma_source(op, groups, i); ++i)
        host::touch(p, 16);
#endif
}
DEVICE void check_ready(const void* d, host::Location location) {
    if (host::runtime->wgmma_under_way(d)) {
        host::runtime->fail("wgmma_wait: these accumulators are still under way", location);
    }
}
}  // namespace hopper

template <class... D>
DEVICE void wgmma_fence(D&... d) {
    host::runtime->wgmma_fence();
}
DEVICE void wgmma_commit() { host::runtime->wgmma_commit(); }
template <int N>
DEVICE void wgmma_wait(HOST_LOCATION) {
    hopper::touch_sources(nullptr, N);
    host::runtime->wgmma_wait(N, location);
}
template <int N, class D, int kRegisters>
DEVICE void wgmma_wait(D (&d)[kRegisters], HOST_LOCATION) {
    wgmma_wait<N>(location);
    hopper::check_ready(d, location);
}
template <int N, class D0, class D1, int kRegisters0, int kRegisters1>
DEVICE void wgmma_wait(D0 (&d0)[kRegisters0], D1 (&d1)[kRegisters1], HOST_LOCATION) {
    wgmma_wait<N>(d0, location);
    hopper::check_ready(d1, location);
}

namespace hopper {
template <class A, class B, Major kA, Major kB, class D, int kRegisters>
DEVICE void multiply(D (&d)[kRegisters], uint64_t a, const uint32_t* a_registers, uint64_t b,
                     bool accumulate, host::Location location) {
    static_assert(kRegisters % 4 == 0 && kRegisters >= 4 && kRegisters <= 128,
                  "N is a multiple of 8 from 8 to 256");
    static_assert(kSame<D, int> == kSame<A, int8_t>, "int8 has int32 accumulators, others float");
    static_assert(sizeof(A) == 1 ? kA == kMajorK && kB == kMajorK : kSame<A, B>,
                  "16-bit operands are of one type, 8-bit ones K-major");
    const host::Wgmma op = {{host::kElementType<A>, host::kElementType<B>},
                            {kA == kMajorMN, kB == kMajorMN},
                            2 * kRegisters,
                            accumulate,
                            {a, b},
                            a_registers,
                            d};
    touch_sources(&op, 0);
    host::runtime->wgmma(&op, location);
}
}  // namespace hopper

template <class A, class B = A, Major kA = kMajorK, Major kB = kMajorK, class D, int kRegisters>
DEVICE void wgmma(D (&d)[kRegisters], uint64_t a, uint64_t b, bool accumulate, HOST_LOCATION) {
    hopper::multiply<A, B, kA, kB>(d, a, nullptr, b, accumulate, location);
}
template <class A, class B = A, Major kA = kMajorK, Major kB = kMajorK, class D, int kRegisters>
DEVICE void wgmma(D (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b, bool accumulate,
                  HOST_LOCATION) {
    static_assert(kA == kMajorK, "A in registers has no major");
    hopper::multiply<A, B, kA, kB>(d, 0, a, b, accumulate, location);
}

// --- elements of A's registers ---------------------------------------------------------------
template <class Stored, class T>
DEVICE void convert_bytes(uint32_t bytes, uint32_t& low, uint32_t& high) {
    const auto number = [&](int i) { return to_float(bit_cast<Stored>(uint8_t(bytes >> 8 * i))); };
    low = pack<T>(number(0), number(1));
    high = pack<T>(number(2), number(3));
}
template <int kSelect>
DEVICE uint32_t permute_bytes(uint32_t bytes) {
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) result |= (bytes >> 8 * (kSelect >> 4 * i & 3) & 0xff) << 8 * i;
    return result;
}
