// How keys, values and queries of attention for decoding get into shared memory.
// Constants: Element, kRows, kDim (at least those of q and v), kTileK (keys of a tile).
#include "parts/decode_task.cuh"
#include "parts/shared_tile.cuh"

constexpr int kVectors = kDim / 8;  // of 16 bytes, in a key
// Lines of a tile that a thread copies one vector of.
constexpr int kLinesAtOnce = kNumThreads / kVectors;
constexpr int kCopies = kTileK / kLinesAtOnce;
static_assert(kCopies * kLinesAtOnce == kTileK, "threads share a tile's vectors");

using KeyTile = SharedTile<kTileK, kDim * 2>;
using QueryTile = SharedTile<kRows, kDim * 2>;
struct DecodeStage {
    KeyTile k, v;
};

// Brings the tiles of keys and values, one after another.  A thread copies one vector of each of
// kCopies keys.
struct KeySource {
    const Element* k;  // contiguous: of this thread's first key in the next tile; paged: of no key
    const Element* v;
    const int* table;  // of this sequence, or null
    int64_t k_page, v_page, k_row, v_row;
    Divisor page_size;
    int last_page, end, line, vector;
    bool has_k, has_v;
    int pages[kCopies], within[kCopies];  // where the next tile's keys are

    DEVICE KeySource(const DecodeParams& params, const Element* k_cache, const Element* v_cache,
                     const int* block_table, const DecodeTask& task) {
        line = int(threadIdx.x) / kVectors, vector = int(threadIdx.x) % kVectors;
        k_page = params.k[0], v_page = params.v[0], k_row = params.k[2], v_row = params.v[2];
        k = k_cache + task.kv_head * params.k[1] + vector * 8;
        v = v_cache + task.kv_head * params.v[1] + vector * 8;
        if (!block_table) {
            k += task.batch * k_page + (task.first + line) * k_row;
            v += task.batch * v_page + (task.first + line) * v_row;
        }
        table = block_table ? block_table + task.batch * params.table_stride : nullptr;
        page_size = params.page_size, last_page = params.num_pages - 1;
        end = task.end;
        has_k = vector * 8 < params.dim, has_v = vector * 8 < params.dim_v;
        find_pages(task.first);
    }
    // One tile ahead, so that nothing waits for the table.
    DEVICE void find_pages(int first_key) {
        if (!table) return;
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            const int key = first_key + i * kLinesAtOnce + line;
            int page = key;
            within[i] = page_size.take_from(page);
            pages[i] = key < end ? table[page] : 0;
        }
    }
    DEVICE void load(DecodeStage& stage, int first_key) {
        // Lines a whole number of periods apart have the same places.
        constexpr int kPeriod = KeyTile::kPeriod;
        constexpr int kPlaces = kLinesAtOnce < kPeriod ? kPeriod / kLinesAtOnce : 1;
        static_assert(kPlaces * kLinesAtOnce % kPeriod == 0, "threads' lines repeat");
        int places[kPlaces];
#pragma unroll
        for (int i = 0; i < kPlaces; ++i) places[i] = KeyTile::place(line + i * kLinesAtOnce, vector);
        const auto copy = [&](int i, const Element* from_k, const Element* from_v) {
            const int place = places[i % kPlaces] + i / kPlaces * kPlaces * kLinesAtOnce * kVectors;
            // What is not there is zero: a weight of zero does not hide NaN.
            const bool valid = first_key + i * kLinesAtOnce + line < end;
            copy_async<16>(&stage.k.chunks[place], from_k, has_k && valid);
            copy_async<16>(&stage.v.chunks[place], from_v, has_v && valid);
        };
        if (!table) {
#pragma unroll
            for (int i = 0; i < kCopies; ++i) {
                copy(i, k, v);
                k += kLinesAtOnce * k_row, v += kLinesAtOnce * v_row;
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            const int page = pages[i] < 0 ? 0 : pages[i] < last_page ? pages[i] : last_page;
            copy(i, k + page * k_page + within[i] * k_row, v + page * v_page + within[i] * v_row);
        }
        find_pages(first_key + kTileK);
    }
};

// Starts to load the rows' queries; rows that there are not are zero.  Not unrolled: code is to be fetched
// as well.
DEVICE void load_queries(QueryTile& tile, const DecodeParams& params, const Element* q,
                         const DecodeTask& task) {
    const int tid = int(threadIdx.x);
    q += task.batch * params.q[0];
    const auto row_of = [&](int i, bool& valid) {
        const int row = task.first_row + i;
        valid = row < params.num_rows;
        int head = row;
        const int query = params.queries.take_from(head);
        const int64_t first_head = task.kv_head * params.heads_per_kv_head;
        return q + (valid ? (first_head + head) * params.q[1] + query * params.q[2] : 0);
    };
    bool valid;
    if (params.query_vectors) {
#pragma unroll 1
        for (int i = tid; i < kRows * kVectors; i += kNumThreads) {
            const int vector = i % kVectors;
            const Element* row = row_of(i / kVectors, valid);
            copy_async<16>(tile(i / kVectors, vector), row + vector * 8,
                           valid && vector * 8 < params.dim);
        }
        return;
    }
#pragma unroll 1
    for (int i = tid; i < kRows * kDim; i += kNumThreads) {
        const int col = i % kDim;
        const Element* row = row_of(i / kDim, valid);
        static_cast<Element*>(tile(i / kDim, col / 8))[col % 8] =
            valid && col < params.dim ? row[col * params.q[3]] : from_float<Element>(0.0f);
    }
}
