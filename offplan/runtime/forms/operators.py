"""What is computed from weights in their stored form, by operators that torch.compile passes over.

It would otherwise analyse each kernel, for seconds and anew for each layer that it compiles. CUDA
only.
"""

import torch

from offplan.forms.form import Form, Kind, Packing, Part
from offplan.runtime.forms import products
from offplan.runtime.forms.operands import operands_of
from offplan.runtime.forms.reference import Parts


def expand(form: Form, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a weight, [..., out, in], in ``dtype``."""
    if not torch.compiler.is_compiling():
        return products.expand_on_gpu(form, parts, dtype)
    return _expand(*_split(form, parts), dtype)


def multiply(form: Form, parts: Parts, x: torch.Tensor, *pairs: torch.Tensor) -> torch.Tensor:
    """Multiply rows by a weight, or with ``pairs``, (order, starts), by those of experts.

    As ``products.multiply_rows`` and ``multiply_pairs`` do.
    """
    if not torch.compiler.is_compiling():
        return _product(form, parts, [x, *pairs])
    return _multiply(*_split(form, parts), [x, *pairs])


def _product(form: Form, parts: Parts, inputs: list[torch.Tensor]) -> torch.Tensor:
    own = products.multiply_rows if len(inputs) == 1 else products.multiply_pairs
    return own(form, parts, *inputs)


def _split(form: Form, parts: Parts) -> tuple[str, list[int], list[torch.Tensor]]:
    """Return a weight as operators take it: its kind, packing and parts' names, block, tensors."""
    packing = "" if form.packing is None else form.packing.value
    names = [form.kind.value, packing, *(part.value for part in parts)]
    return ",".join(names), list(form.block or ()), list(parts.values())


def _join(names: str, block: list[int], tensors: list[torch.Tensor]) -> tuple[Form, Parts]:
    kind, packing, *parts = names.split(",")
    size = (block[0], block[1]) if block else None
    form = Form(Kind(kind), size, Packing(packing) if packing else None)
    return form, dict(zip(map(Part, parts), tensors, strict=True))


@torch.library.custom_op("offplan::expand", mutates_args=())
def _expand(
    names: str, block: list[int], tensors: list[torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    return products.expand_on_gpu(*_join(names, block, tensors), dtype)


@_expand.register_fake
def _(
    names: str, block: list[int], tensors: list[torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    return products.empty_values(*_join(names, block, tensors), dtype)


@torch.library.custom_op("offplan::multiply", mutates_args=())
def _multiply(
    names: str, block: list[int], tensors: list[torch.Tensor], inputs: list[torch.Tensor]
) -> torch.Tensor:
    return _product(*_join(names, block, tensors), inputs)


@_multiply.register_fake
def _(
    names: str, block: list[int], tensors: list[torch.Tensor], inputs: list[torch.Tensor]
) -> torch.Tensor:
    num_out = operands_of(*_join(names, block, tensors)).num_out
    num_rows = len(inputs[0]) if len(inputs) == 1 else inputs[1].numel()
    return inputs[0].new_empty(num_rows, num_out)
