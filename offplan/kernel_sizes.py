"""Sizes at which the runtime chooses another kernel; costs price the same choice, without torch."""

from collections.abc import Collection

CODES_ROWS = 128
"""Rows of an input up to which a weight is multiplied from its codes; more are worth expanding it.

Source: FP8 of 12,288 x 4,096 on an H200. From codes 64 / 128 / 256 rows take 23 / 32 / 58 us;
expanded first, 42 us and cuBLAS' own 30 to 60.
"""
PACKED_ROWS = 64
"""CODES_ROWS of packed weights that have a scratch.

Source: a layer of Qwen3-8B on an H200. From codes 64 / 65 / 128 rows take 302 / 393 / 478 us, and
expanded first 329 / 332 / 340.
"""
MIN_ROWS = 16
"""Rows that a product with codes takes at least."""
PAIR_ROWS = 64
"""Pairs of a token and an expert that read the expert's codes together, at most."""
IN_PLACE_ROWS = 128
"""Pairs of a token and an expert that read the expert's codes in host memory together, at most.

They are more than in GPU memory, since crossing again takes longer than any product. Source:
experts of DeepSeek-V2-Lite, packed, in host memory, 512 tokens on an H200. They take 10.9 ms by 64
and 11.2 by 128 if experts are chosen alike, 15.8 and 12.1 if some are chosen more often.
"""
LINE_BYTES = 128
"""Bytes that kernels ask of host memory at a time, at most."""
MAX_PAIRS = 1024
"""Pairs of a token and an expert that a kernel sorts: a program holds all of them."""
TABLE_COUNTERS = 32
"""Numbers of 4 bytes of a layer's table of cached experts, beside those of its lists."""
TABLE_LISTS = 5
"""Numbers of 4 bytes that such a table has for each expert of its layer."""
EXPERT_MULTIPLE = 16
"""Number of which rows and columns of an expert are multiples where our kernels multiply it."""
MAX_CAPTURED_TOKENS = 4096
"""Tokens of a chunk, over all sequences, up to which prompts are captured. A longer chunk keeps the
GPU busy for longer than the host takes to launch it.

Source: DeepSeek-V2-Lite on an H200, whose prompts of 512 and 2,048 tokens took 28 ms to launch and
16 and 28 to compute.
"""
MAX_CAPTURED_CHUNKS = 16
"""Chunks of a prompt up to which it is captured: graphs grow with their number.

Source: estimated.
"""
FUSED_DIM = 256
"""Elements of a head's vectors up to which torch has kernels for prompts.

Attention with wider ones, 512 of Gemma 4, is compiled. Source: torch 2.13, ``sdp_utils.cpp``.
"""
LATENT_HEADS = 16
"""Heads of one program of the kernel for latents: the least that the matrix units take."""
CODED_PROGRAMS = 2
"""Programs of the kernel for cached codes on each multiprocessor. Source: estimated."""
SPAN_TOKENS = 2048
"""Tokens of each sequence that linear attention takes through its rule at a time.

The rule computes in float32, and holds for each token four times what a head has, or more.
"""
RULE_CHUNK = 32
"""Tokens of a chunk of the delta rule's kernels.

For 64 tokens, as transformers takes, threads have too few registers.
"""
MAX_RULE_DIM = 256
"""Elements of a key or a value up to which the delta rule's kernels have registers for them."""
STORES_CODES = False
"""Whether one kernel encodes a step's keys and values, and writes both into the cache, in place of
what torch makes of encoding them.

False until a GPU has measured by how much that is faster.
"""
EAGER_COPIES = 6
"""Times a pair's hidden state lives while experts run uncompiled: gathered, returned, weighted and
put back in order. The latter two are in float32 if routing weights are.

Source: transformers' ``grouped_mm_experts_forward``, read: its names keep all of them to the end.
"""
PAIR_COPIES = 2
"""Hidden states of each pair besides, where experts stream in parts: as it is handed to them, and
as they return it.

Source: ``runtime.parts.experts.Meeting``. Pairs that are sorted already take less than both terms:
their block is as large, since gates differ in what they hold.
"""
ROW_COST, CODED_ROW_COST = 0.07, 0.25
"""Time that the host's cores take for each further row of a weight in bf16, raw or packed, and of a
weight of codes, as a share of the first row's: at least, up to some eight rows.

Source: AVX-512 of two H200s' hosts, of Zen 5 and of another EPYC. 4 and 8 rows take as many times
as long as one: by bf16 1.05 to 1.54 and 1.22 to 1.63, by 8 bits 1.33 to 1.75 and 1.73 to 3.0, by 4
bits 1.24 to 2.76 and 1.63 to 4.5. The more the first row waits for memory, the less.
"""
ROWS_AT_RATE, CODED_ROWS_AT_RATE = 5.0, 3.0
"""Rows of these two that take as long as the first one alone, where there are many: at most.

Source: estimated.
"""
ASSUMED_CORES_BYTES_PER_S = 60e9
"""Bytes of weights that the host's cores read where nobody has measured them.

Source: two channels of DDR5-5600 have 90 GB/s, of which cores read two thirds: a Ryzen 9700X 62.9
(https://github.com/memtest86plus/memtest86plus/issues/557, 2025-10-29).
"""
ASSUMED_TRIP_S = 15e-6
"""Seconds of a hand-over to the cores where nobody has measured them. Source: estimated."""
KERNEL_TYPES = ("bfloat16", "float16")
"""Types that the runtime's kernels multiply: they would round float32 to TF32, and overfill tiles.
"""

