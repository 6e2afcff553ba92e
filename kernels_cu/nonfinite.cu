// nonfinite.cu: of all elements of any strided array, in one read: how many are NaN, +infinity and
// -infinity, the first of them in C order, and the smallest, the largest and the mean of the
// others.
//
// A thread has kBatch vectors of kVectorWidth elements under way.  Their sum, in FP32 and pairwise,
// is finite if all of them are (otherwise, also if it overflows, they are inspected one by one);
// sums of batches, threads and blocks are added in FP64.  Smallest and largest are found among the
// codes, as integers (struct Extremes), so that subnormals are not flushed.  Counts and the first
// place, which a batch rarely changes, wait in shared memory.
//   kPlain: the elements fill one stretch of memory, in any order of the dims; head and tail of it,
//     which are no whole vectors, are inspected.  Otherwise each vector's place follows from the
//     dims.
// The last block to end merges what all have found, in a fixed order, and sets the counter back to
//   0.
//   buffer   [0, 4): NaN, +inf, -inf, the first place (kNowhere: none); [4, 7), as doubles:
//            smallest, largest, mean (NaN without finite elements); [7, ...): a Summary for each
//            block.
//   counter  0 at the start of every launch, and no other launch's at that time.
// Constants: Element, kVectorWidth, kBatch, kPlain, kMaxDims.  Launch: any grid, block
// (kNumThreads).
#include "parts/vector.cuh"

constexpr int64_t kNowhere = 0x7fffffffffffffffll;

// The array's dims in the order in which elements are walked, innermost first; the element of
// digits d is at start + sum(d * strides) from x's first, and number first + sum(d * weights) in C
// order.
struct NonfiniteParams {
    int64_t num_elements, start, first, num_dims;
    int64_t sizes[kMaxDims], strides[kMaxDims], weights[kMaxDims];

    DEVICE int64_t locate(int64_t element, const int64_t (&steps)[kMaxDims]) const {
        int64_t place = 0;
        uint64_t rest = uint64_t(element);
#pragma unroll 1
        for (int d = 0; d + 1 < int(num_dims); ++d) {
            const uint64_t size = uint64_t(sizes[d]);
            // A 64-bit division costs some hundred instructions, a 32-bit one twenty.
            const uint64_t next =
                (rest | size) >> 32 ? rest / size : uint32_t(rest) / uint32_t(size);
            place += int64_t(rest - next * size) * steps[d];
            rest = next;
        }
        return place + int64_t(rest) * steps[num_dims - 1];
    }
};

// --- codes -----------------------------------------------------------------------------------
// A word holds an element's code in its upper bits, or two of 16 bits each; below an 8-bit code may
// be anything.  Codes are a sign and a magnitude.
constexpr int kBits = 8 * int(sizeof(Element));
constexpr bool kPairs = kBits < 32;

template <int kBytes> struct CodeOf;
template <> struct CodeOf<1> { using Type = uint8_t; };
template <> struct CodeOf<2> { using Type = uint16_t; };
template <> struct CodeOf<4> { using Type = uint32_t; };
using Code = CodeOf<sizeof(Element)>::Type;

// The first magnitude that is not finite, and the one of infinity (e4m3 has none).
constexpr uint32_t kSpecial = kSame<Element, float>  ? 0x7f800000u
                              : kSame<Element, bf16> ? 0x7f80u
                              : kSame<Element, half> ? 0x7c00u
                              : kSame<Element, e5m2> ? 0x7cu
                                                     : 0x7fu;
constexpr uint32_t kInfinite = kSame<Element, e4m3> ? 0xffu : kSpecial;

// Exactly, FP32 subnormals too, which arithmetic would flush.
DEVICE double to_double(Code code) {
    uint32_t bits = code;
    if constexpr (kSame<Element, bf16>) {
        bits <<= 16;
    } else if constexpr (!kSame<Element, float>) {
        bits = bit_cast<uint32_t>(to_float(bit_cast<Element>(code)));
    }
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude >= 0x00800000u) return double(bit_cast<float>(bits));
    constexpr double kUnit = __builtin_bit_cast(double, 0x36a0000000000000ull);  // 2^-149
    const double value = double(int(magnitude)) * kUnit;
    return bits >> 31 ? -value : value;
}

// The smallest and the largest of codes by three integer extremes.  As unsigned integers negative
// numbers are the largest, those of larger magnitude first; as signed ones all of them are below
// the others.  So the largest unsigned code is the smallest number if one is negative, else the
// smallest unsigned one is; the largest signed code is the largest number if one is not negative,
// else the smallest unsigned one is.
struct Extremes {
    uint32_t most, least, most_signed;

