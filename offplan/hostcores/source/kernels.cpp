// Multiplies rows of a matrix by rows of inputs. Compiled once for each instruction set, whose file
// has the vectors, the forms that it decodes in its own way, and the sums of products.
#include <type_traits>
#ifdef __AVX512BF16__
#include "avx512.h"
#else
#include "avx2.h"
#endif

namespace {

struct Raw : Words {
  static const int COLUMNS = CHUNK, STEPS = CHUNK / (VECTORS * sizeof(Bits) / 2);
  static const bool ONE_ROW = false;
  static int column(int s, int i, int j) { return (s * VECTORS + i) * (int)sizeof(Bits) / 2 + j; }
  struct Row {
    const uint8_t* codes;
    int64_t bytes;
  };
  INLINE Row row(const Matrix& a, int64_t r, int) {
    return {a.part[CODES] + r * a.row_bytes(), 2 * a.num_in};
  }
  template <bool TAIL>
  INLINE void decode(const Row& r, int64_t c, int s, Bits* v, int64_t ahead) {
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS; i++) {
      const int64_t at = 2 * (c * CHUNK + column(s, i, 0));
      prefetch(r.codes, at, ahead);
      v[i] = load<TAIL>(r.codes + at, r.bytes - at);
    }
  }
};

// A step takes as many bytes of a row's first half as a vector has, and of the second, or one of both.
struct Packed : Words {
  static const int HALVES = VECTORS / 2;
  static const int COLUMNS = COLUMNS_OF_PACKED, STEPS = COLUMNS / (HALVES * sizeof(Bits));
  static const bool ONE_ROW = true;
  // a chunk has columns of the row's first half, then of the second; of each half those that even
  // bytes have, then those of odd ones
  static int column(int s, int i, int j) {
    const int h = s * HALVES % 2 + i / 2;
    const int byte = s * HALVES / 2 * (int)sizeof(Bits) + 16 * (j / 8) + 8 * (i & 1) + j % 8;
    return COLUMNS / 2 * h + byte % 2 * (COLUMNS / 4) + byte / 2;
  }
  struct Row {
    const uint8_t *codes, *exponents, *bases;
    int64_t half;
    Ahead exponents_ahead;
  };
  INLINE Row row(const Matrix& a, int64_t r, int at_once) {
    const int64_t half = a.num_in / 2, blocks = (half + BASE_BYTES - 1) / BASE_BYTES;
    return {a.part[CODES] + r * a.num_in, a.part[EXPONENTS] + r * half,
            a.part[BASES] + r / BLOCK * blocks * BLOCK + r % BLOCK, half,
            look_ahead(half, a.chunks(), CHUNK / 2, at_once)};
  }
  template <bool TAIL>
  INLINE void decode(const Row& r, int64_t c, int s, Bits* v, int64_t ahead) {
    const int64_t first = c * (COLUMNS / 2), at = first + s * HALVES / 2 * sizeof(Bits);
    const Exponents exponents(r.bases[(uint64_t)first / BASE_BYTES * BLOCK]);
    if (s * HALVES % 2 == 0) prefetch(r.exponents, at, r.exponents_ahead.of(c * (COLUMNS / CHUNK)));
    const Bits both = once(load<TAIL>(r.exponents + at, r.half - at));
#pragma GCC unroll 2
    for (int k = 0; k < HALVES; k++) {
      const int h = s * HALVES % 2 + k;
      const uint8_t* codes = r.codes + h * r.half;
      prefetch(codes, at, ahead);
      const Bits w = once(load<TAIL>(codes + at, r.half - at));
      const Bits code = (h ? shift_right<4>(both) : both) & bytes_of(15);
      const Bits high = exponents.high(w, code), low = exponents.low(w, code);
      v[2 * k] = interleave_low(low, high), v[2 * k + 1] = interleave_high(low, high);
    }
  }
  INLINE const uint16_t* gather(const Matrix& a, const uint16_t* x, int64_t c, uint16_t* room) {
    const int64_t half = a.num_in / 2, run = COLUMNS / 2, at = c * run, left = half - at;  // bytes
    if (left < run) memset(room, 0, 4 * run);
    for (int i = 0; i < 4; i++) {
      const uint16_t* from = x + i / 2 * half + column_of(at + i % 2, half);
      if (left < run) memcpy(room + i * (COLUMNS / 4), from, left);
      else memcpy(room + i * (COLUMNS / 4), from, run);
    }
    return room;
  }
};

template <class Form>
INLINE int64_t chunks_of(const Matrix& a) { return (a.num_in + Form::COLUMNS - 1) / Form::COLUMNS; }

