// Scales of 8-bit caches of keys and values: one number, one a KV head, or one a token and head.
//
// The scale of a head multiplies all scores, or the results; scales of tokens multiply the scores
// of their keys, or their probabilities, and are loaded with the tile.
// Types: Element, CacheElement: Element again in 16-bit caches, which have no scales.
#pragma once
#include "attention/decode/work_tile.cuh"

constexpr bool kScaledCache = sizeof(CacheElement) < sizeof(Element);

struct CacheScaleParams {
    int64_t k_strides[3], v_strides[3];  // of the batch or page, the KV head and the key
    float k_number, v_number;            // where there are no arrays of them
    int32_t k_per_token, v_per_token;
};

// Those of keys or values of a block's KV head.
struct CacheScales {
    const float* tokens;  // those of tokens: of batch element or page 0; else null
    int64_t page_stride, stride;
    float factor;  // of all tokens

    DEVICE CacheScales() : tokens(nullptr), page_stride(0), stride(0), factor(1.0f) {}
    DEVICE CacheScales(const float* scales, const int64_t (&strides)[3], float number,
                       bool per_token, int kv_head)
        : tokens(nullptr), page_stride(strides[0]), stride(strides[2]), factor(number) {
        if (!scales) return;
        scales += kv_head * strides[1];
        if (per_token) tokens = scales;
        else factor = *scales;
    }
};
struct KvScales {
    CacheScales k, v;

    KvScales() = default;
    DEVICE KvScales(const CacheScaleParams& params, const float* k, const float* v, int kv_head)
        : k(k, params.k_strides, params.k_number, params.k_per_token != 0, kv_head),
          v(v, params.v_strides, params.v_number, params.v_per_token != 0, kv_head) {}
};
struct NoKvScales {
    DEVICE KvScales operator()(int) const { return {}; }
};
