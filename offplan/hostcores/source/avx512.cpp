// AVX-512 with BF16 and VBMI: weights become bfloat16 in registers, 128 at a time, inputs are
// bfloat16 in the order in which that leaves them, and vdpbf16ps sums in float32.
#include <immintrin.h>
#include <type_traits>
#include "scales.h"

namespace {

typedef __m512i Bits;
typedef __m512 Floats;

INLINE void prefetch(const uint8_t* p, int64_t ahead) {
  _mm_prefetch((const char*)p + ahead, _MM_HINT_T1);
}
INLINE Floats add_products(Floats sum, Bits weights, Bits inputs) {
  return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)inputs);
}
INLINE __mmask64 first_bytes(int64_t n) { return n >= 64 ? ~0ull : n <= 0 ? 0 : (1ull << n) - 1; }
template <bool TAIL>
INLINE Bits load(const uint8_t* p, int64_t left) {
  Bits made = TAIL ? _mm512_maskz_loadu_epi8(first_bytes(left), p) : _mm512_loadu_si512(p);
  // once, not for each use: GCC would read FP8 codes three times, each out of the second cache
  asm("" : "+v"(made));
  return made;
}

alignas(64) static uint8_t FP8_HIGH[128], FP8_LOW[128], INT8_HIGH[128], INT8_LOW[128];
alignas(64) static uint16_t FP4_TABLE[32], INT4_TABLE[32];

// Each form: `column` says which of 128 columns is word j of vector i, `decode` makes four vectors
// of a row's chunk c. SCALES are those of a chunk, 0 for none; ZERO says whether there are zeros.
// ONE_ROW says whether one input meets one row after the other, not four at a time. Source: one Zen 4
// core, ratios to a plain read: FP8 0.88 by fours and 1.0 by ones, packed 0.81 and 0.97, bf16 0.97
// and 0.78, whole numbers of 4 bits 0.78 and 0.67, others the same.
struct Raw {
  static const int SCALES = 0;
  static const bool ZERO = false, ONE_ROW = false;
  static int column(int i, int j) { return 32 * i + j; }
  struct Row {
    const uint8_t* codes;
    int64_t bytes;
  };
  INLINE Row row(const Matrix& a, int64_t r, int) {
    return {a.part[CODES] + r * a.row_bytes(), 2 * a.num_in};
  }
  template <bool TAIL>
  INLINE void decode(const Row& r, int64_t c, Bits v[4], int64_t ahead) {
    for (int i = 0; i < 4; i++) {
      const int64_t at = c * 256 + i * 64;
      prefetch(r.codes + at, ahead);
      v[i] = load<TAIL>(r.codes + at, r.bytes - at);
    }
  }
};

struct Bytes {
  static int column(int i, int j) { return 64 * (i / 2) + 16 * (j / 8) + 8 * (i & 1) + j % 8; }
  struct Row {
    const uint8_t* codes;
    int64_t bytes;
    Bits flip;
  };
  INLINE Row row(const Matrix& a, int64_t r, int) {
    return {a.part[CODES] + r * a.stored_in, a.num_in,
            _mm512_set1_epi8(a.unsigned_codes ? -128 : 0)};
  }
};

struct Fp8 : Bytes {
  static const int SCALES = 1;
  static const bool ZERO = false, ONE_ROW = true;
  template <bool TAIL>
  INLINE void decode(const Row& r, int64_t c, Bits v[4], int64_t ahead) {
    const Bits h0 = _mm512_load_si512(FP8_HIGH), h1 = _mm512_load_si512(FP8_HIGH + 64);
    const Bits l0 = _mm512_load_si512(FP8_LOW), l1 = _mm512_load_si512(FP8_LOW + 64);
    const Bits sign = _mm512_set1_epi8(-128);
    for (int h = 0; h < 2; h++) {
      const int64_t at = c * CHUNK + h * 64;
      prefetch(r.codes + at, ahead);
      Bits w = load<TAIL>(r.codes + at, r.bytes - at);
      Bits high = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(h0, w, h1), w, sign, 0xF8);
      Bits low = _mm512_permutex2var_epi8(l0, w, l1);
      v[2 * h] = _mm512_unpacklo_epi8(low, high);
      v[2 * h + 1] = _mm512_unpackhi_epi8(low, high);
    }
  }
};

