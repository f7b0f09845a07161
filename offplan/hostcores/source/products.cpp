#include "products.h"
#include <stdlib.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

RowOrder row_order = OF_PROCESSOR;

// Memory of one thread that starts products, kept from one to the next; grows, and ends with it.
struct Room {
  uint8_t* memory = nullptr;
  int64_t size = 0, used = 0;
  ~Room() { free(memory); }
  bool reserve(int64_t bytes) {
    used = 0;
    if (bytes <= size) return true;
    free(memory);
    memory = (uint8_t*)aligned_alloc(64, (bytes + 63) / 64 * 64);
    size = memory ? bytes : 0;
    return memory != nullptr;
  }
  static int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }
  template <class T>
  T* take(int64_t count) {
    T* made = (T*)(memory + used);
    used += rounded(count * sizeof(T));
    return made;
  }
};
static thread_local Room room;

static inline void store(void* to, int64_t at, float value, bool precise) {
  if (precise) ((float*)to)[at] = value;
  else ((uint16_t*)to)[at] = to_bf16(value);
}

struct Deal {  // deals units out: several at a time while there are many, one at the end
  alignas(64) std::atomic<int64_t> next{0};
  bool take(int64_t num, int64_t workers, int64_t& first, int64_t& stop, int64_t most = 4) {
    const int64_t seen = next.load(std::memory_order_relaxed);
    if (seen >= num) return false;
    const int64_t count =
        std::max<int64_t>(1, std::min<int64_t>(most, (num - seen) / (4 * workers)));
    first = next.fetch_add(count);
    stop = std::min(first + count, num);
    return first < num;
  }
};

// How the rows of a matrix are dealt out: so many at a time that a worker reads some 64 KB in a run,
// few enough that at the end none waits long for another. Source: 16 cores, where blocks of 64 rows
// by all experts left half of them idle. Where `together` rows make one column of the next matrix,
// a unit has the rows of so many columns.
struct Grain {
  int64_t rows, units, most;
  explicit Grain(const Matrix& a, int64_t together = 1) {
    const int64_t wanted = (UNIT_BYTES / std::max<int64_t>(1, a.row_bytes()) + 15) / 16 * 16;
    const int64_t all = a.kind == PACKED ? BLOCK : std::max<int64_t>(16, std::min(wanted, BLOCK));
    rows = all / together;
    units = (a.num_out / together + rows - 1) / rows;
    most = MOST_ROWS / all;
  }
  static const int64_t MOST_ROWS = 4 * BLOCK;  // that are taken at a time
 private:
  static const int64_t UNIT_BYTES = 1 << 16;
};

// ---- one matrix ----

struct DenseJob {
  const Dense& dense;
  uint8_t* prepared;
  int64_t stride;
  Deal inputs, blocks;
  Pieces ready;
};

static void dense_body(void* arguments, int num_workers) {
  DenseJob& job = *(DenseJob*)arguments;
  const Dense& d = job.dense;
  const Matrix& a = d.weight;
  int64_t first, stop;
  if (d.num_inputs > 1) {
    while (job.inputs.take(d.num_inputs, num_workers, first, stop)) {
      for (int64_t i = first; i < stop; i++)
        d.kernels->prepare(a, d.inputs + i * a.num_in, job.prepared + i * job.stride);
      job.ready.count(stop - first, d.num_inputs);
    }
    job.ready.wait();
  }
  const Grain grain(a);
  float sums[MOST_INPUTS][BLOCK];
  const uint8_t* x[MOST_INPUTS];
  float* y[MOST_INPUTS];
  while (job.blocks.take(grain.units, num_workers, first, stop, grain.most)) {
    const int64_t last = std::min(stop * grain.rows, a.num_out);
    for (int64_t row = first * grain.rows, end; row < last; row = end) {
      end = std::min(row + BLOCK, last);
      for (int64_t begin = 0; begin < d.num_inputs; begin += MOST_INPUTS) {
        const int64_t num = std::min(d.num_inputs - begin, MOST_INPUTS);
        for (int64_t i = 0; i < num; i++)
          x[i] = job.prepared + (begin + i) * job.stride, y[i] = sums[i];
        d.kernels->rows(a, x, y, num, row, end);
        for (int64_t i = 0; i < num; i++)
          for (int64_t r = row; r < end; r++)
            store(d.outputs, (begin + i) * a.num_out + r, sums[i][r - row], d.precise);
      }
    }
  }
}

