"""How a linear layer's weight is stored, as a config says: tensors from a matrix's shape."""

from collections.abc import Callable
from dataclasses import dataclass

from offplan.forms.form import NESTED_BLOCK, Form, Kind, Part, WordOrder
from offplan.forms.recognise import WORD_BITS

Tensor = tuple[str, str, tuple[int, ...]]
"""The end of a stored tensor's name after the module's, its type (safetensors' name) and shape."""


@dataclass(frozen=True)
class Scheme:
    """What is stored for each linear layer that one part of a config takes."""

    form: Form
    """As headers would be recognised; the block of channel-wise whole numbers is None."""
    store: "Store"
    """Lists what is stored for a matrix [out, in], one of this module's functions."""
    scale: str = "BF16"
    """Type of the scales, as safetensors names it."""
    has_zeros: bool = False
    """Whether groups have a zero of their own, where that is a choice."""
    has_group_index: bool = False
    """Whether columns lie in another order than their groups, so that each one's is stored."""
    has_input_scale: bool = False
    """Whether a scale of the activations is stored, where that is a choice."""
    is_nested: bool = False
    """Whether bitsandbytes' scales are quantised too."""

    @property
    def needed(self) -> set[Part]:
        """Parts that codes and scales alone would stand for other values without."""
        chosen = {Part.ZERO: self.has_zeros, Part.GROUP_INDEX: self.has_group_index}
        return {part for part, is_stored in chosen.items() if is_stored}

    @property
    def per_word(self) -> int:
        """Whole numbers in a word."""
        return WORD_BITS // (4 if self.form.kind is Kind.W4A16 else 8)

    def groups(self, columns: int) -> int:
        """Return the groups of a row."""
        return 1 if self.form.block is None else -(-columns // self.form.block[1])

    def fits(self, rows: int, columns: int) -> bool:
        """Whether the layout can store such a matrix: in whole groups, packed ones in whole words.

        Quantisers leave others as they are, or pad them, each in a way of its own.
        """
        block, order = self.form.block, self.form.word_order
        if self.form.kind is not Kind.FP8_BLOCK and block is not None and columns % block[1]:
            return False
        if order is None or order is WordOrder.NONE:
            return True
        by_columns = self.form.is_by_columns
        return columns % self.per_word == 0 and (not by_columns or rows % self.per_word == 0)


Store = Callable[[Scheme, int, int], list[Tensor]]


def _inputs(scheme: Scheme, name: str, dtype: str, shape: tuple[int, ...]) -> list[Tensor]:
    return [(name, dtype, shape)] if scheme.has_input_scale else []


def store_fp8(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
    """Source: transformers 5.23, ``FP8Linear``."""
    block = scheme.form.block
    shape = () if block is None else (-(-rows // block[0]), -(-columns // block[1]))
    return [
        ("weight", "F8_E4M3", (rows, columns)),
        ("weight_scale_inv", scheme.scale, shape),
        *_inputs(scheme, "activation_scale", scheme.scale, ()),
    ]


def store_bytes(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
    """Source: compressed-tensors 0.15, ``NaiveQuantizationCompressor``."""
    kind, block = scheme.form.kind, scheme.form.block
    shape = (rows if block is None else -(-rows // block[0]), scheme.groups(columns))
    zeros: list[Tensor] = [("weight_zero_point", "I8", shape)] if scheme.has_zeros else []
    return [
        ("weight", "I8" if kind is Kind.W8A16 else "F8_E4M3", (rows, columns)),
        ("weight_scale", scheme.scale, (1,) if kind is Kind.FP8_TENSOR else shape),
        *zeros,
        *_inputs(scheme, "input_scale", scheme.scale, (1,)),
    ]


def store_packed(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
    """Source: compressed-tensors 0.15, ``PackedQuantizationCompressor``."""
    groups, per_word = scheme.groups(columns), scheme.per_word
    zeros: Tensor = ("weight_zero_point", "I32", (-(-rows // per_word), groups))
    return [
        ("weight_packed", "I32", (rows, columns // per_word)),
        ("weight_scale", scheme.scale, (rows, groups)),
        ("weight_shape", "I64", (2,)),
        *([zeros] if scheme.has_zeros else []),
        *([("weight_g_idx", "I32", (columns,))] if scheme.has_group_index else []),
    ]


def store_gptq(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
    """Source: GPTQModel, ``BaseQuantLinear``."""
    groups, per_word = scheme.groups(columns), scheme.per_word
    return [
        ("qweight", "I32", (columns // per_word, rows)),
        ("qzeros", "I32", (groups, rows // per_word)),
        ("scales", scheme.scale, (groups, rows)),
        ("g_idx", "I32", (columns,)),
    ]


def store_awq(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
    """Source: AutoAWQ, ``WQLinear_GEMM``."""
    groups, per_word = scheme.groups(columns), scheme.per_word
    return [
        ("qweight", "I32", (columns, rows // per_word)),
        ("qzeros", "I32", (groups, rows // per_word)),
        ("scales", scheme.scale, (groups, rows)),
    ]


def store_mlx(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
    """Source: mlx, ``QuantizedLinear``."""
    groups = (rows, scheme.groups(columns))
    return [
        ("weight", "U32", (rows, columns // scheme.per_word)),
        ("scales", scheme.scale, groups),
        ("biases", scheme.scale, groups),
    ]


def store_fp4(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
    """Source: compressed-tensors 0.15, ``NVFP4PackedCompressor`` and ``MXFP4PackedCompressor``."""
    is_nvfp4 = scheme.form.kind is Kind.NVFP4
    scale = "F8_E4M3" if is_nvfp4 else "U8"
    return [
        ("weight_packed", "U8", (rows, columns // 2)),
        ("weight_scale", scale, (rows, scheme.groups(columns))),
        *([("weight_global_scale", "F32", (1,))] if is_nvfp4 else []),
        *_inputs(scheme, "input_global_scale", "F32", (1,)),
    ]


def store_modelopt(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
    """Source: ModelOpt's unified export of FP8 and NVFP4."""
    inputs: Tensor = ("input_scale", "F32", ())
    if scheme.form.kind is Kind.FP8_TENSOR:
        return [("weight", "F8_E4M3", (rows, columns)), ("weight_scale", "F32", ()), inputs]
    return [
        ("weight", "U8", (rows, columns // 2)),
        ("weight_scale", "F8_E4M3", (rows, scheme.groups(columns))),
        ("weight_scale_2", "F32", ()),
        inputs,
    ]


def store_bnb8(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
    """Source: bitsandbytes 0.49, ``Linear8bitLt``."""
    scale: Tensor = ("SCB", "F32", (rows,))
    return [("weight", "I8", (rows, columns)), scale, ("weight_format", "U8", ())]


def store_bnb4(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
    """Source: bitsandbytes 0.49, ``QuantState.as_dict``, whose JSON has BNB4_STATE_BYTES or so."""
    blocks = -(-rows * columns // _BNB4_BLOCK)
    nested: list[Tensor] = [
        ("weight.nested_absmax", "F32", (-(-blocks // NESTED_BLOCK),)),
        ("weight.nested_quant_map", "F32", (256,)),
    ]
    return [
        ("weight", "U8", (-(-rows * columns // 2), 1)),
        ("weight.absmax", "U8" if scheme.is_nested else "F32", (blocks,)),
        *(nested if scheme.is_nested else []),
        ("weight.quant_map", "F32", (16,)),
        (f"weight.quant_state.bitsandbytes__{scheme.form.kind.value}", "U8", (BNB4_STATE_BYTES,)),
    ]


_BNB4_BLOCK = 64
"""Weights of bitsandbytes that share a scale."""
BNB4_STATE_BYTES = 96
"""Bytes taken for the JSON of bitsandbytes' parameters, which has some more or less."""
