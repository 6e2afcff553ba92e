// Fibers, barriers, blocks and clusters: what one worker holds of the GPU.

struct Block;
struct Fiber;
struct Warpgroup;

enum Scope { kWarp, kWarpgroup, kBlock, kCluster, kPhase, kStores };

// Where threads meet.  `place` is that of the first to arrive.
struct Barrier {
    Scope scope;
    int arrived, expected;
    const char* word;
    Location location;
    Combine combine;
    unsigned phase;
    TSAN(long long sync[2];)  // by phase, so that early arrivals at the next one order nothing here
};

struct Warp {
    Barrier barrier;
    Fiber* lanes;
    int num_lanes;
    int num_ready;  // in `ready`, which the sticky schedule uses
    Fiber* ready[64];
};

// A Barrier of the kernel; `place` is where it was initialised, `arrived` and `expected` are this
// phase's.
struct PhaseBarrier : Barrier {
    const void* address;
    Block* owner;
    long long bytes;  // expected and not here yet; negative: here and not expected yet
};

// What TMA, an asynchronous store or wgmma has under way.  A store by TMA is done in two steps.
struct Transfer {
    enum Kind { kLoad, kRead, kWrite, kWord, kBulk, kProducts } kind;
    Fiber* issuer;
    Location location;
    TensorMap map;
    int at[5];
    char* shared;  // a store's source, else the destination
    Block* block;  // whose shared memory that is
    PhaseBarrier* barrier;
    int bytes;
    int group;             // of the issuer's stores
    char* data;            // a store's source, as it was when issued; a word
    const char* global;    // a bulk copy's source
    Warpgroup* warpgroup;  // whose products
};

// Who wrote 16 bytes of shared memory last, by store_matrix, after how many of its fences for
// asynchronous transfers.
struct StoredLine {
    const Fiber* by;
    int num_proxy_fences;
};

struct Copy {
    char* shared;
    const char* global;  // null: zeros
    int bytes;
    int group;
};

struct Fiber : ThreadView {
    Context context;
    Block* owner;
    Warp* warp;
    int index;  // in the block
    bool done;
    const Barrier* waiting_for;  // null: ready, running or done
    const char* word;
    Location location;
    void* payload;
    bool arrived_at_cluster;
    unsigned cluster_phase;
    int num_groups, num_copies, copy_capacity;
    Copy* copies;
    int parity;  // that it waits for at a PhaseBarrier
    int num_store_groups;
    int num_wgmma_groups;
    bool wgmma_fenced;
    int num_proxy_fences;
};

constexpr int kNumBarriers = 16;  // sync_block's and the named ones

struct Block : BlockView {
    Barrier barriers[kNumBarriers];
    Fiber* threads;
    char* shared;  // kStaticBytes for the static arrays, and the dynamic struct behind them
    bool started;
    int live;
};

constexpr int kMaxClusterSize = 16;
constexpr int kMaxThreads = 1024;
constexpr int kMaxArrays = 64;
constexpr int kMaxPhaseBarriers = 1024;    // of a cluster
constexpr size_t kStaticBytes = 48 << 10;  // as on CUDA
constexpr size_t kDynamicOffset = kStaticBytes + 2 * kRedzone * kMaxArrays;

struct Cluster {
    int size, num_threads, warp_size, warps_per_block;
    Block blocks[kMaxClusterSize];
    Fiber* fibers;
    Warp* warps;
    Barrier barrier;
    int live;
    PhaseBarrier* phase_barriers;  // made by the first
    int num_phase_barriers;
    Transfer* transfers;
    int num_transfers, transfer_capacity;
    Barrier stores;      // for those who wait for theirs
    StoredLine* stored;  // of all shared memory; made by the first store_matrix
    bool has_stored;
    Warpgroup* warpgroups;  // made by the first wgmma
    // The static arrays met so far lie at the same offsets in all blocks.
    const SharedArray* arrays[kMaxArrays];
    size_t offsets[kMaxArrays];
    int num_arrays;
    size_t static_bytes, dynamic_bytes;

    int num_fibers() const { return size * num_threads; }
    int num_warps() const { return size * warps_per_block; }
};

// --- schedules -------------------------------------------------------------------------------
// Which of the ready fibers runs next.  fifo: who waits longest.  lifo: who came last.  sticky: one
// warp as far as it can go, then another at random.
enum Order { kFifo, kLifo, kSticky };

class ReadyList {
  public:
    void reset(Order order, unsigned long long seed, Cluster* cluster) {
        order_ = order;
        random_ = seed * 0x9e3779b97f4a7c15ull + 0x1234567;
        cluster_ = cluster;
        first_ = count_ = 0;
        warp_ = 0;
        for (int i = 0; i < cluster->num_warps(); ++i) cluster->warps[i].num_ready = 0;
    }
    void push(Fiber* fiber) {
        if (order_ == kSticky) {
            fiber->warp->ready[fiber->warp->num_ready++] = fiber;
        } else {
            fibers_[(first_ + count_) % kCapacity] = fiber;
        }
        ++count_;
    }
    // Null: nobody is ready.
    Fiber* pop() {
        if (count_ == 0) return nullptr;
        --count_;
        if (order_ == kSticky) return pop_of_warp();
        if (order_ == kLifo) return fibers_[(first_ + count_) % kCapacity];
        return fibers_[first_++ % kCapacity];
    }

    Order order() const { return order_; }
    unsigned random() {  // xorshift64*
        random_ ^= random_ >> 12;
        random_ ^= random_ << 25;
        random_ ^= random_ >> 27;
        return unsigned((random_ * 0x2545f4914f6cdd1dull) >> 32);
    }

  private:
    Fiber* pop_of_warp() {
        const int num_warps = cluster_->num_warps();
        if (cluster_->warps[warp_].num_ready == 0) {
            warp_ = int(random() % unsigned(num_warps));
            while (cluster_->warps[warp_].num_ready == 0) warp_ = (warp_ + 1) % num_warps;
        }
        Warp& warp = cluster_->warps[warp_];
        Fiber*& chosen = warp.ready[random() % unsigned(warp.num_ready)];
        Fiber* fiber = chosen;
        chosen = warp.ready[--warp.num_ready];
        return fiber;
    }

    static constexpr unsigned kCapacity = kMaxClusterSize * kMaxThreads;
    Order order_;
    unsigned long long random_;
    Cluster* cluster_;
    unsigned first_, count_;
    int warp_;
    Fiber* fibers_[kCapacity];
};
