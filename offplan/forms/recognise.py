"""Stored forms, recognised from types and shapes, and by the config where these leave a choice.

Tensors that do not fit together are OTHER: they are sized as stored, and no runtime executes them.
"""

from collections.abc import Mapping
from math import prod
from typing import Protocol

from offplan.forms.form import BITS, FP4_GROUPS, OTHER, RAW, Component, Form, Kind, WordOrder

Shape = tuple[int, ...]

FP8_TYPES = frozenset(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"))
CODE_TYPES = FP8_TYPES | {"I8", "U8", "I32", "U32", "F4"}
"""Types that stand for weights only with something beside them."""
WORD_BITS = 32
_FP4_KINDS = {"F8_E4M3": Kind.NVFP4, "F8_E8M0": Kind.MXFP4, "U8": Kind.MXFP4}
"""Kinds of 4-bit floats by the type of their scales."""
_NAMED_KINDS = {"nf4": Kind.NF4, "fp4": Kind.FP4}
"""bitsandbytes' kinds of 4 bits by how the name of their state ends."""
WHOLE_KINDS = {bits: kind for kind, bits in BITS.items()}
"""Kinds of whole numbers by their bits."""
FEW_BITS = (2, 3)
"""Bits of whole numbers in GPTQ's words that are sized, and that no runtime executes."""


class Described(Protocol):
    """A stored tensor's description."""

    @property
    def name(self) -> str:
        """The tensor's whole name."""

    @property
    def dtype(self) -> str:
        """Safetensors' name of the type."""

    @property
    def shape(self) -> Shape:
        """Elements along each dimension, as stored."""


def recognise(
    weight: Described, beside: Mapping[Component, Described], stated: Form | None
) -> tuple[Form, Shape]:
    """Return the form of a weight and the shape that it stands for, [..., out, in].

    ``beside`` are the tensors that belong to it, ``stated`` is what the config says of its module.
    The shape of a bitsandbytes weight of 4 bits is (elements,): the headers do not tell more.
    """
    if not beside:
        is_matrix = len(weight.shape) > 1
        return (OTHER if is_matrix and weight.dtype in CODE_TYPES else RAW), weight.shape
    form, shape = _infer(weight, beside, stated)
    return (form if stated is None or _agree(form, stated) else OTHER), shape


def _agree(form: Form, stated: Form) -> bool:
    """Return True if what was found is what the config says."""
    same_block = stated.block is None or stated.block == form.block
    return same_block and (form.kind, form.word_order) == (stated.kind, stated.word_order)


def _infer(
    weight: Described, beside: Mapping[Component, Described], stated: Form | None
) -> tuple[Form, Shape]:
    if weight.dtype in FP8_TYPES:
        return _recognise_fp8(weight.shape, beside, stated), weight.shape
    if weight.dtype == "I32":
        return _recognise_words(weight, beside, stated)
    if weight.dtype == "U32" and weight.shape:
        return _recognise_mlx(weight.shape, beside, stated)
    if Component.CODES in beside:
        state = beside[Component.STATE].name if Component.STATE in beside else ""
        return Form(_NAMED_KINDS.get(state[-3:], Kind.OTHER)), (2 * prod(weight.shape),)
    scale = beside.get(Component.SCALE)
    if weight.dtype == "I8" and scale is not None and scale.dtype != "F8_E8M0":
        return _recognise_bytes(weight.shape, scale), weight.shape
    return _recognise_fp4(weight, beside)


def _recognise_fp8(
    shape: Shape, beside: Mapping[Component, Described], stated: Form | None
) -> Form:
    """Tell what an FP8 matrix, or each of a stack of them, has scales for."""
    if Component.SCALE not in beside or len(shape) < 2:
        return OTHER
    if not beside.keys() <= {Component.SCALE, Component.INPUT_SCALE}:
        return OTHER
    *stack, rows, columns = shape
    scale = beside[Component.SCALE].shape
    blocks = [(size, size) for size in (128, 64, 32, 256)]
    if stated is not None and stated.kind is Kind.FP8_BLOCK and stated.block is not None:
        blocks = [stated.block]
    # of one matrix: scalar, [1]; of a stack: [experts], [experts, 1, 1]
    elif prod(scale) == prod(stack) and scale[: len(stack)] == tuple(stack):
        return Form(Kind.FP8_TENSOR)
    elif scale in ((*stack, rows), (*stack, rows, 1)):
        return Form(Kind.FP8_CHANNEL)
    for block in blocks:
        if scale == (*stack, -(-rows // block[0]), -(-columns // block[1])):
            return Form(Kind.FP8_BLOCK, block)
    return OTHER


def _recognise_words(
    weight: Described, beside: Mapping[Component, Described], stated: Form | None
) -> tuple[Form, Shape]:
    """Recognise whole numbers packed into 32 bits by compressed-tensors, GPTQ or AWQ."""
    scale, zero = beside.get(Component.SCALE), beside.get(Component.ZERO)
    if scale is None or len(weight.shape) != 2 or len(scale.shape) != 2:
        return OTHER, weight.shape
    if not weight.name.endswith("qweight"):
        return _recognise_rows(weight.shape, scale.shape, beside, stated)
    groups, rows = scale.shape
    bits = WORD_BITS * zero.shape[-1] // rows if zero is not None and zero.shape and rows else 0
    if bits not in (*FEW_BITS, *WHOLE_KINDS):
        return OTHER, weight.shape
    # AWQ packs along the outputs, GPTQ along the inputs
    is_awq = weight.shape[1] * WORD_BITS == rows * bits
    orders = (WordOrder.AWQ,) if is_awq else (WordOrder.GPTQ, WordOrder.GPTQ_V2)
    columns = weight.shape[0] if is_awq else weight.shape[0] * WORD_BITS // bits
    form = OTHER
    is_stated = stated is not None and stated.word_order in orders and bits in WHOLE_KINDS
    if stated is not None and is_stated and (is_awq or weight.shape[1] == rows):
        form = _grouped(bits, stated.word_order, columns, groups)
        # GPTQ's last group may be of fewer columns
        if not is_awq and stated.block and groups == -(-columns // stated.block[1]):
            form = Form(WHOLE_KINDS[bits], stated.block, stated.word_order)
    return form, (rows, columns)


def _recognise_rows(
    shape: Shape, scale: Shape, beside: Mapping[Component, Described], stated: Form | None
) -> tuple[Form, Shape]:
    """Recognise rows of packed whole numbers; without a zero the config alone tells the bits."""
    rows, words = shape
    zero = beside.get(Component.ZERO)
    known = None if stated is None else BITS.get(stated.kind)
    bits = known or 4
    if known is None and zero is not None and zero.shape and rows:
        bits = WORD_BITS * zero.shape[0] // rows
    if bits not in WHOLE_KINDS or scale[0] != rows:
        return OTHER, shape
    columns = words * WORD_BITS // bits
    form = _grouped(bits, WordOrder.COMPRESSED_TENSORS, columns, scale[1])
    return (form if known else OTHER), (rows, columns)


def _recognise_mlx(
    shape: Shape, beside: Mapping[Component, Described], stated: Form | None
) -> tuple[Form, Shape]:
    bits = 8 if stated is not None and stated.kind is Kind.W8A16 else 4
    *stack, words = shape
    columns = words * WORD_BITS // bits
    logical = (*stack, columns)
    scale, offset = beside.get(Component.SCALE), beside.get(Component.OFFSET)
    if stated is None or scale is None or offset is None or scale.shape != offset.shape:
        return OTHER, logical
    return _grouped(bits, WordOrder.MLX, columns, scale.shape[-1] if scale.shape else 0), logical


def _recognise_bytes(shape: Shape, scale: Described) -> Form:
    """Recognise whole numbers of 8 bits, one to a byte."""
    if scale.name.endswith(".SCB"):
        return Form(Kind.BNB8) if scale.shape == shape[:-1] else OTHER
    if len(shape) != 2 or len(scale.shape) != 2 or scale.shape[0] != shape[0]:
        return OTHER
    return _grouped(8, WordOrder.NONE, shape[1], scale.shape[1])


def _grouped(bits: int, order: WordOrder | None, columns: int, num_groups: int) -> Form:
    if not num_groups or columns % num_groups:
        return OTHER
    return Form(WHOLE_KINDS[bits], (1, columns // num_groups), order)


def _recognise_fp4(weight: Described, beside: Mapping[Component, Described]) -> tuple[Form, Shape]:
    """Recognise 4-bit floats, two a byte, with a scale for each group of a row."""
    scale = beside.get(Component.SCALE)
    if scale is None or len(weight.shape) < 2 or scale.dtype not in _FP4_KINDS:
        return OTHER, weight.shape
    kind = _FP4_KINDS[scale.dtype]
    group = FP4_GROUPS[kind]
    *stack, columns = weight.shape
    if len(scale.shape) == len(stack):  # gpt-oss: [experts, out, groups, bytes]
        columns *= stack.pop()
    logical = (*stack, columns if weight.dtype == "F4" else 2 * columns)
    num_global = len(beside.keys() & {Component.GLOBAL_SCALE, Component.GLOBAL_DIVISOR})
    is_whole = num_global == (kind is Kind.NVFP4)
    fits = scale.shape == (*stack, -(-logical[-1] // group))
    return (Form(kind, (1, group)) if fits and is_whole else OTHER), logical
