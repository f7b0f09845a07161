// What Python calls. Calls of one thread at a time use a team.
#include <cpuid.h>
#include <pthread.h>
#include <new>
#include "coordinator.h"

// The calling thread's own OpenMP workers: libgomp's functions, which torch has loaded.
struct OpenMp : Team {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  int (*count)();
  Body body;
  void* arguments;
  static void enter(void* team) {
    OpenMp& self = *(OpenMp*)team;
    self.body(self.arguments, self.count());
  }
  void run(Body with, void* its_arguments) override {
    body = with, arguments = its_arguments;
    if (num_workers == 1) body(arguments, 1);
    else parallel(enter, this, (unsigned)num_workers, 0);
  }
};

// The caller and threads of our own, which spin for a while and then sleep. A thread that has lost its
// core to another program comes late: where the work is done by then it finds the round closed. Only
// those that have entered are waited for.
struct Pool : Team {
  // A round, whether it is closed, and how many of a group are inside.
  struct alignas(64) Door {
    static const uint64_t CLOSED = 1ull << 31;
    std::atomic<uint64_t> state{CLOSED};
    static uint32_t round_of(uint64_t state) { return (uint32_t)(state >> 32); }
    void open(uint32_t round) { state.store((uint64_t)round << 32, std::memory_order_release); }
    // Returns false where the round is closed, or is the one that was `seen` last, which then is the
    // door's.
    bool enter(uint32_t& seen) {
      uint64_t found = state.load(std::memory_order_acquire);
      while (round_of(found) != seen && !(found & CLOSED))
        if (state.compare_exchange_weak(found, found + 1, std::memory_order_acq_rel)) {
          seen = round_of(found);
          return true;
        }
      seen = round_of(found);
      return false;
    }
    void leave() { state.fetch_sub(1, std::memory_order_release); }
    void close() { state.fetch_or(CLOSED, std::memory_order_acq_rel); }
    bool is_empty() const { return (uint32_t)state.load(std::memory_order_acquire) == CLOSED; }
  };
  struct Worker {
    Pool* pool;
    int number, core;
    pthread_t thread;
  };
  Worker* workers = nullptr;
  int num_started = 0;
  alignas(64) std::atomic<uint32_t> round{0};
  Door doors[Groups::MOST];  // of groups of threads
  alignas(64) std::atomic<int> num_asleep{0};
  std::atomic<bool> ends{false};
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
  Body body;
  void* arguments;

  static void pin(int core) {
    if (core < 0) return;
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);
  }
  static void* work(void* arguments) {
    Worker& self = *(Worker*)arguments;
    Pool& pool = *self.pool;
    pin(self.core);
    for (uint32_t seen = 0;;) {
      const int64_t since = now_ns();
      for (int64_t i = 1; pool.round.load(std::memory_order_relaxed) == seen; i++) {
        if (i % 64 == 0 && now_ns() - since > SPIN_NS) break;
        _mm_pause();
      }
      if (pool.round.load() == seen) {
        pthread_mutex_lock(&pool.mutex);
        pool.num_asleep.fetch_add(1);
        while (pool.round.load() == seen) pthread_cond_wait(&pool.wake, &pool.mutex);
        pool.num_asleep.fetch_sub(1);
        pthread_mutex_unlock(&pool.mutex);
      }
      if (pool.ends.load()) return nullptr;
      Door& door = pool.doors[Groups(pool.num_started).of(self.number - 1)];
      if (!door.enter(seen)) continue;
      pool.body(pool.arguments, pool.num_workers);
      door.leave();
    }
  }
  // Returns false where the system gives no more threads.
  bool start(int num, const int64_t* cores) {
    num_workers = num;
    workers = new (std::nothrow) Worker[num];
    for (int i = 1; workers && i < num; i++) {
      workers[i].pool = this, workers[i].number = i;
      workers[i].core = cores ? (int)cores[i] : -1;
      if (pthread_create(&workers[i].thread, nullptr, work, &workers[i])) return false;
      num_started = i;
    }
    return workers != nullptr;
  }
  void next_round() {
    round.fetch_add(1);
    if (num_asleep.load()) {
      pthread_mutex_lock(&mutex);
      pthread_cond_broadcast(&wake);
      pthread_mutex_unlock(&mutex);
    }
  }
  void run(Body with, void* its_arguments) override {
    body = with, arguments = its_arguments;
    const int num_doors = num_started ? Groups(num_started).num : 0;
    for (int i = 0; i < num_doors; i++) doors[i].open(round.load() + 1);
    next_round();
    body(arguments, num_workers);
    for (int i = 0; i < num_doors; i++) doors[i].close();
    for (int i = 0; i < num_doors; i++) spin_until([&] { return doors[i].is_empty(); });
  }
  ~Pool() override {
    ends.store(true);
    next_round();
    for (int i = 1; i <= num_started; i++) pthread_join(workers[i].thread, nullptr);
    delete[] workers;
  }
};