GROUPED_ROWS = {
    "raw": 1,
    **dict.fromkeys(("mxfp4", "nvfp4", "w4a16"), 40),
    **dict.fromkeys(("fp8_block", "fp8_channel", "fp8_tensor", "w8a16", "bnb8"), 160),
    "packed": 140,
}
"""Rows of an expert, on average, from which they multiply values that are made group by group, in
place of codes, by the kind of form that it is stored in.

Source: layers on an H200, where both ways took as long with so many rows: gpt-oss-20b 30, 120b
34, Qwen3-30B in NVFP4 36, in W4A16 45, in FP8 140, in bytes 130, packed 139, Mixtral in FP8 270.
Values were never slower so.
"""
EXPERT_SCRATCH_BYTES = 128 * 2**20
"""Bytes of the memory in which the values of a group of experts are made, where they are more than
one expert's.

Source: a layer of gpt-oss-20b on an H200. With 128 / 256 / 512 MiB 2,048 tokens took 1.55 / 1.48 /
1.40 ms. Memory that experts are kept in is worth more to a step.
"""

FEW_ROWS = (1, 2, 4)
"""Rows that are multiplied by weights in their values without the matrix units.

More than one are where several weights share a launch, or a weight has few outputs. Source:
weights of gpt-oss-20b on an H200, us by cuBLAS and so. Queries, keys and values of 1 / 2 / 4 rows
take 31 / 32 / 33 and 16 / 23 / 30; the router 8 and 3 to 4; the output's 15 and 14 / 17 / 26.
"""
LAID_OUT_ROWS = 32
"""Rows that a compiled step lays out itself for products with codes of several weights in a word.

Source: 4 layers of gpt-oss-20b on an H200. 1 / 4 / 16 / 64 texts took 0.80 / 1.17 / 2.33 / 2.73 ms
before steps took fewer launches, and 0.67 / 1.08 / 2.26 / 2.85 ms once all rows were laid out so.
"""
JOINED_ROWS = 64
"""Rows that several weights in codes multiply in one launch, at most.

Source: queries, keys and values of Qwen3-30B in FP8 on an H200. 1 / 4 / 16 rows take 23 / 19 / 23
us one by one, and 10 / 9 / 8 so.
"""
ROUTED_TOKENS, ROUTED_PAIRS = 16, 128
"""Tokens, and pairs of a token and an expert, that the kernel for routers takes at most.

One program has all of them. Source: 128 experts on an H200, of which 8 are chosen. 1 / 4 / 16 / 64
tokens take 3.8 / 4.9 / 7.9 / 115 us so, and 22 / 28 / 29 / 30 by torch. By sigmoids and a bias, as
DeepSeek-V3 chooses, a step of 8 layers of GLM-4.5-Air took 2.00 ms, and 2.17 by torch. By shares
and a bias, a step of 28 layers of Ernie 4.5 took 3.06 ms, and 3.40 by torch.
"""
FEW_EXPERT_ROWS = 128
"""Rows of an expert on average up to which our product of values is faster than torch's on 9.x.

Source: first matrices of experts on an H200, in GPU memory. 128 rows with each of 128 experts,
2,816 x 4,096, took 0.93 ms, and 1.24 by torch; with 512 rows they took 2.51, and 2.42. Four shapes
gave the same bits.
"""
FEW_IN_PLACE_ROWS, IN_PLACE_VALUE_ROWS = 256, 512
"""Rows of an expert that read its values in host memory together, at most: of few, and of many.

Source: first matrices of experts of two models on an H200, in host memory, 64 of 1,536 x 2,048 and
16 of 5,760 x 2,880. With 128 / 384 / 1,024 rows on average the former took 7.8 / 15.7 / 34.9 ms by
tiles of 256 rows, 7.8 / 7.8 / 19.2 by 512, and 12.0 / 15.7 / 34.9 by torch. With 1,024 the latter
took 45.8, 25.2 and 63.7.
"""
LEAST_SHARES = 1e-12
"""What the sum of chosen shares of the softmax is raised to where the kernel divides by it.

Source: ``moe_norm_min`` of Ernie 4.5, the only value published.
"""


