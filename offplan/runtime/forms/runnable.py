"""Which stored forms are executed, told from headers alone."""

from collections.abc import Collection
from math import prod
from typing import Any

from torch import nn

from offplan.checkpoint.parameter import Parameter
from offplan.forms.form import BITS, FP4_GROUPS, NESTED_BLOCK, Component, Form, Kind, WordOrder
from offplan.forms.recognise import WORD_BITS
from offplan.runtime.refusal import refuse
from offplan.transformers_private import is_experts, name_first

BLOCK_OUT = 64
"""Outputs of a weight that a program of our kernels multiplies."""
_ROWS_PER_ZERO = 8
"""Rows whose zeros are packed in one word of compressed-tensors, at most."""
_MIN_GROUP = 32
"""Weights of a row that share a scale of whole numbers, at least."""
_HALVES = {Kind.MXFP4, Kind.NVFP4, Kind.NF4, Kind.FP4}
"""Kinds of two weights in a byte."""

_FP8, _BYTES = frozenset(("F8_E4M3",)), frozenset(("U8",))
_FLOATS = frozenset(("F32", "F16", "BF16"))
_POWERS = frozenset(("U8", "F8_E8M0"))
"""Types of scales that are powers of two, stored as their biased exponents."""
_TYPES = {
    Kind.FP8_BLOCK: (_FP8, _FLOATS | _POWERS),
    Kind.FP8_CHANNEL: (_FP8, _FLOATS),
    Kind.FP8_TENSOR: (_FP8, _FLOATS),
    Kind.MXFP4: (frozenset(("U8", "I8")), _POWERS),
    Kind.NVFP4: (_BYTES, _FP8),
    Kind.W4A16: (frozenset(("I32",)), _FLOATS),
    Kind.W8A16: (frozenset(("I32", "I8")), _FLOATS),
    Kind.BNB8: (frozenset(("I8",)), frozenset(("F32",))),
    Kind.NF4: (_BYTES, frozenset(("F32", "U8"))),
    Kind.FP4: (_BYTES, frozenset(("F32", "U8"))),
}
"""Types of the codes and of the scales of each form that is executed."""

_NESTED = {Component.NESTED_SCALE, Component.NESTED_CODES}
_TABLES = {Component.CODES: 16, Component.NESTED_CODES: 256, Component.NESTED_SCALE: None}
"""Numbers that each of bitsandbytes' tables has; None for as many as there are blocks of scales."""
_UNUSED = {Component.SHAPE, Component.INPUT_SCALE}
"""Parts that change no value: activations are computed with as they come, whatever their scale."""
_GPTQ = (WordOrder.GPTQ, WordOrder.GPTQ_V2)
_ZEROS = [set[Component](), {Component.ZERO}]
_OF_ORDER: dict[WordOrder, list[set[Component]]] = {
    WordOrder.COMPRESSED_TENSORS: _ZEROS,
    WordOrder.NONE: _ZEROS,
    # AutoRound leaves an index out that would say what is so anyway
    WordOrder.GPTQ: [{Component.ZERO, Component.GROUP_INDEX}, {Component.ZERO}],
    WordOrder.GPTQ_V2: [{Component.ZERO, Component.GROUP_INDEX}, {Component.ZERO}],
    WordOrder.AWQ: [{Component.ZERO}],
}
_OF_KIND: dict[Kind, list[set[Component]]] = {
    Kind.NVFP4: [{Component.GLOBAL_SCALE}, {Component.GLOBAL_DIVISOR}],
    Kind.BNB8: [set(), {Component.STATE}],
    Kind.NF4: [{Component.CODES, Component.STATE}, {Component.CODES, Component.STATE} | _NESTED],
    Kind.FP4: [{Component.CODES, Component.STATE}, {Component.CODES, Component.STATE} | _NESTED],
}
"""Sets of parts that values may be made of, beside codes and scales."""


