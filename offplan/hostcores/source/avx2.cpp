// AVX2, FMA and F16C. bfloat16, FP8 and packed weights become float32 in registers and meet inputs
// of float32. Whole numbers and FP4 meet inputs rounded to 16 bits: sums of a group are exact, and
// an input is off by 2**-16 of the row's largest.
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

// Make eight float32 of the even words of bfloat16, and eight of the odd ones.
INLINE void widen(Bits words, Floats v[2]) {
  v[0] = (Floats)_mm256_slli_epi32(words, 16);
  v[1] = (Floats)_mm256_and_si256(words, _mm256_set1_epi32((int)0xffff0000));
}
// Add the halves of lanes up, of two vectors: lanes are those of the first, then of the second.
INLINE Bits join(const Bits v[2]) {
  return _mm256_add_epi16(_mm256_unpacklo_epi64(v[0], v[1]), _mm256_unpackhi_epi64(v[0], v[1]));
}

// Sums of products in float32, several for few inputs: one sum would wait for each product.
template <int INPUTS>
struct Chains {
  static const int NUM = INPUTS == 1 ? 4 : INPUTS == 2 ? 2 : 1;
  Floats sums[INPUTS][NUM];
  __attribute__((always_inline)) inline Chains() {
    for (int m = 0; m < INPUTS; m++)
      for (int j = 0; j < NUM; j++) sums[m][j] = _mm256_setzero_ps();
  }
  // Add products of four vectors of weights by those of inputs from a place on.
  __attribute__((always_inline)) inline void add(const Floats* v, const uint8_t* const* x, int64_t at) {
#pragma GCC unroll 4
    for (int m = 0; m < INPUTS; m++)
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++)
        sums[m][j % NUM] = _mm256_fmadd_ps(
            v[j], _mm256_loadu_ps((const float*)x[m] + at + 8 * j), sums[m][j % NUM]);
  }
  __attribute__((always_inline)) inline Floats sum(int m) const {
    if (NUM == 1) return sums[m][0];
    const Floats two = _mm256_add_ps(sums[m][0], sums[m][1]);
    return NUM == 2 ? two : _mm256_add_ps(two, _mm256_add_ps(sums[m][2 % NUM], sums[m][3 % NUM]));
  }
};

alignas(32) static uint8_t FP4_TABLE[32];  // twice the values, and 12

// Rows that are multiplied one after the other, as processors read ahead best. Source: one Zen 4 core,
// four rows at a time and one at a time, ratios to a plain read: bf16 0.84 and 0.89, packed weights
// 0.60 and 0.80.
struct Range {
  int64_t first, stop;
};

// ---- forms that become float32, 32 columns at a time ----

struct Raw {
  static const bool HAS_SCALES = false;
  static const int BYTES = 2;  // of a weight
  static int column(int i, int j) { return 16 * (i / 2) + 2 * j + (i & 1); }
  INLINE void decode(const uint8_t* p, Floats v[4]) {
    for (int h = 0; h < 2; h++) widen(load(p + 32 * h), v + 2 * h);
  }
};

struct Fp8 {  // by way of a half, which is a 256th of the value
  static const bool HAS_SCALES = true;
  static const int BYTES = 1;
  static int column(int i, int j) { return 8 * i + j; }
  INLINE void decode(const uint8_t* p, Floats v[4]) {
    for (int i = 0; i < 4; i++) v[i] = from_e4m3(p + 8 * i);
  }
};

