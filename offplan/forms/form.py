"""The form in which a weight's values are stored."""

from enum import Enum
from typing import NamedTuple


class Kind(str, Enum):
    """Ways to store a matrix of weights."""

    RAW = "raw"
    """Each value by itself, in the type of its tensor."""
    FP8_BLOCK = "fp8_block"
    """FP8, with a scale for each block of rows and columns."""
    FP8_CHANNEL = "fp8_channel"
    """FP8, with a scale for each row."""
    FP8_TENSOR = "fp8_tensor"
    """FP8, with one scale for the matrix."""
    MXFP4 = "mxfp4"
    """Two E2M1 values a byte, the first in the low half; a power of two for each 32 of a row.

    Source: OCP Microscaling Formats v1.0.
    """
    NVFP4 = "nvfp4"
    """Two E2M1 values a byte; an FP8 scale for each 16 of a row, and one for the matrix."""
    W4A16 = "w4a16"
    """Whole numbers of 4 bits, a scale for each group of a row, in words as ``word_order`` says."""
    W8A16 = "w8a16"
    """Whole numbers of 8 bits, likewise."""
    BNB8 = "bnb8"
    """bitsandbytes' whole numbers of 8 bits, with a row's largest magnitude as its scale."""
    NF4 = "nf4"
    """bitsandbytes' quantiles of 4 bits, in blocks of the flattened matrix, the first of a byte in
    its high half."""
    FP4 = "fp4"
    """bitsandbytes' floats of 4 bits, likewise."""
    PACKED = "packed"
    """bfloat16 values, bit-exact: a byte of sign and mantissa each, half a byte for the exponent,
    and a base of exponents for each block. A row's weights are packed in two halves. One byte has
    the exponents of a weight of the first half and of the one in / 2 behind it. Each half comes in
    blocks of 128 weights, the last of what is left. The first 64 weights of a block are its even
    bytes, the others its odd ones. Two weights in a row are then made at once of a word's bytes 0
    and 2, or 1 and 3."""
    OTHER = "other"
    """A way that is sized, not understood."""


class Component(str, Enum):
    """The role of a stored tensor for the weight it belongs to."""

    WEIGHT = "weight"
    """The values or their codes (``weight``, ``weight_packed``, ``qweight``, ``_blocks``)."""
    SCALE = "scale"
    """Factors of codes, each for its block, group, row or matrix."""
    ZERO = "zero"
    """The code of zero, for each group."""
    OFFSET = "offset"
    """Offsets added to the scaled codes of a group (MLX's ``biases``)."""
    GROUP_INDEX = "group_index"
    """The group of each column (``g_idx``)."""
    GLOBAL_SCALE = "global_scale"
    """A matrix's scale of its scales (ModelOpt's ``weight_scale_2``)."""
    GLOBAL_DIVISOR = "global_divisor"
    """Divisor of a matrix's scales (compressed-tensors' ``weight_global_scale``)."""
    INPUT_SCALE = "input_scale"
    """The scale of activations that are quantised too."""
    SHAPE = "shape"
    """The matrix's shape, stored as a tensor."""
    CODES = "code_values"
    """The values that codes stand for (bitsandbytes' ``quant_map``)."""
    NESTED_SCALE = "nested_scale"
    NESTED_CODES = "nested_codes"
    """Scales and values of the scales, where they are quantised too (bitsandbytes)."""
    NESTED_OFFSET = "nested_offset"
    """Offset that is then added to the scales; no tensor of its own, but a number of the STATE."""
    STATE = "state"
    """Other data of bitsandbytes: its parameters as JSON, or the name of a layout."""
    EXPONENT = "exponent"
    """Biased exponents of packed values [..., out, in / 2], as 1 to 15 above the block's BASE, in
    the order of the weights' bytes. The low half of a byte is a weight's, the high half that of the
    weight in / 2 behind it. A code of 0 is an exponent of 0. It is that of a zero, of a subnormal
    number in a block whose BASE is 0, and of a weight that PATCHES has instead. The byte of such a
    weight in WEIGHT is 0."""
    BASE = "base"
    """The base of exponents, 0 to 127, of each block of packed values: uint8 [..., out / 64,
    ceil(in / 256) * 64]. A block is 128 bytes of a row of EXPONENT, the row's last block what is
    left. The bases of 64 rows' first blocks come first, then of their second."""
    PATCHES = "patches"
    """Packed values, not zero, that no code of their block reaches: int32 [..., reserve, 2], by
    row, then column, of each matrix. They are row * in + column, and the bits of the bfloat16. The
    rest is unused."""
    PATCH_BLOCKS = "patch_blocks"
    """Begin and end of the PATCHES of each 64 rows: int32 [..., out / 64, 2]."""


