// NVFP4 on the host, with CUDA's kScaledUnit.
#pragma once
template <class T> constexpr float kScaledUnit = kSame<T, half> ? 0x1p-14f : 0x1p-7f;

template <class T, bool kUnits>
DEVICE uint32_t scale_factors(uint32_t scales) {
    float low, high;
    unpack<e4m3>(scales, low, high);
    return pack<T>(low, high);
}

template <class T, bool kUnits>
DEVICE void decode_bytes(const uint32_t (&words)[4], int byte, uint32_t scale_factors,
                         uint32_t (&pairs)[4]) {
    float factors[2];
    unpack<T>(scale_factors, factors[0], factors[1]);
    for (int i = 0; i < 4; ++i) {
        const uint32_t codes = words[i] >> 8 * byte & 0xff;
        const float factor = factors[i / 2] * (kUnits ? kScaledUnit<T> : 1.0f);
        pairs[i] = pack<T>(decode_e2m1(codes & 0xf) * factor, decode_e2m1(codes >> 4) * factor);
    }
}

template <class T, Side kSide, class Tile>
DEVICE void load_scaled(Fragment<T, kSide>& low, Fragment<T, kSide>& high, const Tile& tile,
                        int first, int k) {
    constexpr int kCount = Fragment<T, kSide>::kCount;
    const int mn = first + lane_id() % 16;
    k += lane_id() / 16 * kCount;
    for (int i = 0; i < 2 * kCount; ++i) {
        const int at = k + i % kCount + i / kCount * 16;
        const uint8_t* chunk = static_cast<const uint8_t*>(tile.codes(mn, at / 32));
        const uint32_t code = chunk[at % 32 / 2] >> at % 2 * 4 & 0xf;
        const float x = decode_e2m1(code) * to_float(tile.scale(mn, at / 16));
        (i < kCount ? low : high).values[i % kCount] = from_float<T>(x * kScaledUnit<T>);
    }
}
