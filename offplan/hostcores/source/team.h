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

// Workers are counted in groups: whoever counts takes the number's cache line from the one before.
struct Groups {
  static const int MOST = 16;
  int num_workers, num;
  explicit Groups(int workers)
      : num_workers(workers), num(workers < 4 * MOST ? (workers + 3) / 4 : MOST) {}
  int of(int worker) const { return worker % num; }
  int size(int group) const { return (num_workers - group + num - 1) / num; }
};
struct alignas(64) Number {
  std::atomic<int64_t> value{0};
};

// A meeting of all workers, used once. Those that wait look at a word that is written once: at the
// number of those that came, each look would take it from the next one who comes.
struct Meeting {
  Number arrived[Groups::MOST], groups_arrived, all_came[Groups::MOST];
  void wait(int worker, int num_workers) {
    const Groups groups(num_workers);
    const int own = groups.of(worker);
    auto is_last = [](Number& number, int of) {
      return number.value.fetch_add(1, std::memory_order_acq_rel) == of - 1;
    };
    if (is_last(arrived[own], groups.size(own)) && is_last(groups_arrived, groups.num))
      for (int i = 0; i < groups.num; i++) all_came[i].value.store(1, std::memory_order_release);
    else spin_until([&] { return all_came[own].value.load(std::memory_order_acquire) != 0; });
  }
};