template <class Form, int INPUTS>
static void multiply_floats(const Matrix& a, const uint8_t* const* x, float* const* y,
                            Range of, int64_t out) {
  const int64_t whole = a.num_in / 32, chunks = a.chunks(), row_bytes = a.row_bytes(), PER = CHUNK / 32;
  const Ahead ahead = look_ahead(row_bytes, chunks, a.run_bytes(), 1);
  float scales[Form::HAS_SCALES ? MOST_COLUMNS / CHUNK : 1];
  for (int64_t r = of.first; r < of.stop; r++) {
    const uint8_t* row = a.part[CODES] + r * row_bytes;
    Floats sums[INPUTS];
    if (Form::HAS_SCALES) row_scales(a, r, scales);
    for (int m = 0; m < INPUTS; m++) sums[m] = _mm256_setzero_ps();
    for (int64_t g = 0; g < chunks; g++) {
      const uint8_t* p = row + g * CHUNK * Form::BYTES;
      Chains<INPUTS> chains;
      auto step = [&](const uint8_t* codes, int64_t c) __attribute__((always_inline)) {
        Floats v[4];
        Form::decode(codes, v);
        chains.add(v, x, c * 32);
      };
      if (g * PER + PER <= whole) {
        const int64_t further = ahead.of(g);
#pragma GCC unroll 4
        for (int64_t d = 0; d < PER; d++) {
          if (d % (2 / Form::BYTES) == 0) prefetch(p + d * 32 * Form::BYTES, further);
          step(p + d * 32 * Form::BYTES, g * PER + d);
        }
      } else {
        for (int64_t c = g * PER; c < whole; c++) step(p + (c - g * PER) * 32 * Form::BYTES, c);
        uint8_t rest[64] = {};
        memcpy(rest, p + (whole - g * PER) * 32 * Form::BYTES, (a.num_in - whole * 32) * Form::BYTES);
        step(rest, whole);
      }
      for (int m = 0; m < INPUTS; m++)
        sums[m] = Form::HAS_SCALES
                      ? _mm256_fmadd_ps(chains.sum(m), _mm256_set1_ps(scales[g] * 256), sums[m])
                      : _mm256_add_ps(chains.sum(m), sums[m]);
    }
    for (int m = 0; m < INPUTS; m++) y[m][r - out] = total(sums[m]);
  }
}

template <class Form>
static void lay_floats(const Matrix& a, const uint16_t* x, uint8_t* to) {
  float* made = (float*)to;
  for (int64_t c = 0; c < a.chunks() * (CHUNK / 32) + 1; c++)
    for (int i = 0; i < 4; i++)
      for (int j = 0; j < 8; j++) {
        const int64_t at = c * 32 + Form::column(i, j);
        made[c * 32 + i * 8 + j] = at < a.num_in ? from_bf16(x[at]) : 0.f;
      }
}

// ---- packed weights, which become bfloat16 by tables: 32 columns of each half of a row at a time ----

static int packed_byte(int i, int j) {  // of word j of vector i, of 32 bytes of a half
  return j / 4 * 16 + i / 2 * 8 + j % 4 * 2 + (i & 1);
}
static int64_t packed_steps(const Matrix& a) { return (a.num_in / 2 + 31) / 32; }

