// Elementary functions in FP32, the same instructions on every target, with their largest errors.

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

struct Max {
    DEVICE float operator()(float a, float b) const { return maximum(a, b); }
};
struct Sum {
    DEVICE float operator()(float a, float b) const { return a + b; }
};

// log(x) for finite x >= 2^-126.
DEVICE float log_accurate(float x) {
    // x = 2^e * m with m in [2/3, 4/3)
    const int bits = bit_cast<int>(x);
    const int exponent_bits = (bits - 0x3f2aaaab) & int(0xff800000);
    const float f = bit_cast<float>(bits - exponent_bits) - 1.0f;
    const float e = float(exponent_bits >> 23);
    const float s = f * f;
    float r = -0.130310059f;
    float t = 0.140869141f;
    r = r * s + -0.121483512f;
    t = t * s + 0.139814854f;
    r = r * s + -0.166846126f;
    t = t * s + 0.200120345f;
    r = r * s + -0.249996200f;
    r = t * f + r;
    r = r * f + 0.333331972f;
    r = r * f + -0.5f;
    r = r * s + f;
    return e * kLn2 + r;
}
