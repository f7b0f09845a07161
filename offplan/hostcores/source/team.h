// Threads that run one function at a time, all of them at once.
#pragma once
#include <immintrin.h>
#include <sched.h>
#include <time.h>
#include <atomic>
#include <cstdint>

// Nanoseconds without work after which threads sleep: a step's layers are closer to one another, and
// 16 threads take 160 us to wake. Source: estimated.
static const int64_t SPIN_NS = 20000000;

static inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}

typedef void (*Body)(void* arguments, int worker, int num_workers);

struct Team {
  int num_workers = 1;
  virtual void run(Body body, void* arguments) = 0;
  virtual ~Team() {}
};

// Wait for what another thread is about to do; where it has lost its core, let it have this one.
template <class Done>
static inline void spin_until(Done done) {
  for (int64_t spins = 0; !done(); spins++) {
    if (spins < 4096) _mm_pause();
    else sched_yield();
  }
}

// A meeting of all workers, used once. Those that wait look at a word that is written once: at the
// number of those that came, each look would take it from the next one who comes.
struct Meeting {
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<bool> all_came{false};
  void wait(int num_workers) {
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == num_workers - 1)
      all_came.store(true, std::memory_order_release);
    else spin_until([&] { return all_came.load(std::memory_order_acquire); });
  }
};
