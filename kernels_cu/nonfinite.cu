// nonfinite.cu: counts NaN, +infinity and -infinity in any strided array, and finds the first of
// them in C order and the minimum, maximum and mean of the finite elements, in one read.
//
// A thread has kBatch vectors of kVectorWidth elements in flight.  Their pairwise FP32 sum is
// finite if all elements are; otherwise (also on overflow) they are inspected one by one.  Sums of
// batches, threads and blocks are added in FP64.  Minimum and maximum are computed on the codes, as
// integers (struct Extremes), so that subnormals are not flushed.  Non-finite elements are rare and
// counted by atomics in shared memory.
//   kPlain: the elements are one contiguous span of memory, in any order of the dims; its head and
//   tail, which are not whole vectors, are inspected.  Otherwise each vector's address follows from
//   the dims.
// A block publishes its result in words that are 0 before and nonzero after, so that neither a
// fence nor a second read is needed: the last block to start waits for the words of all blocks,
// merges them in block order and clears them.
//   figures  [0, 4): NaN, +inf, -inf, the first index (kNowhere: none); [4, 7), as doubles:
//            minimum, maximum, mean (NaN without finite elements).
//   words    0 before and after, exclusive to one launch: [0] blocks that have started; then
//            kNumWords arrays of one word per block.
// Constants: Element, kVectorWidth, kBatch, kPlain, kMaxDims.
// Launch: grid (any), block (kNumThreads).
#include "common/vector.cuh"

constexpr uint64_t kNowhere = 0x7fffffffffffffffull;

// The array's dims in traversal order, innermost first.  The element with digits d is at start +
// sum(d * strides) from x's first, and has C-order index first + sum(d * weights).
struct NonfiniteParams {
    int64_t num_elements, start, first, num_dims;
    int64_t sizes[kMaxDims], strides[kMaxDims], weights[kMaxDims];

    DEVICE int64_t locate(int64_t element, const int64_t (&steps)[kMaxDims]) const {
        int64_t index = 0;
        uint64_t rest = uint64_t(element);
#pragma unroll 1
        for (int d = 0; d + 1 < int(num_dims); ++d) {
            const uint64_t size = uint64_t(sizes[d]);
            // A 64-bit division costs some hundred instructions, a 32-bit one twenty.
            const uint64_t next =
                (rest | size) >> 32 ? rest / size : uint32_t(rest) / uint32_t(size);
            index += int64_t(rest - next * size) * steps[d];
            rest = next;
        }
        return index + int64_t(rest) * steps[num_dims - 1];
    }
};

// --- codes -----------------------------------------------------------------------------------
// A word has an element's code in its upper bits, or two codes of 16 bits each; below an 8-bit code
// the bits are undefined.  Codes are sign and magnitude.
constexpr int kBits = 8 * int(sizeof(Element));
constexpr bool kPairs = kBits < 32;

template <int kBytes> struct CodeOf;
template <> struct CodeOf<1> { using Type = uint8_t; };
template <> struct CodeOf<2> { using Type = uint16_t; };
template <> struct CodeOf<4> { using Type = uint32_t; };
using Code = CodeOf<sizeof(Element)>::Type;

// The first non-finite magnitude, and that of infinity (e4m3 has none).
constexpr uint32_t kSpecial = kSame<Element, float>  ? 0x7f800000u
                              : kSame<Element, bf16> ? 0x7f80u
                              : kSame<Element, half> ? 0x7c00u
                              : kSame<Element, e5m2> ? 0x7cu
                                                     : 0x7fu;
constexpr uint32_t kInfinite = kSame<Element, e4m3> ? 0xffu : kSpecial;

// Exact, also for FP32 subnormals, which arithmetic would flush.
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

// Minimum and maximum of codes by three integer extremes.  As unsigned integers, negative codes are
// the largest, those of larger magnitude first; as signed integers, all of them are below the
// others.  So the minimum is the largest unsigned code if that is negative, otherwise the smallest
// unsigned code; the maximum is the largest signed code if that is nonnegative, otherwise the
// smallest unsigned code.
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
    // Both halves become the extreme of the two.
    DEVICE void merge_pairs() {
        if constexpr (kPairs) {
            merge({most << 16 | most >> 16, least << 16 | least >> 16,
                   most_signed << 16 | most_signed >> 16});
        }
    }
    DEVICE bool any() const { return least != none().least || most != none().most; }
    DEVICE Code smallest() const { return Code((most >> 31 ? most : least) >> (32 - kBits)); }
    DEVICE Code largest() const {
        return Code((most_signed >> 31 ? least : most_signed) >> (32 - kBits));
    }
};

