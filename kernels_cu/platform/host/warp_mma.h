// mma, load_matrix and store_matrix, run when a warp's last lane arrives.
#pragma once
#include <stdint.h>

#include "platform/host/barriers.h"
#include "platform/host/products.h"

namespace host {
namespace {

// --- products --------------------------------------------------------------------------------
// Gathers an operand from the fragments of all lanes.
template <int kLanes, class Element, class T>
void gather_operand(T* out, void** payloads, int operand, int mn_stride, int k_stride) {
    constexpr int kCount = 512 / kLanes / int(sizeof(Element));
    for (int lane = 0; lane < kLanes; ++lane) {
        const Mma& mine = *static_cast<const Mma*>(payloads[lane]);
        const Element* from = static_cast<const Element*>(mine.fragments[operand]);
        for (int f = 0; f < mine.counts[operand]; ++f, from += kCount) {
            T* to = out + (f * 16 + lane % 16) * mn_stride + lane / 16 * kCount * k_stride;
            for (int i = 0; i < kCount; ++i) {
                if constexpr (kSame<T, int>) to[i * k_stride] = from[i];
                else to[i * k_stride] = to_float(from[i]);
            }
        }
    }
}
template <int kLanes, class T>
void gather_operand(T* out, void** payloads, int operand, int mn_stride, int k_stride) {
    const ElementType type = static_cast<const Mma*>(payloads[0])->types[operand];
    const auto of = [&](auto element) {
        gather_operand<kLanes, decltype(element)>(out, payloads, operand, mn_stride, k_stride);
    };
    if constexpr (kSame<T, int>) of(int8_t());
    else if (type == kHalf) of(half());
    else if (type == kBf16) of(bf16());
    else if (type == kE4m3) of(e4m3());
    else of(e5m2());
}

// Loads or stores the accumulators of row `m` of fragments.
template <bool kLoad, int kLanes, class T>
void exchange_accumulators(void** payloads, int m, T* d, int n) {
    constexpr int kCount = 256 / kLanes;
    for (int lane = 0; lane < kLanes; ++lane) {
        const Mma& mine = *static_cast<const Mma*>(payloads[lane]);
        T* accumulators = static_cast<T*>(mine.accumulators) + m * n / 16 * kCount;
        for (int f = 0; f < n / 16; ++f, accumulators += kCount) {
            for (int i = 0; i < kCount; ++i) {
                T& here = d[accumulator_row(kLanes, lane, i) * n + f * 16 +
                            accumulator_col(kLanes, lane, i)];
                if constexpr (kLoad) here = accumulators[i];
                else accumulators[i] = here;
            }
        }
    }
}

template <class T, int kLanes>
void combine_mma(void** payloads) {
    // Too large for a fiber's stack; no switch happens meanwhile.
    static thread_local T a[kMaxFragments * 16 * 32], b[32 * kMaxFragments * 16];
    static thread_local T d[16 * kMaxFragments * 16];
    const Mma& op = *static_cast<const Mma*>(payloads[0]);
    const int k = 32 / item_bytes(op.types[0]), n = op.counts[1] * 16;
    gather_operand<kLanes>(a, payloads, 0, k, 1);
    gather_operand<kLanes>(b, payloads, 1, 1, n);
    for (int m = 0; m < op.counts[0]; ++m) {
        exchange_accumulators<true, kLanes>(payloads, m, d, n);
        multiply(op.types, d, a + m * 16 * k, b, 16, n, k);
        exchange_accumulators<false, kLanes>(payloads, m, d, n);
    }
}

void mma(Mma* op, Location location) {
    const int lanes = worker->cluster.warp_size;
    if (worker->current->warp->num_lanes != lanes) fail_at("mma is for whole warps", location);
    const auto of = [&](auto element) {
        using T = decltype(element);
        exchange("mma", op, lanes == 32 ? combine_mma<T, 32> : combine_mma<T, 64>, location);
    };
    if (op->types[0] == kInt8) of(int());
    else of(float());
}

// --- 8 x 8 matrices ---------------------------------------------------------------------------
void combine_matrices(void** payloads) {
    for (int lane = 0; lane < worker->cluster.warp_size; ++lane) {
        if (!payloads[lane]) continue;
        const MoveMatrix& mine = *static_cast<const MoveMatrix*>(payloads[lane]);
        for (int n = 0; n < 2 * mine.count; ++n) {
            const int matrix = n / 2, from = lane % 32 / 4, to = lane % 4 * 2 + n % 2;
            const int source = lane / 32 * 32 + matrix * 8 + (mine.transposed ? to : from);
            if (!payloads[source]) continue;
            uint16_t& element =
                static_cast<MoveMatrix*>(payloads[source])->row[mine.transposed ? from : to];
            uint32_t& r = mine.registers[matrix];
            if (mine.store) element = uint16_t(r >> n % 2 * 16);
            else r = n % 2 ? uint32_t(element) << 16 | (r & 0xffff) : element;
        }
    }
}

void move_matrix(MoveMatrix* mine, Location location) {
    exchange(mine->store ? "store_matrix" : "load_matrix", mine, combine_matrices, location);
}

}  // namespace
}  // namespace host
