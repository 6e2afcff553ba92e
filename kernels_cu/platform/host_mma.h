// mma, load_matrix and store_matrix as host_runtime.cpp runs them, once a warp's last lane has come.

int item_bytes(NumberType type) { return type == kHalf || type == kBf16 ? 2 : 1; }

// --- products --------------------------------------------------------------------------------
// d (rows x n) += a (rows x k) b (k x n); n is a multiple of 8.
template <class T>
void multiply(T* d, const T* a, const T* b, int rows, int n, int k) {
    typedef T Vector __attribute__((vector_size(32), aligned(4), may_alias));
    for (int row = 0; row < rows; ++row) {
        for (int col = 0; col < n; col += 8) {
            Vector& sum = *reinterpret_cast<Vector*>(d + row * n + col);
            Vector s = sum;
            for (int i = 0; i < k; ++i) {
                s += a[row * k + i] * *reinterpret_cast<const Vector*>(b + i * n + col);
            }
            sum = s;
        }
    }
}

// The operand's fragments of all lanes.
template <class Number, class T>
void gather(T* out, void** payloads, int operand, int outer_stride, int k_stride) {
    const int lanes = worker->cluster.warp_size, count = 512 / lanes / int(sizeof(Number));
    for (int lane = 0; lane < lanes; ++lane) {
        const Mma& mine = *static_cast<const Mma*>(payloads[lane]);
        const Number* from = static_cast<const Number*>(mine.fragments[operand]);
        for (int f = 0; f < mine.counts[operand]; ++f) {
            T* to = out + (f * 16 + lane % 16) * outer_stride + lane / 16 * count * k_stride;
            for (int i = 0; i < count; ++i, ++from) {
                if constexpr (kSame<T, int>) to[i * k_stride] = *from;
                else to[i * k_stride] = to_float(*from);
            }
        }
    }
}
template <class T>
void gather(T* out, void** payloads, int operand, int outer_stride, int k_stride) {
    const NumberType type = static_cast<const Mma*>(payloads[0])->types[operand];
    const auto of = [&](auto number) {
        gather<decltype(number)>(out, payloads, operand, outer_stride, k_stride);
    };
    if constexpr (kSame<T, int>) of(int8_t());
    else if (type == kHalf) of(half());
    else if (type == kBf16) of(bf16());
    else if (type == kE4m3) of(e4m3());
    else of(e5m2());
}

// The sums of row `m` of fragments.
template <bool kGather, class T>
void exchange_sums(void** payloads, int m, T* d, int n) {
    const int lanes = worker->cluster.warp_size, count = 256 / lanes;
    for (int lane = 0; lane < lanes; ++lane) {
        const Mma& mine = *static_cast<const Mma*>(payloads[lane]);
        T* sums = static_cast<T*>(mine.sums) + m * n / 16 * count;
        for (int f = 0; f < n / 16; ++f) {
            for (int i = 0; i < count; ++i, ++sums) {
                T& here = d[sum_row(lanes, lane, i) * n + f * 16 + sum_col(lanes, lane, i)];
                if constexpr (kGather) here = *sums;
                else *sums = here;
            }
        }
    }
}

template <class T>
void combine_mma(void** payloads) {
    // Too large for a fiber's stack; none is switched to meanwhile.
    static thread_local T a[kMaxFragments * 16 * 32], b[32 * kMaxFragments * 16];
    static thread_local T d[16 * kMaxFragments * 16];
    const Mma& op = *static_cast<const Mma*>(payloads[0]);
    const int k = 32 / item_bytes(op.types[0]), n = op.counts[1] * 16;
    gather(a, payloads, 0, k, 1);
    gather(b, payloads, 1, 1, n);
    for (int m = 0; m < op.counts[0]; ++m) {
        exchange_sums<true>(payloads, m, d, n);
        multiply(d, a + m * 16 * k, b, 16, n, k);
        exchange_sums<false>(payloads, m, d, n);
    }
}

void mma(Mma* op, Place place) {
    if (worker->current->warp->num_lanes != worker->cluster.warp_size) {
        fail_at("mma is for whole warps", place);
    }
    exchange("mma", op, op->types[0] == kInt8 ? combine_mma<int> : combine_mma<float>, place);
}

// --- matrices of 8 x 8 numbers -----------------------------------------------------------------
void combine_matrices(void** payloads) {
    for (int lane = 0; lane < worker->cluster.warp_size; ++lane) {
        if (!payloads[lane]) continue;
        const MoveMatrix& mine = *static_cast<const MoveMatrix*>(payloads[lane]);
        for (int n = 0; n < 2 * mine.count; ++n) {
            const int matrix = n / 2, from = lane % 32 / 4, to = lane % 4 * 2 + n % 2;
            const int source = lane / 32 * 32 + matrix * 8 + (mine.transposed ? to : from);
            if (!payloads[source]) continue;
            uint16_t& number =
                static_cast<MoveMatrix*>(payloads[source])->row[mine.transposed ? from : to];
            uint32_t& r = mine.registers[matrix];
            if (mine.store) number = uint16_t(r >> n % 2 * 16);
            else r = n % 2 ? uint32_t(number) << 16 | (r & 0xffff) : number;
        }
    }
}

void move_matrix(MoveMatrix* mine, Place place) {
    exchange(mine->store ? "store_matrix" : "load_matrix", mine, combine_matrices, place);
}