// An order-preserving unsigned key of a code; never 0 or 1 for a finite one.
DEVICE uint32_t key_of(Code code) {
    const uint32_t top = uint32_t(code) << (32 - kBits);
    return top >> 31 ? ~top : top | 0x80000000u;
}
DEVICE double value_of(uint32_t key) {
    return to_double(Code((key >> 31 ? key ^ 0x80000000u : ~key) >> (32 - kBits)));
}

// Partial result of finite elements: sum, key of the maximum, complement of the minimum's key;
// kNone without elements.
struct Finite {
    static constexpr uint32_t kNone = 1;
    double sum;
    uint32_t largest, smallest;

    DEVICE static Finite none() { return {0.0, kNone, kNone}; }
    DEVICE void merge(const Finite& other) {
        sum += other.sum;
        largest = other.largest > largest ? other.largest : largest;
        smallest = other.smallest > smallest ? other.smallest : smallest;
    }
    // All-reduce over the warp.
    DEVICE void merge_lanes() {
        sum = sum_of_warp(sum);
        largest = maximum_of_warp(largest);
        smallest = maximum_of_warp(smallest);
    }
};

// Counts of the non-finite kinds, and index of the first: words of a block, and of all.
enum { kNan, kPositive, kNegative, kKinds, kFirst = kKinds, kSpecialWords };
// A block's words: those, then the complement of the sum, which is not NaN, and two keys.
enum { kSum = kSpecialWords, kKeys, kNumWords };

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

KERNEL void nonfinite(const Element* x, uint64_t* figures, uint64_t* words,
                      const NonfiniteParams params) {
    wait_for_previous_grid();
    constexpr int kWarps = kNumThreads / kWarpSize;
    SHARED(Finite, of_warps, [kWarps]);
    // Non-finite counts of this block; index of its first, then the totals of all blocks.
    SHARED(uint32_t, counts, [kKinds]);
    SHARED(uint64_t, special, [kSpecialWords]);
    SHARED(bool, is_last, [1]);
    const int tid = int(threadIdx.x), warp = tid / kWarpSize, lane = lane_id();
    uint32_t* const num_begun = reinterpret_cast<uint32_t*>(words);
    uint32_t begun_before = 0;  // read when the loop is done
    if (tid == 0) begun_before = atomic_add(num_begun, 1u);

    const Element* data = x + params.start;
    int64_t head = 0;
    if constexpr (kPlain) {
        head = int64_t(-reinterpret_cast<uintptr_t>(data) % 16 / sizeof(Element));
        if (head > params.num_elements) head = params.num_elements;
    }
    const int64_t num_items = (params.num_elements - head) / kVectorWidth;

    double sum = 0.0;
    Extremes extremes = Extremes::none();
    // A block's vectors of a batch are adjacent.
    constexpr int kStep = kNumThreads;
    const int64_t step = int64_t(gridDim.x) * kStep * kBatch;
    const auto at = [&](int64_t item) {
        const int64_t element = head + item * kVectorWidth;
        return data + (kPlain ? element : params.locate(element, params.strides));
    };
    // Vectors from `item` on, at most a block's batch.
    const auto count_from = [&](int64_t item) {
        const int64_t count = num_items - item;
        return count < kBatch * kStep ? int(count) : kBatch * kStep;
    };
    const auto load = [&](int64_t item, Items(&batch)[kBatch]) {
        if (item >= num_items) return;
        const int count = count_from(item);
        if (kPlain && count > (kBatch - 1) * kStep) {
            const Element* const first = at(item);
#pragma unroll
            for (int j = 0; j < kBatch; ++j) batch[j].load(first + j * kStep * kVectorWidth);
            return;
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            // Past the end the first one again, which changes no extreme and is not added.
            batch[j].load(at(item + (j * kStep < count ? j * kStep : 0)));
        }
    };
    int64_t item = int64_t(blockIdx.x) * kStep * kBatch + tid;
    Items next[kBatch];
    load(item, next);

    if (tid < kKinds) counts[tid] = 0;
    if (tid < kSpecialWords) special[tid] = tid == kFirst ? kNowhere : 0;
    sync_block();
    // Inspects elements [begin, begin + count) of the traversal, contiguous from p on.
    const auto inspect = [&](const Element* p, int64_t begin, int count) {
        uint32_t num_nan = 0, num_positive = 0, num_negative = 0;
        uint64_t first = kNowhere;
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
            const uint64_t index = params.first + params.locate(begin + i, params.weights);
            first = index < first ? index : first;
        }
        if (first == kNowhere) return;
        atomic_add(&counts[kNan], num_nan);
        atomic_add(&counts[kPositive], num_positive);
        atomic_add(&counts[kNegative], num_negative);
        atomic_min(&special[kFirst], first);
    };
    if constexpr (kPlain) {
        const int64_t tail = head + num_items * kVectorWidth;
        const int64_t element = tid < head ? tid : tid - head + tail;
        if (blockIdx.x == 0 && element < params.num_elements) {
            inspect(data + element, element, 1);
        }
    }