template <int INPUTS>
static void multiply_packed(const Matrix& a, const uint8_t* const* x, float* const* y, Range of,
                            int64_t out) {
  const int64_t half = a.num_in / 2, row_bytes = a.row_bytes();
  const int64_t blocks = (half + BASE_BYTES - 1) / BASE_BYTES, whole = half / 32;
  const Ahead ahead = look_ahead(row_bytes, a.chunks(), a.run_bytes(), 1);
  const Bits low_half = _mm256_set1_epi8(15), sign = _mm256_set1_epi8(-128);
  const Bits numbers = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  const Bits is_code = _mm256_cmpgt_epi8(numbers, _mm256_setzero_si256());
  for (int64_t r = of.first; r < of.stop; r++) {
    Floats sums[INPUTS];
    for (int m = 0; m < INPUTS; m++) sums[m] = _mm256_setzero_ps();
    for (int64_t b = 0; b < blocks; b++) {
      const uint8_t* exponents = a.part[EXPONENTS] + r * half + b * BASE_BYTES;
      const uint8_t* codes[2] = {a.part[CODES] + r * row_bytes + b * BASE_BYTES};
      codes[1] = codes[0] + half;
      // of each code the sign's place and seven bits of the exponent; its last bit
      Bits made = _mm256_set1_epi8(
          (char)a.part[BASES][(r / BLOCK * blocks + b) * BLOCK + r % BLOCK]);
      made = _mm256_and_si256(_mm256_add_epi8(made, numbers), is_code);
      const Bits highs = _mm256_andnot_si256(sign, _mm256_srli_epi16(made, 1));
      const Bits lows = _mm256_and_si256(sign, _mm256_slli_epi16(made, 7));
      Chains<INPUTS> chains;
      auto step = [&](const uint8_t* e, const uint8_t* first, const uint8_t* second, int64_t d)
                      __attribute__((always_inline)) {
        Bits both = load(e);
        asm("" : "+x"(both));
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
          Bits w = load(h ? second : first);
          asm("" : "+x"(w));
          const Bits code = _mm256_and_si256(h ? _mm256_srli_epi16(both, 4) : both, low_half);
          const Bits high = _mm256_or_si256(_mm256_and_si256(sign, w), _mm256_shuffle_epi8(highs, code));
          const Bits low = _mm256_or_si256(_mm256_andnot_si256(sign, w), _mm256_shuffle_epi8(lows, code));
          Floats v[4];
          widen(_mm256_unpacklo_epi8(low, high), v), widen(_mm256_unpackhi_epi8(low, high), v + 2);
          chains.add(v, x, (b * 4 + d) * 64 + h * 32);
        }
      };
      if (b * 4 + 4 <= whole) {
        const int64_t further = ahead.of(2 * b);  // a block is two chunks
        for (int64_t d = 0; d < 4; d++) {
          if (d % 2) prefetch(exponents + d * 32, further / 2);
          else prefetch(codes[0] + d * 32, further), prefetch(codes[1] + d * 32, further);
          step(exponents + d * 32, codes[0] + d * 32, codes[1] + d * 32, d);
        }
      } else {
        uint8_t rest[3][32] = {};
        for (int64_t at = 0; b * BASE_BYTES + at < half; at += 32) {
          const int64_t left = std::min<int64_t>(32, half - b * BASE_BYTES - at);
          memcpy(rest[0], exponents + at, left);
          for (int h = 0; h < 2; h++) memcpy(rest[1 + h], codes[h] + at, left);
          step(rest[0], rest[1], rest[2], at / 32);
        }
      }
      for (int m = 0; m < INPUTS; m++) sums[m] = _mm256_add_ps(chains.sum(m), sums[m]);
    }
    for (int m = 0; m < INPUTS; m++) y[m][r - out] = total(sums[m]);
  }
}

static void lay_packed(const Matrix& a, const uint16_t* x, uint8_t* to) {
  const int64_t half = a.num_in / 2, steps = packed_steps(a);
  float* made = (float*)to;
  for (int64_t c = 0; c < steps; c++)
    for (int h = 0; h < 2; h++)
      for (int i = 0; i < 4; i++)
        for (int j = 0; j < 8; j++) {
          const int64_t byte = c * 32 + packed_byte(i, j), at = h * half + column_of(byte, half);
          made[((c * 2 + h) * 4 + i) * 8 + j] = byte < half ? from_bf16(x[at]) : 0.f;
        }
  memcpy(made + steps * 64, x, a.num_in * 2);
}

// ---- whole numbers of 8 bits, which meet inputs of 16 bits by vpmaddwd, a chunk at a time ----

// A row of inputs: words; their sums that meet each lane of a chunk; what words are to be multiplied by.
INLINE const float* sums_of(const uint8_t* x, int64_t chunks) {
  return (const float*)(x + chunks * CHUNK * 2);
}
INLINE float unit_of(const uint8_t* x, int64_t chunks) { return sums_of(x, chunks)[chunks * 8]; }

// The largest of a row of inputs; what is no number, or not finite, is to show in what is made of it.
struct Largest {
  float value;
  bool is_finite;
  explicit Largest(const Matrix& a, const uint16_t* x) {
    uint16_t most = 0;
    for (int64_t j = 0; j < a.num_in; j++) most = std::max<uint16_t>(most, x[j] & 0x7fff);
    value = from_bf16(most), is_finite = most < 0x7f80;
  }
  // What inputs are multiplied by, for the largest to become a word, and what words are.
  float to_words(float word) const { return value > 0 ? word / value : 0; }
  float from_words(float word) const { return is_finite ? value / word : NAN; }
};

static void lay_words(const Matrix& a, const uint16_t* x, uint8_t* to) {
  const int64_t k = a.num_in, chunks = a.chunks();
  const Largest largest(a, x);
  const float by = largest.to_words(32767);
  int16_t* words = (int16_t*)to;
  float* sums = (float*)sums_of(to, chunks);
  for (int64_t c = 0; c < chunks; c++) {
    int32_t lanes[8] = {};
    for (int64_t j = c * CHUNK; j < (c + 1) * CHUNK; j++) {
      words[j] = (int16_t)lrintf(j < k ? from_bf16(x[j]) * by : 0);
      lanes[j / 2 % 8] += words[j];
    }
    for (int i = 0; i < 8; i++) sums[c * 8 + i] = (float)lanes[i];
  }
  sums[chunks * 8] = largest.from_words(32767);
}

