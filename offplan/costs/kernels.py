"""Seconds that the kernels of a layer take on a machine, where nobody has timed the layer.

Each kind of kernel takes the longer of two times, and kernels follow each other. The first time is
that of its bytes at the rate of GPU memory. The second is that of its arithmetic at the rate of the
unit that does it. Tensor cores multiply, and CUDA cores make values of codes.
"""

from dataclasses import dataclass
from math import ceil

from offplan.checkpoint.windows import Mixer
from offplan.costs.work import Codes, LayerWork, PassShape, makes_values
from offplan.kernel_sizes import (
    CODES_ROWS,
    FEW_ROWS,
    FUSED_DIM,
    MIN_ROWS,
    PAIR_ROWS,
    are_routed,
    experts_at_once,
    next_power,
)
from offplan.machine.profile import LAUNCHES, MachineProfile
from offplan.placement import Phase

MATMUL_EFFICIENCY = 0.97
"""Share of the profile's matmul rate that dense products of a prompt reach.

Source: resident prompts of Qwen3-8B on an H200, of 512 to 16,384 tokens, take 0.92 to 1.05 of what
this gives with ``ATTENTION_EFFICIENCY`` (``benchmarks.predictions``).
"""
ATTENTION_EFFICIENCY = 0.7
"""Share of the matmul rate that attention of a prompt reaches.

Source: gpt-oss-20b on an H200, chunks of 8,192 tokens. They look at 32,768 and 131,072 tokens in
8.07 and 37.3 ms, which is 0.70 and 0.67; at themselves in 1.99 ms, which is 0.41.
"""
REST_EFFICIENCY = 0.46
"""ATTENTION_EFFICIENCY of what remains of a prompt behind whole chunks, which cuDNN does not read.

Source: the same chunks by torch's other kernels. 32,768 and 131,072 tokens take 12.3 and 54.6 ms.
"""
WIDE_EFFICIENCY = 0.21
"""ATTENTION_EFFICIENCY of heads of more than FUSED_DIM, whose attention is compiled.

Source: 16 heads of 512 on 2 KV heads on an H200. Chunks of 8,192 tokens look at themselves in 7.9
ms, which is 0.21, and at 32,768 tokens in 52.2, which is 0.22. By whole products in float32, as
torch does, the former took 60 ms and 10.6 GB.
"""
WINDOW_TOKENS = 1024
"""Tokens beyond its window that a new token takes as long as looking at.

Source: such a chunk with a window of 128 takes 0.35 ms on an H200, as 1,240 tokens would.
"""
LAUNCH_SLOWDOWN = 1.8
"""Time of a small kernel of a layer as a multiple of one that does next to nothing.

Source: 130 kernels of 4 layers of gpt-oss-20b on an H200 take 2.2 us each, less products' bytes.
"""
DENSE_LAUNCHES, VALUES_LAUNCHES, CODES_LAUNCHES = 12, 22, 32
"""Kernels of a captured layer, products included: without routed experts, and with those stored as
values or as codes.

Source: an H200, as ``LAUNCH_SLOWDOWN`` for codes. Beside their bytes and ``RAMP_S``, steps of
Qwen3-8B take 30 us a layer, and of DeepSeek-V2-Lite 50.
"""
ROUTED_LAUNCHES = 18
"""CODES_LAUNCHES of few tokens, whose experts one kernel chooses.

Source: layers on an H200 by one token, and what is given. gpt-oss-20b's take 82 us and 90 are
given, those of Qwen3-30B in FP8 71 and 71. Ernie-4.5-21B's in W4A16 take 118 and 105: operators of
torch choose its experts.
"""
HANDED_LAUNCHES = 8
"""Kernels besides of a layer that is handed inputs of its own: two products, their gate and a norm.

Source: Gemma 4 E4B packed on an H200, whose step of 42 layers took 4.42 ms, and 3.64 were given
without them. It has 19 kernels a layer.
"""
RULE_LAUNCHES = 14
"""Kernels of linear attention that checks drafts, beside those of a step.

Source: counted in ``runtime.model.delta_rule``: five products, a triangular solve, what is noted.
"""
RULE_INSTRUCTIONS, STATE_ELEMENT_BYTES = 20, 4
"""Instructions of the delta rule for each token of a prompt and element of a state, in float32.

Source: the rule's kernels on an H200. 48 heads of 128 x 128 took 0.25 ms for 512 tokens and 0.96
for 2,048: at ``vector`` 21 and 20.
"""
RAMP_S, FEW_RAMP_S = 4e-6, 0.8e-6
"""Seconds that a product takes beside those of its weight's bytes and its launch: any of few rows,
and one of FEW_ROWS rows with values.

Source: 7 matrices of a layer of Qwen3-8B by one row on an H200, whose bytes take 92 us. Their 4
products took 117, and take 108 by other tiles. A step of 36 layers takes 4.74 ms, 4.83 are given.
Of gpt-oss-20b 2.24 ms are taken, and 2.42 given.
"""
CODE_INSTRUCTIONS = Codes(half=11.0, whole=5.0)
"""Instructions of the CUDA cores to make a value of a code of four bits, and of eight.

Source: an H200. Experts of gpt-oss-20b by 4 and 16 pairs, each by itself, make 2.8e12 and 3.3e12
values a second. 12,288 x 4,096 of W4A16 make 3.1e12 by one row. Codes of eight bits: as
CODE_EFFICIENCY.
"""
CPU_VALUE_BYTES = Codes(half=150.0, whole=100.0)
"""Bytes that a CPU reads while it makes a value of a code of four bits, and of eight.

Source: two busy cores of a server. ``runtime.forms.reference.expand`` of 4,096 x 4,096 took as long
as a product of one row would read 105 to 139 bytes for FP8, 157 to 377 for MXFP4 and W4A16. Layers
of a few million weights took 60 to 70 for FP8, and 80 to 130 for MXFP4.
"""
CODE_EFFICIENCY = Codes(half=0.15, whole=0.84)
"""Share of the matmul rate of products by values that the same kernel makes of codes.

Source: experts on an H200. Those of gpt-oss-20b take 2.00 / 5.56 / 20.7 ms from codes by 512 /
2,048 / 8,192 tokens, and those of 120b 3.1 by 512. Qwen3-30B's in FP8 take 0.47 / 0.65 ms by 512 /
1,024 tokens, and Mixtral-8x22B's 1.56 by 512, which is the furthest off: 2.1 are given.
"""
ROW_INSTRUCTIONS = 8.4e5
"""Instructions beside these that an expert's tile takes for each row that it has room for.

Source: Qwen3-30B's experts by 512 and 1,024 tokens, which are 128 and some 192 tiles.
"""
GROUP_S = 20e-6
"""Seconds that each group of experts takes whose values are made together, beside its kernels' own.

Source: an H200, 2,048 tokens. gpt-oss-20b took 1.38 / 1.40 / 1.48 / 1.55 ms in 2 / 3 / 6 / 12
groups, gpt-oss-120b 3.99 / 4.14 / 4.40 / 4.82 in 8 / 12 / 24 / 48, Qwen3-30B in FP8 1.05 / 1.08 /
1.10 / 1.20 in 2 / 3 / 6 / 11 (``benchmarks/results/grouped-experts-h200.json``).
"""
SORTING_S = 80e-6
"""Seconds that a prompt's routing takes beside a step's: more pairs are sorted and summed up.

Source: Qwen3-30B's experts in FP8, as above.
"""
TILE_ROWS = 128
"""Rows of a tile of products with values of experts: half a tile is empty of each, on average."""

