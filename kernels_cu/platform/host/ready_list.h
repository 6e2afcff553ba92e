// The fibers that can run, and the order in which they do.
#pragma once
#include "platform/host/state.h"

namespace host {
namespace {

// Which ready fiber runs next.  fifo: the first that became ready.  lifo: the last.  sticky: those
// of one warp until none is ready, then those of another warp, at random.
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
    // Returns null if no fiber is ready.
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

}  // namespace
}  // namespace host