#define EXPORT __attribute__((visibility("default")))
extern "C" {
// Bit 0: AVX2 with FMA and F16C; bit 1: AVX-512 with F, DQ, BW, VL, BF16, VBMI and VNNI. Asked of the
// processor itself: zig's __builtin_cpu_supports knows of none. Source: Intel's manual, CPUID.
EXPORT int64_t offplan_instruction_sets() {
  uint32_t a, b, c1, d, b7, c7, a71 = 0, low, high;
  if (!__get_cpuid(1, &a, &b, &c1, &d)) return 0;
  if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d)) return 0;
  if (a >= 1) __get_cpuid_count(7, 1, &a71, &b, &d, &d);
  if (!(c1 >> 27 & 1)) return 0;  // the system keeps no wide registers
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  int64_t found = 0;
  if ((low & 0x06) == 0x06 && (b7 >> 5 & 1) && (c1 >> 12 & 1) && (c1 >> 29 & 1)) found |= 1;
  const uint32_t wide = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
  const uint32_t more = 1u << 1 | 1u << 11;
  if ((low & 0xe6) == 0xe6 && (b7 & wide) == wide && (c7 & more) == more && (a71 >> 5 & 1)) found |= 2;
  return found;
}

EXPORT const Kernels* offplan_kernels(int64_t with_avx512) { return with_avx512 ? &AVX512 : &AVX2; }

// Of all products that begin from now on.
EXPORT void offplan_row_order(int64_t order) { row_order = (RowOrder)order; }

EXPORT void offplan_tables(const float* fp4, const float* fp8) {
  const int64_t found = offplan_instruction_sets();
  if (found & 1) AVX2.set_tables(fp4, fp8);
  if (found & 2) AVX512.set_tables(fp4, fp8);
}

EXPORT int64_t offplan_sizes(int64_t which) {
  const int64_t sizes[] = {sizeof(Matrix), sizeof(Dense), sizeof(::Experts), sizeof(Words),
                           sizeof(LaterList), sizeof(LaterTensor), sizeof(Later), sizeof(Driver)};
  return sizes[which];
}

EXPORT void* offplan_openmp(int64_t num_workers, void* parallel, void* count) {
  OpenMp* team = new (std::nothrow) OpenMp;
  if (!team) return nullptr;
  team->num_workers = (int)num_workers;
  team->parallel = (decltype(team->parallel))parallel;
  team->count = (decltype(team->count))count;
  return (Team*)team;
}

EXPORT void* offplan_pool(int64_t num_workers, const int64_t* cores) {
  Pool* team = new (std::nothrow) Pool;
  if (team && !team->start((int)num_workers, cores)) {
    delete team;
    team = nullptr;
  }
  return (Team*)team;
}

EXPORT void offplan_end(void* team) { delete (Team*)team; }
EXPORT int64_t offplan_multiply(void* team, const Dense* dense) { return multiply(*(Team*)team, *dense); }
EXPORT int64_t offplan_multiply_experts(void* team, const Experts* experts) {
  return multiply_experts(*(Team*)team, *experts);
}
EXPORT void offplan_read(void* team, const uint8_t* bytes, int64_t num_bytes) {
  read(*(Team*)team, bytes, num_bytes);
}

// What a host function of a stream is given: it rings, and waits for the answer.
struct Call {
  Coordinator* coordinator;
  int64_t job;
};
EXPORT void offplan_call(void* call) {
  ((Call*)call)->coordinator->exchange((uint32_t)((Call*)call)->job);
}

EXPORT void* offplan_coordinator(void* team, void* words, int64_t core) {
  Coordinator* made = new (std::nothrow) Coordinator;
  if (made && !made->start((Team*)team, (Words*)words, (int)core)) {
    delete made;
    made = nullptr;
  }
  return made;
}
EXPORT int64_t offplan_add_job(void* coordinator, int64_t kind, const void* task, int64_t limit) {
  return ((Coordinator*)coordinator)->add(kind, task, limit);
}
EXPORT int64_t offplan_exchange(void* coordinator, int64_t job) {
  return ((Coordinator*)coordinator)->exchange((uint32_t)job);
}
EXPORT int64_t offplan_copy_by(void* coordinator, const Driver* driver, uint64_t target,
                               const void* source) {
  return ((Coordinator*)coordinator)->copy_by(*driver, target, source);
}
EXPORT void offplan_wake(void* coordinator) { ((Coordinator*)coordinator)->wake(); }
EXPORT void offplan_drain(void* coordinator) { ((Coordinator*)coordinator)->drain(); }
EXPORT int64_t offplan_counter(void* coordinator, int64_t which) {
  const Coordinator& its = *(Coordinator*)coordinator;
  const std::atomic<int64_t>* counters[] = {&its.busy_ns, &its.queueing_ns, &its.queued_bytes};
  return counters[which]->load();
}
EXPORT int64_t offplan_trouble(void* coordinator) {
  return ((Coordinator*)coordinator)->trouble();
}
// Where a worker hangs the coordinator is left to it.
EXPORT int64_t offplan_end_coordinator(void* coordinator) {
  Coordinator* ended = (Coordinator*)coordinator;
  const bool all = ended->end();
  if (all) delete ended;
  return all;
}
}
