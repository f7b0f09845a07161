// AVX2, FMA and F16C. bfloat16, FP8 and packed weights become float32 in registers and meet inputs
// of float32. Whole numbers and FP4 meet inputs rounded to 16 bits, by vpmaddwd: sums of a chunk
// are exact, and an input is off by 2**-16 of the row's largest.
#include <immintrin.h>
#include <algorithm>
#include <cmath>
#include "scales.h"

namespace {

typedef __m256i Bits;
typedef __m256 Floats;

INLINE void prefetch(const uint8_t* p, int64_t ahead) {
  _mm_prefetch((const char*)p + ahead, _MM_HINT_T1);
}
INLINE Bits load(const void* p) { return _mm256_loadu_si256((const Bits*)p); }
INLINE __m128i load_half(const void* p) { return _mm_loadu_si128((const __m128i*)p); }
INLINE float total(Floats v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_hadd_ps(s, s);
  return _mm_cvtss_f32(_mm_hadd_ps(s, s));
}

alignas(32) static int8_t FP4_TABLE[32], INT4_TABLE[32];  // of FP4 twice the values

// ---- forms that become float32, 32 columns at a time ----

// A row's codes from 32 columns on: up to three runs of bytes.
struct Run {
  const uint8_t *codes, *second, *exponents;
  uint8_t base;
};

struct Raw {
  static const bool HAS_SCALES = false, IN_HALVES = false;
  static int column(int i, int j) { return 16 * (i / 2) + 2 * j + (i & 1); }
  INLINE Run run(const Matrix& a, int64_t r, int64_t c) {
    return {a.part[CODES] + (r * a.num_in + 32 * c) * 2, nullptr, nullptr, 0};
  }
  INLINE void fetch(const Run& p, int64_t, int64_t ahead) { prefetch(p.codes, ahead); }
  INLINE Run pad(const Run& p, int64_t left, uint8_t* to) {
    memcpy(to, p.codes, 2 * left);
    return {to, nullptr, nullptr, 0};
  }
  INLINE void decode(const Run& p, Floats v[4]) {
    for (int h = 0; h < 2; h++) {
      Bits w = load(p.codes + 32 * h);
      v[2 * h] = (Floats)_mm256_slli_epi32(w, 16);
      v[2 * h + 1] = (Floats)_mm256_and_si256(w, _mm256_set1_epi32((int)0xffff0000));
    }
  }
};

struct Fp8 {  // by way of a half, which is a 256th of the value
  static const bool HAS_SCALES = true, IN_HALVES = false;
  static int column(int i, int j) { return 8 * i + j; }
  INLINE Run run(const Matrix& a, int64_t r, int64_t c) {
    return {a.part[CODES] + r * a.num_in + 32 * c, nullptr, nullptr, 0};
  }
  INLINE void fetch(const Run& p, int64_t c, int64_t ahead) {
    if (!(c & 1)) prefetch(p.codes, ahead);
  }
  INLINE Run pad(const Run& p, int64_t left, uint8_t* to) {
    memcpy(to, p.codes, left);
    return {to, nullptr, nullptr, 0};
  }
  INLINE void decode(const Run& p, Floats v[4]) {
    for (int h = 0; h < 2; h++) {
      Bits w = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_half(p.codes + 16 * h)), 7);
      w = _mm256_and_si256(w, _mm256_set1_epi16((short)0xBF80));
      v[2 * h] = _mm256_cvtph_ps(_mm256_castsi256_si128(w));
      v[2 * h + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256(w, 1));
    }
  }
};

