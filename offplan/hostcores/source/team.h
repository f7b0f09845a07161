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

typedef void (*Body)(void* arguments, int num_workers);

// Runs a function by workers that each do what is left of its work, until none is. Workers that come
// when the work is done may be left out, so a function waits for work and for no worker.
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

// Workers are counted in groups: whoever counts takes the number's cache line from the one before.
struct Groups {
  static const int MOST = 16;
  int num;
  explicit Groups(int workers) : num(workers < 4 * MOST ? (workers + 3) / 4 : MOST) {}
  int of(int worker) const { return worker % num; }
};
struct alignas(64) Number {
  std::atomic<int64_t> value{0};
};

// Pieces of work that all have to be done before anybody goes on, used once: workers that do none are
// not waited for. Those that wait look at a word that is written once: at the number of pieces, each
// look would take it from the next one who counts.
struct Pieces {
  Number num_done, are_done;
  void count(int64_t num, int64_t of) {
    if (num_done.value.fetch_add(num, std::memory_order_acq_rel) == of - num)
      are_done.value.store(1, std::memory_order_release);
  }
  void wait() {
    spin_until([&] { return are_done.value.load(std::memory_order_acquire) != 0; });
  }
};
