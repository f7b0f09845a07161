"""Whole numbers as GPTQ and AWQ store them, by columns: their values, and what is held of them."""

import torch

from offplan.forms.form import BITS, Form, Part, WordOrder
from offplan.runtime.forms import reference
from offplan.runtime.forms.reference import ONES, Parts
from offplan.runtime.loading.rows import in_rows, order_of

AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def expand(form: Form, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of stored codes, [..., out, in]: those by columns by their own formula.

    Source: GPTQModel, ``dequantize_weight``; AutoAWQ, ``dequantize_gemm``.
    """
    if not form.is_by_columns:
        return reference.expand(form, parts, dtype)
    bits, scales = BITS[form.kind], parts[Part.SCALE]
    num_out = scales.shape[-1]
    if form.word_order is WordOrder.AWQ:
        numbers = _unpack(parts[Part.WEIGHT], bits, AWQ_NIBBLES)
        zeros = _unpack(parts[Part.ZERO], bits, AWQ_NIBBLES)
    else:
        numbers = _unpack(parts[Part.WEIGHT].mT, bits).mT
        words = parts[Part.ZERO]
        zeros = _unpack(words + ONES[bits] if form.word_order is WordOrder.GPTQ else words, bits)
    num_in = numbers.shape[-2]
    _, size = form.block or (1, num_in)
    index = (torch.arange(num_in, device=scales.device) // size)[None]
    if Part.GROUP_INDEX in parts:
        index = parts[Part.GROUP_INDEX].long()
    # the group of each weight, [..., in, out]; joined matrices have an index each
    groups = index.repeat_interleave(num_out // index.shape[-2], -2).mT.expand(numbers.shape)
    values = (numbers - zeros.gather(-2, groups)).to(scales.dtype) * scales.gather(-2, groups)
    return values.mT.to(dtype)


def hold(form: Form, parts: Parts) -> tuple[Form, Parts]:
    """Return a weight, or those of experts, as they are held once loaded: in rows."""
    if not form.is_by_columns:
        return form, parts
    lead, index, order = parts[Part.SCALE].shape[:-2], parts.get(Part.GROUP_INDEX), None
    joined, held = 1, {}
    if index is not None:
        joined = index.shape[-2]
        _, size = form.block or (1, index.shape[-1])
        found = order_of("g_idx", index, parts[Part.SCALE].shape[-2], size)
        assert found is not None
        order = found.to(index.device)
        held[Part.GROUP_INDEX] = order.view(index.shape)
    for part in (Part.WEIGHT, Part.SCALE, Part.ZERO):
        # each matrix is stored by itself
        stored = parts[part].unflatten(-1, (joined, -1)).movedim(-2, -3).flatten(0, -3)
        rows = in_rows(form, part, stored, order if part is Part.WEIGHT else None)
        rows = rows.reshape(*lead, joined * rows.shape[1], rows.shape[2])
        held[part] = rows.clone(memory_format=torch.contiguous_format)
    return form._replace(word_order=WordOrder.COMPRESSED_TENSORS), held


def _unpack(words: torch.Tensor, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the codes of 32-bit words, int32 of [..., words x codes], in order or as placed."""
    order = torch.tensor(places or range(32 // bits), dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> (bits * order)) & ((1 << bits) - 1)).flatten(-2)