template <bool ZERO, int INPUTS>
static void multiply_bytes(const Matrix& a, const uint8_t* const* x, float* const* y, Range of,
                           int64_t out) {
  const int64_t chunks = a.chunks(), whole = a.num_in / CHUNK, row_bytes = a.row_bytes();
  const Ahead ahead = look_ahead(row_bytes, chunks, CHUNK, 1);
  const Bits flip = _mm256_set1_epi8(a.unsigned_codes ? -128 : 0);
  float scales[MOST_COLUMNS / CHUNK], zeros[ZERO ? MOST_COLUMNS / CHUNK : 1];
  for (int64_t r = of.first; r < of.stop; r++) {
    const uint8_t* row = a.part[CODES] + r * row_bytes;
    Floats sums[INPUTS];
    row_scales(a, r, scales);
    if (ZERO) row_zeros(a, r, zeros);
    for (int m = 0; m < INPUTS; m++) sums[m] = _mm256_setzero_ps();
    auto step = [&](const uint8_t* p, int64_t c) __attribute__((always_inline)) {
      Bits both[INPUTS];
#pragma GCC unroll 4
      for (int h = 0; h < 4; h++) {
        const Bits w = _mm256_xor_si256(load(p + 32 * h), flip);
        const Bits first = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(w));
        const Bits second = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(w, 1));
#pragma GCC unroll 4
        for (int m = 0; m < INPUTS; m++) {
          const int16_t* q = (const int16_t*)x[m] + c * CHUNK + h * 32;
          const Bits sum = _mm256_add_epi32(_mm256_madd_epi16(first, load(q)),
                                            _mm256_madd_epi16(second, load(q + 16)));
          both[m] = h ? _mm256_add_epi32(both[m], sum) : sum;
        }
      }
#pragma GCC unroll 4
      for (int m = 0; m < INPUTS; m++) {
        Floats part = _mm256_cvtepi32_ps(both[m]);
        if (ZERO)
          part = _mm256_fnmadd_ps(_mm256_set1_ps(zeros[c]),
                                  _mm256_loadu_ps(sums_of(x[m], chunks) + c * 8), part);
        sums[m] = _mm256_fmadd_ps(part, _mm256_set1_ps(scales[c]), sums[m]);
      }
    };
    for (int64_t c = 0; c < whole; c++) {
      const uint8_t* p = row + c * CHUNK;
      prefetch(p, ahead.of(c)), prefetch(p + 64, ahead.of(c));
      step(p, c);
    }
    if (whole < chunks) {
      uint8_t rest[CHUNK] = {};
      memcpy(rest, row + whole * CHUNK, a.num_in - whole * CHUNK);
      step(rest, whole);
    }
    for (int m = 0; m < INPUTS; m++) y[m][r - out] = total(sums[m]) * unit_of(x[m], chunks);
  }
}

// ---- four bits, which meet inputs of 16 bits by vpmaddubsw, a chunk at a time ----

// Codes are unsigned bytes, 8 or of FP4 12 more than they stand for. Inputs are words 256 * h + l of
// two signed bytes, since products of bytes take half the room of those of words: sums of 16 bits
// are exact. What codes have too much meets the inputs' own sums.
static const float LARGEST_WORD = 127 * 256 + 127;

// A row of inputs: of each 64 columns h and l of the even ones, then of the odd ones; of each chunk
// what its lanes have too much, or, where there are zeros, sums of inputs as float32; and what words
// are to be multiplied by.
template <int G>
struct Halves {
  static const int LANES = G == 8 ? 16 : 8;  // with 16 columns a group, each half has its own
  const int8_t* bytes;
  const int32_t* lanes;
  INLINE Halves of(const uint8_t* x, int64_t chunks) {
    return {(const int8_t*)x, (const int32_t*)(x + chunks * CHUNK * 2)};
  }
  INLINE float unit(const Halves& of, int64_t chunks) {
    return ((const float*)of.lanes)[chunks * LANES];
  }
  static int lane(int h, int at) {  // that a byte of half a chunk comes to: see `lanes_of`
    return G == 8 ? h * 8 + at / 4 : G == 1 ? at / 4 : at / 16 * 4 + h * 2 + at % 8 / 4;
  }
};

