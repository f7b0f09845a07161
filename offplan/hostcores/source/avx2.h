// AVX2, FMA and F16C. bfloat16, FP8 and packed weights become float32 in registers and meet inputs
// of float32. Whole numbers and FP4 meet inputs rounded to 16 bits of a chunk's largest: sums of a
// group are exact.
#pragma once
#include "form.h"
#define KERNELS AVX2

namespace {

typedef __m256i Bits;
typedef __m256 Floats;
// Rows that are multiplied at a time: processors read ahead best of one. Source: one Zen 4 core,
// four rows and one, ratios to a plain read: bf16 0.84 and 0.89, packed weights 0.60 and 0.80.
static const int MOST_ROWS = 1;
static const int COLUMNS_OF_PACKED = 2 * BASE_BYTES;  // that make one sum

INLINE void prefetch(const uint8_t* p, int64_t at, int64_t ahead) {  // of 64 bytes once
  if (at % 64 == 0) _mm_prefetch((const char*)p + at + ahead, _MM_HINT_T1);
}
INLINE Bits load(const void* p) { return _mm256_loadu_si256((const Bits*)p); }
INLINE Floats load_floats(const void* p) { return _mm256_loadu_ps((const float*)p); }
template <bool TAIL>
INLINE Bits load(const uint8_t* p, int64_t left) {
  Bits made = {};
  if (!TAIL || left >= 32) return load(p);
  if (left > 0) memcpy(&made, p, left);
  return made;
}
INLINE float total(Floats v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_hadd_ps(s, s);
  return _mm_cvtss_f32(_mm_hadd_ps(s, s));
}
INLINE Bits bytes_of(int byte) { return _mm256_set1_epi8((char)byte); }
template <int BITS>
INLINE Bits shift_right(Bits words) { return _mm256_srli_epi16(words, BITS); }
INLINE Bits interleave_low(Bits low, Bits high) { return _mm256_unpacklo_epi8(low, high); }
INLINE Bits interleave_high(Bits low, Bits high) { return _mm256_unpackhi_epi8(low, high); }
INLINE Bits look_up(Bits table, Bits codes) { return _mm256_shuffle_epi8(table, codes); }

// Puts bytes of a sign and a mantissa, and the exponents that codes stand for, together: the high
// bytes of bfloat16 and the low ones.
struct Exponents {
  Bits highs, lows;  // of each code seven bits of the exponent, and its last one
  METHOD explicit Exponents(int base) {
    const Bits sign = bytes_of(-128), codes = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    const Bits made = _mm256_add_epi8(bytes_of(base), codes) & _mm256_cmpgt_epi8(codes, Bits{});
    highs = _mm256_andnot_si256(sign, shift_right<1>(made));
    lows = sign & _mm256_slli_epi16(made, 7);
  }
  METHOD Bits high(Bits w, Bits codes) const {
    return (bytes_of(-128) & w) | look_up(highs, codes);
  }
  METHOD Bits low(Bits w, Bits codes) const {
    return _mm256_andnot_si256(bytes_of(-128), w) | look_up(lows, codes);
  }
};

// ---- forms that become float32 ----

// WORDS says whether vectors are of bfloat16, of which the even ones meet eight inputs, then the odd.
template <bool WORDS>
struct Floating : Form {
  static const int GROUPS = WORDS ? 0 : 1, BYTES = WORDS ? 64 : 32;
  static const int VECTORS = WORDS ? 2 : 4;
  static const bool ONE_ROW = true, BY_INPUTS = !WORDS;
  template <class Own>
  INLINE float lay(const uint16_t* x, uint8_t* to) {
    const int num = BYTES / 4;
    for (int v = 0; v < Own::STEPS * Own::VECTORS; v++)
      for (int j = 0; j < num; j++)
        ((float*)to)[v * num + (WORDS ? j % 2 * 8 + j / 2 : j)] =
            from_bf16(x[Own::column(v / Own::VECTORS, v % Own::VECTORS, j)]);
    return 1;
  }
  // Several sums for few inputs: one would wait for each product.
  template <int INPUTS>
  struct Sums {
    static const int BYTES = Floating::BYTES;  // of inputs that meet a vector of weights
    static const int NUM = INPUTS == 1 ? 4 : INPUTS == 2 ? 2 : 1;
    Floats sums[NUM];
    METHOD void start(Floats) {
      for (int k = 0; k < NUM; k++) sums[k] = Floats{};
    }
    METHOD void add_floats(Bits v, const uint8_t* x, int k) {
      sums[k % NUM] = _mm256_fmadd_ps((Floats)v, load_floats(x), sums[k % NUM]);
    }
    METHOD void add(Bits v, const uint8_t* x, int j) {
      if (!WORDS) return add_floats(v, x, j);
      add_floats(_mm256_slli_epi32(v, 16), x, 2 * j);
      add_floats(v & _mm256_set1_epi32((int)0xffff0000), x + 32, 2 * j + 1);
    }
    template <bool, class Row>
    METHOD Floats finish(Floats before, const Row&, int64_t, const float* scales, const float*,
                         const uint8_t*) const {
      Floats sum = sums[0];
      if (NUM > 1) sum = sum + sums[1 % NUM];
      if (NUM > 2) sum = sum + (sums[2 % NUM] + sums[3 % NUM]);
      return GROUPS ? _mm256_fmadd_ps(sum, _mm256_set1_ps(*scales * 256), before) : sum + before;
    }
  };
};
typedef Floating<true> Words;

struct Fp8 : Floating<false> {  // by way of a half, which is a 256th of the value
  static const int COLUMNS = CHUNK, STEPS = CHUNK / 32;
  static int column(int s, int i, int j) { return s * 32 + i * 8 + j; }
  struct Row {
    const uint8_t* codes;
    int64_t bytes;
  };
  INLINE Row row(const Matrix& a, int64_t r, int) {
    return {a.part[CODES] + r * a.row_bytes(), a.num_in};
  }
  template <bool TAIL>
  INLINE void decode(const Row& r, int64_t c, int s, Bits* v, int64_t ahead) {
    const int64_t at = c * CHUNK + s * 32;
    const uint8_t* p = r.codes + at;
    Bits some;
    prefetch(r.codes, at, ahead);
    if (TAIL) some = load<TAIL>(p, r.bytes - at), p = (const uint8_t*)&some;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) v[i] = (Bits)from_e4m3(p + 8 * i);
  }
};

