// How the warps of a block share a tile: kTileM rows, kTileN keys and kDim columns of V.
//
// With many rows each warp has its own rows.  With few rows all warps compute all rows, each for
// its own keys.  If a tile has fewer fragments of keys than warps, warps also split the columns of
// V.
// Types: Element, CacheElement.  Constants: kTileM, kTileN, kDim, kNumThreads.
#pragma once
#include "attention/decode/scales.cuh"

constexpr int kNumWarps = kNumThreads / kWarpSize;
constexpr int kRowWarps = kTileM >= 16 * kNumWarps ? kNumWarps : 1;
// A tile of 8 rows, which are the columns of a B operand.
constexpr bool kIsNarrow = kTileM == 8;
constexpr int kFragmentRows = kIsNarrow ? 8 : 16;
constexpr int kKeyFragments = kTileN / 16, kDimFragments = kDim / 16;
constexpr int kWarpsPerRows = kNumWarps / kRowWarps;  // warps that compute the same rows
// Fragments of 8-bit keys and values are loaded in pairs (load_mixed_input).
constexpr int kKeyShares = kKeyFragments / (kScaledCache ? 2 : 1);
constexpr int kKeyWarps = kWarpsPerRows < kKeyShares ? kWarpsPerRows : kKeyShares;
constexpr int kColWarps = kWarpsPerRows / kKeyWarps;
// Fragments per warp.
constexpr int kWarpRowFragments = kTileM / kFragmentRows / kRowWarps;
constexpr int kWarpKeyFragments = kKeyFragments / kKeyWarps;
constexpr int kWarpColFragments = kDimFragments / kColWarps;
static_assert(kWarpRowFragments * kFragmentRows * kRowWarps == kTileM,
              "warps share the rows evenly");
static_assert(kWarpKeyFragments * kKeyWarps == kKeyFragments, "warps share the keys evenly");
static_assert(kWarpColFragments * kColWarps == kDimFragments, "warps share the columns evenly");
constexpr bool kWarpOwnsRows = kRowWarps == kNumWarps;
// Each warp loads keys that no other warp reads: no block barrier before the end of a chunk.
constexpr bool kWarpOwnsKeys = kKeyWarps == kNumWarps;

DEVICE int warp_index() { return int(threadIdx.x) / kWarpSize; }
DEVICE int key_warp() { return warp_index() % kKeyWarps; }
DEVICE int warp_first_row() {
    return kRowWarps == 1 ? 0 : warp_index() / (kKeyWarps * kColWarps) * 16 * kWarpRowFragments;
}
DEVICE int warp_first_key() { return kKeyWarps == 1 ? 0 : key_warp() * 16 * kWarpKeyFragments; }
DEVICE int warp_first_col() {
    return kColWarps == 1 ? 0 : warp_index() / kKeyWarps % kColWarps * 16 * kWarpColFragments;
}

// Barrier of the threads that load and read the same keys.
DEVICE void sync_stage() {
    if constexpr (kWarpOwnsKeys) sync_warp();
    else sync_block();
}
