// Threads that run one function at a time, all of them at once.
#pragma once
#include <immintrin.h>
#include <sched.h>
#include <atomic>
#include <cstdint>

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

// A meeting of all workers, used once.
struct Meeting {
  std::atomic<int> arrived{0};
  void wait(int num_workers) {
    arrived.fetch_add(1, std::memory_order_acq_rel);
    spin_until([&] { return arrived.load(std::memory_order_acquire) >= num_workers; });
  }
};
