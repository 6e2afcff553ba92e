// Constant-bank prefetch: each warp reads other 64-byte lines of the kernel's parameters, so that
// they are fetched concurrently instead of one after the other at their use.  The result is
// practically never true; it keeps the loads alive.
#pragma once
template <class Params>
DEVICE bool prefetch_params(const Params& params, int warp) {
    constexpr int kLine = 16, kLines = int(sizeof(Params)) / 4 / kLine;
    return reinterpret_cast<const int*>(&params)[warp % kLines * kLine] == 0x5ca1ab1e;
}

// Prefetches the parameters and, by warp `first`, the tensor maps.
template <class Params>
DEVICE void prefetch_maps(const Params& params, int warp, int first, const TensorMap& a_map,
                          const TensorMap& b_map) {
    if ((warp == first && elect_one()) || prefetch_params(params, warp)) {
        prefetch_tensor_map(a_map);
        prefetch_tensor_map(b_map);
    }
}
