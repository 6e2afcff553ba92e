// What becomes of a chunk's sums: they are folded into their group's, groups' sums are added up,
// and rows are written.
//
// A kernel gives a type Layout for what a thread has of the sums of weighted values:
//   Layout::Sums, an Accumulator, of which there are kM x kN, in whatever order `at(m, n)` says;
//   Layout::row(m, i), col(n, i): where value i of one lies in the block's rows;
//   Layout::kNeighbours: how many values, from each multiple of it on, are neighbours in a row;
//   Layout::kSlots, slot(i), slot_row(m, s): the rows that a thread's values lie in;
//   Layout::is_first(): whether this thread speaks for its rows.
#include "parts/decode_merge.cuh"

// Blocks of many rows only leave their sums: decode_merge.cu adds them up, by many blocks.
constexpr bool kMergesLater = kRows > 16;

// Whether a cluster's two blocks have the two groups that sequences have at most.
constexpr bool kPairs = kClusterSize == 2;
// What the second block leaves in the memory of the first one.
struct PairMemory {
    PartialSum totals[kRows];
    alignas(16) float values[kRows][kDim];
};

// A thread's sums of weighted values.
template <class Layout>
struct ValueSums {
    using Sums = typename Layout::Sums;
    static constexpr int kM = Layout::kM, kN = Layout::kN, kCount = Sums::kCount;
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
    // Into the node's place, the rows that there are.
    DEVICE void store(const Nodes& nodes, int64_t node, int num_rows) {
        constexpr int kNeighbours = Layout::kNeighbours;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int i = 0; i < kCount; i += kNeighbours) {
                const int row = Layout::row(m, i);
                if (row >= num_rows) continue;
                float* to = nodes.value(node, row, 0);
#pragma unroll
                for (int n = 0; n < kN; ++n) {
                    Bytes<4 * kNeighbours> bytes;
                    memcpy(&bytes, all.at(m, n).values + i, sizeof(bytes));
                    store_vector<4 * kNeighbours>(to + Layout::col(n, i), bytes);
                }
            }
        }
    }
};
// The exponents and sums of a thread's rows.
template <class Layout>
struct RowSums {
    PartialSum of[Layout::kM][Layout::kSlots];

    DEVICE void restart() {
#pragma unroll
        for (int m = 0; m < Layout::kM; ++m) {
#pragma unroll
            for (int s = 0; s < Layout::kSlots; ++s) of[m][s] = {-kInfinity, 0.0f};
        }
    }
};

// The results of a task.
template <class Layout>
struct RunResults {
    static constexpr int kM = Layout::kM, kN = Layout::kN, kCount = Layout::Sums::kCount;
    static constexpr int kSlots = Layout::kSlots;
    const DecodeParams& params;
    const DecodeTask& task;  // in shared memory
    Nodes nodes;
    RowSums<Layout> totals;  // of the group so far
    ValueSums<Layout> values;
    int chunk;

