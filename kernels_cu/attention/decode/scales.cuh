// Scales of 8-bit caches (attention/cache_scales.cuh), which are loaded with the tile.
// Types: Element, CacheElement: Element again in 16-bit caches, which have no scales.
#pragma once
#include "attention/cache_scales.cuh"
#include "attention/decode/work_tile.cuh"

constexpr bool kScaledCache = sizeof(CacheElement) < sizeof(Element);

struct NoKvScales {
    DEVICE KvScales operator()(int) const { return {}; }
};