    DEVICE static Extremes none() { return {0u, 0xffffffffu, kPairs ? 0x80008000u : 0x80000000u}; }
    DEVICE void take(uint32_t word) { merge({word, word, word}); }
    DEVICE void take_code(Code code) {
        const uint32_t top = uint32_t(code) << (32 - kBits);
        take(kPairs ? top | top >> 16 : top);
    }
    DEVICE void merge(const Extremes& other) {
        if constexpr (kPairs) {
            most = max_unsigned_pair(most, other.most);
            least = min_unsigned_pair(least, other.least);
            most_signed = max_signed_pair(most_signed, other.most_signed);
        } else {
            most = other.most > most ? other.most : most;
            least = other.least < least ? other.least : least;
            most_signed =
                int(other.most_signed) > int(most_signed) ? other.most_signed : most_signed;
        }
    }
    // Both halves of a word become the extreme of the two.
    DEVICE void merge_pairs() {
        if constexpr (kPairs) {
            merge({most << 16 | most >> 16, least << 16 | least >> 16,
                   most_signed << 16 | most_signed >> 16});
        }
    }
    DEVICE Code smallest() const { return Code((most >> 31 ? most : least) >> (32 - kBits)); }
    DEVICE Code largest() const {
        return Code((most_signed >> 31 ? least : most_signed) >> (32 - kBits));
    }
};

// What some of the elements hold.
struct Summary {
    int64_t num_nan, num_positive, num_negative, first;
    double sum;
    Extremes extremes;
    uint32_t padding;

    DEVICE static Summary none() { return {0, 0, 0, kNowhere, 0.0, Extremes::none(), 0}; }
    DEVICE void merge(const Summary& other) {
        num_nan += other.num_nan;
        num_positive += other.num_positive;
        num_negative += other.num_negative;
        first = other.first < first ? other.first : first;
        sum += other.sum;
        extremes.merge(other.extremes);
    }
    // Of all lanes; each of them gets it.
    DEVICE void merge_lanes() {
        // Whether one of them has more than a sum and extremes.
        const bool counted = vote_any(first != kNowhere);
#pragma unroll
        for (int bit = 1; bit < kWarpSize; bit *= 2) {
            sum += shuffle_xor(sum, bit);
            extremes.merge({shuffle_xor(extremes.most, bit), shuffle_xor(extremes.least, bit),
                            shuffle_xor(extremes.most_signed, bit)});
        }
        if (!counted) return;
#pragma unroll 1
        for (int bit = 1; bit < kWarpSize; bit *= 2) {
            num_nan += shuffle_xor(num_nan, bit);
            num_positive += shuffle_xor(num_positive, bit);
            num_negative += shuffle_xor(num_negative, bit);
            const int64_t other = shuffle_xor(first, bit);
            first = other < first ? other : first;
        }
    }
    // Elements [begin, begin + count) of the walk, which lie at p and on.
    DEVICE void inspect(const Element* p, int64_t begin, int count, const NonfiniteParams& params) {
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const Element element = p[i];  // one load: bit_cast reads bytes
            const Code code = bit_cast<Code>(element);
            const uint32_t magnitude = code & ((1u << (kBits - 1)) - 1);
            if (magnitude < kSpecial) {
                sum += to_double(code);
                extremes.take_code(code);
                continue;
            }
            if (magnitude != kInfinite) {
                ++num_nan;
            } else if (code >> (kBits - 1)) {
                ++num_negative;
            } else {
                ++num_positive;
            }
            const int64_t place = params.first + params.locate(begin + i, params.weights);
            first = place < first ? place : first;
        }
    }
};

// --- vectors ---------------------------------------------------------------------------------
using Items = Vector<Element, kVectorWidth>;

// values[0] + ... pairwise: log2(kCount) roundings for each.
template <int kCount>
DEVICE float sum_pairwise(const float* values) {
    if constexpr (kCount == 1) {
        return values[0];
    } else {
        return sum_pairwise<kCount / 2>(values) + sum_pairwise<kCount / 2>(values + kCount / 2);
    }
}

DEVICE float sum_of(const Items& items) {
    float values[kVectorWidth];
    if constexpr (kPairs && kVectorWidth > 1) {
        constexpr int kWords = 4;
        uint32_t words[kWords];
        memcpy(words, items.bytes, sizeof(words));
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            float* to = values + i * (32 / kBits);
            unpack<Element>(words[i], to[0], to[1]);
            if constexpr (kBits == 8) unpack<Element>(words[i] >> 16, to[2], to[3]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kVectorWidth; ++i) values[i] = items[i];
    }
    return sum_pairwise<kVectorWidth>(values);
}

DEVICE void take(const Items& items, Extremes& extremes) {
    if constexpr (kVectorWidth == 1) {
        extremes.take_code(bit_cast<Code>(items.element(0)));
    } else {
        uint32_t words[4];
        memcpy(words, items.bytes, sizeof(words));
#pragma unroll
        for (const uint32_t word : words) {
            extremes.take(word);
            if constexpr (kBits == 8) extremes.take(word << 8);
        }
    }
}

DEVICE bool is_finite(float x) { return (bit_cast<uint32_t>(x) & 0x7fffffffu) < 0x7f800000u; }