#pragma unroll 1
    for (; item < num_items; item += step) {
        Items batch[kBatch];
        float sums[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) batch[j] = next[j];
        load(item + step, next);
        const int count = count_from(item);
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            const float part = sum_of(batch[j]);
            sums[j] = j * kStep < count ? part : 0.0f;
        }
        const float batch_sum = sum_pairwise<kBatch>(sums);
        if (is_finite(batch_sum)) {
            sum += double(batch_sum);
#pragma unroll
            for (int j = 0; j < kBatch; ++j) take(batch[j], extremes);
        } else {
#pragma unroll 1
            for (int j = 0; j < count; j += kStep) {
                inspect(at(item + j), head + (item + j) * kVectorWidth, kVectorWidth);
            }
        }
    }
    extremes.merge_pairs();
    Finite found = Finite::none();
    if (extremes.any()) found = {sum, key_of(extremes.largest()), ~key_of(extremes.smallest())};

    if (tid == 0) is_last[0] = begun_before == gridDim.x - 1;
    const int grid = int(gridDim.x);
    const auto word = [&](int which, int block) { return words + 1 + which * grid + block; };
    double per_element = 0.0;
    // Reduces the threads of this block, then, in the last block, the blocks: one instance of the
    // code, which is fetched once.
#pragma unroll 1
    for (int level = 0;; ++level) {
        found.merge_lanes();
        if (lane == 0) of_warps[warp] = found;
        sync_block();
        // By another warp; counts, usually zero, after the first index.
        if (level == 0 && warp == kWarps - 1) {
            const bool counted = special[kFirst] != kNowhere;
            if (lane == kFirst || (counted && lane < kKinds)) {
                store_relaxed(word(lane, blockIdx.x),
                              1 + (lane == kFirst ? special[kFirst] : counts[lane]));
            }
        }
        if (warp == 0) {
            found = lane < kWarps ? of_warps[lane] : Finite::none();
            found.merge_lanes();
        }
        if (level == 1) break;
        if (warp == 0 && lane == 0) {
            store_relaxed(word(kSum, blockIdx.x), ~bit_cast<uint64_t>(found.sum));
            store_relaxed(word(kKeys, blockIdx.x), uint64_t(found.largest) << 32 | found.smallest);
        }
        if (!is_last[0]) return;
        sync_block();  // a spinning warp may keep others from arriving
        // Overlaps the other blocks.
        per_element = 1.0 / double(params.num_elements);
        found = Finite::none();
#pragma unroll 1
        for (int first = warp * kWarpSize; first < grid; first += kNumThreads) {
            const int block = first + lane;
            uint64_t sum_word = 0, keys = 0, index = 0;
            bool there = true;
            do {
                if (block < grid) {
                    sum_word = load_relaxed(word(kSum, block));
                    keys = load_relaxed(word(kKeys, block));
                    index = load_relaxed(word(kFirst, block));
                    there = sum_word != 0 && keys != 0 && index != 0;
                }
            } while (vote_any(!there));
            bool counted = false;
            if (block < grid) {
                store_relaxed(word(kSum, block), 0);
                store_relaxed(word(kKeys, block), 0);
                store_relaxed(word(kFirst, block), 0);
                found.merge({bit_cast<double>(~sum_word), uint32_t(keys >> 32), uint32_t(keys)});
                counted = index - 1 != kNowhere;
            }
            if (!vote_any(counted)) continue;
            if (counted) atomic_min(&special[kFirst], index - 1);
#pragma unroll 1
            for (int kind = 0; kind < kKinds; ++kind) {
                uint64_t count = 1;
                do {
                    if (counted) count = load_relaxed(word(kind, block));
                } while (vote_any(count == 0));
                if (counted) store_relaxed(word(kind, block), 0);
                // Exact, up to 2^53.
                const double of_warp = sum_of_warp(double(count - 1));
                if (lane == 0) atomic_add(&special[kind], uint64_t(of_warp));
            }
        }
    }
    if (tid < kSpecialWords) figures[tid] = special[tid];
    if (tid == 0) {
        *num_begun = 0;
        const int64_t num_finite =
            params.num_elements - int64_t(special[kNan] + special[kPositive] + special[kNegative]);
        if (num_finite != params.num_elements) per_element = 1.0 / double(num_finite);
        const double quotient = found.sum * per_element;
        const double rest = found.sum - quotient * double(num_finite);
        double* statistics = reinterpret_cast<double*>(figures + kSpecialWords);
        const double nan = __builtin_bit_cast(double, 0x7ff8000000000000ull);
        statistics[0] = num_finite ? value_of(~found.smallest) : nan;
        statistics[1] = num_finite ? value_of(found.largest) : nan;
        // A product and its correction: faster than a division.
        statistics[2] = num_finite ? quotient + rest * per_element : nan;
    }
}
