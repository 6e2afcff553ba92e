// kWidth contiguous elements of T, moved in the widest accesses.
#pragma once
template <class T, int kWidth>
struct Vector {
    static constexpr int kAccess = sizeof(T) * kWidth < 16 ? int(sizeof(T)) * kWidth : 16;
    static constexpr int kAccesses = int(sizeof(T)) * kWidth / kAccess;
    Bytes<kAccess> bytes[kAccesses];

    DEVICE float operator[](int i) const {
        if constexpr (sizeof(T) == 2 && kAccess >= 4) {
            // Unpacks whole words: to extract a half word first would take two instructions.
            constexpr int kPerAccess = kAccess / 2;
            float low, high;
            unpack<T>(bytes[i / kPerAccess].words[i % kPerAccess / 2], low, high);
            return i % 2 == 0 ? low : high;
        } else {
            return to_float(element(i));
        }
    }
    DEVICE T element(int i) const {
        constexpr int kPerAccess = kAccess / int(sizeof(T));
        T values[kPerAccess];
        memcpy(values, &bytes[i / kPerAccess], kAccess);
        return values[i % kPerAccess];
    }

    DEVICE void fill(T value) {
        T values[kWidth];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) values[i] = value;
        from_elements(values);
    }

    // Element-wise maximum; the signs of `other` are flipped if `flip`.
    DEVICE void take_larger(const Vector& other, bool flip) {
        constexpr bool kPairs = sizeof(T) == 2 && kAccess >= 4;
        if constexpr (kPairs) {
            const uint32_t signs = flip ? 0x80008000u : 0u;
#pragma unroll
            for (int i = 0; i < kAccesses; ++i) {
#pragma unroll
                for (int j = 0; j < kAccess / 4; ++j) {
                    uint32_t& word = bytes[i].words[j];
                    word = maximum_pair<T>(word, other.bytes[i].words[j] ^ signs);
                }
            }
        } else {
            T larger[kWidth];
#pragma unroll
            for (int i = 0; i < kWidth; ++i) {
                const float y = other[i];
                larger[i] = from_float<T>(maximum((*this)[i], flip ? -y : y));
            }
            from_elements(larger);
        }
    }

    // p is aligned to min(16, kWidth * sizeof(T)) bytes.
    DEVICE void load(const T* p) {
#pragma unroll
        for (int i = 0; i < kAccesses; ++i) {
            bytes[i] = load_vector<kAccess>(reinterpret_cast<const char*>(p) + i * kAccess);
        }
    }
    DEVICE void load(const T* p, LoadPolicy policy) {
        static_assert(kAccess == 16, "policies are for loads of 16 bytes");
#pragma unroll
        for (int i = 0; i < kAccesses; ++i) {
            bytes[i] = load_vector<kAccess>(reinterpret_cast<const char*>(p) + i * kAccess, policy);
        }
    }
    // Loads memory that nothing writes to while the kernel runs.
    DEVICE void load_read_only(const T* p) {
#pragma unroll
        for (int i = 0; i < kAccesses; ++i) {
            bytes[i] =
                load_vector_read_only<kAccess>(reinterpret_cast<const char*>(p) + i * kAccess);
        }
    }
    DEVICE void store(T* p) const {
#pragma unroll
        for (int i = 0; i < kAccesses; ++i) {
            store_vector<kAccess>(reinterpret_cast<char*>(p) + i * kAccess, bytes[i]);
        }
    }
    DEVICE void store(T* p, StorePolicy policy) const {
        static_assert(kAccess == 16, "policies are for stores of 16 bytes");
#pragma unroll
        for (int i = 0; i < kAccesses; ++i) {
            store_vector<kAccess>(reinterpret_cast<char*>(p) + i * kAccess, bytes[i], policy);
        }
    }
    DEVICE void from_elements(const T (&values)[kWidth]) { memcpy(bytes, values, sizeof(bytes)); }
    DEVICE void from_floats(const float (&values)[kWidth]) {
        if constexpr (sizeof(T) == 2 && kWidth % 2 == 0) {
            uint32_t pairs[kWidth / 2];
#pragma unroll
            for (int i = 0; i < kWidth / 2; ++i) {
                pairs[i] = pack<T>(values[2 * i], values[2 * i + 1]);
            }
            memcpy(bytes, pairs, sizeof(bytes));
        } else if constexpr ((kSame<T, e4m3> || kSame<T, e5m2>) && kWidth % 2 == 0) {
            uint16_t pairs[kWidth / 2];
#pragma unroll
            for (int i = 0; i < kWidth / 2; ++i) {
                pairs[i] = uint16_t(pack<T>(values[2 * i], values[2 * i + 1]));
            }
            memcpy(bytes, pairs, sizeof(bytes));
        } else {
            T rounded[kWidth];
#pragma unroll
            for (int i = 0; i < kWidth; ++i) rounded[i] = from_float<T>(values[i]);
            memcpy(bytes, rounded, sizeof(bytes));
        }
    }
};

// Loads kRun adjacent columns of a row at any stride; those from `count` on become zero.
template <class T, int kRun>
DEVICE void load_run(const T* p, int64_t stride, int count, float (&values)[kRun]) {
    constexpr int kBytes = kRun * int(sizeof(T)) < 16 ? kRun * int(sizeof(T)) : 16;
    if (stride == 1 && count == kRun && reinterpret_cast<uintptr_t>(p) % kBytes == 0) {
        Vector<T, kRun> vector;
        vector.load(p);
#pragma unroll
        for (int i = 0; i < kRun; ++i) values[i] = vector[i];
    } else {
#pragma unroll
        for (int i = 0; i < kRun; ++i) values[i] = i < count ? to_float(p[i * stride]) : 0.0f;
    }
}
template <class T, int kRun>
DEVICE void store_run(T* p, int64_t stride, int count, const float (&values)[kRun]) {
    constexpr int kBytes = kRun * int(sizeof(T)) < 16 ? kRun * int(sizeof(T)) : 16;
    if (stride == 1 && count == kRun && reinterpret_cast<uintptr_t>(p) % kBytes == 0) {
        Vector<T, kRun> vector;
        vector.from_floats(values);
        vector.store(p);
    } else {
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
            if (i < count) p[i * stride] = from_float<T>(values[i]);
        }
    }
}
