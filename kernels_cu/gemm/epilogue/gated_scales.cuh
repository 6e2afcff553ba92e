// The scales of a dual GEMM's two products.
#pragma once
#include "gemm/epilogue/linear_combination.cuh"
#include "common/math.cuh"

namespace gemm {

struct GatedScales {
    const MatrixEpilogue &first, &second;

    // Computes one factor per product.  Returns whether it can replace the scales: there are no
    // scale vectors, and the order of the multiplications does not matter.
    DEVICE bool plain(float (&factors)[2]) const {
        const EpilogueParams& p = first.params;
        bool fits = true;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const MatrixEpilogue& e = i == 0 ? first : second;
            fits = fits && (!e.scale_a || p.scale_a_stride == 0) &&
                   (!e.scale_b || e.params.scale_b_stride == 0);
            const float a = e.scale_a ? *e.scale_a : 1.0f, b = e.scale_b ? *e.scale_b : 1.0f;
            factors[i] = b * a * e.params.alpha;
            fits = fits && normal(b * a) && normal(factors[i]);
        }
        return fits;
    }
    DEVICE static bool normal(float x) {
        return magnitude(x) >= kSmallestNormal && magnitude(x) < kInfinity;
    }
    DEVICE static float row(const MatrixEpilogue& e, int at) {
        const EpilogueParams& p = e.params;
        return e.scale_a && at < p.m ? e.scale_a[at * p.scale_a_stride] : 1.0f;
    }
    DEVICE static float col(const MatrixEpilogue& e, int at) {
        const EpilogueParams& p = e.params;
        return e.scale_b && at < p.n ? e.scale_b[at * p.scale_b_stride] : 1.0f;
    }
};

}  // namespace gemm