    DEVICE RunResults(const DecodeParams& params, const DecodeTask& task, void* partial_results)
        : params(params), task(task), nodes(params, partial_results) {}
    DEVICE void begin(int first_chunk) {
        chunk = first_chunk;
        restart();
    }
    DEVICE void restart() {
        totals.restart();
        values.restart();
    }
    // The group's sums so far and those of its next chunk, of the m-th rows.  added(n, i): a value.
    template <class Added>
    DEVICE void fold(int m, const PartialSum (&added_sums)[kSlots], const Added& added) {
        FoldFactors factors[kSlots];
#pragma unroll
        for (int s = 0; s < kSlots; ++s) factors[s] = fold_sum(totals.of[m][s], added_sums[s]);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
#pragma unroll
            for (int n = 0; n < kN; ++n) {
                float& value = values.all.at(m, n).values[i];
                value = fold_value(value, added(n, i), factors[Layout::slot(i)]);
            }
        }
    }
    // The next chunk of the run has been folded.  is_last: of the run.
    DEVICE void end_chunk(bool is_last) {
        const bool of_chunks = params.chunks_per_block == 1 && task.num_chunks > 1;
        const bool ends_group = chunk % kGroup == kGroup - 1 || is_last;
        if (of_chunks || (!kPairs && ends_group && task.num_groups > 1)) {
            leave(of_chunks ? task.chunk_node(params, chunk)
                            : task.group_node(params, chunk / kGroup));
            restart();
        }
        ++chunk;
    }
    // For whoever adds it up.
    DEVICE void leave(int64_t node) {
        values.store(nodes, node, task.num_rows);
        if (!Layout::is_first()) return;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int s = 0; s < kSlots; ++s) {
                const int row = Layout::slot_row(m, s);
                if (row < task.num_rows) nodes.set_sum(node, row, totals.of[m][s]);
            }
        }
    }
    // After the last chunk.  memory, sums: that nobody uses any more, MergeValues and MergeSums.
    template <class Memory, class Sums, class Pair>
    DEVICE void finish(Memory& memory, Sums& sums, Pair& pair, int& told, uint32_t* counters,
                       Element* out, float* lse) {
        const bool of_chunks = params.chunks_per_block == 1;
        const RowOutput output = {params, task, out, lse};
        if (of_chunks ? task.num_chunks == 1 : task.num_groups == 1) {
            write(output);
            return;
        }
        if constexpr (kPairs) {
            cluster_wait();  // the first block has begun
            const bool is_first = task.first_chunk == 0;
            if (!is_first) leave_in(*cluster_shared(&pair, 0));
            cluster_arrive();
            if (!is_first) return;
            cluster_wait();
            add_second(pair);
            write(output);
        } else if constexpr (!kMergesLater) {
            constexpr int kValuesAtOnce = sizeof(Memory) / sizeof(memory[0]);
            // Chunks that are added up at once where a sequence has no more.
            constexpr int kChunksAtOnce = kMaxGroups;
            uint32_t* mine = counters + int64_t(task.place) * params.counters;
            int blocks = task.num_groups;  // that leave groups of this sequence
            if (of_chunks) {
                const bool all = task.num_chunks <= kChunksAtOnce;
                const int index = all ? 0 : task.first_chunk / kGroup, first = index * kGroup;
                const int left = task.num_chunks - first;
                const int count = all || left < kGroup ? left : kGroup;
                if (!is_last(told, mine + (all ? 0 : 1 + index), count)) return;
                const int64_t node = task.group_node(params, index);
                merge_rows(
                    sums, task.chunk_node(params, first), count,
                    [&](const Merge& merge) { return merge.add_chunks<kValuesAtOnce>(memory); },
                    [&](bool valid, int row, int col, const MergedRow& merged) {
                        if (all) {
                            output.write(valid, row, col, merged.total, merged.values);
                        } else if (valid) {
                            Bytes<16> bytes;
                            memcpy(&bytes, merged.values, 16);
                            store_vector<16>(nodes.value(node, row, col), bytes);
                            if (col == 0) nodes.set_sum(node, row, merged.total);
                        }
                    });
                if (all) return;
            } else {
                blocks = (task.num_chunks - 1) / params.chunks_per_block + 1;
            }
            if (!is_last(told, mine, blocks)) return;
            merge_rows(
                sums, task.group_node(params, 0), task.num_groups,
                [&](const Merge& merge) { return merge.add_groups<kValuesAtOnce>(memory); },
                [&](bool valid, int row, int col, const MergedRow& merged) {
                    output.write(valid, row, col, merged.total, merged.values);
                });
        }
    }
    // give(valid, row, col, merged) for this thread's quads of all rows, by add(merge) of nodes.
    template <class Add, class Give>
    DEVICE void merge_rows(MergeSums& sums, int64_t first, int count, const Add& add,
                           const Give& give) {
        const OwnQuad own;
        const int num_rows = task.num_rows < kRows ? task.num_rows : kRows;
#pragma unroll 1
        for (int begin = 0; begin < num_rows; begin += kRowsAtOnce) {
            const int row = begin + own.row;
            const bool has_row = row < num_rows;
            const Merge merge = {nodes, first, count, has_row ? row : 0, own.col, has_row, sums};
            give(has_row, row, own.col, add(merge));
        }
    }
    DEVICE void leave_in(PairMemory& pair) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
            const int row = Layout::row(m, 0);
            if (row >= task.num_rows) break;
            Bytes<16> bytes;
            memcpy(&bytes, values.all.at(m, 0).values, 16);
            store_vector<16>(&pair.values[row][Layout::col(0, 0)], bytes);
            if (Layout::is_first()) pair.totals[row] = totals.of[m][0];
        }
    }
    // The same as Merge::add_groups of this block's group and the second one.
    DEVICE void add_second(const PairMemory& pair) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
            const int row = Layout::row(m, 0);
            if (row >= task.num_rows) break;
            PartialSum& total = totals.of[m][0];
            const PartialSum second = pair.totals[row];
            const float largest = maximum(total.exponent, second.exponent);
            const float finite = largest == -kInfinity ? 0.0f : largest;
            const float mine = exp2_approx(total.exponent - finite);
            const float other = exp2_approx(second.exponent - finite);
            const float sum = multiply_add(total.sum, mine, 0.0f);
            total = {largest, sum + multiply_add(second.sum, other, 0.0f)};
            const auto& others =
                reinterpret_cast<const Bytes<16>&>(pair.values[row][Layout::col(0, 0)]);
            float added[4];
            memcpy(added, &others, 16);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float& value = values.all.at(m, 0).values[j];
                value = multiply_add(added[j], other, multiply_add(value, mine, 0.0f));
            }
        }
    }
    // The sums that threads have.
    DEVICE void write(const RowOutput& output) {
        if constexpr (Layout::kNeighbours == 4 && kCount == 4 && kN == 1) {
#pragma unroll
            for (int m = 0; m < kM; ++m) {
                const int row = Layout::row(m, 0);
                if (row >= task.num_rows) break;
                output.write(true, row, Layout::col(0, 0), totals.of[m][0],
                             values.all.at(m, 0).values);
            }
        } else {
#pragma unroll
            for (int m = 0; m < kM; ++m) {
                int64_t places[kSlots];
                float factors[kSlots];
#pragma unroll
                for (int s = 0; s < kSlots; ++s) {
                    const int row = Layout::slot_row(m, s);
                    const OutputRow place(params, task.batch, task.kv_head, task.first_row + row);
                    places[s] = place.out, factors[s] = normalizer(totals.of[m][s].sum);
                    if (output.lse && Layout::is_first() && row < task.num_rows)
                        output.lse[place.lse] = log_sum_exp(totals.of[m][s]);
                }
#pragma unroll
                for (int i = 0; i < kCount; ++i) {
                    if (Layout::row(m, i) >= task.num_rows) continue;
#pragma unroll
                    for (int n = 0; n < kN; ++n) {
                        const int col = Layout::col(n, i);
                        if (col >= params.dim_v) continue;
                        const float value = values.all.at(m, n).values[i];
                        output.out[places[Layout::slot(i)] + col * params.out[3]] =
                            from_float<Element>(value * factors[Layout::slot(i)]);
                    }
                }
            }
        }
    }
};
