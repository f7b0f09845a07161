"""Values of a config as strangers may write them, read without trust."""

from collections.abc import Mapping
from typing import Any, TypeGuard

from offplan.forms.form import OTHER, Component, Form, Kind, WordOrder
from offplan.forms.recognise import FEW_BITS, WHOLE_KINDS
from offplan.forms.scheme import Scheme


def grouped_form(bits: Any, group: Any, order: WordOrder | None) -> Form:
    """Return the form of whole numbers in groups; -1 columns are all of a row's."""
    if order is None or type(bits) is not int or bits not in WHOLE_KINDS:
        return OTHER
    if group is None or group == -1:
        return Form(WHOLE_KINDS[bits], None, order)
    return Form(WHOLE_KINDS[bits], (1, group), order) if is_size(group) else OTHER


def read_words(
    bits: Any,
    group: Any,
    order: WordOrder,
    layout: str,
    choices: Mapping[Component, bool] | None = None,
) -> Scheme | None:
    """Return the scheme of whole numbers in words of GPTQ or AWQ; None if it is not known."""
    is_few = type(bits) is int and bits in FEW_BITS and order is not WordOrder.AWQ
    form = grouped_form(4 if is_few else bits, group, order)
    if form is OTHER:
        return None
    form = form._replace(kind=Kind.OTHER) if is_few else form
    return Scheme(form, layout, "F16", choices or {}, bits if is_few else None)


def block_of(value: Any) -> tuple[int, int] | None:
    """Return a block's rows and columns; None for anything else."""
    is_pair = isinstance(value, list) and len(value) == 2 and all(map(is_size, value))
    return (value[0], value[1]) if is_pair else None


def is_size(value: Any) -> TypeGuard[int]:
    """Return True if it is a number of rows or columns."""
    return type(value) is int and 0 < value < 2**20


def is_record(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return True if it is a JSON object."""
    return isinstance(value, Mapping)


def names_of(value: Any) -> tuple[str, ...]:
    """Return the names of a list; () for anything else."""
    found = value if isinstance(value, (list, tuple)) else ()
    return tuple(name for name in found if isinstance(name, str) and name)
