"""Operators that compute from weights in their stored form, which torch.compile passes over.

It would otherwise analyse each kernel, for seconds and anew for each layer that it compiles. CUDA
only.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from offplan.forms.form import Component, Form, Kind, WordOrder
from offplan.kernel_sizes import LAID_OUT_ROWS, PACKED_ROWS
from offplan.runtime.forms import grouped, products, value_kernels
from offplan.runtime.forms.declared import declare
from offplan.runtime.forms.gates import Gate
from offplan.runtime.forms.operands import operands_of
from offplan.runtime.forms.reference import Components

Compute = Callable[..., torch.Tensor]
"""Computes from a form, parts and further arguments."""


def multiply(
    form: Form,
    parts: Components,
    x: torch.Tensor,
    *pairs: torch.Tensor,
    in_place: bool = False,
) -> torch.Tensor:
    """Multiply rows by a weight, or with ``pairs``, (order, starts), by those of experts.

    As ``products.multiply_rows`` and ``multiply_pairs`` do.
    """
    return _multiply_all(form, parts, [_lay_out(form, parts, x), *pairs], in_place)


def multiply_slots(
    form: Form,
    parts: Components,
    rest: Components,
    x: torch.Tensor,
    *pairs: torch.Tensor,
) -> torch.Tensor:
    """Multiply rows by the weights of experts in slots, as ``products.multiply_slots`` does."""
    inputs = [_lay_out(form, parts, x), *pairs]
    return _multiply_slots(form, parts, list(rest.values()), inputs)


def _lay_out(form: Form, parts: Components, x: torch.Tensor) -> torch.Tensor:
    """Lay inputs out where torch's compiler sees it, and joins it with what makes them."""
    if not torch.compiler.is_compiling() or x.shape[-2] > LAID_OUT_ROWS:
        return x
    return products.lay_out(form, parts, x)


def gate_rows(made: torch.Tensor, gate: Gate) -> torch.Tensor:
    """Return the gated activation of rows, as ``grouped.gate_rows`` does."""
    return _gate_rows(made, *gate)