struct Packed {
  static const bool HAS_SCALES = false, IN_HALVES = true;
  // columns from 16 on are those of the row's second half
  static int column(int i, int j) { return 16 * (i / 2) + 2 * j + (i & 1); }
  INLINE Run run(const Matrix& a, int64_t r, int64_t c) {
    const int64_t half = a.num_in / 2, blocks = (half + BASE_BYTES - 1) / BASE_BYTES;
    const uint8_t* codes = a.part[CODES] + r * a.num_in + 16 * c;
    return {codes, codes + half, a.part[EXPONENTS] + r * half + 16 * c,
            a.part[BASES][(r / BLOCK * blocks + 16 * c / BASE_BYTES) * BLOCK + r % BLOCK]};
  }
  INLINE void fetch(const Run& p, int64_t c, int64_t ahead) {
    if (c & 3) return;
    prefetch(p.codes, ahead), prefetch(p.second, ahead), prefetch(p.exponents, ahead / 2);
  }
  INLINE Run pad(const Run& p, int64_t left, uint8_t* to) {
    memcpy(to, p.codes, left), memcpy(to + 16, p.second, left);
    memcpy(to + 32, p.exponents, left);
    return {to, to + 16, to + 32, p.base};
  }
  INLINE void decode(const Run& p, Floats v[4]) {
    const __m128i low_half = _mm_set1_epi8(15), sign = _mm_set1_epi8(-128);
    const __m128i both = load_half(p.exponents), base = _mm_set1_epi8((char)p.base);
    const __m128i codes[2] = {_mm_and_si128(both, low_half),
                              _mm_and_si128(_mm_srli_epi16(both, 4), low_half)};
    for (int h = 0; h < 2; h++) {
      __m128i w = load_half(h ? p.second : p.codes);
      __m128i is_zero = _mm_cmpeq_epi8(codes[h], _mm_setzero_si128());
      __m128i e = _mm_andnot_si128(is_zero, _mm_add_epi8(codes[h], base));
      __m128i high = _mm_or_si128(_mm_and_si128(sign, w),
                                  _mm_andnot_si128(sign, _mm_srli_epi16(e, 1)));
      __m128i low = _mm_or_si128(_mm_and_si128(sign, _mm_slli_epi16(e, 7)),
                                 _mm_andnot_si128(sign, w));
      Bits b = _mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high));
      v[2 * h] = (Floats)_mm256_slli_epi32(b, 16);
      v[2 * h + 1] = (Floats)_mm256_and_si256(b, _mm256_set1_epi32((int)0xffff0000));
    }
  }
};

template <class Form, int INPUTS, int ROWS>
static void multiply_floats(const Matrix& a, const uint8_t* const* x, float* const* y,
                            Rows of, int64_t out) {
  const int64_t width = Form::IN_HALVES ? 16 : 32, end = Form::IN_HALVES ? a.num_in / 2 : a.num_in;
  const int64_t whole = end / width, chunks = a.chunks();
  const Ahead ahead = look_ahead(a.row_bytes(), chunks, a.run_bytes(), ROWS);
  float scales[Form::HAS_SCALES ? ROWS : 1][Form::HAS_SCALES ? MOST_COLUMNS / CHUNK : 1];
  const int64_t between = of.between;
  for (int64_t n = 0; n < of.count * of.together; n += ROWS) {
    const int64_t r = of.first + n / of.together * of.step + n % of.together * between;
    Floats sums[ROWS][INPUTS];
    for (int i = 0; i < ROWS; i++) {
      if (Form::HAS_SCALES) row_scales(a, r + i * between, scales[i]);
      for (int m = 0; m < INPUTS; m++) sums[i][m] = _mm256_setzero_ps();
    }
    auto step = [&](const Run& p, int64_t c, Floats part[INPUTS]) __attribute__((always_inline)) {
      Floats v[4];
      Form::decode(p, v);
#pragma GCC unroll 4
      for (int m = 0; m < INPUTS; m++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++)
          part[m] = _mm256_fmadd_ps(
              v[j], _mm256_loadu_ps((const float*)x[m] + c * 32 + 8 * j), part[m]);
    };
    const int64_t PER = CHUNK / 32;
    for (int64_t g = 0; g < (Form::HAS_SCALES ? chunks : (whole + PER) / PER); g++) {
#pragma GCC unroll 4
      for (int i = 0; i < ROWS; i++) {
        Floats part[INPUTS];
        for (int m = 0; m < INPUTS; m++)
          part[m] = Form::HAS_SCALES ? _mm256_setzero_ps() : sums[i][m];
        const int64_t stop_c = std::min((g + 1) * PER, whole), further = ahead.of(g);
        if (g * PER + PER <= whole) {
#pragma GCC unroll 4
          for (int64_t d = 0; d < PER; d++) {
            const Run p = Form::run(a, r + i * between, g * PER + d);
            Form::fetch(p, g * PER + d, further);
            step(p, g * PER + d, part);
          }
        } else {
          for (int64_t c = g * PER; c < stop_c; c++) step(Form::run(a, r + i * between, c), c, part);
          if (whole * width < end) {
            uint8_t rest[64] = {};
            step(Form::pad(Form::run(a, r + i * between, whole), end - whole * width, rest), whole, part);
          }
        }
        for (int m = 0; m < INPUTS; m++)
          sums[i][m] = Form::HAS_SCALES
                           ? _mm256_fmadd_ps(part[m], _mm256_set1_ps(scales[i][g] *
                                             (a.kind == FP8 ? 256.f : 1.f)), sums[i][m])
                           : part[m];
      }
    }
    for (int i = 0; i < ROWS; i++)
      for (int m = 0; m < INPUTS; m++) y[m][r + i * between - out] = total(sums[i][m]);
  }
}