// A row of inputs is laid out: what meets each step; for each chunk of some forms, sums of inputs as
// they meet each lane, and the unit of rounded ones; of packed weights the inputs as they were.
template <class Form>
INLINE int64_t laid_bytes(const Matrix& a) {
  return chunks_of<Form>(a) * Form::STEPS * Form::VECTORS * Form::template Sums<1>::BYTES;
}
template <class Form>
INLINE int64_t raw_at(const Matrix& a) {
  return laid_bytes<Form>(a) + chunks_of<Form>(a) * (Form::SUMS + Form::UNIT);
}

// Multiplies rows, ROWS at a time, and so many inputs at a time.
template <class Form, int INPUTS, int ROWS>
static void multiply(const Matrix& a, const uint8_t* const* x, float* const* y, Rows of,
                     int64_t out) {
  typedef typename Form::template Sums<INPUTS> Sums;
  constexpr int G = Form::GROUPS, STEPS = Form::STEPS, V = Form::VECTORS;
  constexpr int SIZE = STEPS * V * Sums::BYTES, MORE = Form::SUMS + Form::UNIT;
  const int64_t chunks = chunks_of<Form>(a), whole = a.num_in / Form::COLUMNS;
  const int64_t laid = laid_bytes<Form>(a), between = of.between;
  const Ahead ahead = look_ahead(a.row_bytes(), a.chunks(), a.run_bytes(), ROWS);
  alignas(64) float scales[G ? ROWS : 1][G ? MOST_COLUMNS / CHUNK * G : 1];
  alignas(64) float zeros[Form::ZERO ? ROWS : 1][Form::ZERO ? MOST_COLUMNS / CHUNK * G : 1];
  for (int64_t n = 0; n < of.count * of.together; n += ROWS) {
    const int64_t r = of.first + n / of.together * of.step + n % of.together * between;
    typename Form::Row rows[ROWS];
    Floats sums[ROWS][INPUTS];
    for (int i = 0; i < ROWS; i++) {
      rows[i] = Form::row(a, r + i * between, ROWS);
      if (G) row_scales(a, r + i * between, scales[i]);
      if (Form::ZERO) row_zeros(a, r + i * between, zeros[i]);
      for (int m = 0; m < INPUTS; m++) sums[i][m] = Floats{};
    }
    auto multiply_chunk = [&](auto tail, int64_t c) __attribute__((always_inline)) {
      constexpr bool TAIL = decltype(tail)::value;
      const int64_t further = ahead.of(c * (Form::COLUMNS / CHUNK));
      Sums made[ROWS][INPUTS];
#pragma GCC unroll 8
      for (int s = 0; s < STEPS; s++) {
        Bits v[ROWS][V];
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; i++) Form::template decode<TAIL>(rows[i], c, s, v[i], further);
#pragma GCC unroll 32
        for (int k = 0; k < V * INPUTS; k++) {
          const int m = Form::BY_INPUTS ? k / V : k % INPUTS, j = Form::BY_INPUTS ? k % V : k / INPUTS;
          const uint8_t *inputs = x[m] + c * SIZE, *more = x[m] + laid + c * MORE;
          if (s + j == 0)
#pragma GCC unroll 4
            for (int i = 0; i < ROWS; i++)
              made[i][m].start(sums[i][m]);
#pragma GCC unroll 4
          for (int i = 0; i < ROWS; i++) made[i][m].add(v[i][j], inputs + (s * V + j) * Sums::BYTES, j);
          if (s == STEPS - 1 && j == V - 1)
#pragma GCC unroll 4
            for (int i = 0; i < ROWS; i++)
              sums[i][m] = made[i][m].template finish<TAIL>(
                  sums[i][m], rows[i], c, G ? scales[i] + c * G : nullptr,
                  Form::ZERO ? zeros[i] + c * G : nullptr, more);
        }
      }
    };
    for (int64_t c = 0; c < whole; c++) multiply_chunk(std::false_type{}, c);
    if (whole < chunks) multiply_chunk(std::true_type{}, whole);
    for (int i = 0; i < ROWS; i++)
      for (int m = 0; m < INPUTS; m++)
        y[m][r + i * between - out] = Form::result(rows[i], total(sums[i][m]));
  }
}

template <class Form, int ROWS, int MOST>
static void all_inputs(const Matrix& a, const uint8_t* const* x, float* const* y, int64_t num,
                       Rows of, int64_t out) {
  int64_t i = 0;
  if constexpr (MOST >= 8)
    for (; i + 8 <= num; i += 8) multiply<Form, 8, ROWS / 2>(a, x + i, y + i, of, out);
  if constexpr (MOST >= 4) {
    for (; i + 4 <= num; i += 4) multiply<Form, 4, ROWS>(a, x + i, y + i, of, out);
    for (; i + 3 <= num; i += 3) multiply<Form, 3, ROWS>(a, x + i, y + i, of, out);
  }
  if constexpr (MOST >= 2)
    for (; i + 2 <= num; i += 2) multiply<Form, 2, ROWS>(a, x + i, y + i, of, out);
  for (; i < num; i++) multiply<Form, 1, ROWS>(a, x + i, y + i, of, out);
}