template <bool WITH_ZERO>
struct Int8 : Bytes {
  static const int SCALES = 1;
  static const bool ZERO = WITH_ZERO, ONE_ROW = false;
  template <bool TAIL>
  INLINE void decode(const Row& r, int64_t c, Bits v[4], int64_t ahead) {
    const Bits h0 = _mm512_load_si512(INT8_HIGH), h1 = _mm512_load_si512(INT8_HIGH + 64);
    const Bits l0 = _mm512_load_si512(INT8_LOW), l1 = _mm512_load_si512(INT8_LOW + 64);
    const Bits sign = _mm512_set1_epi8(-128);
    for (int h = 0; h < 2; h++) {
      const int64_t at = c * CHUNK + h * 64;
      prefetch(r.codes + at, ahead);
      Bits w = _mm512_xor_si512(load<TAIL>(r.codes + at, r.bytes - at), r.flip);
      Bits size = _mm512_abs_epi8(w);
      const __mmask64 is_128 = _mm512_movepi8_mask(size);  // of which the table has no entry
      Bits high = _mm512_permutex2var_epi8(h0, size, h1);
      high = _mm512_mask_mov_epi8(high, is_128, _mm512_set1_epi8(0x43));
      high = _mm512_ternarylogic_epi32(high, w, sign, 0xF8);
      Bits low = _mm512_permutex2var_epi8(l0, size, l1);
      v[2 * h] = _mm512_unpacklo_epi8(low, high);
      v[2 * h + 1] = _mm512_unpackhi_epi8(low, high);
    }
  }
};

// Four bits each, the first in the low half of a byte.
template <bool IS_FLOAT, int NUM_SCALES, bool WITH_ZERO>
struct Halves {
  static const int SCALES = NUM_SCALES;
  static const bool ZERO = WITH_ZERO, ONE_ROW = false;
  static int column(int i, int j) { return 4 * j + i; }
  struct Row {
    const uint8_t* codes;
    int64_t bytes;
  };
  INLINE Row row(const Matrix& a, int64_t r, int) {
    return {a.part[CODES] + r * (a.stored_in / 2), a.num_in / 2};
  }
  template <bool TAIL>
  INLINE void decode(const Row& r, int64_t c, Bits v[4], int64_t ahead) {
    const Bits table = _mm512_load_si512(IS_FLOAT ? FP4_TABLE : INT4_TABLE);
    prefetch(r.codes + c * 64, ahead);
    Bits w = load<TAIL>(r.codes + c * 64, r.bytes - c * 64);  // what is beyond meets zeros
    v[0] = _mm512_permutexvar_epi16(w, table);
    v[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(w, 4), table);
    v[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(w, 8), table);
    v[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(w, 12), table);
  }
};