template <int G, bool ZERO>
static void lay_halves(const Matrix& a, const uint16_t* x, uint8_t* to) {
  const int64_t k = a.num_in, chunks = a.chunks(), LANES = Halves<G>::LANES;
  const int32_t more = a.kind == FP4 ? 12 : 8;
  const Largest largest(a, x);
  const float by = largest.to_words(LARGEST_WORD);
  int8_t* bytes = (int8_t*)to;
  int32_t* all_lanes = (int32_t*)Halves<G>::of(to, chunks).lanes;
  for (int64_t c = 0; c < chunks; c++) {
    int32_t lanes[16] = {};
    for (int h = 0; h < 2; h++)
      for (int j = 0; j < 64; j++) {
        const int64_t at = c * CHUNK + h * 64 + j;
        const int32_t word = (int32_t)lrintf(at < k ? from_bf16(x[at]) * by : 0);
        const int8_t low = (int8_t)word;
        int8_t* place = bytes + (c * 2 + h) * 128 + (j & 1) * 64 + j / 2;
        place[0] = (int8_t)((word - low) / 256), place[32] = low;
        lanes[Halves<G>::lane(h, j / 2)] += word;
      }
    for (int i = 0; i < LANES; i++) {
      const float sum = (float)lanes[i];
      const int32_t too_much = lanes[i] * more;
      memcpy(all_lanes + c * LANES + i, ZERO ? (const void*)&sum : &too_much, 4);
    }
  }
  const float unit = largest.from_words(LARGEST_WORD);
  memcpy(all_lanes + chunks * LANES, &unit, 4);
}

// What the lanes of a chunk are multiplied by: a number a group, of G groups. Lanes have the groups
// 0 0 2 2 1 1 3 3, of two groups 0 0 1 1 0 0 1 1.
template <int G>
INLINE Floats lanes_of(const float* p) {
  if (G == 1) return _mm256_set1_ps(*p);
  if (G == 2) {
    const Floats both = _mm256_castpd_ps(_mm256_broadcast_sd((const double*)p));
    return _mm256_unpacklo_ps(both, both);
  }
  return _mm256_permutevar_ps(_mm256_broadcast_ps((const __m128*)p),
                              _mm256_setr_epi32(0, 0, 2, 2, 1, 1, 3, 3));
}
INLINE Floats lanes_of_exponents(const uint8_t* p) {
  int32_t four;
  memcpy(&four, p, 4);
  const int8_t _ = -1;  // a byte of zero
  const Bits places = _mm256_setr_epi8(_, _, _, 0, _, _, _, 0, _, _, _, 2, _, _, _, 2,  //
                                       _, _, _, 1, _, _, _, 1, _, _, _, 3, _, _, _, 3);
  return (Floats)_mm256_srli_epi32(_mm256_shuffle_epi8(_mm256_set1_epi32(four), places), 1);
}

