"""The values that stored codes stand for, by plain torch: what every kernel must agree with."""

import torch
from torch import nn

from offplan.forms.form import BASE_BYTES, BITS, NESTED_BLOCK, Component, Form, Kind, WordOrder

Components = dict[Component, torch.Tensor]
"""The stored tensors of a weight, or those of all experts in one, by what they are to it."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of 4-bit floats, by code. Source: OCP Microscaling Formats v1.0."""
PER_127 = 7.874015718698502e-3
"""What bitsandbytes takes for 1 / 127. Source: bitsandbytes 0.49, ``int8_vectorwise_dequant``."""
ONES = {4: 0x11111111, 8: 0x01010101}
"""A word whose codes are ones, by their bits. GPTQ adds it to words of zeros, carries included.

Source: GPTQModel, ``convert_gptq_v1_to_v2_format_module``.
"""


def expand(form: Form, parts: Components, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a weight, [..., out, in], in ``dtype``.

    Source: transformers 5.23, ``Fp8Dequantize`` and ``convert_moe_packed_tensors``;
    compressed-tensors 0.15, ``_dequantize``; GPTQModel, ``dequantize_weight``; AutoAWQ,
    ``dequantize_gemm``; ModelOpt, ``NVFP4QTensor.dequantize``; bitsandbytes 0.49,
    ``dequantize_4bit`` of its CUDA kernels and ``int8_vectorwise_dequant``.
    """
    if form.kind is Kind.PACKED:
        return _expand_packed(parts).to(dtype)
    numbers, scales = _expand_rows(form, parts)
    # whole numbers are computed with in the scales' type, as their libraries do
    values = numbers.to(scales.dtype) * scales
    values = (values * PER_127 if form.kind is Kind.BNB8 else values).to(dtype)
    return restore_order(parts, values)


def restore_order(parts: Components, values: torch.Tensor) -> torch.Tensor:
    """Return values, [..., out, in], with each input in its place, where parts have them sorted."""
    order = parts.get(Component.GROUP_INDEX)
    if order is None:
        return values
    # joined matrices have an order each
    of_each = values.unflatten(-2, (order.shape[-2], -1))
    places = order.argsort(-1).unsqueeze(-2).expand_as(of_each)
    return of_each.gather(-1, places).flatten(-3, -2)


def has_powers(form: Form, scales: torch.Tensor) -> bool:
    """Return True if scales are powers of two, stored as their biased exponents."""
    is_float = form.kind in (Kind.FP8_BLOCK, Kind.MXFP4)
    return is_float and scales.dtype in (torch.uint8, torch.float8_e8m0fnu)


def codes_of(parts: Components) -> torch.Tensor:
    """View codes as bytes, uint8 of [..., out, bytes]."""
    codes = _bytes(parts[Component.WEIGHT])
    # MXFP4 may store the bytes of each block apart
    return codes if codes.ndim == parts[Component.SCALE].ndim else codes.flatten(-2)


def nested_scales(parts: Components) -> torch.Tensor:
    """Return bitsandbytes' scales of blocks of 4-bit codes, float32 of [out, blocks]."""
    scales = parts[Component.SCALE]
    if Component.NESTED_SCALE not in parts:
        return scales
    values = parts[Component.NESTED_CODES][scales.flatten().int()]
    spread = parts[Component.NESTED_SCALE].repeat_interleave(NESTED_BLOCK)[: scales.numel()]
    return (values * spread + parts[Component.NESTED_OFFSET]).view(scales.shape)


def block_of(form: Form, num_out: int, num_in: int, scales: torch.Tensor) -> tuple[int, int]:
    """Return the rows and columns of weights that share one of ``scales``, [..., rows, columns].

    Matrices with one scale each may be joined in one: their rows then share as many scales.
    """
    return form.block or (num_out // scales.shape[-2], num_in // scales.shape[-1])


def _expand_packed(parts: Components) -> torch.Tensor:
    """Return packed values, bfloat16 of [..., out, in], bit for bit."""
    weight, base, halves = (
        parts[part] for part in (Component.WEIGHT, Component.BASE, Component.EXPONENT)
    )
    halves = interleave(halves, back=True)
    codes = torch.cat((halves & 0xF, halves >> 4), -1).short()
    num_rows = weight.shape[-2] // base.shape[-2]
    base = base.unflatten(-1, (-1, num_rows)).mT.flatten(-3, -2)
    base = base.repeat_interleave(BASE_BYTES, -1)[..., : halves.shape[-1]]
    exponents = (torch.cat((base, base), -1) + codes).where(codes != 0, 0)
    bits = interleave(weight.unflatten(-1, (2, -1)), back=True).flatten(-2).short()
    bits = ((bits & 0x80) << 8) | (bits & 0x7F) | (exponents << 7)
    reserve, num_weights = parts[Component.PATCHES].shape[-2], weight.shape[-2] * weight.shape[-1]
    places, patch_bits = parts[Component.PATCHES].view(-1, reserve, 2).unbind(-1)
    # a pass that only allocates may find a slot of the ring not yet filled
    bounds = parts[Component.PATCH_BLOCKS].clamp(0, reserve).long()
    begins, ends = bounds.view(len(places), -1, 2).unbind(-1)
    ones = torch.ones_like(begins)
    steps = begins.new_zeros(len(places), reserve + 1)
    steps = steps.scatter_add(1, begins, ones).scatter_add(1, ends, -ones)
    is_used = (steps.cumsum(1)[:, :-1] > 0) & (places >= 0) & (places < num_weights)
    # what is not in use goes to one more weight, which is dropped
    bits = nn.functional.pad(bits.view(len(places), num_weights), (0, 1))
    bits.scatter_(1, places.where(is_used, num_weights).long(), patch_bits.short())
    return bits[:, :-1].reshape(weight.shape).view(torch.bfloat16)


def gather_rows(parts: Components, rows: torch.Tensor) -> torch.Tensor:
    """Return rows of a packed weight, chosen by int64 of [rows], as bfloat16 of [rows, in].

    Whole blocks of rows are expanded: those in which the rows lie.
    """
    num_out, num_in = parts[Component.WEIGHT].shape
    block_rows = num_out // len(parts[Component.BASE])
    made = torch.empty(len(rows), num_in, dtype=torch.bfloat16)
    blocks = rows // block_rows
    for block in blocks.unique().tolist():
        start, (begin, end) = block * block_rows, parts[Component.PATCH_BLOCKS][block].tolist()
        patches = parts[Component.PATCHES][begin:end] - torch.tensor([start * num_in, 0]).int()
        of_block = {
            **{
                p: parts[p][start : start + block_rows]
                for p in (Component.WEIGHT, Component.EXPONENT)
            },
            Component.BASE: parts[Component.BASE][block : block + 1],
            Component.PATCHES: nn.functional.pad(patches, (0, 0, 0, 1)),
            Component.PATCH_BLOCKS: torch.tensor([[0, end - begin]], dtype=torch.int32),
        }
        of_it = blocks == block
        made[of_it] = _expand_packed(of_block)[rows[of_it] - start]
    return made


def interleave(halves: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """Bring the bytes of halves of rows, [..., in / 2], into the order of packed ones.

    ``back`` brings them back into the order of weights.
    """
    size = halves.shape[-1]
    whole = size - size % BASE_BYTES
    made = torch.empty_like(halves)
    for block, part in ((BASE_BYTES, slice(whole)), (size - whole, slice(whole, size))):
        if block and size >= block:
            shape = (-1, block // 2, 2) if back else (-1, 2, block // 2)
            made[..., part] = halves[..., part].unflatten(-1, shape).mT.flatten(-3)
    return made


def _expand_rows(form: Form, parts: Components) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what codes stand for and their scales, each [..., out, in]."""
    scales, numbers = _scales_of(form, parts), _numbers_of(form, parts)
    num_out, num_in = numbers.shape[-2:]
    high, wide = block_of(form, num_out, num_in, scales)

    def spread(said: torch.Tensor) -> torch.Tensor:
        """Repeat what is said of each block, [..., rows, columns], for each of its weights."""
        rows = said.repeat_interleave(high, -2)[..., :num_out, :]
        return rows.repeat_interleave(wide, -1)[..., :num_in]

    if form.word_order is not None:
        numbers = numbers - spread(_zeros_of(form, parts, scales))
    return numbers, spread(scales)


def _numbers_of(form: Form, parts: Components) -> torch.Tensor:
    """Return what the codes of rows stand for before zeros and scales, [..., out, in]."""
    weight = parts[Component.WEIGHT]
    if form.word_order is WordOrder.COMPRESSED_TENSORS:
        return _read_words(weight, BITS[form.kind])
    if form.kind in (Kind.MXFP4, Kind.NVFP4):
        return torch.tensor(E2M1, device=weight.device)[_halves(codes_of(parts), (0, 4))]
    if form.kind in (Kind.NF4, Kind.FP4):
        return parts[Component.CODES][_halves(weight, (4, 0))]
    return weight.int() if form.word_order is WordOrder.NONE else weight.float()


def _scales_of(form: Form, parts: Components) -> torch.Tensor:
    """Return the scales of blocks of rows, [..., rows, columns]."""
    scales = parts[Component.SCALE]
    if has_powers(form, scales):  # nothing is rounded before the end
        return torch.exp2(_bytes(scales).float() - 127)
    if form.kind is Kind.NVFP4:
        whole = parts.get(Component.GLOBAL_SCALE, parts.get(Component.GLOBAL_DIVISOR))
        assert whole is not None
        whole = whole.repeat_interleave(scales.shape[-2] // whole.shape[-2], -2)
        return scales.float() * whole if Component.GLOBAL_SCALE in parts else scales.float() / whole
    if form.kind in (Kind.NF4, Kind.FP4):
        return nested_scales(parts)
    return scales if form.word_order is not None else scales.float()


def _zeros_of(form: Form, parts: Components, scales: torch.Tensor) -> torch.Tensor:
    """Return the code of zero of each group of a row, int32 of [..., out, groups]."""
    zeros = parts.get(Component.ZERO)
    if form.word_order is WordOrder.NONE:
        return torch.zeros_like(scales, dtype=torch.int32) if zeros is None else zeros.int()
    bits = BITS[form.kind]
    if zeros is None:
        return torch.full_like(scales, 1 << (bits - 1), dtype=torch.int32)
    return _read_words(zeros.mT, bits).mT


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _halves(codes: torch.Tensor, shifts: tuple[int, int]) -> torch.Tensor:
    """Return the two codes of each byte, int32 of [..., 2 x bytes], found at these bits."""
    return torch.stack([(codes >> shift) & 0xF for shift in shifts], -1).flatten(-2).int()


def _read_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of 32-bit words, int32 of [..., words x codes], in order."""
    places = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> places) & ((1 << bits) - 1)).flatten(-2)
