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


def multiply_groups(
    form: Form,
    parts: Components,
    x: torch.Tensor,
    starts: torch.Tensor,
    bias: torch.Tensor | None,
    scratch: torch.Tensor | None,
) -> torch.Tensor:
    """Multiply sorted rows by the values of experts' codes, as ``grouped.multiply_codes`` does."""
    return _multiply_groups(form, parts, x, starts, bias, scratch)


def multiply_values(
    values: torch.Tensor, x: torch.Tensor, starts: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply sorted rows by experts' values, as ``grouped.multiply_values`` does."""
    if not torch.compiler.is_compiling():
        return grouped.multiply_values(values, x, starts, bias)
    made: torch.Tensor = _values_operator(values, x, starts, bias)
    return made


def gate_rows(made: torch.Tensor, gate: Gate) -> torch.Tensor:
    """Return the gated activation of rows, as ``grouped.gate_rows`` does."""
    if not torch.compiler.is_compiling():
        return grouped.gate_rows(made, gate)
    gated: torch.Tensor = _gate_operator(made, *gate)
    return gated


def sum_pairs(
    made: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum up each token's products by weights, as ``grouped.sum_pairs`` does."""
    if not torch.compiler.is_compiling():
        return grouped.sum_pairs(made, weights, rows)
    summed: torch.Tensor = _sum_operator(made, weights, rows)
    return summed


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


def _operator(name: str, others: str, compute: Compute, describe: Compute) -> tuple[Any, Compute]:
    """Make an operator of what computes, and what calls it where torch.compile would analyse that.

    ``others`` declares the arguments after form and parts; ``describe`` returns an empty tensor of
    the result's shape.
    """
    operator = torch.library.custom_op(
        f"offplan::{name}",
        lambda *weight_and: compute(*_join(*weight_and[:3]), *weight_and[3:]),
        mutates_args=(),
        schema=f"(str names, int[] block, Tensor[] tensors, {others}) -> Tensor",
    )
    operator.register_fake(lambda *weight_and: describe(*_join(*weight_and[:3]), *weight_and[3:]))

    def call(form: Form, parts: Components, *arguments: Any) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            return compute(form, parts, *arguments)
        made: torch.Tensor = operator(*_split(form, parts), *arguments)
        return made

    return operator, call


_expand, expand = _operator(
    "expand", "ScalarType dtype", products.expand_on_gpu, products.empty_values
)
"""``expand`` returns the values of a weight, [..., out, in], in ``dtype``."""

# That it changes the scratch is not declared: what it leaves there nobody reads. All of a session
# runs on one stream, and no view of the scratch is returned; otherwise it would be wrong.
_linear, linear = _operator(
    "linear",
    "Tensor x, Tensor? bias, Tensor? scratch",
    _expand_and_multiply,
    lambda form, parts, x, *_: x.new_empty(*x.shape[:-1], operands_of(form, parts).num_out),
)
"""``linear`` multiplies ``x``, [..., in], by a weight's values, which are made first: [..., out].

They are made in ``scratch``, if there is one: see ``products.expand_on_gpu``.
"""

_linear_of_any, linear_of_any = _operator(
    "linear_of_any",
    "Tensor x, Tensor? bias",
    _choose_and_multiply,
    lambda form, parts, x, _: x.new_empty(*x.shape[:-1], operands_of(form, parts).num_out),
)
"""``linear_of_any`` does the same for however many rows, which the compiler need not know: few
rows multiply packed codes, many their values."""

_multiply, _multiply_all = _operator(
    "multiply",
    "Tensor[] inputs, bool in_place",
    _product,
    lambda form, parts, inputs, *_: inputs[0].new_empty(
        inputs[0].shape[-2] if len(inputs) == 1 else inputs[1].numel(),
        operands_of(form, parts).num_out,
    ),
)

_slots_operator, _multiply_slots = _operator(
    "multiply_slots",
    "Tensor[] rest, Tensor[] inputs",
    lambda form, parts, rest, inputs: products.multiply_slots(
        form, parts, dict(zip(parts, rest, strict=False)), *inputs
    ),
    lambda form, parts, _, inputs, *__: inputs[0].new_empty(
        inputs[1].numel(), operands_of(form, parts).num_out
    ),
)

_groups_operator, _multiply_groups = _operator(
    "multiply_groups",
    "Tensor x, Tensor starts, Tensor? bias, Tensor? scratch",
    grouped.multiply_codes,
    lambda form, parts, x, *_: x.new_empty(len(x), operands_of(form, parts).num_out),
)

_values_operator = torch.library.custom_op(
    "offplan::multiply_values",
    grouped.multiply_values,
    mutates_args=(),
    schema="(Tensor values, Tensor x, Tensor starts, Tensor? bias) -> Tensor",
)
_values_operator.register_fake(lambda values, x, *_: x.new_empty(len(x), values.shape[1]))

_gate_operator = torch.library.custom_op(
    "offplan::gate_rows",
    lambda made, *gate: grouped.gate_rows(made, Gate(*gate)),
    mutates_args=(),
    schema="(Tensor made, str activation, bool is_interleaved, str limited, float limit,"
    " float factor, float added) -> Tensor",
)
_gate_operator.register_fake(lambda made, *_: made.new_empty(made.shape[0], made.shape[1] // 2))

_sum_operator = torch.library.custom_op(
    "offplan::sum_pairs",
    grouped.sum_pairs,
    mutates_args=(),
    schema="(Tensor made, Tensor weights, Tensor? rows) -> Tensor",
)
_sum_operator.register_fake(
    lambda made, weights, _: made.new_empty(weights.shape[0], made.shape[-1])
)

_few_operator = torch.library.custom_op(
    "offplan::multiply_few",
    value_kernels.multiply_values,
    mutates_args=(),
    schema="(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor",
)
_few_operator.register_fake(lambda x, weights, biases: x.new_empty(len(x) * sum(map(len, weights))))


def _several(
    names: str, block: list[int], tensors: list[torch.Tensor], count: int
) -> tuple[Form, list[Components]]:
    """Return the form of several weights, and the parts of each, which follow one another."""
    size = len(tensors) // count
    each = [_join(names, block, tensors[at : at + size]) for at in range(0, len(tensors), size)]
    return each[0][0], [parts for _, parts in each]


_together_operator = torch.library.custom_op(
    "offplan::multiply_together",
    lambda *weights_and: products.multiply_together(*_several(*weights_and[:4]), *weights_and[4:]),
    mutates_args=(),
    schema="(str names, int[] block, Tensor[] tensors, int count, Tensor x) -> Tensor",
)
_together_operator.register_fake(
    lambda names, block, tensors, count, x: x.new_empty(
        x.shape[-2] * sum(count_out(*_several(names, block, tensors, count)))
    )
)


def count_out(form: Form, weights: list[Components]) -> list[int]:
    """Return the outputs of each weight."""
    return [operands_of(form, parts).num_out for parts in weights]


def can_join(
    names: str, block: list[int], tensors: list[torch.Tensor], count: int, x: torch.Tensor
) -> bool:
    """Return True if ``offplan::multiply_together`` takes these weights, as it is given them."""
    several = _several(names, block, tensors, count)
    return products.are_alike(*several, x.shape[-2], x.device.index or 0)
