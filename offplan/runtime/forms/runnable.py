"""Which stored forms are executed, told from headers alone."""

from collections.abc import Collection
from typing import Any

from torch import nn

from offplan.checkpoint.parameter import Parameter
from offplan.forms.form import Form, Kind, Packing, Part
from offplan.runtime.refusal import refuse

_FP8 = frozenset(("F8_E4M3",))
_CODES = {
    Kind.FP8_BLOCK: _FP8,
    Kind.FP8_CHANNEL: _FP8,
    Kind.FP8_TENSOR: _FP8,
    Kind.MXFP4: frozenset(("U8",)),
    Kind.W4A16: frozenset(("I32",)),
}
"""Types of the codes of each form that is executed."""
_PARTS = {Part.WEIGHT, Part.SCALE, Part.ZERO, Part.SHAPE, Part.INPUT_SCALE}
"""Parts that values are made of, or that change none: activations are computed with as they come,
whatever their scale."""
_ROWS_PER_ZERO = 8
"""Rows whose zeros are packed in one word of compressed-tensors."""


def check_form(name: str, parameter: Parameter, module: nn.Module) -> None:
    """Raise CheckpointError for a weight of ``module`` whose stored form is not executed."""
    form, codes = parameter.form, parameter.tensors[0]
    known = form.kind in _CODES and codes.dtype in _CODES[form.kind]
    known = known and Part.SCALE in parameter.parts and set(parameter.parts) <= _PARTS
    if not known or form.packing not in (None, Packing.COMPRESSED_TENSORS):
        packing = f" in the order of {form.packing.value}" if form.packing is not None else ""
        raise refuse(f"{name} is stored as {form.kind.value} ({codes.dtype}){packing}")
    if type(module) is not nn.Linear and not hasattr(module, "has_gate"):
        raise refuse(f"{name} of a {type(module).__name__} is stored as {form.kind.value}")
    if is_transposed(module) and form.kind is not Kind.MXFP4:
        raise refuse(f"{name}, whose rows are inputs, is stored as {form.kind.value}")


def check_joined(name: str, form: Form, num_rows: int, of_each: int) -> None:
    """Raise CheckpointError where matrices of so many rows are joined amid what shares a scale."""
    step = max(form.block[0] if form.block is not None else 1, _ROWS_PER_ZERO)
    if num_rows != of_each and of_each % step:
        raise refuse(f"{name} joins matrices of {of_each} rows, no multiple of {step}")


def check_experts(model: nn.Module, coded: Collection[str]) -> None:
    """Raise CheckpointError for experts of which a part is stored as codes and the rest is not."""
    weights = [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if hasattr(module, "has_gate")
        for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    ]
    plain = [name for name in weights if name not in coded]
    if plain and len(plain) < len(weights):
        raise refuse(f"{plain[0]} is stored by its values, other experts are not")


def part_shape(
    form: Form, part: Part, stored: tuple[int, ...], weight: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the shape that a part is given in memory: scales in rows and columns of their own.

    ``weight`` is the shape that the weight stands for, [..., out, in].
    """
    if part is Part.SCALE and form.kind is Kind.FP8_TENSOR:
        return (*weight[:-2], 1, 1)
    if part is Part.SCALE and form.kind is Kind.FP8_CHANNEL:
        return (*weight[:-1], 1)
    return stored or (1,)


def is_transposed(module: Any) -> bool:
    """Whether transformers holds the weights of these experts as [in, out]."""
    return bool(getattr(module, "is_transposed", False))
