// Scales of 8-bit caches (attention/cache_scales.cuh), which are loaded with the tile.
// Types: Element; CacheElement, the same as Element for 16-bit caches, which have no scales.
#pragma once
#include "attention/cache_scales.cuh"
#include "attention/decode/work_tile.cuh"

constexpr bool kScaledCache = sizeof(CacheElement) < sizeof(Element);
// Type of queries, keys, probabilities and values in products.  FP16 represents all 8-bit codes,
// and converting two of them takes one instruction; BF16 takes four, through FP32.
using Operand = Choose<kScaledCache, half, Element>::Type;

struct NoKvScales {
    DEVICE KvScales operator()(int) const { return {}; }
};
