// Which part of a block's rows, of a tile's keys and of the columns of V a warp has.
//
// Of many rows every warp has some of its own.  Few rows all warps share, each with keys of its own
// (and where a tile has too few of them, with columns of V).
// Constants: kRows, kDim, kTileK, kNumThreads.
constexpr int kNumWarps = kNumThreads / kWarpSize;
constexpr int kRowWarps = kRows >= 16 * kNumWarps ? kNumWarps : 1;
constexpr int kKeyFragments = kTileK / 16, kSteps = kDim / 16;
constexpr int kWarpsOfRows = kNumWarps / kRowWarps;
constexpr int kKeyWarps = kWarpsOfRows < kKeyFragments ? kWarpsOfRows : kKeyFragments;
constexpr int kColWarps = kWarpsOfRows / kKeyWarps;
// Of a warp.
constexpr int kFragmentsM = kRows / 16 / kRowWarps;
constexpr int kWarpKeyFragments = kKeyFragments / kKeyWarps;
constexpr int kColSteps = kSteps / kColWarps;
static_assert(kFragmentsM * 16 * kRowWarps == kRows, "warps share the rows in fragments of 16");
static_assert(kWarpKeyFragments * kKeyWarps == kKeyFragments, "warps share a tile's keys");
static_assert(kColSteps * kColWarps == kSteps, "warps share the columns of V");
constexpr bool kOwnRows = kRowWarps == kNumWarps;
// Whether nobody else reads what a warp's keys are about: it brings them itself, and waits for no
// other warp before a chunk ends.
constexpr bool kOwnKeys = kKeyWarps == kNumWarps;

// A warp's part.
DEVICE int warp_index() { return int(threadIdx.x) / kWarpSize; }
DEVICE int key_warp() { return warp_index() % kKeyWarps; }
DEVICE int first_row_of_warp() {
    return kRowWarps == 1 ? 0 : warp_index() / (kKeyWarps * kColWarps) * 16 * kFragmentsM;
}
DEVICE int first_key_of_warp() { return kKeyWarps == 1 ? 0 : key_warp() * 16 * kWarpKeyFragments; }
DEVICE int first_col_of_warp() {
    return kColWarps == 1 ? 0 : warp_index() / kKeyWarps % kColWarps * 16 * kColSteps;
}

// For those who share a tile's keys.
DEVICE void sync_tile() {
    if constexpr (kOwnKeys) sync_warp();
    else sync_block();
}
