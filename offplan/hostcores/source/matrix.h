// A matrix of weights as it lies in memory, and the kernels that multiply rows of it.
#pragma once
#include <cpuid.h>
#include <cstddef>
#include <cstdint>

// inlined, since other files are compiled for other processors
#define METHOD inline __attribute__((always_inline))
#define INLINE static METHOD

enum Kind : int64_t { RAW, FP8, FP4, INT4, INT8, PACKED };
enum ScaleType : int64_t { NO_SCALE, FLOAT32, FLOAT16, BFLOAT16, EXPONENT, E4M3 };
enum ZeroType : int64_t { NO_ZERO, BYTES, WORDS };
enum Part { CODES, SCALES, ZEROS, WHOLE, EXPONENTS, BASES, PATCHES, PATCH_BLOCKS, NUM_PARTS };

// Columns that kernels take at a time; inputs are laid out for so many.
static const int64_t CHUNK = CHUNK_COLUMNS;
// Rows of a matrix that one worker multiplies at a time. Patches lie together for as many.
static const int64_t BLOCK = 64;
static_assert(BLOCK == PATCH_ROWS && CHUNK == BASE_BYTES, "what forms/form.py says of packing");
// Inputs that a call of `rows` multiplies, at most.
static const int64_t MOST_INPUTS = 64;
// Columns of a matrix, at most.
static const int64_t MOST_COLUMNS = MOST_COLUMNS_OF_A_ROW;
// Bytes ahead of themselves that loops read into the second cache. Source: two Zen 4 cores, FP8:
// 0.39 of a plain read's speed without, 0.95 with it.
static const int64_t AHEAD = 8192;

// [num_out, num_in], rows contiguous; of a stack of experts the first one, and the bytes to the
// next one of each part.
struct Matrix {
  const uint8_t* part[NUM_PARTS];
  int64_t step[NUM_PARTS];
  int64_t num_out, num_in;
  int64_t kind, scale_type, zero_type;
  int64_t scale_rows, scale_columns;  // rows and columns that share a scale
  int64_t row_scales;                 // scales of a row
  int64_t whole_rows;                 // rows that share one of the scales of scales
  int64_t whole_divides;              // whether these divide
  int64_t rows_ahead;                 // rows that loops are to read ahead of themselves
  int64_t unsigned_codes;             // whether the codes of whole numbers are moved up by half
  int64_t stored_in;                  // columns that a row has in memory: num_in, or more
  double factor;                      // what all values are multiplied by

  METHOD Matrix of(int64_t expert) const {
    Matrix one = *this;
    for (int i = 0; i < NUM_PARTS; i++)
      if (one.part[i]) one.part[i] += expert * step[i];
    return one;
  }
  METHOD int64_t chunks() const { return (num_in + CHUNK - 1) / CHUNK; }
  // The first columns of the same rows: a multiple of CHUNK, and not of packed weights.
  METHOD Matrix first_columns(int64_t columns) const {
    Matrix some = *this;
    some.num_in = columns;
    return some;
  }
  // Bytes from a row of codes to the next one.
  METHOD int64_t row_bytes() const {
    return kind == RAW ? 2 * stored_in : kind == FP4 || kind == INT4 ? stored_in / 2 : stored_in;
  }
  // Bytes of a chunk that lie in a run.
  METHOD int64_t run_bytes() const {
    return kind == RAW ? 2 * CHUNK : kind == FP8 || kind == INT8 ? CHUNK : CHUNK / 2;
  }
};

// The order in which loops take rows of a matrix, one at a time for one input alone; benchmarks
// compare them. Sums are the same bits in all of them.
enum RowOrder : int64_t { OF_PROCESSOR, ONE_BY_ONE, BESIDE, APART };
extern RowOrder row_order;

// Whether loops take rows that lie apart: Intel's processors read ahead of one place of a page only,
// and short rows share one. AMD's lose by rows that are a power of two apart. Source: Intel with AMX,
// MXFP4 of 2,048 columns, four rows side by side: one core reads 8.9 GB/s where a plain read has
// 14.8; Zen 5, one core: 36 GB/s side by side, 28 apart.
static inline bool takes_rows_apart() {
  static const bool is_intel = (__builtin_cpu_init(), __builtin_cpu_is("intel"));
  return row_order == OF_PROCESSOR ? is_intel : row_order == APART;
}

