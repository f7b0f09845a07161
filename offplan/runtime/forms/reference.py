"""The values that stored codes stand for, by plain torch: what every kernel must agree with."""

import torch

from offplan.forms.form import Form, Kind, Part

Parts = dict[Part, torch.Tensor]
"""The stored tensors of a weight, or those of all experts in one, by what they are to it."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of 4-bit floats, by code. Source: OCP Microscaling Formats v1.0."""


def expand(form: Form, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a weight, [..., out, in], in ``dtype``.

    Codes are [..., out, bytes] and scales [..., rows, columns], as ``codes_of`` and ``scales_of``
    give them. Source: transformers 5.23, ``Fp8Dequantize`` and ``convert_moe_packed_tensors``;
    compressed-tensors 0.15, ``_dequantize``.
    """
    codes, scales = codes_of(parts), parts[Part.SCALE]
    if form.kind is Kind.MXFP4:
        values = torch.tensor(_E2M1, device=codes.device)[_halves(codes).int()]
        # powers of two: nothing is rounded before the end
        powers = torch.exp2(_bytes(scales).float() - 127)
        return (values * _spread(powers, values.shape, form)).to(dtype)
    if form.kind is Kind.W4A16:
        zeros = _zeros(parts, scales)
        exact = _halves(codes).int() - _spread(
            zeros, (*codes.shape[:-1], 2 * codes.shape[-1]), form
        )
        # the library computes in the scales' type
        return (exact.to(scales.dtype) * _spread(scales, exact.shape, form)).to(dtype)
    values = parts[Part.WEIGHT].float()
    return (values * _spread(scales.float(), values.shape, form)).to(dtype)


def codes_of(parts: Parts) -> torch.Tensor:
    """View codes as bytes, uint8 of [..., out, bytes]: of two weights the low half is the first."""
    codes = _bytes(parts[Part.WEIGHT])
    # MXFP4 may store the bytes of each block apart
    return codes if codes.ndim == parts[Part.SCALE].ndim else codes.flatten(-2)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _halves(codes: torch.Tensor) -> torch.Tensor:
    """Return the two codes of each byte, in their order, uint8 of [..., 2 x bytes]."""
    return torch.stack((codes & 0xF, codes >> 4), -1).flatten(-2)


def _spread(scales: torch.Tensor, shape: torch.Size | tuple[int, ...], form: Form) -> torch.Tensor:
    """Repeat what is said of each block, [..., rows, columns], for each of its weights."""
    num_out, num_in = shape[-2:]
    high, wide = block_of(form, num_out, num_in, scales.shape[-2])
    rows = scales.repeat_interleave(high, -2)[..., :num_out, :]
    return rows.repeat_interleave(wide, -1)[..., :num_in]


def block_of(form: Form, num_out: int, num_in: int, num_rows: int) -> tuple[int, int]:
    """Return the rows and columns of weights that share a scale, of ``num_rows`` rows of scales.

    Matrices with one scale each may be joined in one: their rows then share as many scales.
    """
    return form.block or (num_out // num_rows, num_in)


def _zeros(parts: Parts, scales: torch.Tensor) -> torch.Tensor:
    """Return the code of zero of each group, int32 of [..., out, groups]."""
    packed = parts.get(Part.ZERO)
    if packed is None:
        return torch.full(scales.shape, 8, dtype=torch.int32, device=scales.device)
    shifts = 4 * torch.arange(8, dtype=torch.int32, device=packed.device)
    return ((packed.unsqueeze(-2) >> shifts[:, None]) & 0xF).flatten(-3, -2)