template <class Form>
static void lay_floats(const Matrix& a, const uint16_t* x, uint8_t* to) {
  const int64_t k = a.num_in, num = a.chunks() * (CHUNK / 32) + 1;
  const int64_t step = Form::IN_HALVES ? 16 : 32, end = Form::IN_HALVES ? k / 2 : k;
  float* made = (float*)to;
  for (int64_t c = 0; c < num; c++)
    for (int i = 0; i < 4; i++)
      for (int j = 0; j < 8; j++) {
        int64_t column = Form::column(i, j), second = 0;
        if (Form::IN_HALVES && column >= 16) column -= 16, second = k / 2;
        const int64_t at = c * step + column;
        made[c * 32 + i * 8 + j] = at < end ? from_bf16(x[second + at]) : 0.f;
      }
  if (Form::IN_HALVES) memcpy(made + num * 32, x, k * 2);
}

// ---- forms that meet inputs of 16 bits, a chunk at a time ----

struct Whole8 {
  static const int PARTS = 1;
  static int column(int q, int j) { return 16 * q + j; }  // vector q of a chunk's eight, word j
};
struct Halves4 {
  static const int PARTS = 2;
  static int column(int q, int j) {  // in the order that unpacking leaves, 64 columns at a time
    return q / 4 * 64 + 2 * (j / 8 * 16 + (q & 1) * 8 + j % 8) + q % 4 / 2;
  }
};

// A row of inputs: words, lane sums of each 64 columns, and what words are to be multiplied by.
INLINE const float* sums_of(const uint8_t* x, int64_t chunks) {
  return (const float*)(x + chunks * CHUNK * 2);
}
INLINE float unit_of(const uint8_t* x, int64_t chunks) { return sums_of(x, chunks)[chunks * 16]; }

template <class Form>
static void lay_words(const Matrix& a, const uint16_t* x, uint8_t* to) {
  const int64_t k = a.num_in, chunks = a.chunks();
  uint16_t most = 0;
  for (int64_t j = 0; j < k; j++) most = std::max<uint16_t>(most, x[j] & 0x7fff);
  const float top = from_bf16(most);
  const float inverse = top > 0 ? 32767 / top : 0;
  int16_t* words = (int16_t*)to;
  float* sums = (float*)(to + chunks * CHUNK * 2);
  for (int64_t c = 0; c < chunks; c++) {
    for (int q = 0; q < 8; q++)
      for (int j = 0; j < 16; j++) {
        const int64_t at = c * CHUNK + Form::column(q, j);
        const float value = at < k ? from_bf16(x[at]) * inverse : 0;
        words[c * CHUNK + q * 16 + j] = (int16_t)lrintf(value);
      }
    for (int h = 0; h < 2; h++)
      for (int lane = 0; lane < 8; lane++) {
        int sum = 0;
        for (int q = 4 * h; q < 4 * h + 4; q++)
          sum += words[c * CHUNK + q * 16 + 2 * lane] + words[c * CHUNK + q * 16 + 2 * lane + 1];
        sums[c * 16 + h * 8 + lane] = (float)sum;
      }
  }
  // what is no number, or not finite, is to show in what is made of it
  sums[chunks * 16] = most >= 0x7f80 ? NAN : top / 32767;
}

