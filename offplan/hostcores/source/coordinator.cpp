#include "coordinator.h"
#include <sched.h>
#include <time.h>

static void doze(int64_t ns) {
  const timespec time = {ns / 1000000000, ns % 1000000000};
  nanosleep(&time, nullptr);
}
// Nanoseconds between looks at a bell, once the coordinator dozes, and between the watchdog's.
static const int64_t DOZE_NS = 50000, WATCH_NS = 20000000;
// Nanoseconds for which a bell may go unheard.
static const int64_t UNHEARD_NS = 1000000000;

bool Coordinator::start(Team* its_team, Words* its_words, int its_core) {
  team = its_team, words = its_words, core = its_core;
  words->bell.store(0), words->answer.store(NO_ANSWER);
  if (pthread_create(&worker, nullptr, [](void* self) -> void* {
        ((Coordinator*)self)->serve();
        return nullptr;
      }, this))
    return false;
  if (pthread_create(&watchdog, nullptr, [](void* self) -> void* {
        ((Coordinator*)self)->watch();
        return nullptr;
      }, this)) {
    ends.store(true);
    pthread_join(worker, nullptr);
    return false;
  }
  return true;
}

int64_t Coordinator::add(int64_t kind, const void* task, int64_t its_limit_ns) {
  const int64_t number = num_jobs.load() + 1;
  if (number >= MOST_JOBS) return 0;
  jobs[number] = {kind, task, its_limit_ns};
  num_jobs.store(number, std::memory_order_release);
  return number;
}

uint32_t Coordinator::exchange(uint32_t job) {
  words->answer.store(NO_ANSWER);
  words->bell.store(job, std::memory_order_release);
  spin_until([&] { return words->answer.load(std::memory_order_acquire) != NO_ANSWER; });
  return words->answer.load();
}

// From the first failure on nothing is done any more, and the watchdog answers every bell.
void Coordinator::fail(int64_t reason) {
  int64_t nothing = 0;
  why.compare_exchange_strong(nothing, reason);
  words->answer.store(FAILED, std::memory_order_release);
}

void Coordinator::serve() {
  if (core >= 0) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);
  }
  int64_t heard_ns = now_ns();
  for (int64_t looks = 0; !ends.load(std::memory_order_relaxed) && !why.load(); looks++) {
    const uint32_t number = words->bell.load(std::memory_order_acquire);
    if (!number) {
      _mm_pause();
      if (looks % 256 == 0 && now_ns() - heard_ns > SPIN_NS) doze(DOZE_NS);
      continue;
    }
    words->bell.store(0, std::memory_order_relaxed);
    const Job& job = jobs[number <= num_jobs.load(std::memory_order_acquire) ? number : 0];
    limit_ns.store(job.limit_ns, std::memory_order_relaxed);
    began_ns.store(now_ns(), std::memory_order_release);
    int failed = 0;
    switch (job.kind) {
      case DENSE: failed = multiply(*team, *(const Dense*)job.task); break;
      case EXPERTS: failed = multiply_experts(*team, *(const ::Experts*)job.task); break;
      case SLEEP: doze((int64_t)job.task * 1000000); break;
      default: break;
    }
    began_ns.store(0, std::memory_order_release);
    heard_ns = now_ns();
    num_done.fetch_add(1, std::memory_order_relaxed);
    if (why.load()) break;  // the watchdog was sooner, and its answer stands
    if (failed) fail(1);
    else words->answer.store(DONE, std::memory_order_release);
  }
  has_ended.store(true);
}

void Coordinator::watch() {
  int64_t rung_ns = 0;
  while (!ends.load()) {
    doze(why.load() ? 1000000 : WATCH_NS);
    const int64_t now = now_ns(), began = began_ns.load(std::memory_order_acquire);
    const bool rings = words->bell.load() != 0;
    if (why.load()) {  // nobody else hears
      if (rings) words->bell.store(0), words->answer.store(FAILED, std::memory_order_release);
      continue;
    }
    rung_ns = !rings || began ? 0 : rung_ns ? rung_ns : now;
    if (began && now - began > limit_ns.load()) fail(2);
    if (rung_ns && now - rung_ns > UNHEARD_NS) words->bell.store(0), fail(2);
  }
}

bool Coordinator::end() {
  ends.store(true);
  pthread_join(watchdog, nullptr);
  // a worker that hangs is not waited for longer than a job may take
  for (int64_t waited = 0; !has_ended.load() && waited < 2000; waited++) doze(1000000);
  if (words->bell.load() || words->answer.load() == NO_ANSWER)
    words->answer.store(FAILED, std::memory_order_release);
  if (!has_ended.load()) {
    pthread_detach(worker);
    return false;
  }
  pthread_join(worker, nullptr);
  return true;
}
