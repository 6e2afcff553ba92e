// named_barrier_arrive(id, count): arrives at named barrier `id` of `count` threads without
// waiting: the other half of named_barrier, for the threads that let others in.
#pragma once

#if defined(HOST_WARP_SIZE)
DEVICE void named_barrier_arrive(int id, int count, HOST_LOCATION) {
    host::runtime->named_barrier_arrive(id, count, location);
}
#else
DEVICE void named_barrier_arrive(int id, int count) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory");
}
#endif
