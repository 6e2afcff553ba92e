// wait_for_previous_grid.
//
// A launch with late arrays behaves as if the previous kernel wrote them at the last moment.  They
// are poison (0xff) until all threads of a cluster wait: an earlier read gives another result, and
// an earlier write is detected.  Clusters run one after another; each starts with poison.
#pragma once
#include <stdlib.h>
#include <string.h>

#include "platform/host/barriers.h"

namespace host {
namespace {

// In an overlapping kernel, accesses to global memory and a thread's end must follow the wait.
void check_waited_for_grid(const char* message, Location location) {
    if (worker->launch->overlaps && !worker->current->waited_for_grid) fail_at(message, location);
}
void check_access(Location location) {
    check_waited_for_grid("an access to global memory before wait_for_previous_grid", location);
}

void hide_late_arrays(Launch& launch) {
    for (int i = 0; i < launch.num_late; ++i) {
        LateArray& late = launch.late[i];
        late.copy = static_cast<char*>(malloc(late.bytes));
        memcpy(late.copy, late.array, late.bytes);
        memset(late.array, 0xff, late.bytes);
    }
    launch.hidden = launch.num_late > 0;
}

// Returns whether the arrays still held poison everywhere.
bool show_late_arrays(Launch& launch) {
    bool untouched = true;
    if (!launch.hidden) return untouched;
    for (int i = 0; i < launch.num_late; ++i) {
        const LateArray& late = launch.late[i];
        for (unsigned long long j = 0; j < late.bytes; ++j)
            untouched &= late.array[j] == char(0xff);
        memcpy(late.array, late.copy, late.bytes);
        free(late.copy);
    }
    launch.hidden = false;
    return untouched;
}

void wait_for_previous_grid(Location location) {
    Fiber* self = worker->current;
    Launch& launch = *worker->launch;
    if (self->waited_for_grid) fail_at("wait_for_previous_grid twice", location);
    self->waited_for_grid = true;
    if (launch.num_late == 0) return;  // a barrier would hide races
    Cluster& c = worker->cluster;
    const int count = c.num_fibers();
    if (c.previous_grid.arrived == count - 1 && !show_late_arrays(launch)) {
        fail_at("a thread wrote to global memory before wait_for_previous_grid", location);
    }
    arrive_and_wait(c.previous_grid, c.fibers, count, count, "wait_for_previous_grid", location,
                    false, false);
}

}  // namespace
}  // namespace host
