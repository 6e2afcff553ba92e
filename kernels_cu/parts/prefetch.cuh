// Every warp reads other lines of a kernel's parameters, so that they come together: one after the
// other, as the code asks for them, they take long.  Hardly ever true, because something must come of
// it.
template <class Params>
DEVICE bool prefetch_params(const Params& params, int warp) {
    constexpr int kLine = 16, kLines = int(sizeof(Params)) / 4 / kLine;
    return reinterpret_cast<const int*>(&params)[warp % kLines * kLine] == 0x5ca1ab1e;
}

// By the warp that is the first to use them.
template <class Params>
DEVICE void prefetch_maps(const Params& params, int warp, int first, const TensorMap& a_map,
                          const TensorMap& b_map) {
    if ((warp == first && elect_one()) || prefetch_params(params, warp)) {
        prefetch_tensor_map(a_map);
        prefetch_tensor_map(b_map);
    }
}
