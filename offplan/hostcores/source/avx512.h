// AVX-512 with BF16, VBMI and VNNI: weights become bfloat16 in registers, 128 at a time, inputs are
// bfloat16 in the order in which that leaves them, and vdpbf16ps sums in float32. Whole numbers and FP4
// become words, and so do inputs, for vpdpwssd.
#pragma once
#include "form.h"
#define KERNELS AVX512

namespace {

typedef __m512i Bits;
typedef __m512 Floats;
static const int MOST_ROWS = 4;           // that are multiplied at a time
static const int COLUMNS_OF_PACKED = CHUNK;  // that make one sum

INLINE void prefetch(const uint8_t* p, int64_t at, int64_t ahead) {
  _mm_prefetch((const char*)p + at + ahead, _MM_HINT_T1);
}
INLINE __mmask64 first_bytes(int64_t n) { return n >= 64 ? ~0ull : n <= 0 ? 0 : (1ull << n) - 1; }
template <bool TAIL>
INLINE Bits load(const uint8_t* p, int64_t left) {
  return once(TAIL ? _mm512_maskz_loadu_epi8(first_bytes(left), p) : _mm512_loadu_si512(p));
}
INLINE float total(Floats v) { return _mm512_reduce_add_ps(v); }
INLINE Bits bytes_of(int byte) { return _mm512_set1_epi8((char)byte); }
template <int BITS>
INLINE Bits shift_right(Bits words) { return _mm512_srli_epi16(words, BITS); }
INLINE Bits interleave_low(Bits low, Bits high) { return _mm512_unpacklo_epi8(low, high); }
INLINE Bits interleave_high(Bits low, Bits high) { return _mm512_unpackhi_epi8(low, high); }

// Puts bytes of a sign and a mantissa, and the exponents that codes stand for, together: the high
// bytes of bfloat16 and the low ones.
struct Exponents {
  Bits base;
  METHOD explicit Exponents(int its_base) : base(bytes_of(its_base)) {}
  METHOD Bits of(Bits codes) const {
    return _mm512_maskz_add_epi8(_mm512_test_epi8_mask(codes, codes), codes, base);
  }
  METHOD Bits high(Bits w, Bits codes) const {
    return _mm512_ternarylogic_epi32(bytes_of(-128), w, shift_right<1>(of(codes)), 0xCA);
  }
  METHOD Bits low(Bits w, Bits codes) const {
    return _mm512_ternarylogic_epi32(bytes_of(-128), _mm512_slli_epi16(of(codes), 7), w, 0xCA);
  }
};

// A number for each lane of sums, of NUM that a chunk has.
template <int NUM>
INLINE Floats lanes_of(const float* p) {
  if (NUM == 1) return _mm512_set1_ps(*p);
  if (NUM == 2)
    return _mm512_permutexvar_ps(
        _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1),
        _mm512_castps128_ps512(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)p))));
  if (NUM == 4)
    return _mm512_permutexvar_ps(
        _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
        _mm512_castps128_ps512(_mm_loadu_ps(p)));
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
                               _mm512_castps256_ps512(_mm256_loadu_ps(p)));
}

// For each word of a vector, where it is among two halves of a chunk.
template <class Form>
struct Order {
  alignas(64) uint16_t word[4][32];
  __mmask32 is_second[4] = {};
  Order() {
    for (int i = 0; i < 4; i++)
      for (int j = 0; j < 32; j++) {
        const int column = Form::column(0, i, j);
        word[i][j] = (uint16_t)(column & 63);
        is_second[i] |= (__mmask32)(column >> 6) << j;
      }
  }
};

