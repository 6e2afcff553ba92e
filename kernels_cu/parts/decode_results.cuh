// What becomes of a chunk's sums: they are folded into their group's, groups' sums are added up,
// and rows are written.
//
// A kernel gives a type Layout for what a thread has of the sums of weighted values:
//   Layout::Sums, an Accumulator, of which there are kM x kN, in whatever order `at(m, n)` says;
//   Layout::row(m, i), col(n, i): where value i of one lies in the block's rows.
// Exponents and sums of a row are those of kThreadsPerRow threads, which all have the same.
#include "parts/decode_task.cuh"

constexpr int kThreadsPerRow = kNumThreads / kRows;
static_assert(kThreadsPerRow * kRows == kNumThreads, "threads share rows");

// The row whose exponent and sum this thread has.
struct OwnRow {
    int row, part;

    DEVICE OwnRow()
        : row(int(threadIdx.x) / kThreadsPerRow), part(int(threadIdx.x) % kThreadsPerRow) {}
};

// What sums so far, and those that come to them, are multiplied by.
struct FoldFactors { float before, added; };

struct ResultStorage {
    FoldFactors folds[2][kRows];
    float factors[kRows];
    int is_last[2];
};

// A thread's sums of weighted values.
template <class Layout>
struct ValueSums {
    using Sums = typename Layout::Sums;
    static constexpr int kM = Layout::kM, kN = Layout::kN, kCount = Sums::kCount;
    static constexpr int kVectorsOfSums = kCount / 4;
    static constexpr int kVectorsOfThread = kM * kN * kVectorsOfSums;
    Layout all;

    DEVICE void restart() {
        each([](int, int, int, float& value) { value = 0.0f; });
    }
    // f(m, n, i, value) for all.
    template <class F>
    DEVICE void each(F f) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
#pragma unroll
                for (int n = 0; n < kN; ++n) f(m, n, i, all.at(m, n).values[i]);
            }
        }
    }
    // f(place among the vectors of this thread, four values) for those of rows that there are.
    template <class F>
    DEVICE void each_vector(int num_rows, F f) {
#pragma unroll
        for (int v = 0; v < kVectorsOfThread; ++v) {
            const int sums = v / kVectorsOfSums, m = sums / kN, first = v % kVectorsOfSums * 4;
            bool any = false;
#pragma unroll
            for (int i = first; i < first + 4; ++i) any |= Layout::row(m, i) < num_rows;
            if (any) f(v, all.at(m, sums % kN).values + first);
        }
    }
};

// Where partial results lie: of every node first its values, as the threads hold them, then its
// rows' sums.
struct Nodes {
    static constexpr int kVectors = kRows * kDim / 4;
    Bytes<16>* values;
    PartialSum* sums;

    DEVICE Nodes(const DecodeParams& params, void* memory)
        : values(static_cast<Bytes<16>*>(memory)),
          sums(reinterpret_cast<PartialSum*>(values + params.num_nodes * kVectors)) {}
    DEVICE Bytes<16>* vector(int64_t node, int v) const {
        return values + node * kVectors + v * kNumThreads + int(threadIdx.x);
    }
    DEVICE PartialSum* sum(int64_t node, int row) const { return sums + node * kRows + row; }

    template <class Layout>
    DEVICE void store(int64_t node, const PartialSum& total, ValueSums<Layout>& mine,
                      int num_rows) const {
        static_assert(ValueSums<Layout>::kVectorsOfThread * kNumThreads == kVectors, "all values");
        mine.each_vector(num_rows, [&](int v, float* four) {
            Bytes<16> bytes;
            memcpy(&bytes, four, 16);
            store_vector<16>(vector(node, v), bytes);
        });
        const OwnRow own;
        if (own.part == 0 && own.row < num_rows) *sum(node, own.row) = total;
    }
    template <class Layout>
    DEVICE void load(int64_t node, ValueSums<Layout>& into, int num_rows) const {
        into.each_vector(num_rows, [&](int v, float* four) {
            const Bytes<16> bytes = load_vector<16>(vector(node, v));
            memcpy(four, &bytes, 16);
        });
    }
};

