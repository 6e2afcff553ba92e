// Deadlock messages: which threads wait where, and what the others do.
#pragma once
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "platform/host/state.h"

namespace host {
namespace {

class Text {
  public:
    Text(char* buffer, int size) : p_(buffer), end_(buffer + size) { *p_ = 0; }
    void add(const char* format, ...) __attribute__((format(printf, 2, 3))) {
        va_list args;
        va_start(args, format);
        const int n = vsnprintf(p_, end_ - p_, format, args);
        va_end(args);
        p_ += n < end_ - p_ ? n : end_ - p_ - 1;
    }

  private:
    char *p_, *end_;
};

bool same_location(const Location& a, const Location& b) {
    return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

// Whether two fibers are in the same state: both done, or both in one primitive at one line.
bool alike(const Fiber& a, const Fiber& b) {
    if (a.done || b.done) return a.done == b.done;
    if (!a.waiting_for || !b.waiting_for) return a.waiting_for == b.waiting_for;
    if (a.waiting_for->scope == kPhase && a.waiting_for != b.waiting_for) return false;
    return strcmp(a.primitive, b.primitive) == 0 && same_location(a.location, b.location);
}

// Adds the threads of [first, first + count) in the state of `like`: "32 threads (0-30, 63) ".
void describe_threads(Text& text, const Fiber* first, int count, const Fiber& like,
                      bool with_indices) {
    int n = 0;
    for (int i = 0; i < count; ++i) n += alike(first[i], like);
    text.add("%d thread%s ", n, n == 1 ? "" : "s");
    if (!with_indices) return;
    text.add("(");
    int ranges = 0;
    for (int i = 0; i < count; ++i) {
        if (!alike(first[i], like)) continue;
        int last = i;
        while (last + 1 < count && alike(first[last + 1], like)) ++last;
        if (ranges++ == 4) {
            text.add(", ...");
            break;
        }
        text.add("%s%d", ranges > 1 ? ", " : "", first[i].index);
        if (last > i) text.add("-%d", first[last].index);
        i = last;
    }
    text.add(") ");
}

// Adds why the threads at `barrier` cannot continue.
void describe_divergence(Text text, const Cluster& cluster, const Barrier& barrier) {
    const Fiber* first = cluster.fibers;
    int count = cluster.num_fibers();
    const Fiber* waiting = first;
    while (waiting->waiting_for != &barrier) ++waiting;
    const Block& block = *waiting->owner;
    text.add("%s:%d: %s: %d of %d ", barrier.location.file, barrier.location.line,
             barrier.primitive, barrier.arrived, barrier.expected);
    if (barrier.scope == kWarp) {
        first = waiting->warp->lanes;
        count = waiting->warp->num_lanes;
        text.add("lanes of warp %d of block %u", waiting->index / cluster.warp_size,
                 block.block_index.x);
    } else if (barrier.scope == kWarpgroup) {
        first = block.threads + waiting->index / 128 * 128;
        count = 128;
        text.add("threads of warpgroup %d of block %u", waiting->index / 128, block.block_index.x);
    } else if (barrier.scope == kBlock) {
        first = block.threads;
        count = cluster.num_threads;
        text.add("threads of block %u", block.block_index.x);
    } else {
        text.add("threads of the cluster of block %u", cluster.blocks[0].block_index.x);
    }
    text.add(" arrived");
    for (int i = 0; i < count; ++i) {
        bool seen = false;
        for (int j = 0; j < i && !seen; ++j) seen = alike(first[i], first[j]);
        const Fiber& f = first[i];
        const bool here = f.waiting_for == &barrier &&
                          same_location(f.location, barrier.location) &&
                          strcmp(f.primitive, barrier.primitive) == 0;
        if (seen || here || (!f.done && !f.waiting_for)) continue;
        text.add("; ");
        describe_threads(text, first, count, f, barrier.scope != kCluster);
        if (f.done) {
            text.add("left the kernel");
        } else {
            text.add("wait at %s:%d: %s", f.location.file, f.location.line, f.primitive);
        }
    }
}

// Returns a barrier of the smallest scope that has waiting fibers: its message is most specific.
const Barrier* narrowest_barrier(const Cluster& cluster) {
    const Barrier* found = nullptr;
    for (int i = 0; i < cluster.num_fibers(); ++i) {
        const Barrier* b = cluster.fibers[i].waiting_for;
        if (b && (!found || b->scope < found->scope)) found = b;
    }
    return found;
}

// Adds what is missing in the phase that `f` waits for.
void describe_phase(Text& text, const Fiber& f) {
    const PhaseBarrier& b = *static_cast<const PhaseBarrier*>(f.waiting_for);
    text.add(" for parity %d of the Barrier of %s:%d: ", f.parity, b.location.file,
             b.location.line);
    if (int(b.phase % 2) != f.parity) {
        text.add("that phase is over");
        return;
    }
    text.add("%d of %d arrivals", b.arrived, b.expected);
    if (b.bytes > 0) text.add(", %lld bytes are missing", b.bytes);
    if (b.bytes < 0) text.add(", %lld bytes more than expected", -b.bytes);
}

// Adds why no fiber can continue: all threads' states, first of those that wait at an mbarrier.
void describe_stall(Text text, const Cluster& cluster) {
    int groups = 0;
    for (int pass = 0; pass < 2; ++pass) {
        const bool at_phase = pass == 0;
        for (int i = 0; i < cluster.num_fibers(); ++i) {
            const Fiber& f = cluster.fibers[i];
            const Fiber* first = f.owner->threads;
            if ((f.waiting_for && f.waiting_for->scope == kPhase) != at_phase) continue;
            bool seen = false;
            for (int j = 0; j < f.index && !seen; ++j) seen = alike(first[j], f);
            if (seen) continue;
            if (groups++ > 0) text.add("; ");
            if (f.waiting_for)
                text.add("%s:%d: %s: ", f.location.file, f.location.line, f.primitive);
            describe_threads(text, first, cluster.num_threads, f, true);
            text.add("of block %u %s", f.owner->block_index.x, f.done ? "left the kernel" : "wait");
            if (at_phase) describe_phase(text, f);
        }
    }
}

bool waits_at_phase(const Cluster& cluster) {
    for (int i = 0; i < cluster.num_fibers(); ++i) {
        const Barrier* b = cluster.fibers[i].waiting_for;
        if (b && b->scope == kPhase) return true;
    }
    return false;
}

}  // namespace
}  // namespace host