// Forms of weights that become bfloat16; those that become words take the layout alone. ONE_ROW.
// Source: one Zen 4 core, ratios to a plain read by fours and by ones: FP8 0.88 and 1.0, packed 0.81
// and 0.97, bf16 0.97 and 0.78. By vdpbf16ps whole numbers of 4 bits 0.78 and 0.67, others the same.
template <int NUM_SCALES>
struct Scaled : Form {
  static const int COLUMNS = CHUNK, STEPS = 1, GROUPS = NUM_SCALES;
  template <class Own>
  INLINE float lay(const uint16_t* x, uint8_t* to) {
    static const Order<Own> order;
    for (int i = 0; i < 4; i++) {
      const Bits word = _mm512_load_si512(order.word[i]);
      auto choose = [&](const uint16_t* from) {
        return _mm512_permutex2var_epi16(_mm512_loadu_si512(from), word, _mm512_loadu_si512(from + 32));
      };
      _mm512_storeu_si512(to + 64 * i,
                          _mm512_mask_blend_epi16(order.is_second[i], choose(x), choose(x + 64)));
    }
    return 1;
  }
  template <int>
  struct Sums {
    static const int BYTES = 64;  // of inputs that meet a vector of weights
    Floats sum;
    METHOD void start(Floats before) { sum = GROUPS ? Floats{} : before; }
    METHOD void add(Bits weights, const uint8_t* x, int) {
      sum = _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)_mm512_loadu_si512(x));
    }
    template <bool, class Row>
    METHOD Floats finish(Floats before, const Row&, int64_t, const float* scales, const float*,
                         const uint8_t*) const {
      return GROUPS ? _mm512_fmadd_ps(sum, lanes_of<GROUPS>(scales), before) : sum;
    }
  };
};
typedef Scaled<0> Words;

alignas(64) static uint8_t FP8_TABLES[2][128];  // high bytes, then low ones
alignas(64) static uint16_t FP4_TABLE[32], INT4_TABLE[32];

struct Fp8 : Scaled<1> {
  static const bool ONE_ROW = true;
  static int column(int, int i, int j) { return 64 * (i / 2) + 16 * (j / 8) + 8 * (i & 1) + j % 8; }
  struct Row {
    const uint8_t* codes;
    int64_t bytes;
  };
  INLINE Row row(const Matrix& a, int64_t r, int) {
    return {a.part[CODES] + r * a.stored_in, a.num_in};
  }
  template <bool TAIL>
  INLINE void decode(const Row& r, int64_t c, int s, Bits* v, int64_t ahead) {
    const uint8_t(*t)[128] = FP8_TABLES;
    const Bits h0 = _mm512_load_si512(t[0]), h1 = _mm512_load_si512(t[0] + 64);
    const Bits l0 = _mm512_load_si512(t[1]), l1 = _mm512_load_si512(t[1] + 64);
    for (int h = 0; h < 2; h++) {
      const int64_t at = c * CHUNK + h * 64;
      prefetch(r.codes, at, ahead);
      const Bits w = load<TAIL>(r.codes + at, r.bytes - at);
      const Bits high = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(h0, w, h1), w,
                                                  bytes_of(-128), 0xF8);
      const Bits low = _mm512_permutex2var_epi8(l0, w, l1);
      v[2 * h] = interleave_low(low, high), v[2 * h + 1] = interleave_high(low, high);
    }
  }
};