LAUNCH_S = 8.2e-6
"""Seconds that the host takes for an operator of an uncaptured pass, Python included.

Source: stock's decode step of DeepSeek-V2-Lite, of 4,876 operators as ``stock_passes`` counts them,
took some 40 ms on an H200.
"""
MOVED_EFFICIENCY = 0.5
"""Share of the profile's HBM rate at which uncaptured operators read and write their tensors.

Source: prompts of 512 tokens by transformers' own passes on an H200. Nemotron-H's layers (3.2 GB)
took 40 ms, where their bytes at the whole rate take 17. Granite's hybrid (5.4 GB) took 236 ms,
where its bytes take 134.
"""


@dataclass(frozen=True)
class LayerSeconds:
    """Estimated seconds of one layer by its kernels."""

    making: float
    """Making the values of dense weights, for passes of many tokens."""
    dense: float
    """Products with dense weights."""
    routed: float
    """Products with routed experts, making their values included."""
    attention: float
    """Attention and the cache, which it reads."""
    rule: float
    """The gated delta rule of a prompt's tokens."""
    moving: float
    """Rows that products read and write."""

    @property
    def total(self) -> float:
        """Seconds of all of it, launches left out."""
        return self.making + self.dense + self.routed + self.attention + self.rule + self.moving


def estimate_layer(machine: MachineProfile, work: LayerWork, shape: PassShape) -> float:
    """Estimate the seconds of a layer: ``layer_seconds``, plus launches.

    A layer of transformers' own passes takes its kernels, its launches, or what its operators read
    and write, whichever is most.
    """
    kernels = layer_seconds(machine, work, shape).total
    if work.operators is None or work.moved is None:
        return kernels + launch_seconds(machine, work, shape)
    beside = work.moved(shape) / MOVED_EFFICIENCY
    moving = (work.weight_bytes(shape) + beside) / machine.hbm.value
    return max(kernels, LAUNCH_S * work.operators[shape.phase], moving)


