"""Products by the host's cores of weights in their stored form, where they lie.

What the C++ library is told of a weight: addresses and sizes, no copy. Inputs and products are
bfloat16. Weights, biases and whatever else a product reads lie in memory of the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from offplan.forms.form import BITS, FP4_GROUPS, RAW, Component, Form, Kind, WordOrder
from offplan.forms.host_kernels import why_no_kernel
from offplan.hostcores import library as cores
from offplan.hostcores.build import refuse as refuse
from offplan.hostcores.library import Activation, Place, ScaleType, ZeroType
from offplan.hostcores.library import Experts as Experts
from offplan.hostcores.library import Matrix as Matrix
from offplan.runtime.forms.operands import is_stacked
from offplan.runtime.forms.reference import (
    E2M1,
    PER_127,
    Components,
    block_of,
    codes_of,
    has_powers,
)
from offplan.transformers_private import apply_gate

_KINDS = {
    Kind.RAW: cores.Kind.RAW,
    Kind.FP8_BLOCK: cores.Kind.FP8,
    Kind.FP8_CHANNEL: cores.Kind.FP8,
    Kind.FP8_TENSOR: cores.Kind.FP8,
    Kind.MXFP4: cores.Kind.FP4,
    Kind.NVFP4: cores.Kind.FP4,
    Kind.W4A16: cores.Kind.INT4,
    Kind.W8A16: cores.Kind.INT8,
    Kind.BNB8: cores.Kind.INT8,
    Kind.PACKED: cores.Kind.PACKED,
}
"""Kinds that the cores multiply."""
_SCALES = {
    torch.float32: ScaleType.FLOAT32,
    torch.float16: ScaleType.FLOAT16,
    torch.bfloat16: ScaleType.BFLOAT16,
}
_AHEAD_BYTES = 8192
"""Bytes of codes that kernels read ahead, as ``matrix.h`` has it."""
_PLACES = {
    Component.WEIGHT: Place.CODES,
    Component.SCALE: Place.SCALES,
    Component.ZERO: Place.ZEROS,
    Component.GLOBAL_SCALE: Place.WHOLE,
    Component.GLOBAL_DIVISOR: Place.WHOLE,
    Component.EXPONENT: Place.EXPONENTS,
    Component.BASE: Place.BASES,
    Component.PATCHES: Place.PATCHES,
    Component.PATCH_BLOCKS: Place.PATCH_BLOCKS,
}


def load() -> cores.Library:
    """Load the library, compiled first where it is not there yet; raises OffplanError."""
    fp8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    # no key of a cache is equal to one that has a NaN
    return cores.load_library(E2M1, tuple(fp8.nan_to_num(nan=float("inf")).tolist()))


def why_not(form: Form, dtype: torch.dtype, num_in: int) -> str | None:
    """Say why the cores do not multiply weights of a form, or None where they do.

    ``dtype`` is that of the model, ``num_in`` the length of a row.
    """
    if form.is_by_columns:
        return f"has no kernel for weights stored as {form.label}"
    return why_no_kernel(form, str(dtype).removeprefix("torch."), num_in)


def describe(form: Form, parts: Components) -> Matrix:
    """Describe a weight of a form that the cores multiply, or those of all experts.

    The description is of use while the parts stay where they are.
    """
    matrix = Matrix(factor=1.0, scale_rows=1, scale_columns=1, row_scales=1, whole_rows=1)
    matrix.kind = _KINDS[form.kind]
    stacked = parts[Component.WEIGHT].ndim > 2 if form is RAW else is_stacked(form, parts)
    for part, value in parts.items():
        if (place := _PLACES.get(part)) is None:
            continue
        assert value.is_contiguous(), part
        matrix.part[place] = value.data_ptr()
        matrix.step[place] = value.stride(0) * value.itemsize if stacked else 0
    codes = codes_of(parts) if form.is_rounded else parts[Component.WEIGHT]
    matrix.rows_ahead = 4 + _AHEAD_BYTES // max(1, codes.shape[-1])
    halves = 2 if form.kind in FP4_GROUPS or BITS.get(form.kind) == 4 else 1
    matrix.num_out, matrix.num_in = codes.shape[-2], codes.shape[-1] * halves
    matrix.stored_in = matrix.num_in
    if form.is_rounded:
        _describe_scales(matrix, form, parts)
    return matrix


def _describe_scales(matrix: Matrix, form: Form, parts: Components) -> None:
    scales = parts[Component.SCALE]
    high, wide = block_of(form, matrix.num_out, matrix.num_in, scales)
    matrix.scale_rows, matrix.scale_columns = high, wide
    matrix.row_scales = scales.shape[-1]
    if has_powers(form, scales):
        matrix.scale_type = ScaleType.EXPONENT
    elif form.kind is Kind.NVFP4:
        whole = parts.get(Component.GLOBAL_SCALE, parts.get(Component.GLOBAL_DIVISOR))
        assert whole is not None
        matrix.scale_type = ScaleType.E4M3
        matrix.whole_rows, rest = divmod(matrix.num_out, whole.shape[-2])
        if rest:  # the last rows would read scales of scales that are not there
            raise refuse(
                f"has no kernel for {matrix.num_out} rows of {form.label} by {whole.shape[-2]} "
                "scales of scales, which do not share them evenly"
            )
        matrix.whole_divides = Component.GLOBAL_DIVISOR in parts
    else:
        matrix.scale_type = _SCALES[scales.dtype]
    matrix.factor = PER_127 if form.kind is Kind.BNB8 else 1.0
    in_words = form.word_order is WordOrder.COMPRESSED_TENSORS
    matrix.unsigned_codes = in_words and matrix.kind == cores.Kind.INT8
    if form.word_order is WordOrder.NONE and form.kind is Kind.W4A16:
        raise refuse(f"has no kernel for weights stored as {form.label}")
    if Component.ZERO in parts:
        matrix.zero_type = ZeroType.WORDS if in_words else ZeroType.BYTES


def multiply(
    team: cores.Team, kernels: int, weight: Matrix, x: torch.Tensor, *, precise: bool = False
) -> torch.Tensor:
    """Multiply rows, bfloat16 of [rows, in], by a weight: bfloat16 of [rows, out], or float32."""
    x = x.contiguous()
    out = x.new_empty(len(x), weight.num_out, dtype=torch.float32 if precise else x.dtype)
    assert x.shape[1] == weight.num_in, x.shape
    assert x.dtype == torch.bfloat16, x.dtype
    team.multiply(cores.Dense(kernels, weight, len(x), x.data_ptr(), out.data_ptr(), int(precise)))
    return out


@dataclass(frozen=True)
class Gate:
    """What becomes of the first product of routed experts."""

    activation: Activation
    is_gated: bool
    is_interleaved: bool = False
    """True if gate and up come by turns; otherwise up comes behind all of gate."""
    alpha: float = 1.0
    """What SiLU multiplies its input by within the sigmoid."""
    limit: float = float("inf")
    """The largest gate, and the largest magnitude of up."""
    offset: float = 0.0
    """What is added to up."""

    def apply(self, made: torch.Tensor) -> torch.Tensor:
        """Compute the same by torch, [pairs, width] of [pairs, 2 x width] where it is gated."""
        gate, up = made, torch.ones_like(made)
        if self.is_gated:
            halves = (made[..., ::2], made[..., 1::2]) if self.is_interleaved else made.chunk(2, -1)
            gate, up = halves
            up = up.clamp(-self.limit, self.limit) + self.offset
        return _BY_TORCH[self.activation](gate.clamp(max=self.limit), self.alpha) * up


_BY_TORCH: dict[Activation, Callable[[torch.Tensor, float], torch.Tensor]] = {
    Activation.SILU: lambda x, alpha: x * torch.sigmoid(alpha * x),
    Activation.GELU: lambda x, _: torch.nn.functional.gelu(x),
    Activation.GELU_TANH: lambda x, _: torch.nn.functional.gelu(x, approximate="tanh"),
    Activation.RELU: lambda x, _: x.relu(),
    Activation.RELU_SQUARED: lambda x, _: x.relu().square(),
}


@cache
def _probe() -> torch.Tensor:
    """Return inputs that tell gates apart: small, large, of both signs, float32 of [8, 64]."""
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    return values * torch.logspace(-1, 2, 8)[:, None]


def find_gate(experts: Any) -> Gate:
    """Find what these experts compute between their products, by trying what the cores know.

    Raises OffplanError where the cores know nothing that gives what the experts give.
    """
    name = type(experts).__name__
    if getattr(experts, "has_post_expert_norm", False):
        raise refuse(f"has no kernel for experts with a norm behind them ({name})")
    own = {"alpha": "alpha", "limit": "limit", "swiglu_limit": "limit", "swiglu_alpha": "alpha"}
    said = {to: float(vars(experts)[key]) for key, to in own.items() if _is_number(experts, key)}
    clamped = [{}, said] if said else [{}]
    found = [
        Gate(activation, experts.has_gate, interleaved, offset=offset, **limits)
        for limits in clamped
        for activation in Activation
        for interleaved in ((False, True) if experts.has_gate else (False,))
        for offset in ((0.0, 1.0) if experts.has_gate else (0.0,))
    ]
    probe = _probe()
    with torch.no_grad():
        wanted = apply_gate(experts, probe) if experts.has_gate else experts.act_fn(probe)
        for gate in found:
            made = gate.apply(probe)
            if made.shape == wanted.shape and torch.allclose(made, wanted, rtol=1e-5, atol=1e-6):
                return gate
    raise refuse(f"has no kernel for what {name} computes between its products")


def _is_number(experts: Any, name: str) -> bool:
    value = vars(experts).get(name)
    return isinstance(value, int | float) and not isinstance(value, bool)


def describe_experts(
    experts: Any, up: Matrix, down: Matrix, biases: Sequence[torch.Tensor] | None
) -> Experts:
    """Describe a layer's experts by their weights, and biases of bfloat16; raises OffplanError.

    The description is of use while weights and biases stay where they are.
    """
    gate = find_gate(experts)
    made = Experts(up=up, down=down, num_experts=experts.num_experts)
    made.is_gated, made.activation = gate.is_gated, gate.activation
    made.is_interleaved, made.offset = gate.is_interleaved, gate.offset
    made.alpha, made.limit = gate.alpha, gate.limit
    if biases is not None:
        made.up_bias, made.down_bias = (each.data_ptr() for each in biases)
    return made


def send(
    team: cores.Team,
    kernels: int,
    experts: Experts,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    precise: bool = False,
) -> torch.Tensor:
    """Send tokens, bfloat16 of [tokens, hidden], through their experts: the same shape.

    ``top_k_index`` and ``top_k_weights`` are [tokens, k]. An expert that several tokens share is
    read once for up to 64 of them.
    """
    x, chosen = hidden_states.contiguous(), top_k_index.long().contiguous()
    factors = top_k_weights.float().contiguous()
    out = torch.empty_like(x, dtype=torch.float32 if precise else x.dtype)
    assert x.shape[1] == experts.up.num_in, x.shape
    assert x.dtype == torch.bfloat16, x.dtype
    task = Experts.from_buffer_copy(experts)
    task.kernels, task.precise = kernels, int(precise)
    task.num_tokens, task.num_chosen = chosen.shape
    task.inputs, task.chosen = x.data_ptr(), chosen.data_ptr()
    task.factors, task.outputs = factors.data_ptr(), out.data_ptr()
    team.multiply_experts(task)
    return out
