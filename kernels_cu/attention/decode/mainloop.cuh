// Mainloop of decode attention: a block loads the key tiles of its work tile through a cp.async
// pipeline, and its warps compute them (attention/decode/mma.cuh).  At the end of a chunk,
// attention/decode/epilogue.cuh folds it.
//
// Warps that share rows add their partial accumulators of a chunk in warp order, through shared
// memory.  Constants: see decode_attention.cu.
#pragma once
#include "attention/decode/warp_scales.cuh"

// Layout of the epilogue's accumulators if warps share the rows: a thread has a quad of every
// kRowsPerPass-th row.
struct QuadOutput {
    struct Fragment {
        static constexpr int kCount = 4;
        float values[4];
    };
    static constexpr int kM = kTileM / kRowsPerPass, kN = 1, kContiguous = 4, kSlots = 1;
    static_assert(kM * kRowsPerPass == kTileM, "threads share the rows evenly");
    Fragment fragments[kM];

    DEVICE Fragment& at(int m, int) { return fragments[m]; }
    DEVICE static int row(int m, int) { return ThreadQuad().row + m * kRowsPerPass; }
    DEVICE static int col(int, int i) { return ThreadQuad().col + i; }
    DEVICE static constexpr int ordered(int i) { return i; }
    DEVICE static constexpr int slot(int) { return 0; }
    DEVICE static int slot_row(int m, int) { return row(m, 0); }
    DEVICE static bool is_row_leader() { return ThreadQuad().col == 0; }
    // Whether any thread has a row of pass m.
    DEVICE static bool has_rows(int m, int num_rows) { return m * kRowsPerPass < num_rows; }
};

// Exchange between warps at the end of a chunk: states of all rows, values of one pass.
struct WarpExchange {
    SoftmaxState states[kTileM][kKeyWarps];
    // Padded, so that adjacent rows start in different banks.
    alignas(16) float values[kKeyWarps][kRowsPerPass][kDim + 8];
};

// The merge reuses the stages' memory.  A batch has as many partial results as fit, but at least a
// group.
constexpr int kStageBatch =
    kStages * int(sizeof(KvStage)) / 16 / kNumThreads / kChunksPerGroup * kChunksPerGroup;
constexpr int kMostBatch = kStageBatch < kMaxGroups ? kStageBatch : kMaxGroups;
constexpr int kMergeBatch = kMostBatch > kChunksPerGroup ? kMostBatch : kChunksPerGroup;
static_assert(sizeof(KvStage) % 128 == 0 && sizeof(QueryTile) % 128 == 0,
              "FragmentLoader needs tiles aligned to 128 bytes");
struct DecodeStorage {
    union {
        KvStage stages[kStages];
        Choose<kHasMergeKernel, char, MergeValues<kMergeBatch>>::Type
            merge_values;  // after the tiles
    };
    QueryTile q;
    union {
        Choose<kWarpOwnsRows, char, WarpExchange>::Type exchange;
        Choose<kHasMergeKernel, char, MergeStates>::Type merge_states;  // after the last chunk
    };
    Choose<kMergesInCluster, ClusterPartial, char>::Type cluster;
    QueryConversion q_conversion;
    int is_last;
    WorkTile work;
};