def are_grouped(num_pairs: int, num_experts: int, kinds: Collection[str]) -> bool:
    """Return True if so many pairs of a token and an expert multiply values, group by group.

    ``kinds`` are those of the forms that the experts' weights are stored in. It follows from forms
    and shapes alone: a plan that offloads rounds as one that does not. Only steps that read experts
    from slots do not ask, however many texts they have.

    Source: a layer of gpt-oss-20b on an H200. 512 / 2,048 / 8,192 tokens took 2.00 / 5.56 / 20.7 ms
    from codes, and 1.13 / 1.48 / 3.20 so.
    """
    if not all(kind in GROUPED_ROWS for kind in kinds):
        return False
    return num_pairs >= num_experts * max(GROUPED_ROWS[kind] for kind in kinds)


def experts_at_once(num_experts: int, num_values: int) -> int:
    """Return how many experts have the values of a weight, ``num_values`` of each, made at once."""
    return max(1, min(num_experts, EXPERT_SCRATCH_BYTES // (2 * num_values)))


def expert_scratch(num_experts: int, num_values: int) -> int:
    """Return the values that experts' scratch has room for because of a weight."""
    return experts_at_once(num_experts, num_values) * num_values


def are_routed(num_tokens: int, num_chosen: int) -> bool:
    """Return True if so many tokens, of so many experts each, choose them by one kernel."""
    pairs = next_power(num_tokens) * next_power(num_chosen)
    return num_tokens <= ROUTED_TOKENS and pairs <= ROUTED_PAIRS


def are_gathered(num_pairs: int, num_experts: int) -> bool:
    """Return True if experts' codes in host memory are gathered before they are multiplied.

    They are where so few pairs of a token and an expert are sent to so many experts.
    """
    return num_pairs <= num_experts


def rows_in_place(num_rows: float, num_experts: int) -> int:
    """Return how many rows of an expert read its values in host memory together, at most.

    ``num_rows`` are those of all its experts. By the most of few rows a tile has nothing to do.
    """
    is_few = num_rows <= FEW_IN_PLACE_ROWS // 4 * num_experts
    return FEW_IN_PLACE_ROWS if is_few else IN_PLACE_VALUE_ROWS


def is_captured(num_chunks: int, num_tokens: int) -> bool:
    """Return True if a prompt of so many chunks of ``num_tokens``, of all rows, is captured."""
    return num_chunks <= MAX_CAPTURED_CHUNKS and num_tokens <= MAX_CAPTURED_TOKENS


def eager_width(hidden: int, inside: int) -> int:
    """Elements that a pair of a token and an expert takes while experts run uncompiled.

    They are the more of two. One is EAGER_COPIES of its hidden state. The other is one hidden
    state, what gate and up give (``inside``), and as much again for their product.
    """
    return max(EAGER_COPIES * hidden, hidden + 2 * inside)


def parted_width(hidden: int, inside: int) -> int:
    """``eager_width`` where experts stream in parts."""
    return PAIR_COPIES * hidden + eager_width(hidden, inside)


def are_ruled(*dims: int) -> bool:
    """Return True if the delta rule's kernels take keys and values of such sizes."""
    return all(dim % 16 == 0 and dim <= MAX_RULE_DIM for dim in dims)


def slowness(rows: float, *, codes: bool) -> float:
    """Time of a product by the host's cores, as a multiple of that of one row."""
    more = 1.0 + (CODED_ROW_COST if codes else ROW_COST) * max(0.0, rows - 1)
    return max(more, rows / (CODED_ROWS_AT_RATE if codes else ROWS_AT_RATE))


def next_power(number: int) -> int:
    """Return the least power of two that is no smaller than a number from 1 on."""
    return 1 << (number - 1).bit_length()


def is_power(dim: int) -> bool:
    """Return True if kernels for attention know a width: a power of two from 16 on."""
    return dim >= 16 and dim & (dim - 1) == 0
