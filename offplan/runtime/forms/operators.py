"""What is computed from weights in their stored form, by operators that torch.compile passes over.

It would otherwise analyse each kernel, for seconds and anew for each layer that it compiles. CUDA
only.
"""

import torch
from torch.nn import functional

from offplan.forms.form import Form, Kind, Packing, Part
from offplan.runtime.forms import products
from offplan.runtime.forms.operands import operands_of
from offplan.runtime.forms.reference import Parts


def expand(form: Form, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a weight, [..., out, in], in ``dtype``."""
    if not torch.compiler.is_compiling():
        return products.expand_on_gpu(form, parts, dtype)
    return _expand(*_split(form, parts), dtype)


def linear(
    form: Form,
    parts: Parts,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    scratch: torch.Tensor | None,
) -> torch.Tensor:
    """Multiply ``x``, [..., in], by a weight's values, which are made first: [..., out].

    They are made in ``scratch``, if there is one: see ``products.expand_on_gpu``.
    """
    if not torch.compiler.is_compiling():
        return _expand_and_multiply(form, parts, x, bias, scratch)
    return _linear(*_split(form, parts), x, bias, scratch)


def multiply(
    form: Form, parts: Parts, x: torch.Tensor, *pairs: torch.Tensor, in_place: bool = False
) -> torch.Tensor:
    """Multiply rows by a weight, or with ``pairs``, (order, starts), by those of experts.

    As ``products.multiply_rows`` and ``multiply_pairs`` do.
    """
    if not torch.compiler.is_compiling():
        return _product(form, parts, [x, *pairs], in_place)
    return _multiply(*_split(form, parts), [x, *pairs], in_place)


def _expand_and_multiply(
    form: Form,
    parts: Parts,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    scratch: torch.Tensor | None,
) -> torch.Tensor:
    x, parts = products.sort_inputs(x, parts)
    return functional.linear(x, products.expand_on_gpu(form, parts, x.dtype, scratch), bias)


def _product(form: Form, parts: Parts, inputs: list[torch.Tensor], in_place: bool) -> torch.Tensor:
    if len(inputs) == 1:
        return products.multiply_rows(form, parts, *inputs)
    return products.multiply_pairs(form, parts, *inputs, in_place=in_place)


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


def _num_out(names: str, block: list[int], tensors: list[torch.Tensor]) -> int:
    return operands_of(*_join(names, block, tensors)).num_out


@torch.library.custom_op("offplan::expand", mutates_args=())
def _expand(
    names: str, block: list[int], tensors: list[torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    return products.expand_on_gpu(*_join(names, block, tensors), dtype)


# That it changes the scratch is not declared: what it leaves there nobody reads. All of a session
# runs on one stream, and no view of the scratch is returned; otherwise it would be wrong.
@torch.library.custom_op("offplan::linear", mutates_args=())
def _linear(
    names: str,
    block: list[int],
    tensors: list[torch.Tensor],
    x: torch.Tensor,
    bias: torch.Tensor | None,
    scratch: torch.Tensor | None,
) -> torch.Tensor:
    return _expand_and_multiply(*_join(names, block, tensors), x, bias, scratch)


@torch.library.custom_op("offplan::multiply", mutates_args=())
def _multiply(
    names: str,
    block: list[int],
    tensors: list[torch.Tensor],
    inputs: list[torch.Tensor],
    in_place: bool,
) -> torch.Tensor:
    return _product(*_join(names, block, tensors), inputs, in_place)


# what each returns, for torch.compile
_expand.register_fake(
    lambda names, block, tensors, dtype: products.empty_values(*_join(names, block, tensors), dtype)
)
_linear.register_fake(
    lambda names, block, tensors, x, *_: x.new_empty(*x.shape[:-1], _num_out(names, block, tensors))
)
_multiply.register_fake(
    lambda names, block, tensors, inputs, _: inputs[0].new_empty(
        len(inputs[0]) if len(inputs) == 1 else inputs[1].numel(), _num_out(names, block, tensors)
    )
)
