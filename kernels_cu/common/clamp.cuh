// Limits of magnitudes.
#pragma once
#include "common/math.cuh"

// x, or +-most if that is closer to 0; NaN stays.
DEVICE float clamp_magnitude(float x, float most) {
    return magnitude(x) > most ? with_sign(most, x) : x;
}
