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

// Each form has, beside what is here:
//   COLUMNS   of a chunk, whose products make one sum before they meet a scale
//   STEPS     of a chunk, each of which decodes VECTORS
//   GROUPS    float32 scales of a chunk, 0 for none; ZERO: whether it has zeros, too
//   ONE_ROW   whether one input meets one row after the other, not four at a time
//   SUMS      bytes of a chunk's inputs summed as they meet its lanes, 0 where nothing needs them
//   Row, row  where the parts of a row lie
//   decode    makes the vectors of a step
//   column    of the chunk, of word j of vector i of a step
//   one       a vector of weights of 1
//   lay       writes the inputs of a chunk as `Sums` takes them, and of its SUMS what it knows of them
//   Sums      of the products of a chunk: one row by one of so many inputs
struct Form {
  static const int VECTORS = 4;
  // Whether an input meets all vectors of a step before the next one does, or a vector all inputs.
  static const bool BY_INPUTS = true;
  // What the largest of a row of inputs becomes, where inputs are rounded; they are multiplied by it.
  static constexpr float LARGEST = 0;
  // The inputs of a chunk in the order of `column`: as they lie, or in `room`, which is zeros at first.
  INLINE const uint16_t* gather(const Matrix& a, const uint16_t* x, int64_t c, uint16_t* room) {
    const int64_t left = a.num_in - c * CHUNK;
    return left < CHUNK ? (const uint16_t*)memcpy(room, x + c * CHUNK, left * 2) : x + c * CHUNK;
  }
  // What a row's sum stands for; `unit` is that of rounded inputs.
  template <class Row>
  INLINE float result(const Row&, float sum, const float*) { return sum; }
};

}  // namespace
