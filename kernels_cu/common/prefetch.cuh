// Constant-bank prefetch: each warp reads a different 64-byte line of the kernel's parameters, so
// that the lines are fetched concurrently instead of one after another at their use.  The result is
// practically never true; it keeps the compiler from removing the loads.
#pragma once
template <class Params>
DEVICE bool prefetch_params(const Params& params, int warp) {
    constexpr int kLine = 16, kLines = int(sizeof(Params)) / 4 / kLine;
    return reinterpret_cast<const int*>(&params)[warp % kLines * kLine] == 0x5ca1ab1e;
}

// Whether this thread prefetches tensor maps: one of warp `first`.  The other warps prefetch
// parameters, which this warp must not wait for.
template <class Params>
DEVICE bool prefetches_maps(const Params& params, int warp, int first) {
    return warp == first ? elect_one() : prefetch_params(params, warp);
}

// Prefetches the parameters and two tensor maps.
template <class Params>
DEVICE void prefetch_maps(const Params& params, int warp, int first, const TensorMap& a_map,
                          const TensorMap& b_map) {
    if (prefetches_maps(params, warp, first)) {
        prefetch_tensor_map(a_map);
        prefetch_tensor_map(b_map);
    }
}
