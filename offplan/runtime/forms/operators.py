"""Products and expansion as an operator of torch: what compiles layers sees nothing of the kernels.

Were they seen, each call of one would be analysed in each layer that is compiled, for a second.
"""

import torch

from offplan.forms.form import Form, Kind, Packing, Part
from offplan.runtime.forms import products
from offplan.runtime.forms.operands import operands_of
from offplan.runtime.forms.reference import Parts


def expand_on_gpu(form: Form, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a weight, [..., out, in], in ``dtype``."""
    return _run(form, parts, dtype)


def multiply_rows(form: Form, parts: Parts, x: torch.Tensor) -> torch.Tensor:
    """Multiply rows, [rows, in], by a weight: [rows, out]."""
    return _run(form, parts, x.dtype, x)


def multiply_pairs(
    form: Form, parts: Parts, x: torch.Tensor, order: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """Multiply each pair's row of ``x`` by its expert's weight, as ``products.multiply_pairs``."""
    return _run(form, parts, x.dtype, x, order, starts)


def _run(form: Form, parts: Parts, dtype: torch.dtype, *inputs: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.ops.offplan.compute(*arguments_of(form, parts, dtype, *inputs))
    return made


def arguments_of(
    form: Form, parts: Parts, dtype: torch.dtype, *inputs: torch.Tensor
) -> tuple[str, list[int], str, str, list[torch.Tensor], list[torch.Tensor], torch.dtype]:
    """Return what the operator takes for a weight and inputs, in types that operators know."""
    packing = "" if form.packing is None else form.packing.value
    names = " ".join([part.value for part in parts])
    tensors = list(parts.values()), list(inputs)
    return form.kind.value, list(form.block or ()), packing, names, *tensors, dtype


@torch.library.custom_op("offplan::compute", mutates_args=())
def _compute(
    kind: str,
    block: list[int],
    packing: str,
    names: str,
    parts: list[torch.Tensor],
    inputs: list[torch.Tensor],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Expand a weight where there are no inputs, multiply rows, or pairs with order and starts."""
    form, whole = _whole(kind, block, packing, names, parts)
    if not inputs:
        return products.expand_on_gpu(form, whole, dtype)
    if len(inputs) == 1:
        return products.multiply_rows(form, whole, inputs[0])
    return products.multiply_pairs(form, whole, *inputs)


@_compute.register_fake
def _(
    kind: str,
    block: list[int],
    packing: str,
    names: str,
    parts: list[torch.Tensor],
    inputs: list[torch.Tensor],
    dtype: torch.dtype,
) -> torch.Tensor:
    form, whole = _whole(kind, block, packing, names, parts)
    weight = operands_of(form, whole)
    if inputs:
        num_rows = len(inputs[0] if len(inputs) == 1 else inputs[1])
        return inputs[0].new_empty(num_rows, weight.num_out)
    shape = weight.num_experts, weight.num_out, weight.length * weight.pack
    if form.is_by_columns:
        values = parts[0].new_empty(shape[0], shape[2], shape[1], dtype=dtype).mT
    else:
        values = parts[0].new_empty(shape, dtype=dtype)
    return values if whole[Part.SCALE].ndim > 2 else values[0]


def _whole(
    kind: str, block: list[int], packing: str, names: str, parts: list[torch.Tensor]
) -> tuple[Form, Parts]:
    high_wide = (block[0], block[1]) if block else None
    form = Form(Kind(kind), high_wide, Packing(packing) if packing else None)
    return form, dict(zip(map(Part, names.split()), parts, strict=True))