// Whether loops of one input or two take one row at a time of every form: Zen 5 and later do. Source:
// two Zen 5 cores that read 50 GB/s, one input, ratios to a plain read by fours and by ones: MXFP4
// 0.74 and 0.91, NVFP4 0.74 and 0.90, whole numbers of 4 bits 0.73 and 0.90, of 8 bits 0.74 and 0.93,
// bf16 0.92 and 0.98. Two inputs: FP8 0.74 and 0.85, bf16 0.85 and 0.92, packed 0.76 and 0.85; MXFP4
// 0.79 and 0.88, but 0.68 and 0.62 where the cores read 74 GB/s.
static inline bool takes_one_row() {
  static const bool found = [] {
    uint32_t a = 0, b, c, d;
    __get_cpuid(1, &a, &b, &c, &d);
    const uint32_t family = (a >> 8 & 15) + (a >> 20 & 255);
    return (__builtin_cpu_init(), __builtin_cpu_is("amd")) && family >= 26;
  }();
  return found;
}

// Rows that loops multiply, some at a time: `first` and those `between`, twice `between` ... beyond
// it, then those `step` further.
struct Rows {
  int64_t first, count, between, together, step;
  static Rows fours(int64_t first, int64_t stop) {
    const int64_t count = (stop - first) / 4;
    return takes_rows_apart() ? Rows{first, count, count, 4, 1} : Rows{first, count, 1, 4, 4};
  }
  static Rows rest(int64_t first, int64_t stop) { return {first, stop - first, 0, 1, 1}; }
  Rows only(int64_t n) const { return {first + n * step, 1, between, together, step}; }
};

// How far ahead of a chunk loops are to read, which take so many rows at a time: into the rest of
// the same rows, or beyond their end into the rows that come next.
struct Ahead {
  int64_t last, within, beyond;
  METHOD int64_t of(int64_t chunk) const {
    return chunk < last ? within : beyond;
  }
};
// Of rows of so many bytes and chunks, where `width` bytes of a chunk lie in a run.
static inline Ahead look_ahead(int64_t row_bytes, int64_t chunks, int64_t width, int64_t rows) {
  const int64_t next = takes_rows_apart() ? 1 : rows;
  const int64_t distance = AHEAD / (rows * width);
  if (distance < chunks)
    return {chunks - distance, distance * width, next * row_bytes - (chunks - distance) * width};
  return {0, 0, (distance + chunks / 2) / chunks * next * row_bytes};
}

// The products of one instruction set.
struct Kernels {
  // Bytes of one row of inputs as the kernels of a matrix take it.
  int64_t (*prepared_bytes)(const Matrix&);
  // Lay a row of inputs out, bfloat16 of [num_in].
  void (*prepare)(const Matrix&, const uint16_t* x, uint8_t* prepared);
  // Multiply rows `first` to `stop` by so many inputs: y[i][row - first], float32.
  void (*rows)(const Matrix&, const uint8_t* const* x, float* const* y, int64_t num_inputs,
               int64_t first, int64_t stop);
  // Told once what codes stand for, from forms' own tables: [16] of FP4 and [256] of FP8.
  void (*set_tables)(const float* fp4, const float* fp8);
};
extern const Kernels AVX512, AVX2;

static inline float from_bf16(uint16_t bits) {
  uint32_t word = (uint32_t)bits << 16;
  float value;
  __builtin_memcpy(&value, &word, 4);
  return value;
}
static inline uint16_t to_bf16(float value) {  // to the nearest, ties to even
  uint32_t word;
  __builtin_memcpy(&word, &value, 4);
  if ((word & 0x7fffffff) > 0x7f800000) return (uint16_t)(word >> 16 | 0x40);
  return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

// Which of `half` columns, those of a half of a packed row, one of its bytes has: each block has its
// first weights in even bytes, the others in odd ones.
INLINE int64_t column_of(int64_t byte, int64_t half) {
  const int64_t block = byte / BASE_BYTES * BASE_BYTES;
  const int64_t size = half - block < BASE_BYTES ? half - block : BASE_BYTES;
  return block + byte % 2 * (size / 2) + byte % BASE_BYTES / 2;
}

// Patches add what codes have left out; a row of inputs has its raw values `raw_at` bytes on.
INLINE void add_patches(const Matrix& a, int64_t raw_at, const uint8_t* const* x, float* const* y,
                        int64_t num, int64_t first, int64_t stop) {
  const int32_t *patches = (const int32_t*)a.part[PATCHES],
                *blocks = (const int32_t*)a.part[PATCH_BLOCKS];
  for (int64_t b = first / BLOCK; b * BLOCK < stop; b++)
    for (int64_t p = blocks[2 * b]; p < blocks[2 * b + 1]; p++) {
      const int64_t row = patches[2 * p] / a.num_in, column = patches[2 * p] % a.num_in;
      if (row < first || row >= stop) continue;
      const float value = from_bf16((uint16_t)patches[2 * p + 1]);
      for (int64_t i = 0; i < num; i++) {
        const uint16_t* raw = (const uint16_t*)(x[i] + raw_at);
        y[i][row - first] += value * from_bf16(raw[column]);
      }
    }
}
