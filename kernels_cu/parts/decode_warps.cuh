// What the warps of a block of decode_attention.cu do with its tiles (parts/decode_products.cuh), and
// how what a chunk's keys give to warps that share rows is added up where it ends, in the warps' order.
// Constants: see decode_attention.cu.
#include "parts/decode_products.cuh"

// The sums of a chunk or group where warps have shared its rows: four neighbours of some rows.
struct ThreadSums {
    struct Sums {
        static constexpr int kCount = 4;
        float values[4];
    };
    static constexpr int kM = kRows / kRowsAtOnce, kN = 1, kNeighbours = 4, kSlots = 1;
    static_assert(kM * kRowsAtOnce == kRows, "threads share the rows");
    Sums sums[kM];

    DEVICE Sums& at(int m, int) { return sums[m]; }
    DEVICE static int row(int m, int) { return OwnQuad().row + m * kRowsAtOnce; }
    DEVICE static int col(int, int i) { return OwnQuad().col + i; }
    DEVICE static constexpr int slot(int) { return 0; }
    DEVICE static int slot_row(int m, int) { return row(m, 0); }
    DEVICE static bool is_first() { return OwnQuad().col == 0; }
    // Whether any thread has.
    DEVICE static bool has_rows(int m, int num_rows) { return m * kRowsAtOnce < num_rows; }
};

// Where warps with keys of their own leave what they have of a chunk, some rows at once.
struct WarpMemory {
    PartialSum totals[kRows][kKeyWarps];
    // Rows begin at other banks than those before.
    alignas(16) float values[kKeyWarps][kRowsAtOnce][kDim + 8];
};

// Values at once where all stages were; at least a group's.
constexpr int kRoomForValues = kStages * 4 * kTileK * kDim / 16 / kNumThreads / kGroup * kGroup;
constexpr int kMostAtOnce = kRoomForValues < kMaxGroups ? kRoomForValues : kMaxGroups;
constexpr int kValuesAtOnce = kMostAtOnce > kGroup ? kMostAtOnce : kGroup;
static_assert(sizeof(DecodeStage) % 128 == 0 && sizeof(QueryTile) % 128 == 0,
              "tiles begin at multiples of 128 bytes, as FragmentLoader wants");
struct DecodeStorage {
    union {
        DecodeStage stages[kStages];
        Choose<kMergesLater, char, MergeValues<kValuesAtOnce>>::Type values;  // after the tiles
    };
    QueryTile q;
    union {
        Choose<kOwnRows, char, WarpMemory>::Type warps;
        Choose<kMergesLater, char, MergeSums>::Type sums;  // after the last chunk
    };
    Choose<kPairs, PairMemory, char>::Type pair;
    int is_last;
    DecodeTask task;
};

// What warps with keys of their own have of a chunk, added up.
struct WarpMerge {
    // All threads.
    template <class Results>
    DEVICE static void run(Results& results, const RowSums<WarpSums>& my_sums,
                           ValueSums<WarpSums>& mine, WarpMemory& memory, int num_rows) {
        if constexpr (kOwnKeys) sync_block();  // what lies there has been read since
        if (WarpSums::is_first()) {
#pragma unroll
            for (int m = 0; m < kFragmentsM; ++m) {
#pragma unroll
                for (int s = 0; s < WarpSums::kSlots; ++s)
                    memory.totals[WarpSums::slot_row(m, s)][key_warp()] = my_sums.of[m][s];
            }
        }
#pragma unroll
        for (int m = 0; m < ThreadSums::kM; ++m) {
            if (!ThreadSums::has_rows(m, num_rows)) break;
            if (m > 0) sync_block();  // the rows before have been read
            store(mine, memory, m * kRowsAtOnce, num_rows);
            sync_block();
            PartialSum total[1];
            float values[4];
            add(total[0], values, memory, ThreadSums::row(m, 0), num_rows);
            results.fold(m, total, [&](int, int i) { return values[i]; });
        }
    }
    // A row of all warps.
    DEVICE static void add(PartialSum& total, float (&values)[4], const WarpMemory& memory, int row,
                           int num_rows) {
        total = {-kInfinity, 0.0f};
#pragma unroll
        for (int j = 0; j < 4; ++j) values[j] = 0.0f;
        if (row >= num_rows) return;
        PartialSum warps[kKeyWarps];
#pragma unroll
        for (int w = 0; w < kKeyWarps; ++w) {
            warps[w] = memory.totals[row][w];
            total.exponent = maximum(total.exponent, warps[w].exponent);
        }
        const float finite = total.exponent == -kInfinity ? 0.0f : total.exponent;
        const OwnQuad own;
#pragma unroll
        for (int w = 0; w < kKeyWarps; ++w) {
            const float weight = exp2_approx(warps[w].exponent - finite);
            total.sum = multiply_add(warps[w].sum, weight, total.sum);
            float four[4];
            memcpy(four, &reinterpret_cast<const Bytes<16>&>(memory.values[w][own.row][own.col]),
                   16);
#pragma unroll
            for (int j = 0; j < 4; ++j) values[j] = multiply_add(four[j], weight, values[j]);
        }
    }
    // This warp's, of the rows from `first` on.
    DEVICE static void store(ValueSums<WarpSums>& mine, WarpMemory& memory, int first,
                             int num_rows) {
        constexpr int kNeighbours = WarpSums::kNeighbours;
        const int end = first + kRowsAtOnce < num_rows ? first + kRowsAtOnce : num_rows;
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) {
            if (m * 16 >= first + kRowsAtOnce || m * 16 + 16 <= first) continue;
#pragma unroll
            for (int i = 0; i < WarpSums::Sums::kCount; i += kNeighbours) {
                const int row = WarpSums::row(m, i);
                if (row < first || row >= end) continue;
                float* to = memory.values[key_warp()][row - first];
#pragma unroll
                for (int n = 0; n < kColSteps; ++n) {
                    Bytes<4 * kNeighbours> bytes;
                    memcpy(&bytes, mine.all.at(m, n).values + i, sizeof(bytes));
                    store_vector<4 * kNeighbours>(to + WarpSums::col(n, i), bytes);
                }
            }
        }
    }
};

