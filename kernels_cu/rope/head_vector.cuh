// A thread's part of one head vector: load, RMS norm, rotation, store; and a block's tables.
//
// Constants: kVectorWidth (elements per load; 1: any strides), kLoads (a thread's loads of its
// pairs' first elements, and of their second elements).  A vector has 2^lanes_log2 threads; thread
// `lane` has kVectorWidth pairs from (lane + i * lanes) * kVectorWidth on, for each i < kLoads.
#pragma once
#include "rope/params.cuh"
#include "rope/sine_cosine.cuh"
#include "rows/quantize.cuh"

namespace rope {

constexpr int kPairs = kVectorWidth * kLoads;

DEVICE int first_pair(const RopeParams& p, int lane, int load) {
    return (lane + (load << p.lanes_log2)) * kVectorWidth;
}

// A block's norm weights, cosines and sines in shared memory, in the order of pairs.
struct Tables {
    float* weights;  // for q, then for k: of the pairs' first elements, then of the second
    float* angles;   // for each token of the block: cosines, then sines

    DEVICE float* weight(const RopeParams& p, bool of_k, int number) const {
        return weights + (2 * of_k + number) * p.num_pairs();
    }
    DEVICE float* cosines(const RopeParams& p, int token) const {
        return angles + 2 * token * p.half.divisor;
    }

    // Called by all threads.  A null weight is left out.
    DEVICE void fill_weights(const RopeParams& p, const void* q_weight,
                             const void* k_weight) const {
        for (int i = threadIdx.x; i < p.num_pairs(); i += kNumThreads) {
            const Columns columns(p, i, 1);
            const auto fill = [&](const void* from, int64_t stride, int dtype, bool of_k) {
                if (!from) return;
                weight(p, of_k, 0)[i] = load_element(from, columns.first * stride, dtype);
                weight(p, of_k, 1)[i] =
                    columns.has_second ? load_element(from, columns.second * stride, dtype) : 0.0f;
            };
            fill(q_weight, p.q_weight_stride, p.q_weight_dtype, false);
            fill(k_weight, p.k_weight_stride, p.k_weight_dtype, true);
        }
    }
    // rotation: frequencies, or a table whose row `position` has sines after cosines.
    DEVICE void fill_angle(const RopeParams& p, const float* rotation, int token, int pair,
                           int position) const {
        const float* const from = rotation + pair * p.rotation_strides[1];
        SineCosine found;
        if (p.num_rows) {
            const int last = p.num_rows - 1;
            const int row = position < 0 ? 0 : position < last ? position : last;
            const float* const cosine = from + row * p.rotation_strides[0];
            found = {cosine[p.half.divisor * p.rotation_strides[1]], cosine[0]};
        } else {
            found = sine_cosine(double(position) * double(*from));
        }
        cosines(p, token)[pair] = found.cosine * p.attention_factor;
        cosines(p, token)[p.half.divisor + pair] = found.sine * p.attention_factor;
    }
};

class HeadVector {
    using Items = Vector<Element, kVectorWidth>;
    Items first_[kLoads], second_[kLoads];

  public:
    float a[kPairs], b[kPairs];  // the pairs' first and second elements

    // from: address of the vector's element 0.  If it does not exist, all elements become zero.
    DEVICE void load(const RopeParams& p, const Element* from, int64_t stride, int lane,
                     bool exists) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const Columns columns(p, first_pair(p, lane, i), kVectorWidth);
            first_[i].fill(from_float<Element>(0.0f));
            second_[i].fill(from_float<Element>(0.0f));
            if (exists && columns.has_first) first_[i].load(from + columns.first * stride);
            if (exists && columns.has_second) second_[i].load(from + columns.second * stride);
        }
    }
    DEVICE void unpack_pairs(const RopeParams& p, int lane) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            float* const a_i = a + i * kVectorWidth;
            float* const b_i = b + i * kVectorWidth;
            if (p.has_halves(first_pair(p, lane, i))) {
#pragma unroll
                for (int j = 0; j < kVectorWidth; ++j)
                    a_i[j] = first_[i][j], b_i[j] = second_[i][j];
            } else {
#pragma unroll
                for (int j = 0; j < 2 * kVectorWidth; ++j) {
                    const float x = j < kVectorWidth ? first_[i][j] : second_[i][j - kVectorWidth];
                    (j % 2 == 0 ? a_i : b_i)[j / 2] = x;
                }
            }
        }
    }

    // Called by all lanes of a warp, which reduce the sum.  has_weight: whether to normalise this
    // vector.
    DEVICE void normalize(const RopeParams& p, const Tables& tables, int lane, bool is_k,
                          bool has_weight) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kPairs; ++j) sum += a[j] * a[j] + b[j] * b[j];
