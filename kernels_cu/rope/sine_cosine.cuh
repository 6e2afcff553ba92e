// Sine and cosine of large angles.  cupykern/reference/elementary.py states their errors and
// tests/platform/test_sine_cosine.py measures them.
#pragma once

struct SineCosine { float sine, cosine; };

// Sine and cosine of an FP64 angle up to 2^32, with absolute errors of about 2^-24.
//
// The angle is reduced in FP64 by multiples of pi / 2, which is split in two (Cody and Waite): the
// product with the 26 bits of the first part is exact for up to 2^27 multiples, and off by 2^-22
// for 2^31.  The remainder, at most pi / 4, is rounded to FP32; the polynomials are minimax.
DEVICE SineCosine sine_cosine(double angle) {
    constexpr double kTwoOverPi = 0.63661977236758134308;
    constexpr double kHigh = 0x1.921fb58p+0, kLow = -0x1.dde973dcb3b3ap-27;
    constexpr double kRound = 0x1.8p+52;  // a sum of this size has an ulp of 1
    constexpr float s[] = {-0.166666546f, 0.00833216082f, -0.000195152956f};
    constexpr float c[] = {0.0416666456f, -0.00138873163f, 2.44331571e-05f};
    const double shifted = angle * kTwoOverPi + kRound;
    const uint32_t quadrant = uint32_t(bit_cast<uint64_t>(shifted));
    const double multiple = shifted - kRound;
    const float x = float((angle - multiple * kHigh) - multiple * kLow);
    const float square = x * x;
    const float sine = x + x * square * (s[0] + square * (s[1] + square * s[2]));
    const float cosine =
        (1.0f - 0.5f * square) + square * square * (c[0] + square * (c[1] + square * c[2]));
    const bool swaps = quadrant & 1;
    const float first = swaps ? cosine : sine, second = swaps ? sine : cosine;
    return {quadrant & 2 ? -first : first, (quadrant + 1) & 2 ? -second : second};
}