template <bool IS_FLOAT, int G, bool ZERO, int INPUTS>
static void multiply_halves(const Matrix& a, const uint8_t* const* x, float* const* y, Range of,
                            int64_t out) {
  const int64_t chunks = a.chunks(), whole = a.num_in / CHUNK, row_bytes = a.row_bytes();
  const int64_t LANES = Halves<G>::LANES;
  const Ahead ahead = look_ahead(row_bytes, chunks, CHUNK / 2, 1);
  const Bits low_half = _mm256_set1_epi8(15), table = load(FP4_TABLE);
  const Bits high_unit = _mm256_set1_epi16(256), low_unit = _mm256_set1_epi16(1);
  // scales of FP4 are taken as they are stored
  float scales[IS_FLOAT ? 1 : MOST_COLUMNS / CHUNK * G];
  float zeros[ZERO ? MOST_COLUMNS / CHUNK * G : 1];
  for (int64_t r = of.first; r < of.stop; r++) {
    const uint8_t *row = a.part[CODES] + r * row_bytes, *row_stored = nullptr;
    Floats sums[INPUTS];
    if (IS_FLOAT) row_stored = scales_at(a, r);
    else row_scales(a, r, scales);
    if (ZERO) row_zeros(a, r, zeros);
    for (int m = 0; m < INPUTS; m++) sums[m] = _mm256_setzero_ps();
    auto step = [&](const uint8_t* p, const uint8_t* stored, int64_t c)
                    __attribute__((always_inline)) {
      Bits even[2], odd[2];
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        Bits w = load(p + 32 * h);
        asm("" : "+x"(w));  // or GCC reads it twice
        even[h] = _mm256_and_si256(w, low_half);
        odd[h] = _mm256_and_si256(_mm256_srli_epi16(w, 4), low_half);
        if (IS_FLOAT) {
          even[h] = _mm256_shuffle_epi8(table, even[h]);
          odd[h] = _mm256_shuffle_epi8(table, odd[h]);
        }
      }
      const Floats said = G == 8 ? from_e4m3(stored) : IS_FLOAT ? lanes_of_exponents(stored)
                                                                : lanes_of<G>(scales + c * G);
#pragma GCC unroll 4
      for (int m = 0; m < INPUTS; m++) {
        const Halves<G> laid = Halves<G>::of(x[m], chunks);
        auto add = [&](Bits high, Bits low, int64_t lane, Floats scale) __attribute__((always_inline)) {
          Bits sum = _mm256_add_epi32(_mm256_madd_epi16(high, high_unit),
                                      _mm256_madd_epi16(low, low_unit));
          const Bits more = load(laid.lanes + c * LANES + lane);
          if (!ZERO) sum = _mm256_sub_epi32(sum, more);
          Floats part = _mm256_cvtepi32_ps(sum);
          if (ZERO)
            part = _mm256_fnmadd_ps(_mm256_add_ps(lanes_of<G>(zeros + c * G), _mm256_set1_ps(8)),
                                    (Floats)more, part);
          sums[m] = _mm256_fmadd_ps(part, scale, sums[m]);
        };
        Bits high[2], low[2];
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
          const int8_t* q = laid.bytes + (c * 2 + h) * 128;
          high[h] = _mm256_add_epi16(_mm256_maddubs_epi16(even[h], load(q)),
                                     _mm256_maddubs_epi16(odd[h], load(q + 64)));
          low[h] = _mm256_add_epi16(_mm256_maddubs_epi16(even[h], load(q + 32)),
                                    _mm256_maddubs_epi16(odd[h], load(q + 96)));
          if (G == 8)
            add(high[h], low[h], 8 * h, _mm256_permutevar8x32_ps(said, _mm256_add_epi32(
                _mm256_set1_epi32(4 * h), _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3))));
        }
        if (G == 1) add(_mm256_add_epi16(high[0], high[1]), _mm256_add_epi16(low[0], low[1]), 0, said);
        if (G == 2 || G == 4) add(join(high), join(low), 0, said);
      }
    };
    for (int64_t c = 0; c < whole; c++) {
      const uint8_t* p = row + c * (CHUNK / 2);
      prefetch(p, ahead.of(c));
      step(p, row_stored + c * G, c);
    }
    if (whole < chunks) {
      uint8_t rest[CHUNK / 2] = {}, rest_scales[8] = {};
      memcpy(rest, row + whole * (CHUNK / 2), a.num_in / 2 - whole * (CHUNK / 2));
      if (IS_FLOAT) memcpy(rest_scales, row_stored + whole * G, a.row_scales - whole * G);
      step(rest, rest_scales, whole);
    }
    const float unit = !IS_FLOAT ? 1.f : scale_of_scales(a, r) * (G == 8 ? 128.f : .5f);
    for (int m = 0; m < INPUTS; m++)
      y[m][r - out] = total(sums[m]) * unit * Halves<G>::unit(Halves<G>::of(x[m], chunks), chunks);
  }
}

// ---- all forms ----

