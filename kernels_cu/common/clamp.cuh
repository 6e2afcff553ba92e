// Clamping of magnitudes.
#pragma once
#include "common/math.cuh"

// Limits the magnitude of x to `most`, which is at least 0; NaN stays.
DEVICE float clamp_magnitude(float x, float most) {
    return magnitude(x) > most ? with_sign(most, x) : x;
}