// Whether this is the last of `count` blocks; then what all of them have stored is there to be
// read.
DEVICE bool is_last(int& told, uint32_t* counter, int count) {
    sync_block();  // what this block's threads have stored is there
    if (threadIdx.x == 0) {
        const bool last = atomic_add_acq_rel(counter, 1) == uint32_t(count - 1);
        if (last) *counter = 0;
        told = last;
    }
    sync_block();
    return told;
}

// The results of a task.
template <class Layout>
struct RunResults {
    static constexpr int kM = Layout::kM, kN = Layout::kN, kCount = Layout::Sums::kCount;
    const DecodeParams& params;
    const DecodeTask& task;
    ResultStorage& storage;
    Nodes nodes;
    PartialSum total;  // of this thread's row, of the group so far
    ValueSums<Layout> values;
    int turn, chunk;

    DEVICE RunResults(const DecodeParams& params, const DecodeTask& task, ResultStorage& storage,
                      void* partial_results)
        : params(params), task(task), storage(storage), nodes(params, partial_results), turn(0) {
        begin();
    }
    // The task is another one.
    DEVICE void begin() {
        chunk = task.first_chunk;
        restart();
    }
    DEVICE void restart() {
        total = {-kInfinity, 0.0f};
        values.restart();
    }
    // The group's sums so far and those of its next chunk.
    DEVICE void fold(const PartialSum& added, ValueSums<Layout>& added_values) {
        const OwnRow own;
        const float exponent = maximum(total.exponent, added.exponent);
        const float finite = exponent == -kInfinity ? 0.0f : exponent;
        const FoldFactors mine = {exp2_approx(total.exponent - finite),
                                  exp2_approx(added.exponent - finite)};
        total = {exponent, multiply_add(total.sum, mine.before, added.sum * mine.added)};
        turn ^= 1;  // the other buffer may still be read
        if (own.part == 0) storage.folds[turn][own.row] = mine;
        sync_block();
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                const FoldFactors factors = storage.folds[turn][Layout::row(m, i)];
#pragma unroll
                for (int n = 0; n < kN; ++n) {
                    float& value = values.all.at(m, n).values[i];
                    const float product = added_values.all.at(m, n).values[i] * factors.added;
                    value = multiply_add(value, factors.before, product);
                }
            }
        }
    }
    // The next chunk of the run.  All threads; is_last: of the run.
    DEVICE void add_chunk(const PartialSum& chunk_total, ValueSums<Layout>& chunk_values,
                          bool is_last) {
        fold(chunk_total, chunk_values);
        const bool ends_group = chunk % kGroup == kGroup - 1 || is_last;
        if (ends_group && params.chunks_per_block > 1 && task.num_groups > 1) {
            store_group(chunk / kGroup);
            restart();
        }
        ++chunk;
    }
    DEVICE void store_group(int group) {
        nodes.store(task.group_node(params, group), total, values, task.num_rows);
    }
    // The sums of `count` chunks of one group, by the last block to finish one of them.
    DEVICE void fold_chunks(int first, int count) {
        constexpr int kAtOnce = kM * kN * kCount < 32 ? 2 : 1;
        const OwnRow own;
        restart();
#pragma unroll 1
        for (int done = 0; done < count; done += kAtOnce) {
            ValueSums<Layout> added[kAtOnce];
            PartialSum sums[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                added[i].restart();
                sums[i] = {-kInfinity, 0.0f};
                if (done + i >= count) continue;
                const int64_t node = task.chunk_node(params, first + done + i);
                nodes.load(node, added[i], task.num_rows);
                if (own.row < task.num_rows) sums[i] = *nodes.sum(node, own.row);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (done + i < count) fold(sums[i], added[i]);
            }
        }
    }
    DEVICE PartialSum sum_of(int group, int row) const {
        if (row >= task.num_rows) return {-kInfinity, 0.0f};
        return *nodes.sum(task.group_node(params, group), row);
    }
    // The sums of all groups of a sequence, by the last block to finish one of them.
    DEVICE void add_groups(GroupWeights& weights) {
        constexpr int kAtOnce = kM * kN * kCount < 32 ? 4 : 1;
        const OwnRow own;
        float largest = -kInfinity;
        for (int i = own.part; i < task.num_groups; i += kThreadsPerRow) {
            largest = maximum(largest, sum_of(i, own.row).exponent);
        }
        largest = MergeFloats<Max>().across_lanes(largest, 1, kThreadsPerRow);
        const float finite = largest == -kInfinity ? 0.0f : largest;
        float sum = 0.0f;
        for (int i = own.part; i < task.num_groups; i += kThreadsPerRow) {
            const PartialSum group = sum_of(i, own.row);
            const float weight = exp2_approx(group.exponent - finite);
            sum = multiply_add(group.sum, weight, sum);
            weights[i][own.row] = weight;
        }
        total = {largest, MergeFloats<Sum>().across_lanes(sum, 1, kThreadsPerRow)};
        sync_block();
        values.restart();
#pragma unroll 1
        for (int first = 0; first < task.num_groups; first += kAtOnce) {
            ValueSums<Layout> added[kAtOnce];
#pragma unroll
            for (int g = 0; g < kAtOnce; ++g) {
                added[g].restart();
                if (first + g < task.num_groups) {
                    nodes.load(task.group_node(params, first + g), added[g], task.num_rows);
                }
            }
#pragma unroll
            for (int g = 0; g < kAtOnce; ++g) {
                if (first + g >= task.num_groups) continue;
#pragma unroll
                for (int m = 0; m < kM; ++m) {
#pragma unroll
                    for (int i = 0; i < kCount; ++i) {
                        const float weight = weights[first + g][Layout::row(m, i)];
#pragma unroll
                        for (int n = 0; n < kN; ++n) {
                            float& value = values.all.at(m, n).values[i];
                            value = multiply_add(added[g].all.at(m, n).values[i], weight, value);
                        }
                    }
                }
            }
        }
    }
    // After the last chunk.  weights: memory that nobody uses any more.
    DEVICE void finish(GroupWeights& weights, uint32_t* counters, Element* out, float* lse) {
        uint32_t* mine = counters + task.place * params.counters;
        int blocks = task.num_groups;  // that leave groups of this sequence
        if (params.chunks_per_block > 1) {
            blocks = (task.num_chunks - 1) / params.chunks_per_block + 1;
        } else {
            const int index = task.first_chunk / kGroup, first = index * kGroup;
            const int count = first + kGroup < task.num_chunks ? kGroup : task.num_chunks - first;
            if (count > 1) {
                nodes.store(task.chunk_node(params, task.first_chunk), total, values,
                            task.num_rows);
                if (!is_last(storage.is_last[0], mine + 1 + index, count)) return;
                fold_chunks(first, count);
            }
            if (task.num_groups > 1) store_group(index);
        }
        if (task.num_groups > 1) {
            if (!is_last(storage.is_last[1], mine, blocks)) return;
            add_groups(weights);
        }
        write(out, lse);
    }
    DEVICE void write(Element* out, float* lse) {
        const OwnRow own;
        if (own.part == 0) {
            storage.factors[own.row] = normalizer(total.sum);
            if (lse && own.row < task.num_rows) {
                const OutputRow place(params, task.batch, task.kv_head, task.first_row + own.row);
                lse[place.lse] = log_sum_exp(total);
            }
        }
        sync_block();
#pragma unroll
        for (int m = 0; m < kM; ++m) {
            int64_t places[kCount];  // the same for the values of one row: worked out once
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                const int row = task.first_row + Layout::row(m, i);
                places[i] = OutputRow(params, task.batch, task.kv_head, row).out;
            }
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                const int row = Layout::row(m, i);
                if (row >= task.num_rows) continue;
                const float factor = storage.factors[row];
#pragma unroll
                for (int n = 0; n < kN; ++n) {
                    const int col = Layout::col(n, i);
                    if (col >= params.dim_v) continue;
                    out[places[i] + col * params.out[3]] =
                        from_float<Element>(values.all.at(m, n).values[i] * factor);
                }
            }
        }
    }
};
