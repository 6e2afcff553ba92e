// The online softmax of Hopper attention: one comparison per row tells whether origins stay, and a
// query tile's first key tile compares nothing.
#pragma once
#include "attention/online_softmax.cuh"

namespace attention {

// A score is above `limit` if it moves its row's origin, and possibly if it does not: the limit is
// rounded by up to 0.5 (base 2) where origins are large.
template <class T, class Layout> struct SoftmaxSm90 : OnlineSoftmax<T, Layout> {
    using Base = OnlineSoftmax<T, Layout>;
    using Base::kRows;
    using typename Base::Rows;
    float limit[kRows];  // -inf: the origin is far, or there is none

    DEVICE void reset() {
        Base::reset();
#pragma unroll
        for (int r = 0; r < kRows; ++r) limit[r] = -kInfinity;
    }
    DEVICE void begin(float score, float scale, bool owns) {
        Base::begin(score, scale, owns);
        set_limits(scale);
    }
    // The first kFragments fragments of scores after `reset` or `begin`, before `exponentiate`.
    // largest: this lane's largest score of each row; -inf: none.
    template <int kFragments, class Score>
    DEVICE void start(const Score& score, float scale, float (&largest)[kRows]) {
        Base::template find_row_maxima<kFragments>(score, largest);
        this->any_far = false;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const float begun = this->origin[r], top = Rows::across_lanes(largest[r], Max());
            this->set_origin(r, maximum(begun, top), scale);
            if (this->sum[r] != 0.0f) this->sum[r] = exp2_approx(this->exponent(r, begun, scale));
            this->any_far |= this->is_far(this->origin[r], scale);
        }
        set_limits(scale);
        if (vote_any(this->any_far)) Base::template subtract_far<kFragments>(score, scale);
    }
    // Later scores, likewise.  Returns, uniformly over the warp, whether the outputs so far must be
    // multiplied by `factors`, which are undefined otherwise.
    template <int kFragments, class Score>
    DEVICE bool update(const Score& score, float scale, float (&largest)[kRows],
                       float (&factors)[kRows]) {
        Base::template find_row_maxima<kFragments>(score, largest);
        bool moves = false, moved = false;
#pragma unroll
        for (int r = 0; r < kRows; ++r) moves |= largest[r] > limit[r];
        // Runs at most once.  With a branch instead of the loop, ptxas moves the exponentials
        // behind the next wait for wgmma.
#pragma unroll 1
        while (vote_any(moves)) {
            this->rescale(largest, scale, factors);
            Base::template subtract_far<kFragments>(score, scale);
            set_limits(scale);
            moves = this->exceeds(largest, scale);
            moved = true;
        }
        return moved;
    }

  private:
    DEVICE void set_limits(float scale) {
        // 1 less than the threshold: the rounding of the limit must not hide a move.
        const float grows = (kRescaleAbove - 1.0f) * reciprocal_approx(scale);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const float origin = this->origin[r];
            limit[r] = this->is_far(origin, scale) ? -kInfinity : origin + grows;
        }
    }
};

}  // namespace attention
