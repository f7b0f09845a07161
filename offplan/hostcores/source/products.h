// Products of a layer: a matrix by rows of inputs, and routed experts.
#pragma once
#include "matrix.h"
#include "team.h"

enum Activation : int64_t { SILU, GELU, GELU_TANH, RELU, RELU_SQUARED };

// Inputs and outputs are bfloat16; `precise` outputs are float32.
struct Dense {
  const Kernels* kernels;
  Matrix weight;
  int64_t num_inputs;
  const uint16_t* inputs;  // [num_inputs, num_in]
  void* outputs;           // [num_inputs, num_out]
  int64_t precise;
};

struct Experts {
  const Kernels* kernels;
  Matrix up, down;  // the first expert's; of gated ones `up` has gate and up in one
  const uint16_t *up_bias, *down_bias;  // [experts, num_out], or null
  int64_t num_experts, is_gated;
  int64_t activation, is_interleaved;  // gate and up by turns, or one after the other
  double alpha, limit, offset;  // silu's factor, the largest input, and what is added to up
  int64_t num_tokens, num_chosen;
  const uint16_t* inputs;  // [num_tokens, hidden]
  // [num_tokens, num_chosen]: an expert, or none; or, of an expert that others multiply the rest of,
  // num_experts x (1 + CHUNKs of its inner columns, the first ones) more, without down_bias. Pairs
  // that choose an expert in one call choose the same of it.
  const int64_t* chosen;
  const float* factors;    // [num_tokens, num_chosen]
  void* outputs;           // [num_tokens, hidden]
  int64_t precise;
};

// Both return 0, or 1 where memory ran out.
int multiply(Team& team, const Dense& dense);
int multiply_experts(Team& team, const Experts& experts);
// Read bytes and do nothing with them: what the memory gives.
void read(Team& team, const uint8_t* bytes, int64_t num_bytes);