def check_form(name: str, parameter: Parameter, module: nn.Module) -> None:
    """Raise CheckpointError for a weight of ``module`` whose stored form is not executed."""
    form, codes = parameter.form, parameter.tensors[0]
    if not _is_known(parameter):
        order = f" in the order of {form.word_order.value}" if form.word_order is not None else ""
        scales = [f"scales of {scale.dtype}" for scale in parameter.of(Component.SCALE)[:1]]
        types = ", ".join([codes.dtype, *scales])
        raise refuse(f"{name} is stored as {form.kind.value} ({types}){order}")
    check_module(name, form, module)
    if is_transposed(module) and form.kind is not Kind.MXFP4:
        raise refuse(f"{name}, whose rows are inputs, is stored as {form.kind.value}")
    _, group = form.block or (1, parameter.shape[-1])
    if is_experts(module) and form.word_order in _GPTQ and parameter.shape[-1] % group:
        raise refuse(f"{name} has experts whose last group is of fewer inputs than others")
    for part in parameter.components:
        tensor = parameter.of(part)[0]
        found = part_shape(parameter, part)
        if found is None:
            raise refuse(f"{tensor.name} is stored as {tensor.dtype} {list(tensor.shape)}")


def check_module(name: str, form: Form, module: nn.Module) -> None:
    """Raise CheckpointError for a module that does not compute with a weight of such a form."""
    # each of bitsandbytes' weights of 4 bits has a state of a length of its own
    is_alone = form.kind in (Kind.NF4, Kind.FP4)
    multiplies = isinstance(module, nn.Linear) or (is_experts(module) and not is_alone)
    gathers = isinstance(module, nn.Embedding) and module.max_norm is None
    if not multiplies and not (gathers and form.kind is Kind.PACKED):
        raise refuse(f"{name} of a {type(module).__name__} is stored as {form.kind.value}")


def _is_known(parameter: Parameter) -> bool:
    """Return True if a form is executed that has these types, parts and groups."""
    form = parameter.form
    if form.kind is Kind.PACKED:
        return True  # it is of our own making
    if form.kind not in _TYPES or Component.SCALE not in parameter.components:
        return False
    codes, scales = (parameter.of(part)[0].dtype for part in (Component.WEIGHT, Component.SCALE))
    parts = set(parameter.components) - {Component.WEIGHT, Component.SCALE} - _UNUSED
    known = _OF_KIND.get(form.kind, [set()])
    if form.word_order is not None:
        known = _OF_ORDER.get(form.word_order, [])
    types = _TYPES[form.kind]
    if codes not in types[0] or scales not in types[1] or parts not in known:
        return False
    if form.kind in (Kind.NF4, Kind.FP4):
        return (scales == "U8") == (parts >= _NESTED)
    if form.kind in BITS and (codes == "I8") != (form.word_order is WordOrder.NONE):
        return False
    # AutoAWQ has 4 bits alone
    return form.word_order is not WordOrder.AWQ or form.kind is Kind.W4A16


def check_joined(name: str, form: Form, whole: tuple[int, ...], of_each: tuple[int, ...]) -> None:
    """Raise CheckpointError where matrices are joined amid what shares a scale.

    ``whole`` and ``of_each`` are the shapes of the weight and of what it is joined of, both
    [..., out, in].
    """
    if whole[-1] != of_each[-1]:
        raise refuse(f"{name} joins matrices along their inputs, stored as {form.kind.value}")
    step = max(form.block[0] if form.block is not None else 1, _ROWS_PER_ZERO)
    if whole[-2] != of_each[-2] and of_each[-2] % step:
        raise refuse(f"{name} joins matrices of {of_each[-2]} rows, no multiple of {step}")


def check_experts(model: nn.Module, coded: Collection[str]) -> None:
    """Raise CheckpointError for a layer's experts of which one weight alone is stored as codes."""
    for path, module in model.named_modules():
        if is_experts(module):
            names = (name_first(module), "down_proj")
            plain = [f"{path}.{name}" for name in names if f"{path}.{name}" not in coded]
            if len(plain) == 1:
                raise refuse(
                    f"{plain[0]} is stored by its values, the other weight of these experts is not"
                )