def sum_pairs(
    made: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum up each token's products by weights, as ``grouped.sum_pairs`` does."""
    return _sum_pairs(made, weights, rows)


def _expand_and_multiply(
    form: Form,
    parts: Components,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    scratch: torch.Tensor | None,
) -> torch.Tensor:
    x, parts = products.sort_inputs(x, parts)
    return functional.linear(x, products.expand_on_gpu(form, parts, x.dtype, scratch), bias)


def _choose_and_multiply(
    form: Form, parts: Components, x: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    if x.numel() > PACKED_ROWS * x.shape[-1]:
        return _expand_and_multiply(form, parts, x, bias, None)
    made = products.multiply_rows(form, parts, x.flatten(0, -2)).unflatten(0, x.shape[:-1])
    return made if bias is None else made + bias


def _product(
    form: Form,
    parts: Components,
    inputs: list[torch.Tensor],
    in_place: bool,
) -> torch.Tensor:
    if len(inputs) == 1:
        return products.multiply_rows(form, parts, *inputs)
    return products.multiply_pairs(form, parts, *inputs, in_place=in_place)


def _split(form: Form, parts: Components) -> tuple[str, list[int], list[torch.Tensor]]:
    """Return a weight as operators take it: kind, order and names of parts; block; tensors."""
    order = "" if form.word_order is None else form.word_order.value
    names = [form.kind.value, order, *(part.value for part in parts)]
    return ",".join(names), list(form.block or ()), list(parts.values())


def _join(names: str, block: list[int], tensors: list[torch.Tensor]) -> tuple[Form, Components]:
    kind, order, *parts = names.split(",")
    size = (block[0], block[1]) if block else None
    form = Form(Kind(kind), size, WordOrder(order) if order else None)
    return form, dict(zip(map(Component, parts), tensors, strict=True))


def _of_weight(name: str, others: str, compute: Compute, describe: Compute) -> Compute:
    """Declare an operator of a weight; returns what calls it, or outside of torch.compile computes.

    ``others`` declares the arguments after form and parts; ``describe`` returns an empty tensor of
    the result's shape.
    """
    operator = declare(
        name,
        f"(str names, int[] block, Tensor[] tensors, {others}) -> Tensor",
        lambda *weight_and: describe(*_join(*weight_and[:3]), *weight_and[3:]),
    )(lambda *weight_and: compute(*_join(*weight_and[:3]), *weight_and[3:]))

    def call(form: Form, parts: Components, *arguments: Any) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            return compute(form, parts, *arguments)
        made: torch.Tensor = operator(*_split(form, parts), *arguments)
        return made

    return call


expand = _of_weight("expand", "ScalarType dtype", products.expand_on_gpu, products.empty_values)
"""``expand`` returns the values of a weight, [..., out, in], in ``dtype``."""

# That it changes the scratch is not declared: what it leaves there nobody reads. All of a session
# runs on one stream, and no view of the scratch is returned; otherwise it would be wrong.
linear = _of_weight(
    "linear",
    "Tensor x, Tensor? bias, Tensor? scratch",
    _expand_and_multiply,
    lambda form, parts, x, *_: x.new_empty(*x.shape[:-1], operands_of(form, parts).num_out),
)
"""``linear`` multiplies ``x``, [..., in], by a weight's values, which are made first: [..., out].

They are made in ``scratch``, if there is one: see ``products.expand_on_gpu``.
"""

linear_of_any = _of_weight(
    "linear_of_any",
    "Tensor x, Tensor? bias",
    _choose_and_multiply,
    lambda form, parts, x, _: x.new_empty(*x.shape[:-1], operands_of(form, parts).num_out),
)
"""``linear_of_any`` does the same for however many rows, which the compiler need not know: few
rows multiply packed codes, many their values."""

_multiply_all = _of_weight(
    "multiply",
    "Tensor[] inputs, bool in_place",
    _product,
    lambda form, parts, inputs, *_: inputs[0].new_empty(
        inputs[0].shape[-2] if len(inputs) == 1 else inputs[1].numel(),
        operands_of(form, parts).num_out,
    ),
)

_multiply_slots = _of_weight(
    "multiply_slots",
    "Tensor[] rest, Tensor[] inputs",
    lambda form, parts, rest, inputs: products.multiply_slots(
        form, parts, dict(zip(parts, rest, strict=False)), *inputs
    ),
    lambda form, parts, _, inputs, *__: inputs[0].new_empty(
        inputs[1].numel(), operands_of(form, parts).num_out
    ),
)

multiply_groups = _of_weight(
    "multiply_groups",
    "Tensor x, Tensor starts, Tensor? bias, Tensor? scratch",
    grouped.multiply_codes,
    lambda form, parts, x, *_: x.new_empty(len(x), operands_of(form, parts).num_out),
)
"""``multiply_groups`` multiplies sorted rows by the values of experts' codes, as
``grouped.multiply_codes`` does."""

multiply_values = declare(
    "multiply_values",
    "(Tensor values, Tensor x, Tensor starts, Tensor? bias, bool in_place) -> Tensor",
    lambda values, x, *_: x.new_empty(len(x), values.shape[1]),
)(lambda *inputs: grouped.multiply_values(*inputs[:-1], in_place=inputs[-1]))
"""``multiply_values`` multiplies sorted rows by experts' values, as ``grouped.multiply_values``
does."""

_gate_rows = declare(
    "gate_rows",
    "(Tensor made, str activation, bool is_interleaved, str limited, float limit,"
    " float factor, float added) -> Tensor",
    lambda made, *_: made.new_empty(made.shape[0], made.shape[1] // 2),
)(lambda made, *gate: grouped.gate_rows(made, Gate(*gate)))

_sum_pairs = declare(
    "sum_pairs",
    "(Tensor made, Tensor weights, Tensor? rows) -> Tensor",
    lambda made, weights, _: made.new_empty(weights.shape[0], made.shape[-1]),
)(grouped.sum_pairs)

# a compiled step has these put into its graph
declare(
    "multiply_few",
    "(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor",
    lambda x, weights, biases: x.new_empty(len(x) * sum(map(len, weights))),
)(value_kernels.multiply_values)


def _several(
    names: str, block: list[int], tensors: list[torch.Tensor], count: int
) -> tuple[Form, list[Components]]:
    """Return the form of several weights, and the parts of each, which follow one another."""
    size = len(tensors) // count
    each = [_join(names, block, tensors[at : at + size]) for at in range(0, len(tensors), size)]
    return each[0][0], [parts for _, parts in each]


def _empty_together(
    names: str, block: list[int], tensors: list[torch.Tensor], count: int, x: torch.Tensor
) -> torch.Tensor:
    form, weights = _several(names, block, tensors, count)
    return x.new_empty(x.shape[-2] * sum(operands_of(form, each).num_out for each in weights))


declare(
    "multiply_together",
    "(str names, int[] block, Tensor[] tensors, int count, Tensor x) -> Tensor",
    _empty_together,
)(lambda *weights_and: products.multiply_together(*_several(*weights_and[:4]), *weights_and[4:]))


def can_join(
    names: str, block: list[int], tensors: list[torch.Tensor], count: int, x: torch.Tensor
) -> bool:
    """Return True if ``offplan::multiply_together`` takes these weights, as it is given them."""
    several = _several(names, block, tensors, count)
    return products.are_alike(*several, x.shape[-2], x.device.index or 0)