int multiply(Team& team, const Dense& dense) {
  const int64_t stride = Room::rounded(dense.kernels->prepared_bytes(dense.weight));
  if (!room.reserve(stride * dense.num_inputs)) return 1;
  DenseJob job{dense, room.take<uint8_t>(stride * dense.num_inputs), stride, {}, {}, {}};
  // whoever starts the others prepares a single row: for them to wait for it takes longer
  if (dense.num_inputs == 1) dense.kernels->prepare(dense.weight, dense.inputs, job.prepared);
  team.run(dense_body, &job);
  return 0;
}

// ---- routed experts ----

static inline float exponential(float x) {  // e^x by 2^t, off by 2e-7 of itself
  float t = x * 1.44269504f;
  t = t < -126.f ? -126.f : t;
  t = t > 126.f ? 126.f : t;
  const float whole = (t + 12582912.f) - 12582912.f, f = t - whole;
  const float p = 1.f + f * (0.69314718f + f * (0.24022651f + f * (0.055504109f +
                  f * (0.0096181291f + f * (0.0013333558f + f * 0.000154035f)))));
  const int32_t bits = ((int32_t)whole + 127) << 23;
  float power;
  memcpy(&power, &bits, 4);
  return p * power;
}

static inline float activate(int64_t kind, float x, float alpha) {
  switch (kind) {
    case SILU: return x / (1.f + exponential(-alpha * x));
    case GELU: return 0.5f * x * (1.f + erff(x * 0.70710678f));
    case GELU_TANH: {
      const float u = 0.79788456f * (x + 0.044715f * x * x * x);
      return x / (1.f + exponential(-2.f * u));
    }
    case RELU: return x > 0 ? x : x * 0.f;
    default: return x > 0 ? x * x : x * 0.f;
  }
}

// Gate `num` columns from `first` on. Loops are short and without branches, for the compiler.
template <int64_t KIND>
static void gate_values(const Experts& e, const float* made, const uint16_t* bias, int64_t first,
                        int64_t num, uint16_t* to) {
  const float alpha = (float)e.alpha, limit = (float)e.limit, offset = (float)e.offset;
  const int64_t step = e.is_interleaved ? 2 : 1, up = e.is_interleaved ? 1 : e.down.num_in;
  float gates[Grain::MOST_ROWS], ups[Grain::MOST_ROWS];
  auto gather = [&](int64_t from, float* into) {
    for (int64_t j = 0; j < num; j++) into[j] = made[from + j * step];
    if (bias)
      for (int64_t j = 0; j < num; j++) into[j] += from_bf16(bias[from + j * step]);
  };
  gather(first * step, gates);
  for (int64_t j = 0; j < num; j++) gates[j] = gates[j] > limit ? limit : gates[j];  // NaN stays
  for (int64_t j = 0; j < num; j++) gates[j] = activate(KIND, gates[j], alpha);
  if (e.is_gated) {
    gather(first * step + up, ups);
    for (int64_t j = 0; j < num; j++) {
      ups[j] = ups[j] > limit ? limit : ups[j];
      gates[j] *= (ups[j] < -limit ? -limit : ups[j]) + offset;
    }
  }
  for (int64_t j = 0; j < num; j++) to[first + j] = to_bf16(gates[j]);
}

struct Pair {
  int64_t number;  // token * num_chosen + which
  int64_t expert;
  int64_t inner;  // of its inner columns, those that are multiplied
};

struct ExpertsJob {
  const Experts& e;
  int64_t num_used;       // experts that are chosen
  const int64_t* starts;  // [num_used + 1], where each one's pairs begin
  const Pair* pairs;      // by expert
  const int64_t* places;  // [tokens, num_chosen], where each one's pair is, -1 where there is none
  uint8_t *inputs, *hidden;
  int64_t input_stride, hidden_stride;
  float* made;            // [pairs, up.num_out]
  uint16_t* gated;        // [pairs, inner]
  float* parts;           // [pairs, hidden]
  Number *num_up, *is_ready;  // of each used expert: units of up that are done; down's inputs
  std::atomic<int64_t>* num_done;  // experts that are done with each unit of down
  Deal tokens, up_blocks, down_blocks;
  Pieces ready;
};

