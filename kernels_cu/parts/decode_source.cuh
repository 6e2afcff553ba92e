// How keys and values get into shared memory, by threads: any strides.  Warps with keys of their
// own bring these, else all threads share all.
// Constants: Element, kDim (at least those of q and v), kTileK (keys of a tile), kStages, kPaged:
// whether there is a block table (parts/presence.cuh).
#include "parts/decode_queries.cuh"
#include "parts/decode_shape.cuh"
#include "parts/presence.cuh"

// Of the keys of a tile that some threads share, those that they copy at once: a thread copies one
// vector of each of kCopies keys.
constexpr int kSharers = kOwnKeys ? kWarpSize : kNumThreads;
constexpr int kLinesAtOnce = kSharers / kVectors;
constexpr int kCopies = kTileK / (kNumThreads / kSharers) / kLinesAtOnce;
static_assert(kCopies * kLinesAtOnce * kNumThreads == kTileK * kSharers, "a tile's vectors");

constexpr int kColumnDim = kDim;
using KeyColumn = SharedTile<kTileK, kDim * 2>;
struct KeyTile {
    KeyColumn columns[1];

    DEVICE void* operator()(int line, int chunk) { return columns[0](line, chunk); }
    DEVICE const void* operator()(int line, int chunk) const { return columns[0](line, chunk); }
};
struct DecodeStage { KeyTile k, v; };
struct KeyArrays {
    const Element* k;
    const Element* v;
};

// Brings the tiles of keys and values, one after another.
struct KeySource {
    const Element* k;  // contiguous: of this thread's first key in the next tile; paged: of no key
    const Element* v;
    const int* table;  // of this sequence; null: none
    int64_t k_page, v_page, k_row, v_row;
    Divisor page_size;
    int last_page, end, line, vector;
    bool has_k, has_v;
    int pages[kCopies];  // where the next tile's keys are
    LoadPolicy policy;

    DEVICE KeySource(const DecodeParams& params, const DecodeTask& task, const KeyArrays& caches,
                     const int* block_table)
        : policy(load_policy_once()) {
        const int index = int(threadIdx.x) % kSharers;
        line = (kOwnKeys ? first_key_of_warp() : 0) + index / kVectors, vector = index % kVectors;
        k_page = params.k[0], v_page = params.v[0], k_row = params.k[2], v_row = params.v[2];
        page_size = params.page_size, last_page = params.num_pages - 1;
        has_k = vector * 8 < params.dim, has_v = vector * 8 < params.dim_v;
        k = caches.k + task.kv_head * params.k[1] + vector * 8;
        v = caches.v + task.kv_head * params.v[1] + vector * 8;
        end = task.end;
        table = block_table;
        if (paged()) {
            table += task.batch * params.table_stride;
            if constexpr (kPagesAhead) find_pages(task.first);
        } else {
            k += task.batch * k_page + (task.first + line) * k_row;
            v += task.batch * v_page + (task.first + line) * v_row;
        }
    }
    DEVICE bool paged() const { return kPaged == kEither ? table != nullptr : kPaged == kAlways; }
    // One tile ahead, so that nothing waits for the table, where there are registers for it.
    static constexpr bool kPagesAhead = kDim <= 128;
    DEVICE void find_pages(int first_key) {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            const int key = first_key + i * kLinesAtOnce + line;
            int page = key;
            page_size.take_from(page);
            pages[i] = key < end ? table[page] : 0;
        }
    }
    // Other sequences may have the same pages, and other rows have the same keys.
    DEVICE void copy_line(void* to, const Element* from, bool valid, bool pages) const {
        const bool read_once = !pages && kRows == 16;
        if (read_once) copy_async<16>(to, from, valid, policy);
        else copy_async<16>(to, from, valid);
    }
    DEVICE void load(DecodeStage& stage, int first_key) {
        // Lines a whole number of periods apart have the same places.
        constexpr int kPeriod = KeyColumn::kPeriod;
        constexpr int kPlaces = kLinesAtOnce < kPeriod ? kPeriod / kLinesAtOnce : 1;
        static_assert(kPlaces * kLinesAtOnce % kPeriod == 0, "threads' lines repeat");
        int places[kPlaces];
#pragma unroll
        for (int i = 0; i < kPlaces; ++i)
            places[i] = KeyColumn::place(line + i * kLinesAtOnce, vector);
        const auto copy = [&](int i, const Element* from_k, const Element* from_v, bool pages) {
            const int place = places[i % kPlaces] + i / kPlaces * kPlaces * kLinesAtOnce * kVectors;
            // What is not there is zero: a weight of zero does not hide NaN.
            const bool valid = first_key + i * kLinesAtOnce + line < end;
            copy_line(&stage.k.columns[0].chunks[place], from_k, has_k && valid, pages);
            copy_line(&stage.v.columns[0].chunks[place], from_v, has_v && valid, pages);
        };
        if (paged()) {
            if constexpr (!kPagesAhead) find_pages(first_key);
#pragma unroll
            for (int i = 0; i < kCopies; ++i) {
                const int page = pages[i] < 0 ? 0 : pages[i] < last_page ? pages[i] : last_page;
                int key = first_key + i * kLinesAtOnce + line;
                const int within = page_size.take_from(key);  // again: eight registers less
                copy(i, k + page * k_page + within * k_row, v + page * v_page + within * v_row,
                     true);
            }
            if constexpr (kPagesAhead) find_pages(first_key + kTileK);
        } else {
#pragma unroll
            for (int i = 0; i < kCopies; ++i) {
                copy(i, k, v, false);
                k += kLinesAtOnce * k_row, v += kLinesAtOnce * v_row;
            }
            constexpr int kOthers = kTileK - kCopies * kLinesAtOnce;  // keys
            k += kOthers * k_row, v += kOthers * v_row;
        }
    }
};

// The tiles of a block's task on their way, and its queries.
struct TileLoads {
    KeySource source;
    int key, end;  // of the next tile, and of the task
    int next_stage;

    DEVICE TileLoads(const DecodeParams& params, const DecodeTask& task, const KeyArrays& caches,
                     const int* block_table)
        : source(params, task, caches, block_table),
          key(task.first),
          end(task.end),
          next_stage(0) {}
    // The next tile, if there is one.  load_more() also comes with the first one.
    template <class LoadMore>
    DEVICE void start(DecodeStage (&stages)[kStages], bool is_first, const LoadMore& load_more) {
        if (key < end) {
            source.load(stages[next_stage], key);
            if (is_first) load_more();
            key += kTileK;
        }
        copy_async_commit();
        next_stage = next_stage + 1 < kStages ? next_stage + 1 : 0;
    }
};