// What all threads of the block have found, in its first warp.
DEVICE Summary merge_threads(Summary mine) {
    constexpr int kWarps = kNumThreads / kWarpSize;
    SHARED(Summary, of_warps, [kWarps]);
    const int warp = int(threadIdx.x) / kWarpSize;
    // The lanes of each warp, then the warps: the code comes from memory when it is needed, once.
#pragma unroll 1
    for (int level = 0; level < 2; ++level) {
        mine.merge_lanes();
        if (level == 1) break;
        if (lane_id() == 0) of_warps[warp] = mine;
        sync_block();
        if (warp != 0) break;
        mine = lane_id() < kWarps ? of_warps[lane_id()] : Summary::none();
    }
    return mine;
}

KERNEL void nonfinite(const Element* x, int64_t* buffer, uint32_t* counter,
                      const NonfiniteParams params) {
    SHARED(Summary, summaries, [kNumThreads]);
    SHARED(bool, is_last, [1]);
    const int tid = int(threadIdx.x);
    // What a thread has inspected one by one waits here: registers are for loads.
    Summary& mine = summaries[tid];
    bool counted = false;
    const auto inspect = [&](const Element* p, int64_t begin, int count) {
        if (!counted) mine = Summary::none();
        counted = true;
        mine.inspect(p, begin, count, params);
    };

    const Element* data = x + params.start;
    int64_t head = 0;
    if constexpr (kPlain) {
        head = int64_t(-reinterpret_cast<uintptr_t>(data) % 16 / sizeof(Element));
        if (head > params.num_elements) head = params.num_elements;
    }
    const int64_t num_items = (params.num_elements - head) / kVectorWidth;
    if constexpr (kPlain) {
        const int64_t tail = head + num_items * kVectorWidth;
        const int64_t element = tid < head ? tid : tid - head + tail;
        if (blockIdx.x == 0 && element < params.num_elements) {
            inspect(data + element, element, 1);
        }
    }

    double sum = 0.0;
    Extremes extremes = Extremes::none();
    // A block's vectors of a batch lie side by side.
    constexpr int kStep = kNumThreads;
    const int64_t step = int64_t(gridDim.x) * kStep * kBatch;
    const auto load = [&](int64_t item, Items(&batch)[kBatch]) {
        if (item >= num_items) return;
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            // Behind the end the first one again, which changes no extreme and is not added.
            const int64_t there = item + j * kStep < num_items ? item + j * kStep : item;
            const int64_t element = head + there * kVectorWidth;
            batch[j].load(data + (kPlain ? element : params.locate(element, params.strides)));
        }
    };
    int64_t item = int64_t(blockIdx.x) * kStep * kBatch + tid;
    Items next[kBatch];
    load(item, next);
#pragma unroll 1
    for (; item < num_items; item += step) {
        Items batch[kBatch];
        float sums[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) batch[j] = next[j];
        load(item + step, next);
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            const float part = sum_of(batch[j]);
            sums[j] = item + j * kStep < num_items ? part : 0.0f;
        }
        const float batch_sum = sum_pairwise<kBatch>(sums);
        if (is_finite(batch_sum)) {
            sum += double(batch_sum);
#pragma unroll
            for (int j = 0; j < kBatch; ++j) take(batch[j], extremes);
        } else {
#pragma unroll 1
            for (int64_t i = item; i < num_items && i < item + kBatch * kStep; i += kStep) {
                const int64_t element = head + i * kVectorWidth;
                const int64_t place = kPlain ? element : params.locate(element, params.strides);
                inspect(data + place, element, kVectorWidth);
            }
        }
    }
    Summary found = Summary::none();
    if (counted) found = mine;
    extremes.merge(found.extremes);
    extremes.merge_pairs();
    found.extremes = extremes;
    found.sum += sum;

    Summary* of_blocks = reinterpret_cast<Summary*>(buffer + 7);
    // First the threads of this block, then, in the last one, the blocks: by the same code.
#pragma unroll 1
    for (int level = 0;; ++level) {
        found = merge_threads(found);
        if (level == 1) break;
        if (tid == 0) {
            of_blocks[blockIdx.x] = found;
            is_last[0] = atomic_add_acq_rel(counter, 1) == gridDim.x - 1;
        }
        sync_block();
        if (!is_last[0]) return;
        found = Summary::none();
#pragma unroll 1
        for (int i = tid; i < int(gridDim.x); i += kNumThreads) found.merge(of_blocks[i]);
    }
    if (tid == 0) {
        *counter = 0;
        buffer[0] = found.num_nan;
        buffer[1] = found.num_positive;
        buffer[2] = found.num_negative;
        buffer[3] = found.first;
        const int64_t num_finite =
            params.num_elements - found.num_nan - found.num_positive - found.num_negative;
        double* statistics = reinterpret_cast<double*>(buffer + 4);
        const double nan = __builtin_bit_cast(double, 0x7ff8000000000000ull);
        statistics[0] = num_finite ? to_double(found.extremes.smallest()) : nan;
        statistics[1] = num_finite ? to_double(found.extremes.largest()) : nan;
        statistics[2] = num_finite ? found.sum / double(num_finite) : nan;
    }
}
