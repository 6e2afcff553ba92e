// Scales of 8-bit caches (attention/cache_scales.cuh), which are loaded with the tile.
// Types: Element, CacheElement: Element again in 16-bit caches, which have no scales.
#pragma once
#include "attention/cache_scales.cuh"
#include "attention/decode/work_tile.cuh"

constexpr bool kScaledCache = sizeof(CacheElement) < sizeof(Element);
// What queries, keys, probabilities and values are multiplied as.  FP16 holds all 8-bit codes, and
// a conversion of two of them is one instruction; to BF16, through FP32, it is four.
using Operand = Choose<kScaledCache, half, Element>::Type;

struct NoKvScales {
    DEVICE KvScales operator()(int) const { return {}; }
};