// Gate columns `begin` to `end` of what up has made of a used expert, for all of its pairs.
static void gate(const ExpertsJob& job, int64_t used, int64_t begin, int64_t end) {
  const Experts& e = job.e;
  const int64_t wide = e.up.num_out, num = end - begin;
  for (int64_t i = job.starts[used]; i < job.starts[used + 1]; i++) {
    const uint16_t* bias = e.up_bias ? e.up_bias + job.pairs[i].expert * wide : nullptr;
    const float* made = job.made + i * wide;
    uint16_t* to = job.gated + i * e.down.num_in;
    switch (e.activation) {
      case SILU: gate_values<SILU>(e, made, bias, begin, num, to); break;
      case GELU: gate_values<GELU>(e, made, bias, begin, num, to); break;
      case GELU_TANH: gate_values<GELU_TANH>(e, made, bias, begin, num, to); break;
      case RELU: gate_values<RELU>(e, made, bias, begin, num, to); break;
      default: gate_values<RELU_SQUARED>(e, made, bias, begin, num, to); break;
    }
  }
}

// Add what a token's experts have made of some columns, always in the same order.
static void add_parts(const ExpertsJob& job, int64_t begin, int64_t end) {
  const Experts& e = job.e;
  const int64_t hidden = e.down.num_out;
  for (int64_t t = 0; t < e.num_tokens; t++) {
    float sums[BLOCK] = {};
    for (int64_t i = t * e.num_chosen; i < (t + 1) * e.num_chosen; i++) {
      if (job.places[i] < 0) continue;
      const float* part = job.parts + job.places[i] * hidden;
      const bool has_bias = e.down_bias && e.chosen[i] < e.num_experts;
      const uint16_t* bias = has_bias ? e.down_bias + e.chosen[i] * hidden : nullptr;
      for (int64_t r = begin; r < end; r++)
        sums[r - begin] += e.factors[i] * (part[r] + (bias ? from_bf16(bias[r]) : 0.f));
    }
    for (int64_t r = begin; r < end; r++)
      store(e.outputs, t * hidden + r, sums[r - begin], e.precise);
  }
}

// Multiply the rows of up that columns `begin` to `end` of inner are made of.
static void multiply_up(const Experts& e, const Matrix& up, const uint8_t* const* x,
                        float* const* y, int64_t num, int64_t begin, int64_t end) {
  float* here[MOST_INPUTS];
  auto multiply = [&](int64_t first, int64_t stop) {
    for (int64_t i = 0; i < num; i++) here[i] = y[i] + first;
    e.kernels->rows(up, x, here, num, first, stop);
  };
  if (e.is_gated && e.is_interleaved) return multiply(2 * begin, 2 * end);
  multiply(begin, end);
  if (e.is_gated) multiply(e.down.num_in + begin, e.down.num_in + end);
}