#pragma unroll 1
        for (int bit = 1; bit < 1 << p.lanes_log2; bit *= 2) sum += shuffle_xor(sum, bit);
        if (!has_weight) return;
        const float rstd = reciprocal_square_root(sum * p.inv_dim + p.eps);
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int at = first_pair(p, lane, i);
            if (at >= p.num_pairs()) break;
            Vector<float, kVectorWidth> of_a, of_b;
            of_a.load(tables.weight(p, is_k, 0) + at);
            of_b.load(tables.weight(p, is_k, 1) + at);
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) {
                a[i * kVectorWidth + j] = a[i * kVectorWidth + j] * rstd * of_a[j];
                b[i * kVectorWidth + j] = b[i * kVectorWidth + j] * rstd * of_b[j];
            }
        }
    }
    // token: index in the block.
    DEVICE void rotate(const RopeParams& p, const Tables& tables, int token, int lane) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int at = first_pair(p, lane, i);
            if (at >= p.half.divisor) break;
            const float* const cosines = tables.cosines(p, token) + at;
            Vector<float, kVectorWidth> cosine, sine;
            cosine.load(cosines);
            sine.load(cosines + p.half.divisor);
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) {
                float &x = a[i * kVectorWidth + j], &y = b[i * kVectorWidth + j];
                const float turned = x * cosine[j] - y * sine[j];
                y = y * cosine[j] + x * sine[j];
                x = turned;
            }
        }
    }
    // Returns the vector's largest magnitude; NaN if it has one.  Called by all lanes of a warp.
    DEVICE float largest(const RopeParams& p) const {
        rows::Largest found;
#pragma unroll
        for (int j = 0; j < kPairs; ++j) found.take(a[j]), found.take(b[j]);
#pragma unroll 1
        for (int bit = 1; bit < 1 << p.lanes_log2; bit *= 2) {
            const uint32_t other = shuffle_xor(found.code, bit);
            found.code = other > found.code ? other : found.code;
        }
        return found.value();
    }

    // factor: for 8-bit elements only.
    template <class T>
    DEVICE void store(const RopeParams& p, T* to, int64_t stride, int lane, float factor) const {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int at = first_pair(p, lane, i);
            const Columns columns(p, at, kVectorWidth);
            const bool splits = p.has_halves(at);
            float first[kVectorWidth], second[kVectorWidth];
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) {
                const int of_first = j, of_second = j + kVectorWidth;
                const float* const pairs_a = a + i * kVectorWidth;
                const float* const pairs_b = b + i * kVectorWidth;
                first[j] = splits              ? pairs_a[j]
                           : of_first % 2 == 0 ? pairs_a[of_first / 2]
                                               : pairs_b[of_first / 2];
                second[j] = splits               ? pairs_b[j]
                            : of_second % 2 == 0 ? pairs_a[of_second / 2]
                                                 : pairs_b[of_second / 2];
                if constexpr (sizeof(T) == 1) first[j] *= factor, second[j] *= factor;
            }
            Vector<T, kVectorWidth> items;
            items.from_floats(first);
            if (columns.has_first) items.store(to + columns.first * stride);
            items.from_floats(second);
            if (columns.has_second) items.store(to + columns.second * stride);
        }
    }
    // Stores the loaded elements, bit for bit.
    DEVICE void store_loaded(const RopeParams& p, Element* to, int64_t stride, int lane) const {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const Columns columns(p, first_pair(p, lane, i), kVectorWidth);
            if (columns.has_first) first_[i].store(to + columns.first * stride);
            if (columns.has_second) second_[i].store(to + columns.second * stride);
        }
    }
};

}  // namespace rope
