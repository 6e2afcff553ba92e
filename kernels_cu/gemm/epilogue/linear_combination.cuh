// The portable epilogue, in FP32 with one rounding at the end:
//     out = activation(alpha * (scale_a * (scale_b * accumulator)) + bias) + residual
// Kernels call MatrixEpilogue::store for runs of contiguous columns.  A new activation is a line in
// ACTIVATIONS and a name in cupykern/gemm/product.py: ACTIVATIONS.
#pragma once
#include "common/dtype.cuh"
#include "gemm/work_tile.cuh"
#include "common/math.cuh"
#include "common/vector.cuh"

// X(name, value of x), in the order of their codes.
#define ACTIVATIONS(X)            \
    X(kRelu, x < 0.0f ? 0.0f : x) \
    X(kGelu, gelu(x))             \
    X(kGeluTanh, gelu_tanh(x))    \
    X(kSilu, sigmoid(x) * x)

#define ACTIVATION_CODE(name, value) name,
enum Activation { kNoActivation, ACTIVATIONS(ACTIVATION_CODE) kNumActivations };

struct EpilogueParams {
    int64_t m, n;
    MatrixStrides out, bias, residual;
    int64_t scale_a_stride, scale_b_stride;  // per row of A, per column of B
    float alpha;
    int32_t activation, out_dtype, bias_dtype, residual_dtype, padding;
};

DEVICE float activate(float x, int activation) {
#define ACTIVATION_CASE(name, value) \
    if (activation == name) return value;
    ACTIVATIONS(ACTIVATION_CASE)
    return x;
}
// Applies the activation to all values.  One branch, then unrolled: takes more registers than
// activate_compact.
template <int kCount>
DEVICE void activate_all(float (&values)[kCount], int activation) {
#pragma unroll
    for (int known = kNoActivation + 1; known < kNumActivations; ++known) {
        if (activation != known) continue;
#pragma unroll
        for (int i = 0; i < kCount; ++i) values[i] = activate(values[i], known);
    }
}

// The same in a rolled loop, to save code: the values rotate through values[0].
template <int kCount>
DEVICE void activate_compact(float (&values)[kCount], int activation) {
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) {
        const float y = activate(values[0], activation);
#pragma unroll
        for (int j = 1; j < kCount; ++j) values[j - 1] = values[j];
        values[kCount - 1] = y;
    }
}

// The epilogue of one matrix of a batch; pointers are to its element (0, 0), null: absent.
struct MatrixEpilogue {
    const EpilogueParams& params;
    void* out;
    const void* bias;
    const void* residual;
    const float* scale_a;
    const float* scale_b;

    // Offsets of the matrix in the batch, in elements.
    DEVICE static MatrixEpilogue of_matrix(const EpilogueParams& params, void* out,
                                           const void* bias, const void* residual,
                                           const float* scale_a, const float* scale_b,
                                           int64_t out_offset, int64_t bias_offset,
                                           int64_t residual_offset, int64_t scale_a_offset,
                                           int64_t scale_b_offset) {
        const auto advance = [](const void* p, int64_t offset, int dtype) {
            return p ? element_address(p, offset, dtype) : p;
        };
        return {params,
                static_cast<char*>(out) + out_offset * dtype_size(params.out_dtype),
                advance(bias, bias_offset, params.bias_dtype),
                advance(residual, residual_offset, params.residual_dtype),
                static_cast<const float*>(advance(scale_a, scale_a_offset, kFloat)),
                static_cast<const float*>(advance(scale_b, scale_b_offset, kFloat))};
    }

    // Row or column broadcast of the bias; otherwise it is a matrix.
    DEVICE bool bias_of_rows() const { return bias && params.bias.col == 0; }
    DEVICE bool bias_of_cols() const {
        return bias && params.bias.col != 0 && params.bias.row == 0;
    }

    // values += the run of `p` at (row, col).
    template <int kRun>
    DEVICE static void add(const void* p, int dtype, const MatrixStrides& strides, int64_t row,
                           int64_t col, int count, float (&values)[kRun]) {
        const int64_t offset = row * strides.row + col * strides.col;
        float added[kRun];
        if (dtype == kHalf) {
            load_run(static_cast<const half*>(p) + offset, strides.col, count, added);
        } else if (dtype == kBf16) {
            load_run(static_cast<const bf16*>(p) + offset, strides.col, count, added);
        } else {
            load_run(static_cast<const float*>(p) + offset, strides.col, count, added);
        }
#pragma unroll
        for (int i = 0; i < kRun; ++i) values[i] += added[i];
    }

