// How keys and values get into shared memory, by TMA: of caches whose strides it walks, and of pages of
// whole boxes.  The maps are those of (batch or page, head, key, element); boxes of params.box_keys keys by
// 64 elements, swizzled by 128 bytes.
// Constants: Element, kDim (at least those of q and v), kTileK (keys of a tile), kStages.
#include "parts/decode_queries.cuh"

constexpr int kColumnDim = 64;  // numbers in 128 bytes
struct KeyColumn {
    static constexpr int kChunks = 8;
    Bytes<16> chunks[kTileK * kChunks];

    DEVICE static int place(int line, int chunk) { return line * kChunks + (chunk ^ line % 8); }
    DEVICE void* operator()(int line, int chunk) { return &chunks[place(line, chunk)]; }
    DEVICE const void* operator()(int line, int chunk) const { return &chunks[place(line, chunk)]; }
};
struct KeyTile {
    static constexpr int kColumns = kDim / kColumnDim;
    KeyColumn columns[kColumns];

    DEVICE void* operator()(int line, int chunk) { return columns[chunk / 8](line, chunk % 8); }
    DEVICE const void* operator()(int line, int chunk) const {
        return columns[chunk / 8](line, chunk % 8);
    }
};
static_assert(sizeof(KeyTile) % 1024 == 0, "the swizzle's pattern repeats");
struct DecodeStage {
    KeyTile k, v;
};
struct SourceStorage {
    Barrier full[kStages];
};
struct KeyArrays {
    const TensorMap& k;
    const TensorMap& v;
};

// Each of the first warp's lanes brings one box of a tile's keys.
struct KeySource {
    const KeyArrays& caches;
    Barrier* full;
    const int* table;  // of this sequence, or null
    Divisor page_size;
    int last_page, end, box_keys, kv_head, batch, lane;
    int page, within;  // where this lane's box of the next tile begins
    int parity;
    bool has_box;

    DEVICE KeySource(const DecodeParams& params, const KeyArrays& caches, const int* block_table,
                     const DecodeTask& task, SourceStorage& storage)
        : caches(caches), full(storage.full),
          table(block_table ? block_table + task.batch * params.table_stride : nullptr),
          page_size(params.page_size), last_page(params.num_pages - 1), end(task.end),
          box_keys(params.box_keys), kv_head(int(task.kv_head)), batch(int(task.batch)),
          lane(int(threadIdx.x)), parity(0) {
        has_box = lane * box_keys < kTileK;
        find_page(task.first);
        if (lane == 0) {
            for (int i = 0; i < kStages; ++i) full[i].init(1);
            fence_barrier_init();
        }
        sync_block();
    }
    // One tile ahead, so that nothing waits for the table.
    DEVICE void find_page(int first_key) {
        if (!has_box) return;
        within = first_key + lane * box_keys, page = batch;
        if (!table) return;
        int index = within;
        const int key = within;
        within = page_size.take_from(index);
        page = key < end ? table[index] : 0;
        if (key >= end) within = page_size.by;  // what lies outside is zero
    }
    // Before a barrier, after which all have read the stage that is next to be loaded.
    DEVICE void wait() { copy_async_wait<0>(); }  // for the queries
    // Until the stage is whole.  Keys behind the last: a weight of zero does not hide NaN of values.
    DEVICE void wait_whole(DecodeStage& stage, int index, int first_key) {
        full[index].wait(parity);
        if (index == kStages - 1) parity ^= 1;
        if (first_key + kTileK <= end) return;
        const int first = (end - first_key) * kVectors;
        for (int i = first + int(threadIdx.x); i < kTileK * kVectors; i += kNumThreads) {
            *static_cast<Bytes<16>*>(stage.v(i / kVectors, i % kVectors)) = Bytes<16>();
        }
        sync_block();
    }
    DEVICE void load(DecodeStage& stage, int index, int first_key) {
        if (int(threadIdx.x) >= kWarpSize) return;
        if (lane == 0) full[index].arrive_expect_tx(2 * int(sizeof(KeyTile)));
        sync_warp();
        if (!has_box) return;
        int from = page;
        if (table) from = page < 0 ? 0 : page < last_page ? page : last_page;
#pragma unroll
        for (int column = 0; column < KeyTile::kColumns; ++column) {
            const int at[4] = {column * kColumnDim, within, kv_head, from};
            const int place = lane * box_keys * KeyColumn::kChunks;
            tma_load(&stage.k.columns[column].chunks[place], caches.k, full[index], at);
            tma_load(&stage.v.columns[column].chunks[place], caches.v, full[index], at);
        }
        find_page(first_key + kTileK);
    }
};
