#include "coordinator.h"
#include <sched.h>
#include <time.h>
#include <algorithm>

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

// Note what a job lists, before it is answered: until then nobody writes another list there.
void Coordinator::list_later(const Later* later) {
  if (!later || later->list->count <= 0) return;
  while (num_pending == MOST_PENDING) copy_piece();
  Pending& added = pending[(oldest + num_pending++) % MOST_PENDING];
  added = {later, *later->list, 0, 0, 0};
  added.list.count = std::min(added.list.count, (int32_t)LaterList::MOST);
}

// Of two pieces one is being copied while the next waits. More would be on the link when a step has
// the next layer's experts cross, which it waits for. Source: an H200, where pieces of 18 experts a
// step, queued at once, took 1.3 ms of steps of 9.2.
bool Coordinator::may_copy() const {
  if (!num_pending || !driver.query || num_queued < 2) return num_pending;
  return driver.query(driver.events[num_queued % 2]) != Driver::NOT_READY;  // another error the copy has, too
}

// Queue the next piece of the oldest list, and behind its last one the word that says so.
void Coordinator::copy_piece() {
  const int64_t since = now_ns();
  Pending& next = pending[oldest];
  const Later& later = *next.later;
  int status = 0;
  if (!has_context) status = driver.set_context ? driver.set_context(driver.context) : -1;
  has_context = true;
  const LaterTensor& part = later.tensors[next.part];
  const auto& pair = next.list.pairs[next.nth];
  const int64_t bytes = std::min(part.bytes - next.first, (int64_t)PIECE_BYTES);
  if (!status)
    status = driver.copy(part.slots + pair.slot * part.bytes + next.first,
                         part.experts + pair.expert * part.bytes + next.first, bytes, driver.stream);
  queued_bytes.fetch_add(bytes, std::memory_order_relaxed);
  next.first += bytes;
  if (next.first == part.bytes) next.first = 0, next.part++;
  if (next.part == later.num_tensors) next.part = 0, next.nth++;
  if (next.nth == next.list.count) {
    // the list itself has the word: nobody changes it before this copy is done
    if (!status) status = driver.copy(later.done, &later.list->sequence, 4, driver.stream);
    oldest = (oldest + 1) % MOST_PENDING, num_pending--;
  }
  if (!status && driver.record) status = driver.record(driver.events[num_queued % 2], driver.stream);
  num_queued++;
  if (status) num_pending = 0, fail(3);
  queueing_ns.fetch_add(now_ns() - since, std::memory_order_relaxed);
}

void Coordinator::drain() {
  const int64_t own = asked.fetch_add(1) + 1;
  while (drained.load(std::memory_order_acquire) < own) {
    if (why.load() || ends.load() || has_ended.load()) break;
    sched_yield();
  }
  if (driver.synchronize && driver.synchronize(driver.stream)) fail(3);
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
    const int64_t wanted = asked.load();  // before the bell: whoever asks has rung earlier
    const uint32_t number = words->bell.load(std::memory_order_acquire);
    if (!number) {
      if (looks % 16 == 0 && may_copy()) {  // asking takes a lock of the driver's
        copy_piece();
        continue;
      }
      if (!num_pending && drained.load(std::memory_order_relaxed) != wanted)
        drained.store(wanted, std::memory_order_release);
      _mm_pause();
      if (looks % 256 == 0 && !num_pending && now_ns() - heard_ns > SPIN_NS) doze(DOZE_NS);
      continue;
    }
    words->bell.store(0, std::memory_order_relaxed);
    const Job& job = jobs[number <= num_jobs.load(std::memory_order_acquire) ? number : 0];
    limit_ns.store(job.limit_ns, std::memory_order_relaxed);
    const int64_t began = now_ns();
    began_ns.store(began, std::memory_order_release);
    int failed = 0;
    if (job.kind == EXPERTS) list_later(((const ::Experts*)job.task)->later);
    switch (job.kind) {
      case DENSE: failed = multiply(*team, *(const Dense*)job.task); break;
      case EXPERTS: failed = multiply_experts(*team, *(const ::Experts*)job.task); break;
      case SLEEP: doze((int64_t)job.task * 1000000); break;
      default: break;
    }
    began_ns.store(0, std::memory_order_release);
    heard_ns = now_ns();
    busy_ns.fetch_add(heard_ns - began, std::memory_order_relaxed);
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
  if (driver.synchronize) driver.synchronize(driver.stream);  // memory that copies write is given back
  return true;
}