class WordOrder(str, Enum):
    """The order in which whole numbers are packed into words of 32 bits."""

    COMPRESSED_TENSORS = "compressed-tensors"
    """[out, in / 8] along rows, the first in the lowest bits; codes are moved up by 8 (of 4 bits).

    Source: compressed-tensors, ``pack_to_int32``.
    """
    GPTQ = "gptq"
    """[in / 8, out] along columns, in order; zeros along [groups, out / 8], stored less one."""
    GPTQ_V2 = "gptq_v2"
    """As GPTQ, zeros stored as they are."""
    AWQ = "awq"
    """[in, out / 8] along columns, in the order 0 2 4 6 1 3 5 7; zeros likewise."""
    MLX = "mlx"
    """[out, in / 8] along rows, the first in the lowest bits, unsigned."""
    NONE = "none"
    """One to a byte."""


BITS = {Kind.W4A16: 4, Kind.W8A16: 8}
"""Bits of whole numbers."""
FP4_GROUPS = {Kind.MXFP4: 32, Kind.NVFP4: 16}
"""Weights of a row that share a scale, of 4-bit floats."""
NESTED_BLOCK = 256
"""Scales of bitsandbytes that share a scale of theirs."""

PATCH_ROWS = 64
"""Rows of a packed matrix whose patches and bases lie together; it has a multiple of them."""
BASE_BYTES = 128
"""Bytes of a block: of a half of a packed row, and of the exponents of both, which share a base."""
MOST_EXPONENT = 142
"""The largest biased exponent of a packed weight that is no patch: of weights below 2**16.

A base is 15 less at most: two to its power, 127 at most, is a float32.
"""


def patch_reserve(num_out: int, num_in: int) -> int:
    """Return the patches that a packed matrix, [out, in], has room for: one to 512 weights."""
    return -(-num_out * num_in // (512 * 64)) * 64


class Form(NamedTuple):
    """A form in which a weight is stored."""

    kind: Kind
    block: tuple[int, int] | None = None
    """Rows and columns (out, in) of weights that share a scale, where it is neither row nor matrix.

    (128, 128) of FP8 in blocks, (1, 32) of MXFP4, (1, 16) of NVFP4, (1, group) of whole numbers.
    """
    word_order: WordOrder | None = None
    """Order in words of whole numbers of 4 or 8 bits; None of other kinds."""

    @property
    def is_raw(self) -> bool:
        """True if each value is stored by itself."""
        return self.kind is Kind.RAW

    @property
    def is_rounded(self) -> bool:
        """True if codes stand for rounded values; raw and packed weights have the values."""
        return self.kind not in (Kind.RAW, Kind.PACKED)

    @property
    def is_by_columns(self) -> bool:
        """True if codes are stored as [in, out], with scales as [groups, out]."""
        return self.word_order in (WordOrder.GPTQ, WordOrder.GPTQ_V2, WordOrder.AWQ)

    @property
    def label(self) -> str:
        """Name it for a reader: ``fp8 block 128x128``, ``w4a16 1x128 awq``."""
        block = "" if self.block is None else f"{self.block[0]}x{self.block[1]}"
        order = "" if self.word_order is None else self.word_order.value
        return " ".join(filter(None, (self.kind.value.replace("_", " "), block, order)))


RAW = Form(Kind.RAW)
OTHER = Form(Kind.OTHER)