def layer_seconds(machine: MachineProfile, work: LayerWork, shape: PassShape) -> LayerSeconds:
    """Estimate the kernels of a layer, launches left out."""
    attending = work.attention_flops(shape, WINDOW_TOKENS)
    is_prompt = shape.phase is Phase.PREFILL and _runs_own_kernels(machine, work)
    is_rest = is_prompt and shape.is_rest and work.mixer is Mixer.FULL
    efficiency = REST_EFFICIENCY if is_rest else ATTENTION_EFFICIENCY
    if is_prompt and work.attention[shape.phase].query_dim > FUSED_DIM:
        efficiency = WIDE_EFFICIENCY
    return LayerSeconds(
        making=_making(machine, work, shape),
        dense=_dense(machine, work, shape),
        routed=_routed(machine, work, shape),
        attention=max(
            work.kv_cache.nbytes(shape.batch, shape.context) / machine.hbm.value,
            attending / (machine.matmul.value * efficiency),
        ),
        rule=_taking(machine, work, shape),
        moving=work.row_elements * shape.num_tokens * work.element_bytes / machine.hbm.value,
    )


def launch_seconds(machine: MachineProfile, work: LayerWork, shape: PassShape) -> float:
    """Estimate what launching the small kernels of a captured layer takes.

    An engine's layer takes its own time on a GPU, and on a CPU all layers take the profile's.
    """
    if machine.is_cpu:
        return machine.layer_overhead.value
    if work.overhead_s is not None:
        return work.overhead_s
    number, experts = DENSE_LAUNCHES, work.experts
    if work.expert_bytes and experts is not None:
        by_one = are_routed(shape.num_tokens, experts.num_experts_per_token)
        of_codes = ROUTED_LAUNCHES if by_one else CODES_LAUNCHES
        number = of_codes if any(work.expert_codes) else VALUES_LAUNCHES
    if work.kv_cache.state_bytes and shape.phase is Phase.DECODE and shape.tokens > 1:
        number += RULE_LAUNCHES
    if work.is_handed:
        number += HANDED_LAUNCHES
    sorting = SORTING_S if work.expert_bytes and shape.phase is Phase.PREFILL else 0.0
    return number * LAUNCH_SLOWDOWN * machine.layer_overhead.value / LAUNCHES + sorting


def head_seconds(machine: MachineProfile, num_bytes: float, num_weights: int, rows: int) -> float:
    """Estimate the product of the head, which reads so many bytes."""
    multiplying = 2 * num_weights * rows / (machine.matmul.value * MATMUL_EFFICIENCY)
    return max(num_bytes / machine.hbm.value, multiplying)


def _made_elements(machine: MachineProfile, work: LayerWork, shape: PassShape) -> int:
    """Dense weights whose values a pass makes of their codes: on a CPU all, in every pass."""
    return work.expanded_elements if machine.is_cpu else work.made_elements(shape)


def _making(machine: MachineProfile, work: LayerWork, shape: PassShape) -> float:
    """Seconds of making dense values of codes: reading codes and writing values, or computing."""
    values = _made_elements(machine, work, shape)
    if not values:
        return 0.0
    share = values / work.expanded_elements
    num_bytes = share * work.coded_bytes + work.element_bytes * values
    return max(num_bytes / machine.hbm.value, share * _decoding(machine, work.dense_codes))


def _dense(machine: MachineProfile, work: LayerWork, shape: PassShape) -> float:
    """Seconds of the products with dense weights; their values lie in memory, or their codes."""
    rows, values = shape.num_tokens, _made_elements(machine, work, shape)
    share = values / work.expanded_elements if values else 0.0
    num_bytes = work.dense_bytes - share * work.coded_bytes + work.element_bytes * values
    ramp_s = FEW_RAMP_S if rows in FEW_ROWS and not any(work.dense_codes) else RAMP_S
    ramp = 0.0 if work.overhead_s is not None or machine.is_cpu else work.num_matrices * ramp_s
    reading = ramp + num_bytes / machine.hbm.value
    dense_elements = work.token_elements - work.routed_elements
    of_values = 2 * dense_elements * rows / (machine.matmul.value * MATMUL_EFFICIENCY)
    if machine.is_cpu or makes_values(rows, work.element_bytes):
        return max(reading, of_values)
    block = min(CODES_ROWS, tile_rows(rows))
    by_codes = _multiplying(machine, work.dense_codes, 1, block, rows)
    return max(reading, of_values, ramp + by_codes)


