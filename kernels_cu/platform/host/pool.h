// Worker threads, one per CPU, started once, and the queue of launches.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "platform/host/cluster.h"

namespace host {
namespace {

class Pool {
  public:
    static void* operator new(size_t size) noexcept { return malloc(size); }
    // One pool per process: threads do not survive a fork.
    static Pool& get() {
        static Pool* pool;
        Pool* p = __atomic_load_n(&pool, __ATOMIC_ACQUIRE);
        while (!p || p->pid_ != getpid()) {
            Pool* fresh = new Pool();
            if (__atomic_compare_exchange_n(&pool, &p, fresh, false, __ATOMIC_ACQ_REL,
                                            __ATOMIC_ACQUIRE)) {
                fresh->start_workers();
                return *fresh;
            }
            free(fresh);
        }
        return *p;
    }
    void submit(Launch* launch) {
        pthread_mutex_lock(&lock_);
        launch->submitted = launch->queued = true;
        Launch** last = &queue_;
        while (*last) last = &(*last)->next;
        *last = launch;
        if (launch->num_clusters() == 1) pthread_cond_signal(&work_);
        else pthread_cond_broadcast(&work_);
        pthread_mutex_unlock(&lock_);
    }
    // Returns whether the launch finishes within `milliseconds` (negative: no limit).
    bool wait(Launch* launch, int milliseconds) {
        timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += long(milliseconds % 1000) * 1000000;
        until.tv_sec += milliseconds / 1000 + until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        pthread_mutex_lock(&lock_);
        int error = 0;
        while (!launch->finished && error == 0) {
            if (milliseconds < 0) pthread_cond_wait(&finished_, &lock_);
            else error = pthread_cond_timedwait(&finished_, &lock_, &until);
        }
        const bool finished = launch->finished;
        pthread_mutex_unlock(&lock_);
        return finished;
    }
    // Cancels `launch`, started or not, and returns when no worker runs it.
    void cancel(Launch* launch) {
        __atomic_store_n(&launch->stop, 1, __ATOMIC_RELAXED);
        pthread_mutex_lock(&lock_);
        unlink(launch);
        while (launch->num_workers > 0) pthread_cond_wait(&finished_, &lock_);
        pthread_mutex_unlock(&lock_);
    }

  private:
    Pool() : pid_(getpid()), queue_(nullptr) {
        pthread_mutex_init(&lock_, nullptr);
        pthread_cond_init(&work_, nullptr);
        pthread_condattr_t monotonic;
        pthread_condattr_init(&monotonic);
        pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
        pthread_cond_init(&finished_, &monotonic);
    }
    void start_workers() {
        cpu_set_t cpus;
        const int count = sched_getaffinity(0, sizeof(cpus), &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
        sigset_t all, before;  // signals go to Python's threads
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        for (int i = 0; i < count; ++i) {
            pthread_t thread;
            if (pthread_create(&thread, nullptr, work_loop, this) != 0) break;
            pthread_detach(thread);
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    static void* work_loop(void* argument) {
        Pool& pool = *static_cast<Pool*>(argument);
        flush_subnormals();
        pthread_mutex_lock(&pool.lock_);
        for (;;) {
            while (!pool.queue_) pthread_cond_wait(&pool.work_, &pool.lock_);
            Launch* launch = pool.queue_;
            ++launch->num_workers;
            if (launch->num_late > 0) pool.unlink(launch);  // its clusters share hidden arrays
            pthread_mutex_unlock(&pool.lock_);
            run_clusters(*launch);
            pthread_mutex_lock(&pool.lock_);
            pool.unlink(launch);  // all clusters have been started
            if (--launch->num_workers == 0) {
                launch->finished = true;
                pthread_cond_broadcast(&pool.finished_);
            }
        }
        return nullptr;
    }
    void unlink(Launch* launch) {
        if (!launch->queued) return;
        Launch** p = &queue_;
        while (*p != launch) p = &(*p)->next;
        *p = launch->next;
        launch->queued = false;
    }

    pid_t pid_;
    pthread_mutex_t lock_;
    pthread_cond_t work_, finished_;
    Launch* queue_;
};

}  // namespace
}  // namespace host
