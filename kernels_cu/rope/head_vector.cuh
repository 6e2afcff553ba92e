// A thread's part of one head vector: load, RMS norm, rotation, store.
//
// Constants: kVectorWidth (elements per load; 1: any strides), kLoads (a thread's loads of its
// pairs' first elements, and of their second elements).  A vector has 2^lanes_log2 threads; thread
// `lane` has kVectorWidth pairs from (lane + i * lanes) * kVectorWidth on, for each i < kLoads.
#pragma once
#include "rope/params.cuh"
#include "rows/quantize.cuh"

namespace rope {

constexpr int kPairs = kVectorWidth * kLoads;

// A block's norm weights, cosines and sines in shared memory, in the order of pairs.
struct Tables {
    const float* weights;  // for q, then for k: of the pairs' first elements, then of the second
    const float* angles;   // for each token of the block: cosines, then sines

    DEVICE const float* weight(const RopeParams& p, bool of_k, int number) const {
        return weights + (2 * of_k + number) * p.num_pairs();
    }
    DEVICE const float* cosines(const RopeParams& p, int token) const {
        return angles + 2 * token * p.half;
    }
};

enum Kind { kQuery, kKey, kValue };

class HeadVector {
    using Items = Vector<Element, kVectorWidth>;
    Items first_[kLoads], second_[kLoads];

  public:
    int kind, head, token;  // head: index in its kind; token: index in the block
    bool exists;
    float a[kPairs], b[kPairs];  // the pairs' first and second elements

    DEVICE int pair(const RopeParams& p, int lane, int load) const {
        return (lane + (load << p.lanes_log2)) * kVectorWidth;
    }

    // from: address of the vector's element 0.
    DEVICE void load(const RopeParams& p, const Element* from, int64_t stride, int lane) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const Columns columns(p, pair(p, lane, i), kVectorWidth);
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
            if (p.splits(pair(p, lane, i))) {
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

    // Called by all lanes of a warp.  has_weight: whether to normalise this vector.
    DEVICE void normalize(const RopeParams& p, const Tables& tables, int lane, bool has_weight) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kPairs; ++j) sum += a[j] * a[j] + b[j] * b[j];
#pragma unroll 1
        for (int bit = 1; bit < 1 << p.lanes_log2; bit *= 2) sum += shuffle_xor(sum, bit);
        if (!has_weight) return;
        const float rstd = reciprocal_square_root(sum * p.inv_dim + p.eps);
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int at = pair(p, lane, i);
            if (at >= p.num_pairs()) break;
            Vector<float, kVectorWidth> of_a, of_b;
            of_a.load(tables.weight(p, kind == kKey, 0) + at);
            of_b.load(tables.weight(p, kind == kKey, 1) + at);
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) {
                a[i * kVectorWidth + j] = a[i * kVectorWidth + j] * rstd * of_a[j];
                b[i * kVectorWidth + j] = b[i * kVectorWidth + j] * rstd * of_b[j];
            }
        }
    }
    DEVICE void rotate(const RopeParams& p, const Tables& tables, int lane) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int at = pair(p, lane, i);
            if (at >= p.half) break;
            const float* const cosines = tables.cosines(p, token) + at;
            Vector<float, kVectorWidth> cosine, sine;
            cosine.load(cosines);
            sine.load(cosines + p.half);
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
            const int at = pair(p, lane, i);
            const Columns columns(p, at, kVectorWidth);
            const bool splits = p.splits(at);
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
            const Columns columns(p, pair(p, lane, i), kVectorWidth);
            if (columns.has_first) first_[i].store(to + columns.first * stride);
            if (columns.has_second) second_[i].store(to + columns.second * stride);
        }
    }
};

}  // namespace rope