struct Packed {
  static const int SCALES = 0;
  static const bool ZERO = false, ONE_ROW = true;
  // columns from 64 on are those of the row's second half; of each half come 32 that even bytes
  // have, then 32 of odd ones
  static int column(int i, int j) {
    const int byte = 16 * (j / 8) + 8 * (i & 1) + j % 8;
    return 64 * (i / 2) + byte % 2 * 32 + byte / 2;
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
            look_ahead(half, a.chunks(), 64, at_once)};
  }
  template <bool TAIL>
  INLINE void decode(const Row& r, int64_t c, Bits v[4], int64_t ahead) {
    const Bits low_half = _mm512_set1_epi8(15), sign = _mm512_set1_epi8(-128);
    const Bits base = _mm512_set1_epi8((char)r.bases[c / 2 * BLOCK]);
    prefetch(r.exponents + 64 * c, r.exponents_ahead.of(c));
    Bits both = load<TAIL>(r.exponents + 64 * c, r.half - 64 * c);
    Bits codes[2] = {_mm512_and_si512(both, low_half),
                     _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half)};
    for (int h = 0; h < 2; h++) {
      const uint8_t* p = r.codes + h * r.half + 64 * c;
      prefetch(p, ahead);
      Bits w = load<TAIL>(p, r.half - 64 * c);
      const __mmask64 is_code = _mm512_test_epi8_mask(codes[h], codes[h]);
      Bits exponent = _mm512_maskz_add_epi8(is_code, codes[h], base);
      // the sign and seven bits of the exponent; its last bit and the mantissa
      Bits high = _mm512_ternarylogic_epi32(sign, w, _mm512_srli_epi16(exponent, 1), 0xCA);
      Bits low = _mm512_ternarylogic_epi32(sign, _mm512_slli_epi16(exponent, 7), w, 0xCA);
      v[2 * h] = _mm512_unpacklo_epi8(low, high);
      v[2 * h + 1] = _mm512_unpackhi_epi8(low, high);
    }
  }
};

// The scales of a chunk, one for each lane of sums.
template <int SCALES>
INLINE Floats lanes(const float* p) {
  if (SCALES == 1) return _mm512_set1_ps(*p);
  if (SCALES == 2)
    return _mm512_permutexvar_ps(
        _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1),
        _mm512_castps128_ps512(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)p))));
  if (SCALES == 4)
    return _mm512_permutexvar_ps(
        _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
        _mm512_castps128_ps512(_mm_loadu_ps(p)));
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
                               _mm512_castps256_ps512(_mm256_loadu_ps(p)));
}

// A row of inputs: words in the order of the form; then, where there are zeros, the sums of what
// meets each lane; of packed weights, the inputs as they were.
INLINE const float* sums_of(const uint8_t* x, int64_t chunks) {
  return (const float*)(x + chunks * CHUNK * 2);
}

template <class Form, int INPUTS, int ROWS>
static void multiply(const Matrix& a, const uint8_t* const* x, float* const* y, Rows of,
                     int64_t out) {
  const int64_t chunks = a.chunks(), whole = a.num_in / CHUNK;
  constexpr int G = Form::SCALES;
  const Ahead ahead = look_ahead(a.row_bytes(), chunks, a.run_bytes(), ROWS);
  alignas(64) float scales[G ? ROWS : 1][G ? MOST_COLUMNS / CHUNK * G : 1];
  alignas(64) float zeros[Form::ZERO ? ROWS : 1][Form::ZERO ? MOST_COLUMNS / CHUNK * G : 1];
  const int64_t between = of.between;
  for (int64_t n = 0; n < of.count * of.together; n += ROWS) {
    const int64_t r = of.first + n / of.together * of.step + n % of.together * between;
    typename Form::Row rows[ROWS];
    Floats sums[ROWS][INPUTS];
    for (int i = 0; i < ROWS; i++) {
      rows[i] = Form::row(a, r + i * between, ROWS);
      if (G) row_scales(a, r + i * between, scales[i]);
      if (Form::ZERO) row_zeros(a, r + i * between, zeros[i]);
      for (int m = 0; m < INPUTS; m++) sums[i][m] = _mm512_setzero_ps();
    }
    auto step = [&](auto tail, int64_t c) __attribute__((always_inline)) {
      constexpr bool TAIL = decltype(tail)::value;
      const int64_t further = ahead.of(c);
      Bits v[ROWS][4];
#pragma GCC unroll 4
      for (int i = 0; i < ROWS; i++) Form::template decode<TAIL>(rows[i], c, v[i], further);
#pragma GCC unroll 8
      for (int m = 0; m < INPUTS; m++) {
        const uint8_t* inputs = x[m] + c * CHUNK * 2;
        Floats part[ROWS];
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; i++) {
          part[i] = G ? _mm512_setzero_ps() : sums[i][m];
          if (Form::ZERO)
            part[i] = _mm512_fnmadd_ps(lanes<G ? G : 1>(zeros[i] + c * G),
                                       _mm512_loadu_ps(sums_of(x[m], chunks) + c * 16), part[i]);
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
          Bits words = _mm512_loadu_si512(inputs + 64 * j);
#pragma GCC unroll 4
          for (int i = 0; i < ROWS; i++) part[i] = add_products(part[i], v[i][j], words);
        }
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; i++)
          sums[i][m] =
              G ? _mm512_fmadd_ps(part[i], lanes<G ? G : 1>(scales[i] + c * G), sums[i][m])
                : part[i];
      }
    };
    for (int64_t c = 0; c < whole; c++) step(std::false_type{}, c);
    if (whole < chunks) step(std::true_type{}, whole);
    for (int i = 0; i < ROWS; i++)
      for (int m = 0; m < INPUTS; m++)
        y[m][r + i * between - out] = _mm512_reduce_add_ps(sums[i][m]);
  }
}

