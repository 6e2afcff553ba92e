// Epilogue of a work tile: folds chunks into groups in registers, merges groups through memory or
// the cluster, normalises rows and writes them.
//
// A kernel provides a type Layout, a thread's kM x kN fragments of output accumulators:
//   Layout::Fragment, with kCount values, and at(m, n), the fragment;
//   Layout::row(m, i), col(n, i): the row and column in the work tile of value i of a fragment;
//   Layout::kContiguous: in the order ordered(i), each aligned run of that many values is adjacent
//       in a row;
//   Layout::kSlots, slot(i), slot_row(m, s): the rows of a fragment of which the thread has values;
//   Layout::is_row_leader(): whether this thread stores the states of its rows.
#pragma once
#include "attention/decode/merge.cuh"

// Large row tiles only store partial results; the kernel decode_merge merges them with more blocks.
constexpr bool kHasMergeKernel = kTileM > 16;

// The two blocks of a cluster compute the at most two groups of a sequence.
constexpr bool kMergesInCluster = kClusterSize == 2;
// The second block's group, in the shared memory of the first block.
struct ClusterPartial {
    SoftmaxState states[kTileM];
    alignas(16) float values[kTileM][kDim];
};

// A run of a fragment's values that are adjacent in a row.
template <class Layout>
DEVICE Bytes<4 * Layout::kContiguous> adjacent(const typename Layout::Fragment& fragment, int i) {
    float values[Layout::kContiguous];
#pragma unroll
    for (int j = 0; j < Layout::kContiguous; ++j)
        values[j] = fragment.values[Layout::ordered(i + j)];
    Bytes<4 * Layout::kContiguous> bytes;
    memcpy(&bytes, values, sizeof(bytes));
    return bytes;
}

// Output accumulators of a thread.
template <class Layout>
struct OutputAccumulator {
    static constexpr int kM = Layout::kM, kN = Layout::kN, kCount = Layout::Fragment::kCount;
    Layout tile;

    DEVICE void clear() {
        for_each([](int, int, int, float& value) { value = 0.0f; });
    }
    // Calls f(m, n, i, value) for each value.
    template <class F>
    DEVICE void for_each(F f) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
#pragma unroll
                for (int n = 0; n < kN; ++n) f(m, n, i, tile.at(m, n).values[i]);
            }
        }
    }
    // Stores the values of a partial result; rows from num_rows on do not exist.
    DEVICE void store(const Partials& partials, int64_t partial, int num_rows) {
        constexpr int kContiguous = Layout::kContiguous;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int i = 0; i < kCount; i += kContiguous) {
                const int row = Layout::row(m, Layout::ordered(i));
                if (row >= num_rows) continue;
                float* to = partials.value(partial, row, 0);
#pragma unroll
                for (int n = 0; n < kN; ++n) {
                    store_vector<4 * kContiguous>(to + Layout::col(n, Layout::ordered(i)),
                                                  adjacent<Layout>(tile.at(m, n), i));
                }
            }
        }
    }
};
// States of a thread's rows.
template <class Layout>
struct RowStates {
    SoftmaxState rows[Layout::kM][Layout::kSlots];

    DEVICE void clear() {
#pragma unroll
        for (int m = 0; m < Layout::kM; ++m) {
#pragma unroll
            for (int s = 0; s < Layout::kSlots; ++s) rows[m][s] = {-kInfinity, 0.0f};
        }
    }
};

// Accumulates the chunks of a work tile into groups.
template <class Layout>
struct DecodeEpilogue {
    static constexpr int kM = Layout::kM, kN = Layout::kN, kCount = Layout::Fragment::kCount;
    static constexpr int kSlots = Layout::kSlots;
    const DecodeParams& params;
    const WorkTile& work;  // in shared memory
    Partials partials;
    RowStates<Layout> states;  // of the current group
    OutputAccumulator<Layout> output;
    int chunk;                          // the current chunk
    bool stores_chunks, stores_groups;  // as partial results

