// NVFP4 on HIP.  kScaledUnit is 1: gfx90a's matrix unit flushes subnormals to zero.
#pragma once
template <class T> constexpr float kScaledUnit = 1.0f;

template <class T, Side kSide, class Tile>
DEVICE void load_scaled(Fragment<T, kSide>& low, Fragment<T, kSide>& high, const Tile& tile,
                        int first, int k) {
    constexpr int kCount = Fragment<T, kSide>::kCount;  // at most 16
    const int mn = first + lane_id() % 16;
    k += lane_id() / 16 % kGroups * kCount;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int at = k + 16 * j;
        uint8_t codes[kCount / 2];
        memcpy(codes, static_cast<const uint8_t*>(tile.codes(mn, at / 32)) + at % 32 / 2,
               kCount / 2);
        const auto scale = static_cast<_Float16>(to_float(tile.scale(mn, at / 16)));
        const hip::Pack<_Float16, 2> factor = {scale, scale}, unit = {16384, 16384};  // 2^14
        Fragment<T, kSide>& f = j == 0 ? low : high;
#pragma unroll
        for (int i = 0; i < kCount; i += 2) {
            // An element's sign, exponent and mantissa in the fields of FP16 are 2^-14 times the
            // element.
            const uint32_t byte = codes[i / 2], spread = (byte & 0xf) | (byte & 0xf0) << 12;
            const uint32_t bits = (spread << 12 & 0x80008000u) | (spread << 9 & 0x0e000e00u);
            const auto x = bit_cast<hip::Pack<_Float16, 2>>(bits) * unit * factor;
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                if constexpr (kSame<T, half>) {
                    f.values[i + n] = bit_cast<T>(x[n]);
                } else {
                    f.values[i + n] = bit_cast<T>(uint16_t(bit_cast<uint32_t>(float(x[n])) >> 16));
                }
            }
        }
    }
}