template <class Form, int ROWS, int MOST>
static void all_inputs(const Matrix& a, const uint8_t* const* x, float* const* y, int64_t num,
                       Rows of, int64_t out) {
  int64_t i = 0;
  if (MOST >= 8)
    for (; i + 8 <= num; i += 8)
      multiply<Form, MOST >= 8 ? 8 : 1, ROWS / 2 ? ROWS / 2 : 1>(a, x + i, y + i, of, out);
  if (MOST >= 4)
    for (; i + 4 <= num; i += 4)
      multiply<Form, MOST >= 4 ? 4 : 1, ROWS>(a, x + i, y + i, of, out);
  if (MOST >= 2)
    for (; i + 2 <= num; i += 2)
      multiply<Form, MOST >= 2 ? 2 : 1, ROWS>(a, x + i, y + i, of, out);
  for (; i < num; i++) multiply<Form, 1, ROWS>(a, x + i, y + i, of, out);
}

template <class Form>
static void all_rows(const Matrix& a, const uint8_t* const* x, float* const* y, int64_t num,
                     int64_t first, int64_t stop) {
  const bool of_processor = takes_one_row() || (Form::ONE_ROW && num == 1);
  if (num <= 2 && (row_order == OF_PROCESSOR ? of_processor : row_order == ONE_BY_ONE)) {
    fetch_first(a, first, 0);
    return all_inputs<Form, 1, 2>(a, x, y, num, Rows::rest(first, stop), first);
  }
  const Rows fours = Rows::fours(first, stop), rest = Rows::rest(first + fours.count * 4, stop);
  fetch_first(a, first, fours.between);
  if (num <= 2) {
    all_inputs<Form, 4, 8>(a, x, y, num, fours, first);
  } else {  // more inputs than are multiplied at once read these rows from the first cache
    for (int64_t n = 0; n < fours.count; n++)
      all_inputs<Form, 4, 8>(a, x, y, num, fours.only(n), first);
  }
  if (rest.count) all_inputs<Form, 1, 1>(a, x, y, num, rest, first);
}

template <class Form>
struct Order {  // for each word of a vector, where it is among two halves of 128 columns
  alignas(64) uint16_t word[4][32];
  __mmask32 is_second[4];
  Order() {
    for (int i = 0; i < 4; i++) {
      is_second[i] = 0;
      for (int j = 0; j < 32; j++) {
        const int column = Form::column(i, j);
        word[i][j] = (uint16_t)(column & 63);
        is_second[i] |= (__mmask32)(column >> 6) << j;
      }
    }
  }
};

INLINE Bits load_words(const uint16_t* p, int64_t left) {
  return _mm512_maskz_loadu_epi16(left >= 32 ? ~0u : left <= 0 ? 0u : (1u << left) - 1, p);
}

