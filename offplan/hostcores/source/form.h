// What kernels ask of a form of weights.
#pragma once
#include <algorithm>
#include <cmath>
#include "scales.h"

namespace {

// A vector that is loaded once, not for each of its uses, as GCC would: FP8 codes three times, each
// out of the second cache.
template <class Vector>
INLINE Vector once(Vector made) {
  asm("" : "+v"(made));
  return made;
}

// What the largest input of a chunk becomes: two signed bytes of 127 (see `Halves` of AVX2).
static constexpr float LARGEST_WORD = 127 * 256 + 127;

// Round a chunk's inputs to words, of which the largest is LARGEST_WORD. Return what words are to be
// multiplied by: no number where an input is none or not finite, so that products are none.
INLINE float round_chunk(const uint16_t* x, int16_t* words) {
  uint16_t most = 0;
  for (int j = 0; j < CHUNK; j++) most = std::max<uint16_t>(most, x[j] & 0x7fff);
  const float value = from_bf16(most), by = value > 1e-30f ? LARGEST_WORD / value : 0;  // or infinite
  for (int j = 0; j < CHUNK; j++) {
    const float rounded = from_bf16(x[j]) * by + 0x1.8p23f;  // whose last bits are the whole number
    int32_t bits;
    memcpy(&bits, &rounded, 4);
    words[j] = (int16_t)bits;
  }
  return most < 0x7f80 ? value / LARGEST_WORD : NAN;
}

// Each form has, beside what is here:
//   COLUMNS   of a chunk, whose products make one sum before they meet a scale
//   STEPS     of a chunk, each of which decodes VECTORS
//   GROUPS    float32 scales of a chunk, 0 for none
//   ONE_ROW   whether one input meets one row after the other, not four at a time
//   Row, row  where the parts of a row lie
//   decode    makes the vectors of a step
//   column    of the chunk, of word j of vector i of a step
//   lay       writes the inputs of a chunk as `Sums` takes them; returns what rounded ones stand for
//   Sums      of the products of a chunk: one row by one of so many inputs
//   one       a vector of weights of 1, where there are SUMS
struct Form {
  static const int VECTORS = 4;
  static const int SUMS = 0;  // bytes of a chunk's inputs summed as they meet its lanes
  static const int UNIT = 0;  // bytes of what a chunk's inputs are multiplied by, if they are rounded
  static const bool ZERO = false;  // whether groups have zeros, too
  // Whether an input meets all vectors of a step before the next one does, or a vector all inputs.
  static const bool BY_INPUTS = true;
  // The inputs of a chunk in the order of `column`: as they lie, or in `room`, which is zeros at first.
  INLINE const uint16_t* gather(const Matrix& a, const uint16_t* x, int64_t c, uint16_t* room) {
    const int64_t left = a.num_in - c * CHUNK;
    return left < CHUNK ? (const uint16_t*)memcpy(room, x + c * CHUNK, left * 2) : x + c * CHUNK;
  }
  // What a row's sum stands for.
  template <class Row>
  INLINE float result(const Row&, float sum) { return sum; }
};

}  // namespace
