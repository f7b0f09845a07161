"""Stored forms that the host's cores have kernels for, and how packed weights lie."""

from math import prod

from offplan.forms.form import BASE_BYTES, PATCH_ROWS, Component, Form, Kind, patch_reserve

CHUNK_COLUMNS = 128
"""Columns of a row that kernels take at a time."""
MOST_COLUMNS = 65536
"""Columns of a matrix, at most."""
_KINDS = frozenset(
    {
        *(Kind.RAW, Kind.FP8_BLOCK, Kind.FP8_CHANNEL, Kind.FP8_TENSOR, Kind.MXFP4, Kind.NVFP4),
        *(Kind.W4A16, Kind.W8A16, Kind.BNB8, Kind.PACKED),
    }
)


def why_no_kernel(form: Form, dtype: str, num_in: int) -> str | None:
    """Say why the cores do not multiply weights of a form, or None if they do.

    ``dtype`` is the model's, as torch names it, ``num_in`` the length of a row. Whole numbers by
    columns are laid out in rows once they are loaded.
    """
    if dtype != "bfloat16":
        return f"computes in bfloat16, found a model in {dtype}"
    if form.kind not in _KINDS:
        return f"has no kernel for weights stored as {form.label}"
    if num_in > MOST_COLUMNS:
        return f"multiplies rows of {MOST_COLUMNS} weights at most, found {num_in}"
    group = form.block[1] if form.block is not None else num_in
    is_bytes = form.kind in (Kind.FP8_BLOCK, Kind.W8A16)
    if is_bytes and group != num_in and group % CHUNK_COLUMNS:
        return f"has no kernel for scales of {group} weights of 8 bits ({form.label})"
    return None


PACKED = Form(Kind.PACKED)


def can_pack(shape: tuple[int, ...]) -> bool:
    """Return True if a matrix [out, in], or experts' [experts, out, in], has parts of its own."""
    if len(shape) not in (2, 3) or not all(shape):
        return False
    num_out, num_in = shape[-2:]
    # a patch names its weight by a number of 32 bits, also where another matrix is joined
    return num_in % 8 == 0 and num_out % PATCH_ROWS == 0 and num_out * num_in < 2**30


def parts_of(shape: tuple[int, ...]) -> dict[Component, tuple[str, tuple[int, ...]]]:
    """Return the type (safetensors' name) and shape of each part of [..., out, in]."""
    *stack, num_out, num_in = shape
    assert prod(shape), "an empty matrix is stored as it is"
    num_blocks = -(-num_in // (2 * BASE_BYTES))
    matrix = {
        Component.WEIGHT: ("U8", (num_out, num_in)),
        Component.EXPONENT: ("U8", (num_out, num_in // 2)),
        Component.BASE: ("U8", (num_out // PATCH_ROWS, num_blocks * PATCH_ROWS)),
        Component.PATCHES: ("I32", (patch_reserve(num_out, num_in), 2)),
        Component.PATCH_BLOCKS: ("I32", (num_out // PATCH_ROWS, 2)),
    }
    return {part: (dtype, (*stack, *sizes)) for part, (dtype, sizes) in matrix.items()}
