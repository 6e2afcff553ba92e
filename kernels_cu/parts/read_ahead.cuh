// Every warp reads other lines of a kernel's parameters, so that they come together: one after the
// other, as the code asks for them, they take long.  Hardly ever true, because something must come of
// it.
template <class Params>
DEVICE bool read_lines_ahead(const Params& params, int warp) {
    constexpr int kLine = 16, kLines = int(sizeof(Params)) / 4 / kLine;
    return reinterpret_cast<const int*>(&params)[warp % kLines * kLine] == 0x5ca1ab1e;
}
