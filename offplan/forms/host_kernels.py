"""Which stored forms the host's cores have kernels for."""

from offplan.forms.form import Form, Kind

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