    // Multiplies the accumulators of row `row`, columns [col, col + kRun), by alpha and their
    // scales.
    template <int kRun, class T>
    DEVICE void scale(int64_t row, int64_t col, int count, const T (&acc)[kRun],
                      float (&values)[kRun]) const {
#pragma unroll
        for (int i = 0; i < kRun; ++i) values[i] = float(acc[i]);
        if (scale_b) {
            float scales[kRun];
            load_run(scale_b + col * params.scale_b_stride, params.scale_b_stride, count, scales);
#pragma unroll
            for (int i = 0; i < kRun; ++i) values[i] *= scales[i];
        }
        const float factor = scale_a ? scale_a[row * params.scale_a_stride] : 1.0f;
#pragma unroll
        for (int i = 0; i < kRun; ++i) values[i] = values[i] * factor * params.alpha;
    }

    // count: valid columns of the run.
    template <int kRun>
    DEVICE void write(int64_t row, int64_t col, int count, const float (&values)[kRun]) const {
        const int64_t offset = row * params.out.row + col * params.out.col;
        if (params.out_dtype == kHalf) {
            store_run(static_cast<half*>(out) + offset, params.out.col, count, values);
        } else if (params.out_dtype == kBf16) {
            store_run(static_cast<bf16*>(out) + offset, params.out.col, count, values);
        } else {
            store_run(static_cast<float*>(out) + offset, params.out.col, count, values);
        }
    }

    // T: the output's 8-bit type; void: params.out_dtype selects the type.
    template <class T, int kRun>
    DEVICE void write_as(int64_t row, int64_t col, int count, const float (&values)[kRun]) const {
        if constexpr (kSame<T, void>) {
            write(row, col, count, values);
        } else {
            T* first = static_cast<T*>(out) + row * params.out.row + col * params.out.col;
            store_run(first, params.out.col, count, values);
        }
    }

    // Whether the output is alpha * accumulator in FP32 with contiguous columns.
    DEVICE bool is_scaled_float() const {
        return !bias && !residual && !scale_a && !scale_b && params.activation == kNoActivation &&
               params.out_dtype == kFloat && params.out.col == 1;
    }
    // Stores a run of such an output: short code, for unrolled loops.
    template <int kRun>
    DEVICE void store_float(int64_t row, int64_t col, const float (&values)[kRun]) const {
        if (row >= params.m || col >= params.n) return;
        const int count = params.n - col < kRun ? int(params.n - col) : kRun;
        store_run(static_cast<float*>(out) + row * params.out.row + col, 1, count, values);
    }

    // Finishes and stores the accumulators of row `row`, columns [col, col + kRun).  Accesses
    // nothing outside of the matrix.
    template <int kRun, class T>
    DEVICE void store(int64_t row, int64_t col, const T (&acc)[kRun]) const {
        if (row >= params.m || col >= params.n) return;
        const int count = params.n - col < kRun ? int(params.n - col) : kRun;
        if constexpr (kSame<T, int>) {
            if (params.out_dtype == kInt32) {  // exact: nothing else applies
                int* p = static_cast<int*>(out) + row * params.out.row + col * params.out.col;
#pragma unroll  // a loop up to count would need local memory
                for (int i = 0; i < kRun; ++i) {
                    if (i < count) p[i * params.out.col] = acc[i];
                }
                return;
            }
        }
        float values[kRun];
        scale(row, col, count, acc, values);
#pragma unroll 1  // one instance of the code for bias and residual
        for (int i = 0; i < 2; ++i) {
            const bool first = i == 0;
            if (const void* p = first ? bias : residual) {
                add(p, first ? params.bias_dtype : params.residual_dtype,
                    first ? params.bias : params.residual, row, col, count, values);
            }
            if (first && params.activation != kNoActivation) {
                activate_compact(values, params.activation);
            }
        }
        write(row, col, count, values);
    }
};