INLINE Floats two(float low, float high) {
  return _mm256_set_m128(_mm_set1_ps(high), _mm_set1_ps(low));
}

template <bool IS_BYTES, bool IS_FLOAT, int G, bool ZERO, int INPUTS, int ROWS>
static void multiply_words(const Matrix& a, const uint8_t* const* x, float* const* y,
                           Rows of, int64_t out) {
  const int64_t chunks = a.chunks(), whole = a.num_in / CHUNK, row_bytes = a.row_bytes();
  const int64_t chunk_bytes = IS_BYTES ? CHUNK : CHUNK / 2;
  const Ahead ahead = look_ahead(row_bytes, chunks, chunk_bytes, ROWS);
  const Bits low_half = _mm256_set1_epi8(15), none = _mm256_setzero_si256();
  const Bits table = load(IS_FLOAT ? FP4_TABLE : INT4_TABLE);
  const Bits flip = _mm256_set1_epi8(a.unsigned_codes ? -128 : 0);
  const float code_unit = IS_BYTES ? 1.f : IS_FLOAT ? 1.f / 512 : 1.f / 256;
  const Floats zero_unit = _mm256_set1_ps(IS_BYTES ? 1.f : 256.f);
  float scales[ROWS][MOST_COLUMNS / CHUNK * G];
  float zeros[ZERO ? ROWS : 1][ZERO ? MOST_COLUMNS / CHUNK * G : 1];
  const int64_t between = of.between;
  for (int64_t n = 0; n < of.count * of.together; n += ROWS) {
    const int64_t r = of.first + n / of.together * of.step + n % of.together * between;
    Floats sums[ROWS][INPUTS];
    for (int i = 0; i < ROWS; i++) {
      row_scales(a, r + i * between, scales[i]);
      if (ZERO) row_zeros(a, r + i * between, zeros[i]);
      for (int m = 0; m < INPUTS; m++) sums[i][m] = _mm256_setzero_ps();
    }
    auto step = [&](const uint8_t* p, int i, int64_t c) __attribute__((always_inline)) {
      const float *s = scales[i] + c * G, *z = ZERO ? zeros[i] + c * G : nullptr;
      Bits both[INPUTS];
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        Bits v[4];
        if (IS_BYTES) {
          for (int b = 0; b < 2; b++) {
            Bits w = _mm256_xor_si256(load(p + 64 * h + 32 * b), flip);
            v[2 * b] = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(w));
            v[2 * b + 1] = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(w, 1));
          }
        } else {
          Bits w = load(p + 32 * h);
          Bits low = _mm256_shuffle_epi8(table, _mm256_and_si256(w, low_half));
          Bits high = _mm256_shuffle_epi8(table,
                                          _mm256_and_si256(_mm256_srli_epi16(w, 4), low_half));
          v[0] = _mm256_unpacklo_epi8(none, low), v[1] = _mm256_unpackhi_epi8(none, low);
          v[2] = _mm256_unpacklo_epi8(none, high), v[3] = _mm256_unpackhi_epi8(none, high);
        }
#pragma GCC unroll 4
        for (int m = 0; m < INPUTS; m++) {
          const int16_t* q = (const int16_t*)x[m] + c * CHUNK + h * 64;
          Bits even = _mm256_add_epi32(_mm256_madd_epi16(v[0], load(q)),
                                       _mm256_madd_epi16(v[2], load(q + 32)));
          Bits odd = _mm256_add_epi32(_mm256_madd_epi16(v[1], load(q + 16)),
                                      _mm256_madd_epi16(v[3], load(q + 48)));
          if (G == 8) {
            sums[i][m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(even), two(s[4 * h], s[4 * h + 2]),
                                         sums[i][m]);
            sums[i][m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(odd),
                                         two(s[4 * h + 1], s[4 * h + 3]), sums[i][m]);
            continue;
          }
          Bits sum = _mm256_add_epi32(even, odd);
          if (G == 1) {
            both[m] = h ? _mm256_add_epi32(both[m], sum) : sum;
            continue;
          }
          Floats part = _mm256_cvtepi32_ps(sum);
          if (ZERO) {
            Floats by = G == 4 ? two(z[2 * h], z[2 * h + 1]) : _mm256_set1_ps(z[h]);
            part = _mm256_fnmadd_ps(_mm256_mul_ps(by, zero_unit),
                                    _mm256_loadu_ps(sums_of(x[m], chunks) + c * 16 + 8 * h), part);
          }
          sums[i][m] = _mm256_fmadd_ps(
              part, G == 4 ? two(s[2 * h], s[2 * h + 1]) : _mm256_set1_ps(s[h]), sums[i][m]);
        }
      }
      if (G == 1)
