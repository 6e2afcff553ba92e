// One kernel launch.
#pragma once
#include <stdio.h>

#include "platform/host/fiber.h"
#include "platform/host/interface.h"

namespace host {
namespace {

// An array that the previous kernel writes (previous_grid.h); layout: targets/host.py.
struct LateArray {
    char *array, *copy;
    unsigned long long bytes;
};

struct Launch {
    Entry entry;
    void** args;
    int grid, num_threads, cluster_size, warp_size, order;
    unsigned shared_bytes;
    unsigned long long seed;
    bool overlaps;    // its threads call wait_for_previous_grid
    LateArray* late;  // empty if the previous kernel has ended
    int num_late;
    bool hidden;

    int next_cluster;  // atomic
    int stop;          // atomic; set by an error and by cancel
    int num_workers;   // that run it; under the pool's lock
    bool submitted, queued, finished;
    Launch* next;
    char error[2048];

    int num_clusters() const { return grid / cluster_size; }
    bool stopped() const { return __atomic_load_n(&stop, __ATOMIC_RELAXED); }
    // Only the first error is reported.
    void fail(const char* message) {
        int expected = 0;
        if (__atomic_compare_exchange_n(&stop, &expected, 1, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_RELAXED)) {
            Unobserved unobserved;  // an abandoned fiber does not order memory
            snprintf(error, sizeof(error), "%s", message);
        }
    }
};

}  // namespace
}  // namespace host
