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

// Experts of a layer that a kernel lists to be copied into slots of a device once a product is
// answered, in memory that both see. `failed` is the kernel's own.
struct LaterList {
  static const int MOST = 16;
  int32_t count, sequence, failed, unused;
  struct {
    int32_t expert, slot;
  } pairs[MOST];
};
struct LaterTensor {
  const uint8_t* experts;  // the first expert's
  uint64_t slots;          // address of the first slot, on the device
  int64_t bytes;           // of one expert
};
struct Later {
  const LaterList* list;
  uint64_t done;  // address of a word on the device: the list's `sequence` once all of it is there
  int64_t num_tensors;
  const LaterTensor* tensors;
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
  const Later* later;      // or null
};

// Both return 0, or 1 where memory ran out.
int multiply(Team& team, const Dense& dense);
int multiply_experts(Team& team, const Experts& experts);
// Read bytes and do nothing with them: what the memory gives.
void read(Team& team, const uint8_t* bytes, int64_t num_bytes);
