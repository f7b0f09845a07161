"""How a linear layer's weight is stored, as a config says: tensors from a matrix's shape."""

from collections.abc import Callable
from dataclasses import dataclass

from offplan.forms.form import Form, Packing
from offplan.forms.recognise import WORD_BITS

Tensor = tuple[str, str, tuple[int, ...]]
"""The end of a stored tensor's name after the module's, its type (safetensors' name) and shape."""


@dataclass(frozen=True)
class Scheme:
    """What is stored for each linear layer that one part of a config takes."""

    form: Form
    """As headers would be recognised; the block of channel-wise whole numbers is None."""
    layout: str
    """The layout of its tensors, one of LAYOUTS."""
    bits: int = 8
    """Bits of a weight's code."""
    scale: str = "BF16"
    """Type of the scales, as safetensors names it."""
    has_zeros: bool = False
    """Whether groups have a zero of their own."""
    has_group_index: bool = False
    """Whether the group of each column is stored."""
    has_input_scale: bool = False
    """Whether a scale of the activations is stored."""
    is_nested: bool = False
    """Whether bitsandbytes' scales are quantised too."""

    def groups(self, columns: int) -> int:
        """Return the groups of a row."""
        return 1 if self.form.block is None else -(-columns // self.form.block[1])

    def fits(self, rows: int, columns: int) -> bool:
        """Whether the layout can store such a matrix: packed ones only in whole words and groups.

        Quantisers leave others as they are, or pad them, each in a way of its own.
        """
        packing, block = self.form.packing, self.form.block
        if packing is None or packing is Packing.NONE or packing is Packing.MLX:
            return self.layout not in _FP4 or columns % 32 == 0
        per_word = WORD_BITS // self.bits
        is_packed_by_rows = packing is Packing.COMPRESSED_TENSORS
        in_words = columns % per_word == 0 and (is_packed_by_rows or rows % per_word == 0)
        return in_words and (block is None or columns % block[1] == 0)

    def tensors(self, rows: int, columns: int) -> list[Tensor]:
        """List what is stored for a matrix [out, in]."""
        return LAYOUTS[self.layout](self, rows, columns)


def _store_fp8_block(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
    assert scheme.form.block is not None
    high, wide = scheme.form.block
    scale = ("weight_scale_inv", scheme.scale, (-(-rows // high), -(-columns // wide)))
    return [("weight", "F8_E4M3", (rows, columns)), scale, *_static(scheme, "activation_scale")]


def _store_fp8_tensor(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
    scale = ("weight_scale_inv", scheme.scale, ())
    return [("weight", "F8_E4M3", (rows, columns)), scale, *_static(scheme, "activation_scale")]


def _static(
    scheme: Scheme, name: str, dtype: str = "", shape: tuple[int, ...] = ()
) -> list[Tensor]:
    return [(name, dtype or scheme.scale, shape)] if scheme.has_input_scale else []


def _store_rows(weight: str, dtype: str) -> Callable[[Scheme, int, int], list[Tensor]]:
    """Store codes of a byte with a scale for each group, row, block or matrix."""

    def store(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
        block = scheme.form.block
        shape: tuple[int, ...] = (rows, scheme.groups(columns))
        if block is not None:
            shape = (-(-rows // block[0]), shape[1])
        elif scheme.layout == "ct fp8 tensor":
            shape = (1,)
        zeros = [("weight_zero_point", "I8", shape)] if scheme.has_zeros else []
        return [
            (weight, dtype, (rows, columns)),
            ("weight_scale", scheme.scale, shape),
            *zeros,
            *_static(scheme, "input_scale", shape=(1,)),
        ]

    return store


def _store_packed(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
    groups, per_word = scheme.groups(columns), WORD_BITS // scheme.bits
    zeros = [("weight_zero_point", "I32", (rows // per_word, groups))] if scheme.has_zeros else []
    index = [("weight_g_idx", "I32", (columns,))] if scheme.has_group_index else []
    return [
        ("weight_packed", "I32", (rows, columns // per_word)),
        ("weight_scale", scheme.scale, (rows, groups)),
        ("weight_shape", "I64", (2,)),
        *zeros,
        *index,
    ]


def _store_gptq(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
    groups, per_word = scheme.groups(columns), WORD_BITS // scheme.bits
    return [
        ("qweight", "I32", (columns // per_word, rows)),
        ("qzeros", "I32", (groups, rows // per_word)),
        ("scales", scheme.scale, (groups, rows)),
        ("g_idx", "I32", (columns,)),
    ]


def _store_awq(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
    groups, per_word = scheme.groups(columns), WORD_BITS // scheme.bits
    return [
        ("qweight", "I32", (columns, rows // per_word)),
        ("qzeros", "I32", (groups, rows // per_word)),
        ("scales", scheme.scale, (groups, rows)),
    ]


def _store_mlx(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
    groups = (rows, scheme.groups(columns))
    return [
        ("weight", "U32", (rows, columns * scheme.bits // WORD_BITS)),
        ("scales", scheme.scale, groups),
        ("biases", scheme.scale, groups),
    ]


def _store_nvfp4(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
    return [
        ("weight_packed", "U8", (rows, columns // 2)),
        ("weight_scale", "F8_E4M3", (rows, columns // 16)),
        ("weight_global_scale", "F32", (1,)),
        *_static(scheme, "input_global_scale", "F32", (1,)),
    ]


def _store_mxfp4(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
    packed = ("weight_packed", "U8", (rows, columns // 2))
    return [packed, ("weight_scale", "U8", (rows, columns // 32))]


def _store_modelopt_fp8(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
    scales: list[Tensor] = [("weight_scale", "F32", ()), ("input_scale", "F32", ())]
    return [("weight", "F8_E4M3", (rows, columns)), *scales]


def _store_modelopt_nvfp4(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
    return [
        ("weight", "U8", (rows, columns // 2)),
        ("weight_scale", "F8_E4M3", (rows, columns // 16)),
        ("weight_scale_2", "F32", ()),
        ("input_scale", "F32", ()),
    ]


def _store_bnb8(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
    scale: Tensor = ("SCB", "F32", (rows,))
    return [("weight", "I8", (rows, columns)), scale, ("weight_format", "U8", ())]


_NF4_BLOCK, _NESTED_BLOCK, _STATE_BYTES = 64, 256, 96
"""Weights of a scale, scales of a scale's scale, and about the bytes of the parameters as JSON."""


def _store_nf4(scheme: Scheme, rows: int, columns: int) -> list[Tensor]:
    blocks = -(-rows * columns // _NF4_BLOCK)
    nested: list[Tensor] = [
        ("weight.nested_absmax", "F32", (-(-blocks // _NESTED_BLOCK),)),
        ("weight.nested_quant_map", "F32", (256,)),
    ]
    return [
        ("weight", "U8", (-(-rows * columns // 2), 1)),
        ("weight.absmax", "U8" if scheme.is_nested else "F32", (blocks,)),
        *(nested if scheme.is_nested else []),
        ("weight.quant_map", "F32", (16,)),
        ("weight.quant_state.bitsandbytes__nf4", "U8", (_STATE_BYTES,)),
    ]


_FP4 = frozenset(("nvfp4", "mxfp4", "modelopt nvfp4"))
LAYOUTS: dict[str, Callable[[Scheme, int, int], list[Tensor]]] = {
    "fp8 block": _store_fp8_block,
    "fp8 tensor": _store_fp8_tensor,
    "ct fp8": _store_rows("weight", "F8_E4M3"),
    "ct fp8 tensor": _store_rows("weight", "F8_E4M3"),
    "ct int8": _store_rows("weight", "I8"),
    "packed": _store_packed,
    "gptq": _store_gptq,
    "awq": _store_awq,
    "mlx": _store_mlx,
    "nvfp4": _store_nvfp4,
    "mxfp4": _store_mxfp4,
    "modelopt fp8": _store_modelopt_fp8,
    "modelopt nvfp4": _store_modelopt_nvfp4,
    "bnb8": _store_bnb8,
    "nf4": _store_nf4,
}
"""What each layout stores, as its writer does.

Source: transformers 5.23, ``FP8Linear``; compressed-tensors 0.15, ``compressors``; GPTQModel and
AutoAWQ, ``WQLinear_GEMM``; ModelOpt's unified export; bitsandbytes 0.49; mlx, ``QuantizedLinear``.
"""
