// Heads of q, k and v, numbered in a row.
#pragma once
#include "rope/params.cuh"

namespace rope {

struct Head {
    int number, index;  // index: among the heads of its kind (q, k or v)
    bool is_q, is_k;

    DEVICE Head(const RopeParams& p, int number) : number(number) {
        const int first_value = p.num_q_heads + p.num_kv_heads;
        is_q = number < p.num_q_heads, is_k = !is_q && number < first_value;
        index = is_q ? number : is_k ? number - p.num_q_heads : number - first_value;
    }
    // Selects the value for this head's kind: q, k or v.
    template <class T>
    DEVICE T of(const T& of_q, const T& of_k, const T& of_v) const {
        return is_q ? of_q : is_k ? of_k : of_v;
    }
};

}  // namespace rope