// ---- whole numbers of 8 bits, which meet inputs of 16 bits by vpmaddwd ----

template <bool WITH_ZERO>
struct Int8 : Form {
  static const int COLUMNS = CHUNK, STEPS = 2, GROUPS = 1;
  static const int SUMS = WITH_ZERO ? 32 : 0, UNIT = 4;
  static const bool ZERO = WITH_ZERO, ONE_ROW = true;
  INLINE Bits one() { return _mm256_set1_epi16(1); }
  template <class>
  INLINE float lay(const uint16_t* x, uint8_t* to) { return round_chunk(x, (int16_t*)to); }
  struct Row {
    const uint8_t* codes;
    int64_t bytes;
    Bits flip;
  };
  INLINE Row row(const Matrix& a, int64_t r, int) {
    return {a.part[CODES] + r * a.row_bytes(), a.num_in, bytes_of(a.unsigned_codes ? -128 : 0)};
  }
  template <bool TAIL>
  INLINE void decode(const Row& r, int64_t c, int s, Bits* v, int64_t ahead) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      const int64_t at = c * CHUNK + s * 64 + h * 32;
      prefetch(r.codes, at, ahead);
      const Bits w = load<TAIL>(r.codes + at, r.bytes - at) ^ r.flip;
      v[2 * h] = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(w));
      v[2 * h + 1] = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(w, 1));
    }
  }
  template <int>
  struct Sums {
    static const int BYTES = 32;
    Bits sum;
    METHOD void start(Floats) { sum = Bits{}; }
    METHOD void add(Bits v, const uint8_t* x, int) {
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(v, load(x)));
    }
    template <bool>
    METHOD Floats finish(Floats before, const Row&, int64_t, const float* scales,
                         const float* zeros, const uint8_t* more) const {
      Floats part = _mm256_cvtepi32_ps(sum);
      if (ZERO) part = _mm256_fnmadd_ps(_mm256_set1_ps(*zeros), load_floats(more), part);
      const Floats unit = _mm256_broadcast_ss((const float*)(more + SUMS));
      return _mm256_fmadd_ps(part * _mm256_broadcast_ss(scales), unit, before);
    }
    METHOD void keep(uint8_t* more) const { _mm256_storeu_ps((float*)more, _mm256_cvtepi32_ps(sum)); }
  };
};

// ---- four bits, which meet inputs of 16 bits by vpmaddubsw ----

alignas(32) static uint8_t FP4_TABLE[32];  // twice the values, and 12