template <class Form>
struct AsFloats {
  static void lay(const Matrix& a, const uint16_t* x, uint8_t* to) { lay_floats<Form>(a, x, to); }
  template <int INPUTS>
  static void multiply(const Matrix& a, const uint8_t* const* x, float* const* y, Range of,
                       int64_t out) {
    multiply_floats<Form, INPUTS>(a, x, y, of, out);
  }
};
struct AsPacked {
  static void lay(const Matrix& a, const uint16_t* x, uint8_t* to) { lay_packed(a, x, to); }
  template <int INPUTS>
  static void multiply(const Matrix& a, const uint8_t* const* x, float* const* y, Range of,
                       int64_t out) {
    multiply_packed<INPUTS>(a, x, y, of, out);
  }
};
template <bool ZERO>
struct AsBytes {
  static void lay(const Matrix& a, const uint16_t* x, uint8_t* to) { lay_words(a, x, to); }
  template <int INPUTS>
  static void multiply(const Matrix& a, const uint8_t* const* x, float* const* y, Range of,
                       int64_t out) {
    multiply_bytes<ZERO, INPUTS>(a, x, y, of, out);
  }
};
template <bool IS_FLOAT, int G, bool ZERO>
struct AsHalves {
  static void lay(const Matrix& a, const uint16_t* x, uint8_t* to) { lay_halves<G, ZERO>(a, x, to); }
  template <int INPUTS>
  static void multiply(const Matrix& a, const uint8_t* const* x, float* const* y, Range of,
                       int64_t out) {
    multiply_halves<IS_FLOAT, G, ZERO, INPUTS>(a, x, y, of, out);
  }
};

template <class With>
INLINE void choose(const Matrix& a, With with) {
  const int64_t g = a.kind == RAW || a.kind == PACKED ? 0 : scales_of_chunk(a);
  const bool zero = a.zero_type != NO_ZERO;
  switch (a.kind) {
    case RAW: return with(AsFloats<Raw>{});
    case FP8: return with(AsFloats<Fp8>{});
    case PACKED: return with(AsPacked{});
    case INT8: return zero ? with(AsBytes<true>{}) : with(AsBytes<false>{});
    case FP4: return g == 8 ? with(AsHalves<true, 8, false>{}) : with(AsHalves<true, 4, false>{});
    case INT4:
      if (g == 1) return zero ? with(AsHalves<false, 1, true>{}) : with(AsHalves<false, 1, false>{});
      if (g == 2) return zero ? with(AsHalves<false, 2, true>{}) : with(AsHalves<false, 2, false>{});
      return zero ? with(AsHalves<false, 4, true>{}) : with(AsHalves<false, 4, false>{});
  }
}

static int64_t prepared_bytes(const Matrix& a) {
  const int64_t columns = a.chunks() * CHUNK;
  if (a.kind == RAW || a.kind == FP8) return (columns + 32) * 4;
  if (a.kind == PACKED) return packed_steps(a) * 256 + columns * 2;
  return columns * 2 + a.chunks() * 64 + 64;
}

static void prepare(const Matrix& a, const uint16_t* x, uint8_t* prepared) {
  choose(a, [&](auto form) { decltype(form)::lay(a, x, prepared); });
}

template <class Form>
static void all_rows(const Matrix& a, const uint8_t* const* x, float* const* y, int64_t num,
                     int64_t first, int64_t stop) {
  fetch_first(a, first, 0);
  // so many rows that those inputs that are not multiplied at once find them in the first cache
  const int64_t together = num <= 2 || num == 4 ? stop - first : 4;
  for (int64_t r = first; r < stop; r += together) {
    const Range of = {r, std::min(r + together, stop)};
    for (int64_t i = 0; i < num;) {
      if (num - i >= 4) Form::template multiply<4>(a, x + i, y + i, of, first), i += 4;
      else if (num - i >= 2) Form::template multiply<2>(a, x + i, y + i, of, first), i += 2;
      else Form::template multiply<1>(a, x + i, y + i, of, first), i += 1;
    }
  }
}

static void rows(const Matrix& a, const uint8_t* const* x, float* const* y, int64_t num,
                 int64_t first, int64_t stop) {
  choose(a, [&](auto form) { all_rows<decltype(form)>(a, x, y, num, first, stop); });
  if (a.kind == PACKED) add_patches(a, packed_steps(a) * 256, x, y, num, first, stop);
}

}  // namespace

void avx2_tables(const float* fp4, const float*) {
  for (int i = 0; i < 32; i++) FP4_TABLE[i] = (uint8_t)(2 * fp4[i & 15] + 12);
}

const Kernels AVX2 = {prepared_bytes, prepare, rows};