// Adds the warps' partial accumulators of a chunk and folds the sum into the epilogue's group.
struct WarpReduction {
    // Called by all threads.
    template <class Epilogue>
    DEVICE static void run(Epilogue& epilogue, const RowStates<WarpOutput>& states,
                           OutputAccumulator<WarpOutput>& output, WarpExchange& memory,
                           int num_rows) {
        if constexpr (kWarpOwnsKeys) sync_block();  // the last chunk's exchange has been read
        if (WarpOutput::is_row_leader()) {
#pragma unroll
            for (int m = 0; m < kWarpRowFragments; ++m) {
#pragma unroll
                for (int s = 0; s < WarpOutput::kSlots; ++s)
                    memory.states[WarpOutput::slot_row(m, s)][key_warp()] = states.rows[m][s];
            }
        }
#pragma unroll
        for (int m = 0; m < QuadOutput::kM; ++m) {
            if (!QuadOutput::has_rows(m, num_rows)) break;
            if (m > 0) sync_block();  // the previous pass has been read
            store(output, memory, m * kRowsPerPass, num_rows);
            sync_block();
            SoftmaxState state[1];
            float values[4];
            add(state[0], values, memory, QuadOutput::row(m, 0), num_rows);
            epilogue.fold(m, state, [&](int, int i) { return values[i]; });
        }
    }
    // Computes this thread's quad of a row, and the row's state, over all warps.
    DEVICE static void add(SoftmaxState& state, float (&values)[4], const WarpExchange& memory,
                           int row, int num_rows) {
        state = {-kInfinity, 0.0f};
#pragma unroll
        for (int j = 0; j < 4; ++j) values[j] = 0.0f;
        if (row >= num_rows) return;
        SoftmaxState warps[kKeyWarps];
#pragma unroll
        for (int w = 0; w < kKeyWarps; ++w) {
            warps[w] = memory.states[row][w];
            state.exponent = maximum(state.exponent, warps[w].exponent);
        }
        const float finite = state.exponent == -kInfinity ? 0.0f : state.exponent;
        const ThreadQuad quad;
#pragma unroll
        for (int w = 0; w < kKeyWarps; ++w) {
            const float factor = exp2_approx(warps[w].exponent - finite);
            state.sum = multiply_add(warps[w].sum, factor, state.sum);
            float added[4];
            memcpy(added, &reinterpret_cast<const Bytes<16>&>(memory.values[w][quad.row][quad.col]),
                   16);
#pragma unroll
            for (int j = 0; j < 4; ++j) values[j] = multiply_add(added[j], factor, values[j]);
        }
    }
    // Stores this warp's rows of the pass that starts at row `first`.
    DEVICE static void store(OutputAccumulator<WarpOutput>& output, WarpExchange& memory, int first,
                             int num_rows) {
        constexpr int kContiguous = WarpOutput::kContiguous;
        const int end = first + kRowsPerPass < num_rows ? first + kRowsPerPass : num_rows;
#pragma unroll
        for (int m = 0; m < kWarpRowFragments; ++m) {
            const int row_of_fragment = m * kFragmentRows;
            if (row_of_fragment >= first + kRowsPerPass || row_of_fragment + kFragmentRows <= first)
                continue;
#pragma unroll
            for (int i = 0; i < WarpOutput::Fragment::kCount; i += kContiguous) {
                const int row = WarpOutput::row(m, WarpOutput::ordered(i));
                if (row < first || row >= end) continue;
                float* to = memory.values[key_warp()][row - first];
#pragma unroll
                for (int n = 0; n < kWarpColFragments; ++n) {
                    store_vector<4 * kContiguous>(to + WarpOutput::col(n, WarpOutput::ordered(i)),
                                                  adjacent<WarpOutput>(output.tile.at(m, n), i));
                }
            }
        }
    }
};

template <class Epilogue, class Score, class Storage>
DEVICE void end_chunk(Epilogue& epilogue, const WarpSoftmax<Score>& softmax,
                      OutputAccumulator<WarpOutput>& output, Storage& storage, bool is_last) {
    const RowStates<WarpOutput> states = softmax.states(output);
    if constexpr (kWarpOwnsRows) {
#pragma unroll
        for (int m = 0; m < kWarpRowFragments; ++m)
            epilogue.fold(m, states.rows[m],
                          [&](int n, int i) { return output.tile.at(m, n).values[i]; });
    } else {
        WarpReduction::run(epilogue, states, output, storage.exchange, storage.work.num_rows);
    }
    epilogue.end_chunk(is_last);
}