// Whole numbers and FP4 become words, FP4 of twice its values, and meet words, too: inputs that are
// rounded to 16 bits of a chunk's largest, whose sums are exact. Source: one core of a Xeon with
// AMX, its third cache; 1, 2, 4 and 8 rows. MXFP4 of 46 MiB took 12.5, 8.1, 4.8 and 2.6 GB/s by
// vdpbf16ps, and takes 16.8, 13.4, 7.7 and 4.0 so; 8 bits of 22 MiB 15.8, 11.8, 7.5 and 4.4, and 23.5,
// 22.6, 14.5 and 7.6 so.
template <int NUM_SCALES, bool WITH_ZERO>
struct Rounded : Scaled<NUM_SCALES> {
  static const bool ZERO = WITH_ZERO, ONE_ROW = false, IS_TWICE = false;
  static const int SUMS = WITH_ZERO ? 64 : 0, UNIT = 4;
  INLINE Bits one() { return _mm512_set1_epi16(1); }
  template <class Own>
  INLINE float lay(const uint16_t* x, uint8_t* to) {
    uint16_t words[CHUNK];
    const float unit = round_chunk(x, (int16_t*)words) * (Own::IS_TWICE ? .5f : 1.f);
    return unit * Scaled<NUM_SCALES>::template lay<Own>(words, to);
  }
  template <int>
  struct Sums {
    static const int BYTES = 64;
    Bits sum;
    METHOD void start(Floats) { sum = Bits{}; }
    METHOD void add(Bits weights, const uint8_t* x, int) {
      sum = _mm512_dpwssd_epi32(sum, weights, _mm512_loadu_si512(x));
    }
    template <bool, class Row>
    METHOD Floats finish(Floats before, const Row&, int64_t, const float* scales,
                         const float* zeros, const uint8_t* more) const {
      Floats part = _mm512_cvtepi32_ps(sum);
      if (WITH_ZERO) part = _mm512_fnmadd_ps(lanes_of<NUM_SCALES>(zeros), _mm512_loadu_ps(more), part);
      const Floats unit = _mm512_set1_ps(*(const float*)(more + SUMS));
      return _mm512_fmadd_ps(part * lanes_of<NUM_SCALES>(scales), unit, before);
    }
    METHOD void keep(uint8_t* more) const { _mm512_storeu_ps(more, _mm512_cvtepi32_ps(sum)); }
  };
};

template <bool WITH_ZERO>
struct Int8 : Rounded<1, WITH_ZERO> {
  static int column(int, int i, int j) { return 32 * i + j; }
  struct Row {
    const uint8_t* codes;
    int64_t bytes;
    Bits flip;
  };
  INLINE Row row(const Matrix& a, int64_t r, int) {
    return {a.part[CODES] + r * a.stored_in, a.num_in, bytes_of(a.unsigned_codes ? -128 : 0)};
  }
  template <bool TAIL>
  INLINE void decode(const Row& r, int64_t c, int s, Bits* v, int64_t ahead) {
    for (int h = 0; h < 2; h++) {
      const int64_t at = c * CHUNK + h * 64;
      prefetch(r.codes, at, ahead);
      const Bits w = load<TAIL>(r.codes + at, r.bytes - at) ^ r.flip;
      v[2 * h] = _mm512_cvtepi8_epi16(_mm512_castsi512_si256(w));
      v[2 * h + 1] = _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(w, 1));
    }
  }
};

// Four bits each, the first in the low half of a byte.
template <bool IS_FLOAT, int NUM_SCALES, bool WITH_ZERO>
struct Halves : Rounded<NUM_SCALES, WITH_ZERO> {
  static const bool IS_TWICE = IS_FLOAT;
  static int column(int, int i, int j) { return 4 * j + i; }
  struct Row {
    const uint8_t* codes;
    int64_t bytes;
  };
  INLINE Row row(const Matrix& a, int64_t r, int) {
    return {a.part[CODES] + r * a.row_bytes(), a.num_in / 2};
  }
  template <bool TAIL>
  INLINE void decode(const Row& r, int64_t c, int s, Bits* v, int64_t ahead) {
    const Bits table = _mm512_load_si512(IS_FLOAT ? FP4_TABLE : INT4_TABLE);
    prefetch(r.codes, c * 64, ahead);
    const Bits w = load<TAIL>(r.codes + c * 64, r.bytes - c * 64);  // beyond it meets zeros
    v[0] = _mm512_permutexvar_epi16(w, table);
    v[1] = _mm512_permutexvar_epi16(shift_right<4>(w), table);
    v[2] = _mm512_permutexvar_epi16(shift_right<8>(w), table);
    v[3] = _mm512_permutexvar_epi16(shift_right<12>(w), table);
  }
};

static void set_tables(const float* fp4, const float* fp8) {
  for (int i = 0; i < 32; i++) {
    FP4_TABLE[i] = (uint16_t)(int16_t)(2 * fp4[i & 15]);
    INT4_TABLE[i] = (uint16_t)((i & 15) - 8);
  }
  for (int i = 0; i < 128; i++)
    for (int low = 0; low < 2; low++)
      FP8_TABLES[low][i] = (uint8_t)(to_bf16(fp8[i]) >> (low ? 0 : 8));
}

}  // namespace
