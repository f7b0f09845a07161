// Computes products for a GPU's stream: a word rings, the cores compute, a word answers.
#pragma once
#include <pthread.h>
#include "products.h"

enum JobKind : int64_t { NOTHING, DENSE, EXPERTS, SLEEP };
enum Answer : uint32_t { NO_ANSWER, DONE, FAILED };

// The words that the stream and the coordinator share, in page-locked memory, each in a cache line
// of its own. A kernel writes 0 to `answer`, a job's number to `bell`; the stream waits until
// `answer` is 1 or more. It comes to the next job when it has this one's answer, so one pair serves all jobs.
struct alignas(64) Words {
  std::atomic<uint32_t> bell;
  uint8_t between[60];
  std::atomic<uint32_t> answer;
};

// The driver's functions by which experts are copied to a device, each 0 where it succeeds; tests
// have stand-ins. Nothing is linked with the driver.
//
// Any of them may wait for a lock that a thread of the session holds while the GPU works: one that
// loads a kernel at its first launch, or gives memory back, waits for the GPU. The GPU waits for an
// answer. So the thread that hears bells calls none of them: a copier does, beside it. An answer then
// comes whatever the driver does. What waits for the copier is a layer's next lookup alone, which is
// in a later step, when the kernels of a step are loaded, and which gives up by itself. What the
// copier's own first calls load, they load before the first bell: `copy_by` waits for one of each.
struct Driver {
  static const int NOT_READY = 600;
  int (*set_context)(void* context);
  int (*copy)(uint64_t target, const void* source, size_t bytes, void* stream);
  int (*synchronize)(void* stream);
  void *context, *stream;
  // Note that a stream comes to an event, and ask whether it has: NOT_READY if not. Without them
  // (null) all pieces are queued at once.
  int (*record)(void* event, void* stream);
  int (*query)(void* event);
  void* events[2];
};

// Experts that a step has listed, of which some are to be copied yet.
struct Pending {
  const Later* later;
  LaterList list;
  int64_t nth, part, first;  // the next piece: of which pair and part, and its first byte
};

struct Coordinator {
  static const int64_t MOST_JOBS = 1 << 14, MOST_PENDING = 1 << 10, PIECE_BYTES = 1 << 20;
  struct Job {
    int64_t kind;
    const void* task;  // a Dense, an Experts, or of SLEEP the milliseconds
    int64_t limit_ns;
  };

  // Takes the team over, and has the words until `end`. Returns false where there is no thread.
  bool start(Team* team, Words* words, int core);
  // Add a job; its number, or 0 where there is no room. The task stays where it is.
  int64_t add(int64_t kind, const void* task, int64_t limit_ns);
  // Ring for a job and wait for the answer, as the stream does.
  uint32_t exchange(uint32_t job);
  // Have bells heard at once, though none rang for a while: said before a stream rings again.
  void wake();
  // End all threads, every wait being answered. Returns false where a worker hangs: memory that
  // it may still use is then left to it.
  bool end();
  // Copy by a driver what jobs list for later: said once, before there is such a job. First a word of
  // 4 bytes is copied, if there is one. Returns 0, the driver's error, or -1 where there is no thread.
  int copy_by(const Driver& its_driver, uint64_t target, const void* source);
  // Wait until no job is under way and all that was listed for later is copied, or nothing is done
  // any more. For one thread, which no stream rings beside.
  void drain();
  // What went wrong: 0 nothing, 1 memory ran out, 2 the cores did not answer in time, 3 the driver.
  int64_t trouble() const { return why.load(); }
  // Nanoseconds of products, nanoseconds in which copies were queued, and their bytes.
  std::atomic<int64_t> busy_ns{0}, queueing_ns{0}, queued_bytes{0};

 private:
  Team* team = nullptr;
  Words* words = nullptr;
  int core = -1;
  Job jobs[MOST_JOBS]{};  // the first is that of a number which is none: it does nothing
  std::atomic<int64_t> num_jobs{0}, why{0}, began_ns{0}, limit_ns{0}, num_done{0};
  std::atomic<int64_t> asked{0}, drained{0};
  std::atomic<bool> ends{false}, has_ended{false};
  pthread_t worker, watchdog, copier;
  Driver driver{};
  bool has_copier = false;
  Pending pending[MOST_PENDING];  // a ring: the worker adds to it, and the copier takes from it
  std::atomic<int64_t> num_listed{0}, num_copied{0};
  int64_t num_queued = 0;  // pieces
  std::atomic<int64_t> called_ns{0};  // since when the copier may be in a function of the driver's; 0 if not
  std::atomic<bool> has_left{true};   // the copier has ended
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t listed = PTHREAD_COND_INITIALIZER, woken;
  bool is_woken = false;
  void fail(int64_t reason);
  bool is_over() const { return why.load() || ends.load(); }
  bool list_later(const Later* later);
  void wake_copier();
  bool sleep(int64_t ns);
  int warm(uint64_t target, const void* source);
  bool may_copy() const;
  void copy_piece();
  void serve();
  void watch();
  void carry();
};