def part_shape(parameter: Parameter, part: Component) -> tuple[int, ...] | None:
    """Return the shape that a part is given in memory; None where it is stored in another one.

    Scales, zeros and the like have dimensions of their own for rows and columns, so that those of
    joined matrices and of experts may be joined as these are.
    """
    form, shape = parameter.form, parameter.shape
    stored, dtype = parameter.of(part)[0].shape, parameter.of(part)[0].dtype
    if part in _UNUSED or part is Component.STATE:
        return stored or (1,)
    if form.kind is Kind.PACKED:
        return stored
    if part in _TABLES:
        num_scales = parameter.of(Component.SCALE)[0].num_elements
        wanted: tuple[int, ...] = (_TABLES[part] or -(-num_scales // NESTED_BLOCK),)
        return wanted if (stored, dtype) == (wanted, "F32") else None
    *stack, num_out, num_in = shape
    matrix = _matrix_shape(form, part, num_out, num_in, parameter.of(Component.SCALE)[0].shape)
    if matrix is None:
        return None
    found = (*stack, *matrix)
    if part is Component.WEIGHT and form.kind is Kind.MXFP4 and len(stored) > len(found):
        return stored  # the bytes of each block apart
    if part is Component.ZERO and dtype != ("I8" if form.word_order is WordOrder.NONE else "I32"):
        return None
    wanted = found
    if (
        form.is_by_columns and part is not Component.GROUP_INDEX
    ):  # rows are made of them once loaded
        is_awq = part is Component.WEIGHT and form.word_order is WordOrder.AWQ
        wanted = (num_in, num_out * BITS[form.kind] // WORD_BITS) if is_awq else found[::-1]
    is_flat = form.kind in (Kind.NF4, Kind.FP4)
    return found if _sizes(stored, is_flat) == _sizes(wanted, is_flat) else None


def _matrix_shape(
    form: Form, part: Component, num_out: int, num_in: int, scales: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the shape of a part of one matrix; None where kernels do not know its groups.

    ``scales`` is the shape that its scales are stored in.
    """
    if part in (Component.GLOBAL_SCALE, Component.GLOBAL_DIVISOR):
        return 1, 1
    if part is Component.GROUP_INDEX:
        return 1, num_in
    if part is Component.WEIGHT:
        return _codes_shape(form, num_out, num_in)
    high, wide = form.block or (1, num_in)
    if form.kind in (Kind.NF4, Kind.FP4):
        wide = num_out * num_in // max(1, prod(scales))
    elif form.kind is Kind.FP8_TENSOR:
        high = num_out
    is_whole = form.kind in (*BITS, Kind.NF4, Kind.FP4)
    is_power = wide >= _MIN_GROUP and wide & (wide - 1) == 0
    # GPTQ's last group may be of fewer columns
    if is_whole and (not wide or (num_in % wide and form.word_order not in _GPTQ)):
        return None
    if not is_power and wide not in (num_in, FP4_GROUPS.get(form.kind)):
        return None
    rows, groups = -(-num_out // high), -(-num_in // wide)
    if part is Component.ZERO and form.word_order is not WordOrder.NONE:
        rows = rows * BITS[form.kind] // WORD_BITS
    return rows, groups


def _codes_shape(form: Form, num_out: int, num_in: int) -> tuple[int, ...]:
    """Return the shape in which the codes of a matrix are held."""
    if form.kind in BITS and form.word_order is not WordOrder.NONE:
        return num_out, num_in * BITS[form.kind] // WORD_BITS
    return num_out, num_in // (2 if form.kind in _HALVES else 1)


def _sizes(shape: tuple[int, ...], is_flat: bool) -> list[int]:
    """List the sizes of a shape that count when two are compared."""
    return [prod(shape)] if is_flat else [size for size in shape if size != 1]


def is_transposed(module: Any) -> bool:
    """Return True if transformers holds the weights of these experts as [in, out]."""
    return bool(getattr(module, "is_transposed", False))