static void experts_body(void* arguments, int num_workers) {
  ExpertsJob& job = *(ExpertsJob*)arguments;
  const Experts& e = job.e;
  const int64_t wide = e.up.num_out, inner = e.down.num_in, hidden = e.down.num_out;
  int64_t first, stop;
  if (e.num_tokens > 1) {
    while (job.tokens.take(e.num_tokens, num_workers, first, stop)) {
      for (int64_t t = first; t < stop; t++)
        e.kernels->prepare(e.up, e.inputs + t * e.up.num_in, job.inputs + t * job.input_stride);
      job.ready.count(stop - first, e.num_tokens);
    }
    job.ready.wait();
  }

  const uint8_t* x[MOST_INPUTS];
  float* y[MOST_INPUTS];
  const Grain up(e.up, e.is_gated ? 2 : 1), down(e.down);
  while (job.up_blocks.take(job.num_used * up.units, num_workers, first, stop, up.most))
    for (int64_t unit = first, end; unit < stop; unit = end) {
      const int64_t used = unit / up.units, begin = unit % up.units * up.rows;
      const int64_t from = job.starts[used], num = job.starts[used + 1] - from;
      end = std::min(stop, (used + 1) * up.units);
      for (int64_t i = 0; i < num; i++) {
        const int64_t pair = job.pairs[from + i].number;
        x[i] = job.inputs + pair / e.num_chosen * job.input_stride;
        y[i] = job.made + (from + i) * wide;
      }
      const Pair& pair = job.pairs[from];
      const int64_t last = std::min(begin + (end - unit) * up.rows, pair.inner);
      if (begin < last) {
        multiply_up(e, e.up.of(pair.expert), x, y, num, begin, last);
        gate(job, used, begin, last);
      }
      if (job.num_up[used].value.fetch_add(end - unit, std::memory_order_acq_rel) + end - unit ==
          up.units) {  // whoever is last
        const Matrix its = e.down.first_columns(pair.inner);
        for (int64_t i = from; i < from + num; i++)
          e.kernels->prepare(its, job.gated + i * inner, job.hidden + i * job.hidden_stride);
        job.is_ready[used].value.store(1, std::memory_order_release);
      }
    }

  while (job.down_blocks.take(job.num_used * down.units, num_workers, first, stop, down.most))
    for (int64_t unit = first, end; unit < stop; unit = end) {
      const int64_t used = unit / down.units, begin = unit % down.units;
      const int64_t from = job.starts[used], num = job.starts[used + 1] - from;
      const Pair& pair = job.pairs[from];
      const Matrix its = e.down.of(pair.expert).first_columns(pair.inner);
      // all of up is taken by now, by workers that wait for nobody; whoever waits for them reads
      // its first unit meanwhile
      const int64_t bytes = down.rows * its.row_bytes();
      const char *codes = (const char*)its.part[CODES] + begin * bytes, *until = codes + bytes;
      spin_until([&] {
        if (job.is_ready[used].value.load(std::memory_order_acquire)) return true;
        for (int i = 0; i < 16 && codes < until; i++, codes += 64) _mm_prefetch(codes, _MM_HINT_T1);
        return false;
      });
      end = std::min(stop, (used + 1) * down.units);
      for (int64_t i = 0; i < num; i++) {
        x[i] = job.hidden + (from + i) * job.hidden_stride;
        y[i] = job.parts + (from + i) * hidden + begin * down.rows;
      }
      e.kernels->rows(its, x, y, num, begin * down.rows,
                      std::min((begin + end - unit) * down.rows, hidden));
      for (int64_t u = begin; u < begin + end - unit; u++)  // whoever is last adds them up
        if (job.num_done[u].fetch_add(1, std::memory_order_acq_rel) == job.num_used - 1)
          add_parts(job, u * down.rows, std::min((u + 1) * down.rows, hidden));
    }
}