// Computes a work tile.
template <class Score, class Epilogue>
DEVICE void mainloop(DecodeStorage& storage, const typename Score::Params& params,
                     const typename Score::Arrays& arrays, const WorkTile& work,
                     KvPipeline& pipeline, const Element* q, const KvScales& kv_scales,
                     Epilogue& epilogue) {
    WarpSoftmax<Score> softmax;
    Choose<kScaledCache, WarpScales, NoWarpScales>::Type scales(kv_scales);
    FragmentLoaders loaders;
    QueryOperand<Score> queries;
    OutputAccumulator<WarpOutput> output;
    output.clear();

    int stage = 0, issued = 0, key = work.first_key, chunk_end = 0;
    // The prologue is the first kStages rounds of the same loop, which only issue loads, so that
    // the code of the loads exists once.
#pragma unroll 1
    for (;;) {
        if (issued < kStages) {
            ++issued;
        } else {
            copy_async_wait<kStages - 1>();
            sync_stage();  // the stage is full
            if (chunk_end == 0) {
                if constexpr (kWarpOwnsKeys) sync_block();  // the queries are loaded
                storage.q_conversion.convert(storage.q);
                queries.load_registers(storage.q, loaders);
                softmax.init(params, arrays, storage.work, scales.k_factor());
                chunk_end = work.first_key + storage.work.chunk_size;
            }
            const KvStage& full = storage.stages[stage];
            const int type = Score::tile_type(params, arrays, storage.work, key, kTileN);
            if (!Score::kMask || type != kMaskedBlock) {
                Scores scores;
                if constexpr (kScaledCache) queries.multiply_8bit_keys(scores, storage.q, full);
                else queries.multiply_keys(scores, storage.q, full, loaders);
                storage.q_conversion.scale(scores);
                scales.scale_scores(scores, full);
                // Tiles that end at this key or before it need no mask.
                const int all_see = params.common_end(storage.work.num_keys);
                softmax.update(scores, output, params, arrays, key + warp_first_key(),
                               key + kTileN > all_see, type, scales, full);
                scales.scale_probabilities(scores, full);
                multiply_values(output, scores, full, loaders);
            }
            stage = stage + 1 < kStages ? stage + 1 : 0;
            key += kTileN;
            const bool is_last = key >= pipeline.end_key;
            if (is_last || key >= chunk_end) {
                scales.end_chunk(output);
                end_chunk(epilogue, softmax, output, storage, is_last);
                if (is_last) return;
                softmax.reset();
                output.clear();
                chunk_end += storage.work.chunk_size;
            }
            sync_stage();  // the stage is empty
        }
        bool reads = true;
        if constexpr (Score::kMask) {
            const int type = Score::tile_type(params, arrays, work, pipeline.next_key, kTileN);
            reads = type != kMaskedBlock;
        }
        pipeline.issue(storage.stages, pipeline.next_key == work.first_key, reads,
                       [&] { load_queries(storage.q, params, q, work); });
    }
}

// Computes a block's work tile.  scales_of(kv_head) returns the cache's scales.
template <class Score, class ScalesOf = NoKvScales>
DEVICE void decode_block(DecodeStorage& storage, const typename Score::Params& params,
                         const typename Score::Arrays& arrays, const KvCache& cache,
                         const int* seq_lens, const int* block_table, const Element* q,
                         Element* out, float* lse, void* partial_results, uint32_t* counters,
                         const ScalesOf& scales_of = {}) {
    const WorkTile work(params, seq_lens, int(blockIdx.x));
    if constexpr (kMergesInCluster) cluster_arrive_relaxed();
    if (!work.exists) return;
    if (threadIdx.x == 0) storage.work = work;
    DecodeEpilogue<Choose<kWarpOwnsRows, WarpOutput, QuadOutput>::Type> epilogue(
        params, storage.work, partial_results);
    epilogue.begin(work);
    if constexpr (Score::kGeneral) {
        if (work.first_chunk == 0) {
            epilogue.set_states(
                [&](int row) { return Score::first_state(params, arrays, work, row); });
        }
    }
    const KvScales scales = scales_of(work.kv_head);
    KvPipeline pipeline(params, work, cache, block_table, scales);
    mainloop<Score>(storage, params, arrays, work, pipeline, q, scales, epilogue);
    epilogue.finish(storage.merge_values, storage.merge_states, storage.cluster, storage.is_last,
                    counters, out, lse, scales.v.factor);
}
