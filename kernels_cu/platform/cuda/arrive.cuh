// turns.cuh on CUDA.
#pragma once

// Arrives at named barrier `id` of `count` threads and does not wait.
DEVICE void named_barrier_arrive(int id, int count) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory");
}
