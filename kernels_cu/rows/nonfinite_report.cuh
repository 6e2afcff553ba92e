// The scan of an array for non-finite elements, and the merge of what threads, warps and blocks
// find.
//
// A thread has kBatch vectors of kVectorWidth elements in flight.  If their pairwise FP32 sum is
// finite, all elements are.  Otherwise (also on overflow) they are inspected one by one.  Sums of
// batches, threads and blocks are added in FP64.  Minimum and maximum are computed on the codes, as
// integers (struct Extremes), so that subnormals are not flushed.  Non-finite elements are rare;
// atomics in shared memory count them.
//   kPlain: the elements are one contiguous span of memory, in any order of the dims.  The span's
//   head and tail, which are not whole vectors, are inspected one by one.  Without kPlain each
//   vector's address is computed from the dims.
// A block publishes its result in words that are 0 before and nonzero after, so that neither a
// fence nor a second read is needed.  The last block to start waits for the words of all blocks,
// merges them in block order and clears them.
#pragma once
#include "rows/nonfinite.cuh"

// Arguments: nonfinite.cu's.
DEVICE void report_nonfinite(const Element* x, uint64_t* figures, uint64_t* words,
                             const NonfiniteParams& params) {
    constexpr int kWarps = kNumThreads / kWarpSize;
    SHARED(Finite, of_warps, [kWarps]);
    // counts: this block's non-finite counts.  special: the index of its first non-finite element,
    // later the totals of all blocks.
    SHARED(uint32_t, counts, [kKinds]);
    SHARED(uint64_t, special, [kSpecialWords]);
    SHARED(bool, is_last, [1]);
    const int tid = int(threadIdx.x), warp = tid / kWarpSize, lane = lane_id();
    uint32_t* const num_begun = reinterpret_cast<uint32_t*>(words);
    uint32_t begun_before = 0;  // used only after the loop
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
    // The vectors that a block loads in one batch are adjacent.
    constexpr int kStep = kNumThreads;
    const int64_t step = int64_t(gridDim.x) * kStep * kBatch;
    const auto at = [&](int64_t item) {
        const int64_t element = head + item * kVectorWidth;
        return data + (kPlain ? element : params.locate(element, params.strides));
    };
    // Number of vectors from `item` on, at most a block's batch.
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
            // Past the end the first vector is loaded again: extremes stay, and it is not added.
            batch[j].load(at(item + (j * kStep < count ? j * kStep : 0)));
        }
    };
    int64_t item = int64_t(blockIdx.x) * kStep * kBatch + tid;
    Items next[kBatch];
    load(item, next);

    if (tid < kKinds) counts[tid] = 0;
    if (tid < kSpecialWords) special[tid] = tid == kFirst ? kNowhere : 0;
    sync_block();
    // Inspects elements [begin, begin + count) in traversal order, contiguous from p on.
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
    // Level 0 reduces the threads of this block; level 1, in the last block, reduces the blocks.
    // A loop, so that the instructions are fetched once.
#pragma unroll 1
    for (int level = 0;; ++level) {
        found.merge_lanes();
        if (lane == 0) of_warps[warp] = found;
        sync_block();
        // Another warp publishes the first index, and the counts only if any is nonzero.
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
        sync_block();  // a spinning warp could keep others from arriving
        // This division overlaps the other blocks.
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
        // A product and a correction: faster than a division.
        statistics[2] = num_finite ? quotient + rest * per_element : nan;
    }
}