// Send up to MOST_INPUTS tokens through their experts.
static int multiply_some(Team& team, const Experts& e) {
  const int64_t most = e.num_tokens * e.num_chosen, inner = e.down.num_in;
  // of a part, what is multiplied; of an expert, -CHUNK; num_experts itself is none
  auto columns = [&](int64_t p) { return (e.chosen[p] / e.num_experts - 1) * CHUNK; };
  auto is_valid = [&](int64_t p) { return e.chosen[p] >= 0 && columns(p) && columns(p) < inner; };
  auto expert_of = [&](int64_t p) { return e.chosen[p] % e.num_experts; };
  int64_t first = 0;
  while (first < most && !is_valid(first)) first++;
  if (first == most) {  // nobody is woken where nothing is chosen
    memset(e.outputs, 0, e.num_tokens * e.down.num_out * (e.precise ? 4 : 2));
    return 0;
  }
  const int64_t input_stride = Room::rounded(e.kernels->prepared_bytes(e.up));
  const int64_t hidden_stride = Room::rounded(e.kernels->prepared_bytes(e.down));
  const int64_t units = Grain(e.down).units;
  const int64_t bytes = Room::rounded((e.num_experts + 1) * 8) + Room::rounded((most + 1) * 8) +
                        Room::rounded(most * sizeof(Pair)) + Room::rounded(most * 8) +
                        input_stride * e.num_tokens + hidden_stride * most +
                        Room::rounded(most * e.up.num_out * 4) + Room::rounded(most * inner * 2) +
                        Room::rounded(most * e.down.num_out * 4) + most * 2 * sizeof(Number) +
                        Room::rounded(units * 8);
  if (!room.reserve(bytes)) return 1;
  int64_t* counts = room.take<int64_t>(e.num_experts + 1);
  int64_t* starts = room.take<int64_t>(most + 1);
  Pair* pairs = room.take<Pair>(most);
  int64_t* places = room.take<int64_t>(most);
  memset(counts, 0, (e.num_experts + 1) * 8);
  for (int64_t p = 0; p < most; p++)
    if (is_valid(p)) counts[expert_of(p) + 1]++;
  int64_t num_used = 0;
  starts[0] = 0;
  for (int64_t i = 0; i < e.num_experts; i++) {
    if (counts[i + 1]) starts[num_used + 1] = starts[num_used] + counts[i + 1], num_used++;
    counts[i + 1] += counts[i];
  }
  for (int64_t p = 0; p < most; p++) {
    places[p] = is_valid(p) ? counts[expert_of(p)]++ : -1;
    if (is_valid(p)) pairs[places[p]] = {p, expert_of(p), columns(p) > 0 ? columns(p) : inner};
  }
  ExpertsJob job{e, num_used, starts, pairs, places,
                 room.take<uint8_t>(input_stride * e.num_tokens),
                 room.take<uint8_t>(hidden_stride * most), input_stride, hidden_stride,
                 room.take<float>(most * e.up.num_out), room.take<uint16_t>(most * inner),
                 room.take<float>(most * e.down.num_out),
                 room.take<Number>(num_used), room.take<Number>(num_used),
                 room.take<std::atomic<int64_t>>(units), {}, {}, {}, {}};
  for (int64_t i = 0; i < num_used; i++) new (&job.num_up[i]) Number, new (&job.is_ready[i]) Number;
  for (int64_t i = 0; i < units; i++) new (&job.num_done[i]) std::atomic<int64_t>(0);
  if (e.num_tokens == 1) e.kernels->prepare(e.up, e.inputs, job.inputs);
  team.run(experts_body, &job);
  return 0;
}

int multiply_experts(Team& team, const Experts& experts) {
  const int64_t hidden = experts.down.num_out;
  for (int64_t begin = 0; begin < experts.num_tokens; begin += MOST_INPUTS) {
    Experts some = experts;
    some.num_tokens = std::min(experts.num_tokens - begin, MOST_INPUTS);
    some.inputs += begin * experts.up.num_in;
    some.chosen += begin * experts.num_chosen;
    some.factors += begin * experts.num_chosen;
    some.outputs = (uint8_t*)experts.outputs + begin * hidden * (experts.precise ? 4 : 2);
    if (multiply_some(team, some)) return 1;
  }
  return 0;
}

// ---- a plain read ----

static const int64_t READ_BYTES = 1 << 20;
struct ReadJob {
  const uint8_t* bytes;
  int64_t num;
  std::atomic<int64_t> next{0};
};

static void read_body(void* arguments, int) {
  ReadJob& job = *(ReadJob*)arguments;
  __m128i sums[4] = {};
  for (int64_t at; (at = job.next.fetch_add(READ_BYTES)) < job.num;) {
    const int64_t end = std::min(at + READ_BYTES, job.num);
    for (; at + 64 <= end; at += 64) {
      _mm_prefetch((const char*)job.bytes + at + AHEAD, _MM_HINT_T1);
      for (int i = 0; i < 4; i++)
        sums[i] = _mm_add_epi64(sums[i], _mm_loadu_si128((const __m128i*)(job.bytes + at) + i));
    }
  }
  static std::atomic<int64_t> sink;
  __m128i sum = _mm_add_epi64(_mm_add_epi64(sums[0], sums[1]), _mm_add_epi64(sums[2], sums[3]));
  sink.store(_mm_cvtsi128_si64(sum), std::memory_order_relaxed);
}

void read(Team& team, const uint8_t* bytes, int64_t num_bytes) {
  ReadJob job{bytes, num_bytes, {}};
  team.run(read_body, &job);
}