    DEVICE DecodeEpilogue(const DecodeParams& params, const WorkTile& work, void* partial_results)
        : params(params), work(work), partials(params, partial_results) {}
    // tile: `work`, in registers.
    DEVICE void begin(const WorkTile& tile) {
        chunk = tile.first_chunk;
        stores_chunks = tile.stores_chunks(params);
        stores_groups = !kMergesInCluster && !stores_chunks && tile.num_groups > 1;
        clear();
    }
    DEVICE void clear() {
        states.clear();
        output.clear();
    }
    // Sets the state of each row of the work tile to state(row).
    template <class State>
    DEVICE void set_states(const State& state) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int s = 0; s < kSlots; ++s) states.rows[m][s] = state(Layout::slot_row(m, s));
        }
    }
    // Folds the m-th row of fragments of the current chunk into the group.  added(n, i): value i of
    // fragment n.
    template <class Added>
    DEVICE void fold(int m, const SoftmaxState (&added_states)[kSlots], const Added& added) {
        FoldFactors factors[kSlots];
#pragma unroll
        for (int s = 0; s < kSlots; ++s)
            factors[s] = fold_state(states.rows[m][s], added_states[s]);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
#pragma unroll
            for (int n = 0; n < kN; ++n) {
                float& value = output.tile.at(m, n).values[i];
                value = fold_value(value, added(n, i), factors[Layout::slot(i)]);
            }
        }
    }
    // Called after the current chunk has been folded.  is_last: it is the work tile's last chunk.
    DEVICE void end_chunk(bool is_last) {
        const bool ends_group = chunk % kChunksPerGroup == kChunksPerGroup - 1 || is_last;
        if (stores_chunks || (stores_groups && ends_group)) {
            store_partial(stores_chunks ? work.chunk_partial(params, chunk)
                                        : work.group_partial(params, chunk / kChunksPerGroup));
            clear();
        }
        ++chunk;
    }
    DEVICE void store_partial(int64_t partial) {
        output.store(partials, partial, work.num_rows);
        if (!Layout::is_row_leader()) return;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int s = 0; s < kSlots; ++s) {
                const int row = Layout::slot_row(m, s);
                if (row < work.num_rows) partials.set_state(partial, row, states.rows[m][s]);
            }
        }
    }
    // Called after the last chunk.  memory, merge_states: MergeValues and MergeStates, in memory
    // that no thread uses any more.  scale: factor of the results.
    template <class Memory, class States, class Cluster>
    DEVICE void finish(Memory& memory, States& merge_states, Cluster& cluster, int& flag,
                       uint32_t* counters, Element* out, float* lse, float scale) {
        const RowWriter writer = {params, work, out, lse, scale};
        if (!stores_chunks && work.num_groups == 1) {
            write(writer);
            return;
        }
        if constexpr (kMergesInCluster) {
            cluster_wait();  // the first block has begun
            const bool is_first = work.first_chunk == 0;
            if (!is_first) store_to_cluster(*cluster_shared(&cluster, 0));
            cluster_arrive();
            if (!is_first) return;
            cluster_wait();
            merge_from_cluster(cluster);
            write(writer);
        } else if constexpr (!kHasMergeKernel) {
            constexpr int kBatch = sizeof(Memory) / sizeof(memory[0]);
            // Up to this number, chunks are merged at once instead of by group.
            constexpr int kMaxChunksAtOnce = kMaxGroups;
            uint32_t* sequence_counter = counters + int64_t(work.row_tile) * params.counters;
            int blocks;  // number of blocks that store partial results of this sequence
            if (stores_chunks) {
                const bool all = work.num_chunks <= kMaxChunksAtOnce;
                const int group = all ? 0 : work.first_chunk / kChunksPerGroup;
                const int first = group * kChunksPerGroup;
                const int left = work.num_chunks - first;
                const int count = all || left < kChunksPerGroup ? left : kChunksPerGroup;
                const int run = params.chunks_per_block;  // 1, 2 or 4: run >> 1 is log2(run)
                blocks = (count + run - 1) >> (run >> 1);
                if (!is_last_block(flag, sequence_counter + (all ? 0 : 1 + group), blocks)) return;
                const int64_t partial = work.group_partial(params, group);
                merge_rows(
                    merge_states, work.chunk_partial(params, first), count,
                    [&](const RowMerge& merge) { return merge.merge_chunks<kBatch>(memory); },
                    [&](bool valid, int row, int col, const MergedRow& merged) {
                        if (all) {
                            writer.write(valid, row, col, merged.state, merged.values);
                        } else if (valid) {
                            Bytes<16> bytes;
                            memcpy(&bytes, merged.values, 16);
                            store_vector<16>(partials.value(partial, row, col), bytes);
                            if (col == 0) partials.set_state(partial, row, merged.state);
                        }
                    });
                if (all) return;
                blocks = work.num_groups;
            } else {
                blocks = (work.num_chunks - 1) / params.chunks_per_block + 1;
            }
            if (!is_last_block(flag, sequence_counter, blocks)) return;
            merge_rows(
                merge_states, work.group_partial(params, 0), work.num_groups,
                [&](const RowMerge& merge) { return merge.merge_groups<kBatch>(memory); },
                [&](bool valid, int row, int col, const MergedRow& merged) {
                    writer.write(valid, row, col, merged.state, merged.values);
                });
        }
    }
    // Calls store(valid, row, col, merge(row's partial results)) for this thread's quads of all
    // rows.
    template <class Merge, class Store>
    DEVICE void merge_rows(MergeStates& merge_states, int64_t first, int count, const Merge& merge,
                           const Store& store) {
        const ThreadQuad quad;
        const int num_rows = work.num_rows < kTileM ? work.num_rows : kTileM;
#pragma unroll 1
        for (int begin = 0; begin < num_rows; begin += kRowsPerPass) {
            const int row = begin + quad.row;
            const bool has_row = row < num_rows;
            const RowMerge row_merge = {partials, first,   count,       has_row ? row : 0,
                                        quad.col, has_row, merge_states};
            store(has_row, row, quad.col, merge(row_merge));
        }
    }
    DEVICE void store_to_cluster(ClusterPartial& partial) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
            const int row = Layout::row(m, 0);
            if (row >= work.num_rows) break;
            Bytes<16> bytes;
            memcpy(&bytes, output.tile.at(m, 0).values, 16);
            store_vector<16>(&partial.values[row][Layout::col(0, 0)], bytes);
            if (Layout::is_row_leader()) partial.states[row] = states.rows[m][0];
        }
    }
    // Merges this block's group and the second block's, with the arithmetic of
    // RowMerge::merge_groups.
    DEVICE void merge_from_cluster(const ClusterPartial& partial) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
            const int row = Layout::row(m, 0);
            if (row >= work.num_rows) break;
            SoftmaxState& state = states.rows[m][0];
            const SoftmaxState second = partial.states[row];
            const float largest = maximum(state.exponent, second.exponent);
            const float finite = largest == -kInfinity ? 0.0f : largest;
            const float first_factor = exp2_approx(state.exponent - finite);
            const float second_factor = exp2_approx(second.exponent - finite);
            const float sum = multiply_add(state.sum, first_factor, 0.0f);
            state = {largest, sum + multiply_add(second.sum, second_factor, 0.0f)};
            const auto& quad =
                reinterpret_cast<const Bytes<16>&>(partial.values[row][Layout::col(0, 0)]);
            float added[4];
            memcpy(added, &quad, 16);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float& value = output.tile.at(m, 0).values[j];
                value =
                    multiply_add(added[j], second_factor, multiply_add(value, first_factor, 0.0f));
            }
        }
    }
    // Writes the rows from the accumulators.
    DEVICE void write(const RowWriter& writer) {
        if constexpr (Layout::kContiguous == 4 && kCount == 4 && kN == 1) {
#pragma unroll
            for (int m = 0; m < kM; ++m) {
                const int row = Layout::row(m, 0);
                if (row >= work.num_rows) break;
                writer.write(true, row, Layout::col(0, 0), states.rows[m][0],
                             output.tile.at(m, 0).values);
            }
        } else {
#pragma unroll
            for (int m = 0; m < kM; ++m) {
                int64_t offsets[kSlots];
                float factors[kSlots];
#pragma unroll
                for (int s = 0; s < kSlots; ++s) {
                    const int row = Layout::slot_row(m, s);
                    const OutputOffsets of_row(params, work.batch, work.kv_head,
                                               work.first_row + row);
                    offsets[s] = of_row.out;
                    factors[s] = normalizer(states.rows[m][s].sum, writer.scale);
                    if (writer.lse && Layout::is_row_leader() && row < work.num_rows)
                        writer.lse[of_row.lse] = log_sum_exp(states.rows[m][s]);
                }
#pragma unroll
                for (int i = 0; i < kCount; ++i) {
                    if (Layout::row(m, i) >= work.num_rows) continue;
#pragma unroll
                    for (int n = 0; n < kN; ++n) {
                        const int col = Layout::col(n, i);
                        if (col >= params.dim_v) continue;
                        const float value = output.tile.at(m, n).values[i];
                        writer.out[offsets[Layout::slot(i)] + col * params.out_strides[3]] =
                            from_float<Element>(value * factors[Layout::slot(i)]);
                    }
                }
            }
        }
    }
};
