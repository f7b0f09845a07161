"""Whole numbers as GPTQ and AWQ store them, by columns: their values, and what is held of them."""

import torch

from offplan.forms.form import BITS, Component, Form, WordOrder
from offplan.runtime.forms import reference
from offplan.runtime.forms.reference import ONES, Components
from offplan.runtime.loading.contents import in_rows, order_of

AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def expand(form: Form, parts: Components, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of stored codes, [..., out, in]: those by columns by their own formula.

    Source: GPTQModel, ``dequantize_weight``; AutoAWQ, ``dequantize_gemm``.
    """
    if not form.is_by_columns:
        return reference.expand(form, parts, dtype)
    bits, scales = BITS[form.kind], parts[Component.SCALE]
    num_out = scales.shape[-1]
    if form.word_order is WordOrder.AWQ:
        numbers = _unpack(parts[Component.WEIGHT], bits, AWQ_NIBBLES)
        zeros = _unpack(parts[Component.ZERO], bits, AWQ_NIBBLES)
    else:
        numbers = _unpack(parts[Component.WEIGHT].mT, bits).mT
        words = parts[Component.ZERO]
        zeros = _unpack(words + ONES[bits] if form.word_order is WordOrder.GPTQ else words, bits)
    num_in = numbers.shape[-2]
    _, size = form.block or (1, num_in)
    index = (torch.arange(num_in, device=scales.device) // size)[None]
    if Component.GROUP_INDEX in parts:
        index = parts[Component.GROUP_INDEX].long()
    # the group of each weight, [..., in, out]; joined matrices have an index each
    groups = index.repeat_interleave(num_out // index.shape[-2], -2).mT.expand(numbers.shape)
    values = (numbers - zeros.gather(-2, groups)).to(scales.dtype) * scales.gather(-2, groups)
    return values.mT.to(dtype)


def hold(form: Form, parts: Components) -> tuple[Form, Components]:
    """Return a weight, or those of experts, as they are held once loaded: in rows."""
    if not form.is_by_columns:
        return form, parts
    lead, index, order = parts[Component.SCALE].shape[:-2], parts.get(Component.GROUP_INDEX), None
    joined, held = 1, {}
    if index is not None:
        joined = index.shape[-2]
        _, size = form.block or (1, index.shape[-1])
        found = order_of("g_idx", index, parts[Component.SCALE].shape[-2], size)
        assert found is not None
        order = found.to(index.device)
        held[Component.GROUP_INDEX] = order.view(index.shape)
    for part in (Component.WEIGHT, Component.SCALE, Component.ZERO):
        # each matrix is stored by itself
        stored = parts[part].unflatten(-1, (joined, -1)).movedim(-2, -3).flatten(0, -3)
        rows = in_rows(form, part, stored, order if part is Component.WEIGHT else None)
        rows = rows.reshape(*lead, joined * rows.shape[1], rows.shape[2])
        held[part] = rows.clone(memory_format=torch.contiguous_format)
    return form._replace(word_order=WordOrder.COMPRESSED_TENSORS), held


def _unpack(words: torch.Tensor, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the codes of 32-bit words, int32 of [..., words x codes], in order or as placed."""
    order = torch.tensor(places or range(32 // bits), dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> (bits * order)) & ((1 << bits) - 1)).flatten(-2)
