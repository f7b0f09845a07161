#include "coordinator.h"
#include <sched.h>
#include <sys/prctl.h>
#include <time.h>
#include <algorithm>

static void doze(int64_t ns) {
  const timespec time = {ns / 1000000000, ns % 1000000000};
  nanosleep(&time, nullptr);
}
// Nanoseconds between looks at a bell, once the coordinator dozes: this part of the pause so far, up to
// the most. Nobody rings after a long pause who has not woken it. And between the watchdog's looks.
static const int64_t PART_OF_PAUSE = 256, MOST_DOZE_NS = 10000000, WATCH_NS = 20000000;
// Nanoseconds between the copier's looks while it waits for a product or a piece, of which one takes
// 20 us or more on any link.
static const int64_t COPIER_DOZE_NS = 10000;
// Nanoseconds for which a bell may go unheard.
static const int64_t UNHEARD_NS = 1000000000;
// Nanoseconds for which the driver may keep the copier.
static const int64_t MOST_CALL_NS = 10000000000;
// Nanoseconds for which a thread that is to end is waited for.
static const int64_t MOST_END_NS = 2000000000;

bool Coordinator::start(Team* its_team, Words* its_words, int its_core) {
  team = its_team, words = its_words, core = its_core;
  words->bell.store(0), words->answer.store(NO_ANSWER);
  pthread_condattr_t steady;
  pthread_condattr_init(&steady);
  pthread_condattr_setclock(&steady, CLOCK_MONOTONIC);
  pthread_cond_init(&woken, &steady);
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

void Coordinator::wake() {
  pthread_mutex_lock(&mutex);
  is_woken = true;
  pthread_cond_signal(&woken);
  pthread_mutex_unlock(&mutex);
}

// Sleep, unless woken before; returns true if woken.
bool Coordinator::sleep(int64_t ns) {
  const int64_t until = now_ns() + ns;
  const timespec time = {until / 1000000000, until % 1000000000};
  pthread_mutex_lock(&mutex);
  if (!is_woken) pthread_cond_timedwait(&woken, &mutex, &time);
  const bool was_woken = is_woken;
  is_woken = false;
  pthread_mutex_unlock(&mutex);
  return was_woken;
}

// From the first failure on nothing is done any more, and the watchdog answers every bell.
void Coordinator::fail(int64_t reason) {
  int64_t nothing = 0;
  why.compare_exchange_strong(nothing, reason);
  words->answer.store(FAILED, std::memory_order_release);
}

// Note what a job lists, before it is answered: until then nobody writes another list there.
bool Coordinator::list_later(const Later* later) {
  if (!later || later->list->count <= 0) return false;
  const int64_t number = num_listed.load(std::memory_order_relaxed);
  // a layer's next list comes when its last one is copied, so there are no more than layers
  if (!has_copier || number - num_copied.load(std::memory_order_acquire) >= MOST_PENDING) {
    fail(3);
    return false;
  }
  Pending& added = pending[number % MOST_PENDING];
  added = {later, *later->list, 0, 0, 0};
  added.list.count = std::min(added.list.count, (int32_t)LaterList::MOST);
  num_listed.store(number + 1, std::memory_order_release);
  return true;
}

void Coordinator::wake_copier() {
  pthread_mutex_lock(&mutex);
  pthread_cond_signal(&listed);
  pthread_mutex_unlock(&mutex);
}

int Coordinator::copy_by(const Driver& its_driver, uint64_t target, const void* source) {
  struct Begun {
    Coordinator* own;
    uint64_t target;
    const void* source;
    std::atomic<bool> is_warm{false};
    int status = 0;
  } begun;
  begun.own = this, begun.target = target, begun.source = source;
  driver = its_driver;
  has_left.store(false);
  if (pthread_create(&copier, nullptr, [](void* given) -> void* {
        Begun& found = *(Begun*)given;
        Coordinator& self = *found.own;
        const int status = found.status = self.warm(found.target, found.source);
        found.is_warm.store(true, std::memory_order_release);  // from here on `found` is gone
        if (!status) self.carry();
        self.has_left.store(true);
        return nullptr;
      }, &begun)) {
    has_left.store(true);
    return -1;
  }
  has_copier = true;
  while (!begun.is_warm.load(std::memory_order_acquire)) doze(COPIER_DOZE_NS);
  return begun.status;
}

// Call each function once: the driver loads what they need.
int Coordinator::warm(uint64_t target, const void* source) {
  int status = driver.set_context ? driver.set_context(driver.context) : -1;
  if (!status && target) status = driver.copy(target, source, 4, driver.stream);
  for (int i = 0; i < 2 && !status && driver.record; i++) {
    status = driver.record(driver.events[i], driver.stream);
    if (!status && (status = driver.query(driver.events[i])) == Driver::NOT_READY) status = 0;
  }
  if (!status && driver.synchronize) status = driver.synchronize(driver.stream);
  return status;
}

// Of two pieces one is being copied while the next waits. More would be on the link when a step has
// the next layer's experts cross, which it waits for. Source: an H200, where pieces of 18 experts a
// step, queued at once, took 1.3 ms of steps of 9.2.
bool Coordinator::may_copy() const {
  if (began_ns.load(std::memory_order_acquire) || words->bell.load()) return false;
  if (!driver.query || num_queued < 2) return true;
  return driver.query(driver.events[num_queued % 2]) != Driver::NOT_READY;  // another error the copy has, too
}

// Queue the next piece of the oldest list, and behind its last one the word that says so.
void Coordinator::copy_piece() {
  const int64_t since = now_ns(), number = num_copied.load(std::memory_order_relaxed);
  Pending& next = pending[number % MOST_PENDING];
  const Later& later = *next.later;
  const LaterTensor& part = later.tensors[next.part];
  const auto& pair = next.list.pairs[next.nth];
  const int64_t bytes = std::min(part.bytes - next.first, (int64_t)PIECE_BYTES);
  int status = driver.copy(part.slots + pair.slot * part.bytes + next.first,
                           part.experts + pair.expert * part.bytes + next.first, bytes, driver.stream);
  queued_bytes.fetch_add(bytes, std::memory_order_relaxed);
  next.first += bytes;
  if (next.first == part.bytes) next.first = 0, next.part++;
  if (next.part == later.num_tensors) next.part = 0, next.nth++;
  const bool is_last = next.nth == next.list.count;
  // the list itself has the word: nobody changes it before this copy is done
  if (is_last && !status) status = driver.copy(later.done, &later.list->sequence, 4, driver.stream);
  if (!status && driver.record) status = driver.record(driver.events[num_queued % 2], driver.stream);
  num_queued++;
  if (status) fail(3);
  queueing_ns.fetch_add(now_ns() - since, std::memory_order_relaxed);
  if (is_last && !status) num_copied.store(number + 1, std::memory_order_release);
}

// Copy what is listed, and sleep while nothing is.
void Coordinator::carry() {
  prctl(PR_SET_TIMERSLACK, 1000);  // else each doze takes 50 us more
  auto is_idle = [&] { return num_copied.load() == num_listed.load(std::memory_order_acquire); };
  while (!is_over()) {
    if (is_idle()) {
      pthread_mutex_lock(&mutex);
      while (is_idle() && !is_over()) pthread_cond_wait(&listed, &mutex);
      pthread_mutex_unlock(&mutex);
      continue;
    }
    called_ns.store(now_ns());
    const bool may = !is_over() && may_copy();  // asked again: whoever drains looks at `called_ns`
    if (may) copy_piece();
    called_ns.store(0);
    if (!may) doze(COPIER_DOZE_NS);
  }
}

void Coordinator::drain() {
  const int64_t own = asked.fetch_add(1) + 1;
  wake();
  while (drained.load(std::memory_order_acquire) < own && !is_over() && !has_ended.load()) sched_yield();
  while (num_copied.load(std::memory_order_acquire) != num_listed.load() && !is_over()) sched_yield();
  for (const int64_t until = now_ns() + MOST_END_NS; called_ns.load() && now_ns() < until;) sched_yield();
  if (!called_ns.load() && driver.synchronize && driver.synchronize(driver.stream)) fail(3);
}

void Coordinator::serve() {
  if (core >= 0) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);
  }
  int64_t heard_ns = now_ns();
  for (int64_t looks = 0; !is_over(); looks++) {
    const int64_t wanted = asked.load();  // before the bell: whoever asks has rung earlier
    const uint32_t number = words->bell.load(std::memory_order_acquire);
    if (!number) {
      if (drained.load(std::memory_order_relaxed) != wanted)
        drained.store(wanted, std::memory_order_release);
      _mm_pause();
      const int64_t pause = looks % 256 ? 0 : now_ns() - heard_ns;
      if (pause > SPIN_NS) {
        if (sleep(std::min(pause / PART_OF_PAUSE, MOST_DOZE_NS))) heard_ns = now_ns();
        looks = -1;  // one look at a time
      }
      continue;
    }
    words->bell.store(0, std::memory_order_relaxed);
    const Job& job = jobs[number <= num_jobs.load(std::memory_order_acquire) ? number : 0];
    limit_ns.store(job.limit_ns, std::memory_order_relaxed);
    const int64_t began = now_ns();
    began_ns.store(began, std::memory_order_release);
    int failed = 0;
    const bool lists = job.kind == EXPERTS && list_later(((const ::Experts*)job.task)->later);
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
    // an answer that something failed may be older than this bell, whose kernel took it back
    if (failed || why.load()) fail(1);
    else words->answer.store(DONE, std::memory_order_release);
    if (lists) wake_copier();
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
    const int64_t called = called_ns.load();
    if (called && now - called > MOST_CALL_NS) fail(3);
    rung_ns = !rings || began ? 0 : rung_ns ? rung_ns : now;
    if (began && now - began > limit_ns.load()) fail(2);
    if (rung_ns && now - rung_ns > UNHEARD_NS) words->bell.store(0), fail(2);
  }
}

bool Coordinator::end() {
  ends.store(true);
  wake(), wake_copier();
  pthread_join(watchdog, nullptr);
  // a thread that hangs is not waited for longer than a job may take
  auto have_ended = [&] { return has_ended.load() && has_left.load(); };
  for (const int64_t until = now_ns() + MOST_END_NS; !have_ended() && now_ns() < until;) doze(1000000);
  if (words->bell.load() || words->answer.load() == NO_ANSWER)
    words->answer.store(FAILED, std::memory_order_release);
  if (!have_ended()) {
    pthread_detach(worker);
    if (has_copier) pthread_detach(copier);
    return false;
  }
  pthread_join(worker, nullptr);
  if (has_copier) pthread_join(copier, nullptr);
  if (driver.synchronize) driver.synchronize(driver.stream);  // memory that copies write is given back
  return true;
}
