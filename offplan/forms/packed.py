"""The parts that bfloat16 values are packed into: their types and shapes, from a matrix's shape."""

from math import prod

from offplan.forms.form import BASE_BYTES, PATCH_ROWS, Component, Form, Kind, patch_reserve

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