template <class Results, class Storage>
DEVICE void end_chunk(Results& results, const WarpSoftmax& softmax, ValueSums<WarpSums>& values,
                      Storage& storage, bool is_last) {
    const RowSums<WarpSums> sums = softmax.totals();
    if constexpr (kOwnRows) {
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m)
            results.fold(m, sums.of[m],
                         [&](int n, int i) { return values.all.at(m, n).values[i]; });
    } else {
        WarpMerge::run(results, sums, values, storage.warps, storage.task.num_rows);
    }
    results.end_chunk(is_last);
}

// All tiles of the block's task, which has at least one key.
template <class Results>
DEVICE void attend_task(DecodeStorage& storage, const DecodeParams& params, const DecodeTask& task,
                        TileLoads& loads, const Element* q, Results& results) {
    WarpSoftmax softmax;
    Loaders loaders;
    Queries queries;
    ValueSums<WarpSums> values;
    values.restart();

    int stage = 0, filled = 0, key = task.first, chunk_end = 0;
    // The first rounds only load, so that there is one place that does.
#pragma unroll 1
    for (;;) {
        if (filled < kStages) {
            ++filled;
        } else {
            copy_async_wait<kStages - 1>();
            sync_tile();  // this stage is whole
            if (chunk_end == 0) {
                if constexpr (kOwnKeys) sync_block();  // the queries
                queries.hold(storage.q, loaders);
                softmax.begin(params, storage.task);
                chunk_end = task.first + storage.task.chunk_size;
            }
            const DecodeStage& used = storage.stages[stage];
            Scores scores;
            queries.score(scores, storage.q, used, loaders);
            // Of the tiles before, every query sees all keys.
            const int all_see = storage.task.num_keys - (params.causal ? params.queries.by - 1 : 0);
            softmax.weigh(scores, values, key + first_key_of_warp(), params.exponent_scale,
                          key + kTileK > all_see);
            add_values(values, scores, used, loaders);
            stage = stage + 1 < kStages ? stage + 1 : 0;
            key += kTileK;
            const bool ends = key >= loads.end;
            if (ends || key >= chunk_end) {
                end_chunk(results, softmax, values, storage, ends);
                if (ends) return;
                softmax.restart();
                values.restart();
                chunk_end += storage.task.chunk_size;
            }
            sync_tile();  // the stage has been read
        }
        loads.start(storage.stages, loads.key == task.first,
                    [&] { load_queries(storage.q, params, q, task); });
    }
}

DEVICE void attend_rows(DecodeStorage& storage, const DecodeParams& params, const KeyArrays& caches,
                        const int* seq_lens, const int* block_table, const Element* q, Element* out,
                        float* lse, void* partial_results, uint32_t* counters) {
    const DecodeTask task(params, seq_lens, int(blockIdx.x));
    if constexpr (kPairs) cluster_arrive_relaxed();
    if (!task.exists) return;
    if (threadIdx.x == 0) storage.task = task;
    RunResults<Choose<kOwnRows, WarpSums, ThreadSums>::Type> results(params, storage.task,
                                                                     partial_results);
    results.begin(task.first_chunk);
    if (task.first < task.end) {
        TileLoads loads(params, task, caches, block_table);
        attend_task(storage, params, task, loads, q, results);
    } else {
        sync_block();  // storage.task is written
    }
    results.finish(storage.values, storage.sums, storage.pair, storage.is_last, counters, out, lse);
}
