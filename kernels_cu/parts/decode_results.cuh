// What becomes of a chunk's sums: they are folded into their group's, groups' sums are added up,
// and rows are written.
//
// A kernel gives a type Layout for what a thread has of the sums of weighted values:
//   Layout::Sums, an Accumulator, of which there are kM x kN, in whatever order `at(m, n)` says;
//   Layout::row(m, i), col(n, i): where value i of one lies in the block's rows;
//   Layout::kNeighbours: how many values, from each multiple of it on, are neighbours in a row.
// Exponents and sums of a row are those of kThreadsPerRow threads, which all have the same.
#include "parts/decode_merge.cuh"

struct ResultStorage {
    FoldFactors folds[kRows];
    float factors[kRows];
    GroupWeights weights;
    PartialSum group[kRows];  // for the cluster's other blocks
    int is_last[2];
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
#pragma unroll
                for (int n = 0; n < kN; ++n) {
                    Bytes<4 * kNeighbours> bytes;
                    memcpy(&bytes, all.at(m, n).values + i, sizeof(bytes));
                    store_vector<4 * kNeighbours>(nodes.value(node, row, Layout::col(n, i)), bytes);
                }
            }
        }
    }
};

// The results of a task.
template <class Layout>
struct RunResults {
    static constexpr int kM = Layout::kM, kN = Layout::kN, kCount = Layout::Sums::kCount;
    const DecodeParams& params;
    const DecodeTask& task;  // in shared memory
    ResultStorage& storage;
    Nodes nodes;
    PartialSum total;  // of this thread's row, of the group so far
    ValueSums<Layout> values;
    int chunk;