template <class Form>
static void all_rows(const Matrix& a, const uint8_t* const* x, float* const* y, int64_t num,
                     int64_t first, int64_t stop) {
  const bool of_processor = takes_one_row() || (Form::ONE_ROW && num == 1);
  const bool by_ones = row_order == OF_PROCESSOR ? of_processor : row_order == ONE_BY_ONE;
  // more inputs than are multiplied at once read these rows from the first cache
  if (MOST_ROWS == 1 || (num <= 2 && by_ones)) {
    const int64_t together = num <= 4 ? stop - first : 4;
    fetch_first(a, first, 0);
    for (int64_t r = first; r < stop; r += together)
      all_inputs<Form, 1, MOST_ROWS == 1 ? 4 : 2>(
          a, x, y, num, Rows::rest(r, std::min(r + together, stop)), first);
    return;
  }
  if constexpr (MOST_ROWS > 1) {
    const Rows fours = Rows::fours(first, stop), rest = Rows::rest(first + fours.count * 4, stop);
    fetch_first(a, first, fours.between);
    if (num <= 2) all_inputs<Form, 4, 2>(a, x, y, num, fours, first);
    else
      for (int64_t n = 0; n < fours.count; n++)
        all_inputs<Form, 4, 8>(a, x, y, num, fours.only(n), first);
    if (rest.count) all_inputs<Form, 1, 1>(a, x, y, num, rest, first);
  }
}

template <class Form>
static void lay_out(const Matrix& a, const uint16_t* x, uint8_t* to) {
  typedef typename Form::template Sums<1> Sums;
  const int64_t chunks = chunks_of<Form>(a), size = laid_bytes<Form>(a) / chunks;
  uint8_t *more = to + laid_bytes<Form>(a), *raw = to + raw_at<Form>(a);
  uint16_t room[Form::COLUMNS] = {};
  for (int64_t c = 0; c < chunks; c++, to += size, more += Form::SUMS + Form::UNIT) {
    const float unit = Form::template lay<Form>(Form::gather(a, x, c, room), to);
    memcpy(more + Form::SUMS, &unit, Form::UNIT);
    if constexpr (Form::SUMS > 0) {
      Sums sums;  // of inputs, as weights of one make them
      sums.start(Floats{});
      for (int j = 0; j < size / Sums::BYTES; j++)
        sums.add(Form::one(), to + j * Sums::BYTES, j % Form::VECTORS);
      sums.keep(more);
    }
  }
  if (a.kind == PACKED) memcpy(raw, x, a.num_in * 2);
}

// Call `with` an object of the form that a matrix has.
template <class With>
INLINE auto choose(const Matrix& a, With with) {
  const bool zero = a.zero_type != NO_ZERO;
  const int64_t g = a.kind == FP4 || a.kind == INT4 ? scales_of_chunk(a) : 1;
  switch (a.kind) {
    case RAW: return with(Raw{});
    case FP8: return with(Fp8{});
    case PACKED: return with(Packed{});
    case INT8: return zero ? with(Int8<true>{}) : with(Int8<false>{});
    case FP4: return g == 8 ? with(Halves<true, 8, false>{}) : with(Halves<true, 4, false>{});
    default:
      if (g == 1) return zero ? with(Halves<false, 1, true>{}) : with(Halves<false, 1, false>{});
      if (g == 2) return zero ? with(Halves<false, 2, true>{}) : with(Halves<false, 2, false>{});
      return zero ? with(Halves<false, 4, true>{}) : with(Halves<false, 4, false>{});
  }
}

static int64_t prepared_bytes(const Matrix& a) {
  return choose(a, [&](auto form) { return raw_at<decltype(form)>(a); }) +
         (a.kind == PACKED ? a.num_in * 2 : 0);
}

static void prepare(const Matrix& a, const uint16_t* x, uint8_t* prepared) {
  choose(a, [&](auto form) { lay_out<decltype(form)>(a, x, prepared); });
}

static void rows(const Matrix& a, const uint8_t* const* x, float* const* y, int64_t num,
                 int64_t first, int64_t stop) {
  choose(a, [&](auto form) { all_rows<decltype(form)>(a, x, y, num, first, stop); });
  if (a.kind == PACKED) add_patches(a, raw_at<Packed>(a), x, y, num, first, stop);
}

}  // namespace

const Kernels KERNELS = {prepared_bytes, prepare, rows, set_tables};