#pragma GCC unroll 4
        for (int m = 0; m < INPUTS; m++) {
          Floats part = _mm256_cvtepi32_ps(both[m]);
          if (ZERO) {
            const float* of = sums_of(x[m], chunks) + c * 16;
            Floats sum = _mm256_add_ps(_mm256_loadu_ps(of), _mm256_loadu_ps(of + 8));
            part = _mm256_fnmadd_ps(_mm256_mul_ps(_mm256_set1_ps(*z), zero_unit), sum, part);
          }
          sums[i][m] = _mm256_fmadd_ps(part, _mm256_set1_ps(*s), sums[i][m]);
        }
    };
    for (int64_t c = 0; c < whole; c++)
#pragma GCC unroll 4
      for (int i = 0; i < ROWS; i++) {
        const uint8_t* p = a.part[CODES] + (r + i * between) * row_bytes + c * chunk_bytes;
        prefetch(p, ahead.of(c));
        if (IS_BYTES) prefetch(p + 64, ahead.of(c));
        step(p, i, c);
      }
    if (whole < chunks)
      for (int i = 0; i < ROWS; i++) {
        uint8_t rest[CHUNK] = {};
        memcpy(rest, a.part[CODES] + (r + i * between) * row_bytes + whole * chunk_bytes,
               row_bytes - whole * chunk_bytes);
        step(rest, i, whole);
      }
    for (int i = 0; i < ROWS; i++)
      for (int m = 0; m < INPUTS; m++)
        y[m][r + i * between - out] = total(sums[i][m]) * code_unit * unit_of(x[m], chunks);
  }
}

// ---- all forms ----

template <class Form>
struct AsFloats {
  static void lay(const Matrix& a, const uint16_t* x, uint8_t* to) { lay_floats<Form>(a, x, to); }
  template <int INPUTS, int ROWS>
  static void multiply(const Matrix& a, const uint8_t* const* x, float* const* y, Rows of,
                       int64_t out) {
    multiply_floats<Form, INPUTS, ROWS>(a, x, y, of, out);
  }
};
template <bool IS_BYTES, bool IS_FLOAT, int G, bool ZERO>
struct AsWords {
  static void lay(const Matrix& a, const uint16_t* x, uint8_t* to) {
    if (IS_BYTES) lay_words<Whole8>(a, x, to);
    else lay_words<Halves4>(a, x, to);
  }
  template <int INPUTS, int ROWS>
  static void multiply(const Matrix& a, const uint8_t* const* x, float* const* y, Rows of,
                       int64_t out) {
    multiply_words<IS_BYTES, IS_FLOAT, G, ZERO, INPUTS, ROWS>(a, x, y, of, out);
  }
};

