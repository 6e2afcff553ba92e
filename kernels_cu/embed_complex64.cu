// embed_complex64.cu: embeds a complex matrix B in a real matrix B' with twice the rows and
// columns, for products
//     [Re a_0, Im a_0, Re a_1, ...] @ B' = [Re c_0, Im c_0, ...].
// Each element x + iy becomes a block
//     [ x, y]
//     [-y, x].
//
// B' has the memory order of B: row-major, or column-major, which is stored as the transpose.
// "far" and "near" are the outer and the inner dimension in memory.
// Launch: grid (any), block (kNumThreads): a block embeds one contiguous row of B after another.
#include "common/vector.cuh"

struct EmbedParams {
    int64_t matrix_step, far_step, near_step;  // strides of B, in complex elements
    int64_t pitch;                             // row stride of B', in floats
    int64_t num_rows, near_size;               // memory rows of all matrices B; elements per row
    int32_t far_size;                          // rows per matrix in memory
    uint32_t flip;  // XORed into the first row's imaginary parts: 0; transposed: the sign bit
};

KERNEL void embed_complex64(const float* b, float* embedded, const EmbedParams p) {
    wait_for_previous_grid();
    for (int64_t row = blockIdx.x; row < p.num_rows; row += gridDim.x) {
        const int64_t matrix = row / p.far_size, far = row - matrix * p.far_size;
        const float* from = b + 2 * (matrix * p.matrix_step + far * p.far_step);
        float* to = embedded + 2 * row * p.pitch;
        for (int64_t near = threadIdx.x; near < p.near_size; near += kNumThreads) {
            const Bytes<8> element = load_vector<8>(from + 2 * near * p.near_step);
            Bytes<8> first, second;
            first.words[0] = second.words[1] = element.words[0];
            first.words[1] = element.words[1] ^ p.flip;
            second.words[0] = element.words[1] ^ p.flip ^ 0x80000000u;
            store_vector<8>(to + 2 * near, first);
            store_vector<8>(to + p.pitch + 2 * near, second);
        }
    }
}
