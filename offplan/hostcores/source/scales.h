// The scales and zeros of a row as float32, whatever they are stored as; needs AVX2 and F16C.
#pragma once
#include <immintrin.h>
#include <cstring>
#include "matrix.h"

// Scales that a chunk of a row has at most: of groups of 16.
static const int64_t CHUNK_SCALES = 8;
static const int64_t MOST_SCALES = MOST_COLUMNS / CHUNK * CHUNK_SCALES;

// Scales of a chunk: one for 128 columns or more, else one for each group. A row of one group alone
// has one, but of FP4, whose kernels read those of all groups of a chunk.
INLINE int64_t scales_of_chunk(const Matrix& a) {
  const bool is_one = a.scale_columns >= CHUNK || (a.row_scales == 1 && a.kind != FP4);
  return is_one ? 1 : CHUNK / a.scale_columns;
}

template <class Load>
INLINE void convert(const uint8_t* from, int64_t size, int64_t count, float* to, Load load) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, load(from + i * size));
  if (i < count && count >= 8) {  // some of them once more: what is beyond may be no memory
    _mm256_storeu_ps(to + count - 8, load(from + (count - 8) * size));
  } else if (i < count) {
    uint8_t rest[32] = {};
    float made[8];
    memcpy(rest, from + i * size, (count - i) * size);
    _mm256_storeu_ps(made, load(rest));
    memcpy(to + i, made, (count - i) * 4);
  }
}

// Repeat what groups have for each chunk, where a group has several, and pad the last one.
INLINE void spread(const Matrix& a, float* to) {
  const int64_t chunks = a.chunks(), groups = a.row_scales;
  if (a.scale_columns == CHUNK) return;
  if (scales_of_chunk(a) == 1)
    for (int64_t c = chunks - 1; c >= 0; c--) {
      const int64_t group = groups == 1 ? 0 : c * CHUNK / a.scale_columns;
      to[c] = to[group];
    }
  else
    for (int64_t i = groups; i < chunks * scales_of_chunk(a); i++) to[i] = 0;
}

// Fetch what loops that begin at row `first` only read ahead of themselves: of one row after the
// other, or of four that are `between` apart.
static inline void fetch_first(const Matrix& a, int64_t first, int64_t between) {
  const int64_t rows = between ? 4 : 1, row_bytes = a.row_bytes();
  const int64_t each = rows == 1 || row_bytes > AHEAD / rows ? AHEAD / rows : row_bytes;
  for (int64_t i = 0; i < rows; i++) {
    const char* codes = (const char*)a.part[CODES] + (first + i * between) * row_bytes;
    for (int64_t at = 0; at < each; at += 64) _mm_prefetch(codes + at, _MM_HINT_T1);
    if (a.kind != PACKED) continue;
    const char* exponents = (const char*)a.part[EXPONENTS] + (first + i * between) * row_bytes / 2;
    for (int64_t at = 0; at < each / 2; at += 64) {
      _mm_prefetch(codes + row_bytes / 2 + at, _MM_HINT_T1);
      _mm_prefetch(exponents + at, _MM_HINT_T1);
    }
  }
}

// Divide without the instruction, which takes as long as a hundred weights, where that can be.
INLINE int64_t shared_row(int64_t r, int64_t rows) {
  return rows == 1 ? r : rows == 128 ? r / 128 : (int64_t)((uint32_t)r / (uint32_t)rows);
}

static const int64_t SCALE_SIZES[] = {0, 4, 2, 2, 1, 1};

// Where the scales of row `r` lie. Fetches those of rows that the loops are about to come to.
INLINE const uint8_t* scales_at(const Matrix& a, int64_t r) {
  const int64_t bytes = a.row_scales * SCALE_SIZES[a.scale_type];
  const uint8_t* from = a.part[SCALES] + shared_row(r, a.scale_rows) * bytes;
  if (a.scale_rows == 1) {
    const char* next = (const char*)from + (takes_rows_apart() ? a.rows_ahead / 4 : a.rows_ahead) * bytes;
    for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch(next + at, _MM_HINT_T1);
  }
  return from;
}

// What all scales of row `r` are multiplied by.
INLINE float scale_of_scales(const Matrix& a, int64_t r) {
  const float whole = (float)a.factor;
  if (!a.part[WHOLE]) return whole;
  const float said = ((const float*)a.part[WHOLE])[shared_row(r, a.whole_rows)];
  return a.whole_divides ? whole / said : whole * said;
}

// Eight scales of E4M3. As halves their bits are a 256th of the value.
INLINE __m256 from_e4m3(const void* p) {
  __m128i codes = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
  return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(codes, 7), _mm_set1_epi16((short)0xBF80)));
}

// Make the scales of row `r`, for each chunk of the row scales_of_chunk(a) of them.
static inline void row_scales(const Matrix& a, int64_t r, float* to) {
  const int64_t groups = a.row_scales;
  const uint8_t* from = scales_at(a, r);
  const float whole = scale_of_scales(a, r);
  const __m256 by = _mm256_set1_ps(whole);
  switch (a.scale_type) {
    case FLOAT32:
      convert(from, 4, groups, to,
              [&](const uint8_t* p) { return _mm256_mul_ps(_mm256_loadu_ps((const float*)p), by); });
      break;
    case FLOAT16:
      convert(from, 2, groups, to, [&](const uint8_t* p) {
        return _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), by);
      });
      break;
    case BFLOAT16:
      convert(from, 2, groups, to, [&](const uint8_t* p) {
        __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
        return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)), by);
      });
      break;
    case EXPONENT:
      convert(from, 1, groups, to, [&](const uint8_t* p) {
        __m256i words = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
        return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(words, 23)), by);
      });
      break;
    case E4M3:
      convert(from, 1, groups, to, [&](const uint8_t* p) {
        return _mm256_mul_ps(from_e4m3(p), _mm256_mul_ps(by, _mm256_set1_ps(256)));
      });
      break;
  }
  spread(a, to);
}

// Make the zeros of row `r`, less the middle of codes that are moved up, laid out as its scales.
static inline void row_zeros(const Matrix& a, int64_t r, float* to) {
  const int64_t groups = a.row_scales, bits = a.kind == INT4 ? 4 : 8, per = 32 / bits;
  if (a.zero_type == BYTES) {
    const int8_t* from = (const int8_t*)a.part[ZEROS] + shared_row(r, a.scale_rows) * groups;
    for (int64_t g = 0; g < groups; g++) to[g] = from[g];
  } else {
    const uint32_t* from = (const uint32_t*)a.part[ZEROS] + r / per * groups;
    const int64_t shift = r % per * bits, middle = 1 << (bits - 1);
    for (int64_t g = 0; g < groups; g++)
      to[g] = (float)((int64_t)(from[g] >> shift & ((1u << bits) - 1)) - middle);
  }
  spread(a, to);
}