def _routed(machine: MachineProfile, work: LayerWork, shape: PassShape) -> float:
    """Seconds of the products with routed experts, from values, from codes or by groups."""
    experts = work.experts
    if not work.expert_bytes or experts is None:
        return 0.0
    touched = experts.touched(shape.num_tokens)
    share = touched / experts.num_experts
    of_expert = work.expert_elements / experts.num_experts
    pairs = shape.num_tokens * experts.num_experts_per_token
    pairs_here = pairs * experts.num_experts / experts.num_in_all
    reading = share * work.expert_bytes / machine.hbm.value
    if shape.num_tokens == 1:
        rows = pairs_here
    else:  # tiles are cut off at an expert's last row
        rows = pairs_here + min(pairs_here, TILE_ROWS / 2 * touched)
    of_values = 2 * of_expert * rows / (machine.matmul.value * MATMUL_EFFICIENCY)
    codes = work.expert_codes
    if machine.is_cpu and any(codes):  # it makes the values of all experts in every pass
        written = 2 * work.element_bytes * sum(codes) / machine.hbm.value
        return written + _decoding(machine, codes) + max(reading, of_values)
    if work.groups_experts(shape):
        written = work.element_bytes * work.grouped_elements / machine.hbm.value
        made = max(reading + written, share * _decoding(machine, codes))
        groups = sum(
            ceil(experts.num_experts / experts_at_once(experts.num_experts, num_values))
            for num_values in work.grouped_values
        )
        return made + max(share * written, of_values) + groups * GROUP_S
    if not (codes.half or codes.whole):
        return max(reading, of_values)
    each = Codes(*(number / experts.num_experts for number in codes))
    if pairs <= experts.num_in_all and not each.whole:
        return max(reading, pairs_here * _decoding(machine, each))
    block = min(PAIR_ROWS, tile_rows(2 * pairs // experts.num_in_all))
    tiles = touched * max(1.0, pairs_here / touched / block + 0.5)
    laying_out = tiles * block * ROW_INSTRUCTIONS / machine.vector_rate
    return max(reading, laying_out + _multiplying(machine, each, tiles, block, pairs_here))


def _taking(machine: MachineProfile, work: LayerWork, shape: PassShape) -> float:
    """Seconds of the gated delta rule, by which a prompt's tokens change a layer's states.

    A layer of an engine or of transformers' own passes takes its own time, and a CPU's that of its
    products.
    """
    if shape.phase is Phase.DECODE or not _runs_own_kernels(machine, work):
        return 0.0
    elements = work.kv_cache.state_bytes / STATE_ELEMENT_BYTES
    return RULE_INSTRUCTIONS * elements * shape.num_tokens / machine.vector_rate


def _runs_own_kernels(machine: MachineProfile, work: LayerWork) -> bool:
    """Return True if offplan's own passes run a layer on a GPU."""
    return work.overhead_s is None and work.operators is None and not machine.is_cpu


def tile_rows(rows: int) -> int:
    """Rows of the tile of a kernel that multiplies codes by so many rows."""
    return max(MIN_ROWS, next_power(max(1, rows)))


def _decoding(machine: MachineProfile, codes: Codes) -> float:
    """Seconds of making values of codes once."""
    if machine.is_cpu:
        num_bytes = sum(n * each for n, each in zip(codes, CPU_VALUE_BYTES, strict=True))
        return num_bytes / machine.hbm.value
    instructions = sum(n * each for n, each in zip(codes, CODE_INSTRUCTIONS, strict=True))
    return instructions / machine.vector_rate


def _multiplying(
    machine: MachineProfile, codes: Codes, tiles: float, block: int, rows: float
) -> float:
    """Seconds of products of rows with codes, whose values each tile of ``block`` rows makes again.

    Tiles that are nearly empty take as long as full ones with codes of four bits alone. The CUDA
    cores multiply these by one row themselves.
    """
    half = codes.half * tiles * block / CODE_EFFICIENCY.half if rows > 1 else 0.0
    whole = codes.whole * rows / CODE_EFFICIENCY.whole
    return tiles * _decoding(machine, codes) + 2 * (half + whole) / machine.matmul.value