// A number for each lane of sums, of NUM that a chunk has. Lanes have the groups 0 0 2 2 1 1 3 3, of
// two groups 0 0 1 1 0 0 1 1.
template <int NUM>
INLINE Floats lanes_of(const float* p) {
  if (NUM == 1) return _mm256_set1_ps(*p);
  if (NUM == 2) {
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
// Add the halves of lanes up, of two vectors: lanes are those of the first, then of the second.
INLINE Bits join(const Bits v[2]) {
  return _mm256_add_epi16(_mm256_unpacklo_epi64(v[0], v[1]), _mm256_unpackhi_epi64(v[0], v[1]));
}

// Codes are unsigned bytes, 8 or of FP4 12 more than they stand for. Inputs are words 256 * h + l of
// two signed bytes, since products of bytes take half the room of those of words: sums of 16 bits
// are exact. What codes have too much meets the inputs' own sums. Scales of FP4 are taken as they
// are stored. With 16 columns a group, each half of a chunk has lanes of its own.
template <bool IS_FLOAT, int G, bool WITH_ZERO>
struct Halves : Form {
  static const int COLUMNS = CHUNK, STEPS = 1, GROUPS = IS_FLOAT ? 0 : G;
  static const int SUMS = G == 8 ? 64 : 32, UNIT = 4;
  static const bool ZERO = WITH_ZERO, ONE_ROW = true;
  INLINE Bits one() { return bytes_of(1); }
  // for each vector of weights 32 bytes of h, then of l
  template <class>
  INLINE float lay(const uint16_t* x, uint8_t* to) {
    int16_t words[CHUNK];
    const float unit = round_chunk(x, words);
    for (int j = 0; j < CHUNK; j++) {
      const int8_t low = (int8_t)words[j];
      uint8_t* place = to + j / 64 * 128 + (j & 1) * 64 + j % 64 / 2;
      place[0] = (uint8_t)((words[j] - low) / 256), place[32] = (uint8_t)low;
    }
    return unit;
  }
  struct Row {
    const uint8_t *codes, *scales;
    int64_t bytes, num_scales;
    float unit;
  };
  INLINE Row row(const Matrix& a, int64_t r, int) {
    const uint8_t* codes = a.part[CODES] + r * a.row_bytes();
    if (!IS_FLOAT) return {codes, nullptr, a.num_in / 2, 0, 1};
    return {codes, scales_at(a, r), a.num_in / 2, a.row_scales,
            scale_of_scales(a, r) * (G == 8 ? 128.f : .5f)};
  }
  template <bool TAIL>
  INLINE void decode(const Row& r, int64_t c, int s, Bits* v, int64_t ahead) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      const int64_t at = c * (CHUNK / 2) + h * 32;
      prefetch(r.codes, at, ahead);
      const Bits w = once(load<TAIL>(r.codes + at, r.bytes - at)), low_half = bytes_of(15);
      v[2 * h] = w & low_half, v[2 * h + 1] = shift_right<4>(w) & low_half;
      for (int i = 2 * h; i < 2 * h + 2 && IS_FLOAT; i++) v[i] = look_up(load(FP4_TABLE), v[i]);
    }
  }
  template <int>
  struct Sums {
    static const int BYTES = 64, PARTS = G == 8 ? 2 : 1;
    Bits high[2], low[2];  // of each half of a chunk
    METHOD void start(Floats) {}
    METHOD void add(Bits v, const uint8_t* x, int j) {
      const Bits highs = _mm256_maddubs_epi16(v, load(x)), lows = _mm256_maddubs_epi16(v, load(x + 32));
      const int h = j / 2;
      high[h] = j % 2 ? _mm256_add_epi16(high[h], highs) : highs;
      low[h] = j % 2 ? _mm256_add_epi16(low[h], lows) : lows;
    }
    METHOD Bits lanes(int part) const {
      auto merge = [&](const Bits v[2]) __attribute__((always_inline)) {
        return G == 8 ? v[part] : G == 1 ? _mm256_add_epi16(v[0], v[1]) : join(v);
      };
      return _mm256_add_epi32(_mm256_madd_epi16(merge(high), _mm256_set1_epi16(256)),
                              _mm256_madd_epi16(merge(low), _mm256_set1_epi16(1)));
    }
    template <bool TAIL>
    METHOD Floats scale(const Row& r, int64_t c, const float* scales, int part) const {
      if (!IS_FLOAT) return lanes_of<G>(scales);
      const uint8_t* p = r.scales + c * G;
      uint8_t rest[8] = {};
      if (TAIL) p = (const uint8_t*)memcpy(rest, p, r.num_scales - c * G);
      if (G != 8) return lanes_of_exponents(p);
      return _mm256_permutevar8x32_ps(
          from_e4m3(p), _mm256_add_epi32(_mm256_set1_epi32(4 * part),
                                         _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)));
    }
    template <bool TAIL>
    METHOD Floats finish(Floats before, const Row& r, int64_t c, const float* scales,
                         const float* zeros, const uint8_t* more) const {
      Floats found = {};
#pragma GCC unroll 2
      for (int i = 0; i < PARTS; i++) {
        Bits sum = lanes(i);
        if (!ZERO) sum = _mm256_sub_epi32(sum, load(more + 32 * i));
        Floats part = _mm256_cvtepi32_ps(sum);
        if (ZERO) part = _mm256_fnmadd_ps(lanes_of<G>(zeros) + 8.f, load_floats(more), part);
        const Floats s = scale<TAIL>(r, c, scales, i);
        found = i ? _mm256_fmadd_ps(part, s, found) : part * s;
      }
      return _mm256_fmadd_ps(found, _mm256_broadcast_ss((const float*)(more + SUMS)), before);
    }
    // What lanes have too much, or, where there are zeros, sums of inputs as float32.
    METHOD void keep(uint8_t* more) const {
      for (int i = 0; i < PARTS; i++) {
        const Bits much = _mm256_mullo_epi32(lanes(i), _mm256_set1_epi32(IS_FLOAT ? 12 : 8));
        _mm256_storeu_si256((Bits*)more + i, ZERO ? (Bits)_mm256_cvtepi32_ps(lanes(i)) : much);
      }
    }
  };
  INLINE float result(const Row& r, float sum) { return sum * r.unit; }
};

static void set_tables(const float* fp4, const float*) {
  for (int i = 0; i < 32; i++) FP4_TABLE[i] = (uint8_t)(2 * fp4[i & 15] + 12);
}

}  // namespace
