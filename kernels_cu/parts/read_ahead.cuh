// Every warp reads other lines of a kernel's parameters, so that they come together: one after the
// other, as the code asks for them, they take long.  Hardly ever true, because something must come of
// it.  kWarps: how many warps share all lines; 0: each reads one.
template <int kWarps = 0, class Params>
DEVICE bool read_lines_ahead(const Params& params, int warp) {
    constexpr int kLine = 16, kLines = int(sizeof(Params)) / 4 / kLine;
    const int* words = reinterpret_cast<const int*>(&params);
    int all = words[warp % kLines * kLine];
    if constexpr (kWarps > 0) {
#pragma unroll
        for (int first = kWarps; first < kLines; first += kWarps) {
            all ^= words[(first + warp) % kLines * kLine];
        }
    }
    return all == 0x5ca1ab1e;
}
