// turns.cuh on the host.
#pragma once

DEVICE void named_barrier_arrive(int id, int count, HOST_LOCATION) {
    host::runtime->named_barrier_arrive(id, count, location);
}