template <class With>
INLINE void choose(const Matrix& a, With with) {
  const int64_t g = a.kind == RAW || a.kind == PACKED ? 0 : scales_of_chunk(a);
  const bool zero = a.zero_type != NO_ZERO;
  switch (a.kind) {
    case RAW: return with(AsFloats<Raw>{});
    case FP8: return with(AsFloats<Fp8>{});
    case PACKED: return with(AsFloats<Packed>{});
    case INT8:
      return zero ? with(AsWords<true, false, 1, true>{}) : with(AsWords<true, false, 1, false>{});
    case FP4:
      return g == 8 ? with(AsWords<false, true, 8, false>{})
                    : with(AsWords<false, true, 4, false>{});
    case INT4:
      if (g == 1)
        return zero ? with(AsWords<false, false, 1, true>{})
                    : with(AsWords<false, false, 1, false>{});
      if (g == 2)
        return zero ? with(AsWords<false, false, 2, true>{})
                    : with(AsWords<false, false, 2, false>{});
      return zero ? with(AsWords<false, false, 4, true>{})
                  : with(AsWords<false, false, 4, false>{});
  }
}

static int64_t prepared_bytes(const Matrix& a) {
  const int64_t columns = a.chunks() * CHUNK;
  if (a.kind == RAW || a.kind == FP8) return (columns + 32) * 4;
  if (a.kind == PACKED) return (columns + 32) * 4 + columns * 2;
  return columns * 2 + a.chunks() * 64 + 64;
}

static void prepare(const Matrix& a, const uint16_t* x, uint8_t* prepared) {
  choose(a, [&](auto form) { decltype(form)::lay(a, x, prepared); });
}

template <class Form>
static void all_rows(const Matrix& a, const uint8_t* const* x, float* const* y, int64_t num,
                     int64_t first, int64_t stop) {
  const Rows fours = Rows::fours(first, stop), rest = Rows::rest(first + fours.count * 4, stop);
  fetch_first(a, first, fours.between);
  if (num == 1) {
    Form::template multiply<1, 4>(a, x, y, fours, first);
  } else {
    for (int64_t n = 0; n < fours.count; n++)
      for (int64_t i = 0; i < num;) {
        const Rows of = fours.only(n);
        if (num - i >= 4) Form::template multiply<4, 2>(a, x + i, y + i, of, first), i += 4;
        else if (num - i >= 2) Form::template multiply<2, 2>(a, x + i, y + i, of, first), i += 2;
        else Form::template multiply<1, 4>(a, x + i, y + i, of, first), i += 1;
      }
  }
  if (rest.count)
    for (int64_t i = 0; i < num; i++)
      Form::template multiply<1, 1>(a, x + i, y + i, rest, first);
}

static void rows(const Matrix& a, const uint8_t* const* x, float* const* y, int64_t num,
                 int64_t first, int64_t stop) {
  choose(a, [&](auto form) { all_rows<decltype(form)>(a, x, y, num, first, stop); });
  if (a.kind != PACKED) return;
  const int32_t *patches = (const int32_t*)a.part[PATCHES],
                *blocks = (const int32_t*)a.part[PATCH_BLOCKS];
  const int64_t before = (a.chunks() * CHUNK + 32) * 4;
  for (int64_t b = first / BLOCK; b < stop / BLOCK; b++)
    for (int64_t p = blocks[2 * b]; p < blocks[2 * b + 1]; p++) {
      const int64_t row = patches[2 * p] / a.num_in, column = patches[2 * p] % a.num_in;
      const float value = from_bf16((uint16_t)patches[2 * p + 1]);
      for (int64_t i = 0; i < num; i++)
        y[i][row - first] += value * from_bf16(((const uint16_t*)(x[i] + before))[column]);
    }
}

}  // namespace

void avx2_tables(const float* fp4, const float*) {
  for (int i = 0; i < 32; i++) {
    FP4_TABLE[i] = (int8_t)(2 * fp4[i & 15]);
    INT4_TABLE[i] = (int8_t)((i & 15) - 8);
  }
}

const Kernels AVX2 = {prepared_bytes, prepare, rows};
