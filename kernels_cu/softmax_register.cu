// softmax_register.cu: y = softmax(x) or log_softmax(x) of even rows of one block, without
// options but a positive scale.
//
// A row is read once, into registers.  Other arguments: see softmax_shared.cu.
// Constants: Element, kScaled; see also rows/tile.cuh.
// Launch: grid (ceil(rows / kRowsPerBlock)), block (kNumThreads).
#include "rows/softmax_register.cuh"

KERNEL void softmax_register(const Element* x, const uint8_t*, void* y, MaxSum*,
                             const rows::SoftmaxParams params, int64_t) {
    wait_for_previous_grid();
    Element* to = static_cast<Element*>(y);
    if (params.log) {
        rows::softmax_register_rows<true>(x, to, params);
    } else {
        rows::softmax_register_rows<false>(x, to, params);
    }
}