    DEVICE RunResults(const DecodeParams& params, const DecodeTask& task, ResultStorage& storage,
                      void* partial_results)
        : params(params), task(task), storage(storage), nodes(params, partial_results) {}
    DEVICE void begin(int first_chunk) {
        chunk = first_chunk;
        restart();
    }
    DEVICE void restart() {
        total = {-kInfinity, 0.0f};
        values.restart();
    }
    // The group's sums so far and those of its next chunk.
    DEVICE void fold(const PartialSum& added, ValueSums<Layout>& added_values) {
        const OwnRow own;
        const FoldFactors mine = fold_sum(total, added);
        if (own.part == 0) storage.folds[own.row] = mine;
        sync_block();
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                const FoldFactors factors = storage.folds[Layout::row(m, i)];
#pragma unroll
                for (int n = 0; n < kN; ++n) {
                    float& value = values.all.at(m, n).values[i];
                    value = fold_value(value, added_values.all.at(m, n).values[i], factors);
                }
            }
        }
    }
    // The next chunk of the run.  All threads; is_last: of the run.
    DEVICE void add_chunk(const PartialSum& chunk_total, ValueSums<Layout>& chunk_values,
                          bool is_last) {
        if (params.chunks_per_block == 1 && task.num_chunks > 1) {
            total = chunk_total;
            leave(task.chunk_node(params, chunk), chunk_values);
            return;
        }
        fold(chunk_total, chunk_values);
        const bool ends_group = chunk % kGroup == kGroup - 1 || is_last;
        if (kClusterSize == 1 && ends_group && task.num_groups > 1) {
            leave(task.group_node(params, chunk / kGroup), values);
            restart();
        }
        ++chunk;
    }
    // For the block that adds it up.
    DEVICE void leave(int64_t node, ValueSums<Layout>& left) {
        left.store(nodes, node, task.num_rows);
        set_sum(node);
    }
    DEVICE void set_sum(int64_t node) const {
        const OwnRow own;
        if (own.part == 0 && own.row < task.num_rows) nodes.set_sum(node, own.row, total);
    }
    // After the last chunk.  sums, values: memory that nobody uses any more.
    DEVICE void finish(MergeSums& sums, MergeValues& values, uint32_t* counters, Element* out,
                       float* lse) {
        const bool of_chunks = params.chunks_per_block == 1;
        if (of_chunks ? task.num_chunks == 1 : task.num_groups == 1) {
            tell(lse);
            sync_block();
            write(out);
            return;
        }
        if constexpr (kClusterSize > 1) return;  // add_in_cluster
        uint32_t* mine = counters + int64_t(task.place) * params.counters;
        const int rows = task.num_rows < kRows ? task.num_rows : kRows;
        int blocks = task.num_groups;  // that leave groups of this sequence
        if (of_chunks) {
            const bool all = task.num_chunks <= kChunksAtOnce;
            const int index = all ? 0 : task.first_chunk / kGroup, first = index * kGroup;
            const int left = task.num_chunks - first;
            const int count = all || left < kGroup ? left : kGroup;
            if (!is_last(storage.is_last[0], mine + (all ? 0 : 1 + index), count)) return;
            const int64_t node = task.group_node(params, index);
            const Merge merge = {nodes, task.chunk_node(params, first), count, rows, sums, values};
            merge.run<true>(
                storage.weights,
                [&] {
                    total = merge.fold_sums(storage.weights);
                    if (all) tell(lse);
                },
                [&](int row, int col, const float (&four)[4]) {
                    if (all) {
                        write_four(out, row, col, four);
                    } else {
                        Bytes<16> bytes;
                        memcpy(&bytes, four, 16);
                        store_vector<16>(nodes.value(node, row, col), bytes);
                    }
                });
            if (all) return;
            set_sum(node);
        } else {
            blocks = (task.num_chunks - 1) / params.chunks_per_block + 1;
        }
        if (!is_last(storage.is_last[1], mine, blocks)) return;
        const Merge merge = {nodes, task.group_node(params, 0), task.num_groups, rows, sums,
                             values};
        merge.run<false>(
            storage.weights,
            [&] {
                total = Merge::add_sums(sums, task.num_groups);
                tell(lse);
            },
            [&](int row, int col, const float (&four)[4]) { write_four(out, row, col, four); });
    }
    // The cluster's blocks have a group each, and add up parts of the rows' columns.  Each leaves its
    // values in its own memory, for all to read.
    DEVICE void add_in_cluster(bool has_group, MergeSums& sums, MergeValues& memory, Element* out,
                               float* lse) {
        using GroupValues = float[kRows][kDim];
        static_assert(sizeof(GroupValues) <= sizeof(MergeValues), "a group's values fit in");
        auto& mine = reinterpret_cast<GroupValues&>(memory);
        if (has_group) leave_in(mine);
        const OwnRow own;
        if (has_group && own.part == 0) storage.group[own.row] = total;
        cluster_arrive();
        cluster_wait();
        if (has_group) add_groups(mine, sums, out, lse);
        cluster_arrive();  // nobody reads this block's any more
        cluster_wait();
    }
    template <class GroupValues>
    DEVICE void leave_in(GroupValues& mine) {
        constexpr int kNeighbours = Layout::kNeighbours;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int i = 0; i < kCount; i += kNeighbours) {
                const int row = Layout::row(m, i);
                if (row >= task.num_rows) continue;
#pragma unroll
                for (int n = 0; n < kN; ++n) {
                    Bytes<4 * kNeighbours> bytes;
                    memcpy(&bytes, values.all.at(m, n).values + i, sizeof(bytes));
                    store_vector<4 * kNeighbours>(&mine[row][Layout::col(n, i)], bytes);
                }
            }
        }
    }
    template <class GroupValues>
    DEVICE void add_groups(GroupValues& mine, MergeSums& sums, Element* out, float* lse) {
        const int rank = cluster_rank(), count = task.num_groups;
        const int rows = task.num_rows < kRows ? task.num_rows : kRows;
#pragma unroll 1
        for (int i = int(threadIdx.x); i < count * kRows; i += kNumThreads)
            sums[i / kRows][i % kRows].sum = *cluster_shared(&storage.group[i % kRows], i / kRows);
        constexpr int kQuadsOfRow = kDim / 4;
        const int part = (rows * kQuadsOfRow + kClusterSize - 1) / kClusterSize;
        const int first = rank * part;
        const int end = first + part < rows * kQuadsOfRow ? first + part : rows * kQuadsOfRow;
        int quad = first + int(threadIdx.x);
        Bytes<16> groups[kClusterSize];
        const auto load = [&] {
            float* from = &mine[0][0] + quad * 4;
#pragma unroll
            for (int i = 0; i < kClusterSize; ++i) {
                if (quad < end && i < count) groups[i] = load_vector<16>(cluster_shared(from, i));
            }
        };
        load();
        sync_block();
        total = Merge::add_sums(sums, count);
        tell(rank == 0 ? lse : nullptr);
        sync_block();
#pragma unroll 1
        while (quad < end) {
            const int row = quad / kQuadsOfRow;
            float result[4] = {};
#pragma unroll
            for (int i = 0; i < kClusterSize; ++i) {
                if (i >= count) break;
                float added[4];
                memcpy(added, &groups[i], 16);
                const float weight = sums[i][row].weight;
#pragma unroll
                for (int j = 0; j < 4; ++j) result[j] = multiply_add(added[j], weight, result[j]);
            }
            write_four(out, row, quad % kQuadsOfRow * 4, result);
            quad += kNumThreads;
            load();
        }
    }
    // What the row's values are multiplied by at last.  Then a barrier.
    DEVICE void tell(float* lse) {
        const OwnRow own;
        if (own.part != 0) return;
        storage.factors[own.row] = normalizer(total.sum);
        if (lse && own.row < task.num_rows) {
            const OutputRow place(params, task.batch, task.kv_head, task.first_row + own.row);
            lse[place.lse] = log_sum_exp(total);
        }
    }
    DEVICE void write_four(Element* out, int row, int col, const float (&sums)[4]) const {
        if (col >= params.dim_v) return;  // a multiple of 8
        const OutputRow place(params, task.batch, task.kv_head, task.first_row + row);
        const float factor = storage.factors[row];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            out[place.out + (col + j) * params.out[3]] = from_float<Element>(sums[j] * factor);
    }
    // The sums that threads have.
    DEVICE void write(Element* out) {
        if constexpr (Layout::kNeighbours == 4 && kCount == 4 && kN == 1) {
#pragma unroll
            for (int m = 0; m < kM; ++m) {
                const int row = Layout::row(m, 0);
                if (row < task.num_rows)
                    write_four(out, row, Layout::col(0, 0), values.all.at(m, 0).values);
            }
            return;
        }
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