template <class Form>
static void reorder(const Matrix& a, const uint16_t* x, uint8_t* to, bool halves) {
  static const Order<Form> order;
  const int64_t k = a.num_in, chunks = a.chunks();
  const int64_t step = halves ? 64 : CHUNK, end = halves ? k / 2 : k;
  float* sums = (float*)(to + chunks * CHUNK * 2);
  for (int64_t c = 0; c < chunks; c++) {
    const int64_t at = c * step, left = end - at;
    Bits first[2], last[2];
    for (int i = 0; i < 2; i++) {  // even bytes of halves meet 32 inputs in a row, odd ones as many
      const uint16_t* p = x + (halves ? column_of(at + i, end) : at + 32 * i);
      const int64_t rest = halves ? left / 2 : left - 32 * i;
      first[i] = load_words(p, rest);
      last[i] = halves ? load_words(p + end, rest) : load_words(p + 64, rest - 64);
    }
    Floats sum = _mm512_setzero_ps();
    for (int i = 0; i < 4; i++) {
      const Bits word = _mm512_load_si512(order.word[i]);
      Bits made = _mm512_mask_blend_epi16(order.is_second[i],
                                          _mm512_permutex2var_epi16(first[0], word, first[1]),
                                          _mm512_permutex2var_epi16(last[0], word, last[1]));
      _mm512_storeu_si512(to + c * CHUNK * 2 + 64 * i, made);
      sum = add_products(sum, _mm512_set1_epi16(0x3f80), made);
    }
    if (Form::ZERO) _mm512_storeu_ps(sums + c * 16, sum);
  }
  if (halves) memcpy(to + chunks * CHUNK * 2, x, k * 2);
}

// Call `with` an object of the form that a matrix has.
template <class With>
INLINE void choose(const Matrix& a, With with) {
  const int64_t g = a.kind == RAW || a.kind == PACKED ? 0 : scales_of_chunk(a);
  const bool zero = a.zero_type != NO_ZERO;
  switch (a.kind) {
    case RAW: return with(Raw{});
    case FP8: return with(Fp8{});
    case PACKED: return with(Packed{});
    case INT8: return zero ? with(Int8<true>{}) : with(Int8<false>{});
    case FP4: return g == 8 ? with(Halves<true, 8, false>{}) : with(Halves<true, 4, false>{});
    case INT4:
      if (g == 1) return zero ? with(Halves<false, 1, true>{}) : with(Halves<false, 1, false>{});
      if (g == 2) return zero ? with(Halves<false, 2, true>{}) : with(Halves<false, 2, false>{});
      return zero ? with(Halves<false, 4, true>{}) : with(Halves<false, 4, false>{});
  }
}

static int64_t prepared_bytes(const Matrix& a) {
  const int64_t words = a.chunks() * CHUNK * 2;
  return words + (a.kind == PACKED ? words : a.zero_type ? a.chunks() * 64 : 0);
}

static void prepare(const Matrix& a, const uint16_t* x, uint8_t* prepared) {
  choose(a, [&](auto form) { reorder<decltype(form)>(a, x, prepared, a.kind == PACKED); });
}

static void rows(const Matrix& a, const uint8_t* const* x, float* const* y, int64_t num,
                 int64_t first, int64_t stop) {
  choose(a, [&](auto form) { all_rows<decltype(form)>(a, x, y, num, first, stop); });
  if (a.kind == PACKED) add_patches(a, a.chunks() * CHUNK * 2, x, y, num, first, stop);
}

}  // namespace

void avx512_tables(const float* fp4, const float* fp8) {
  for (int i = 0; i < 32; i++) {
    FP4_TABLE[i] = to_bf16(fp4[i & 15]);
    INT4_TABLE[i] = to_bf16((float)((i & 15) - 8));
  }
  for (int i = 0; i < 128; i++) {
    FP8_HIGH[i] = to_bf16(fp8[i]) >> 8, FP8_LOW[i] = to_bf16(fp8[i]) & 255;
    INT8_HIGH[i] = to_bf16((float)i) >> 8, INT8_LOW[i] = to_bf16((float)i) & 255;
  }
}

const Kernels AVX512 = {prepared_bytes, prepare, rows};
