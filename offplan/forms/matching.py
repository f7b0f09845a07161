"""Which modules a config's lists of names and patterns mean, and the forms that they state.

Patterns come from strangers: those that could take exponential or high polynomial time are refused.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeGuard

from offplan.errors import CheckpointError
from offplan.forms.form import OTHER, Component, Form, Kind, WordOrder
from offplan.forms.quantisation import Scheme
from offplan.forms.recognise import FEW_BITS, WHOLE_KINDS

_MAX_PATTERN = 2_000
_MAX_REPEATS = 6
"""Unbounded repeats in one pattern: matching takes time in the power of their number."""
_REPEATED_GROUP = re.compile(r"\)\s*[*+{]|\\[1-9]")
IN_STACK = re.compile(r"\.\d+\.")
"""Tells the modules of a stack of layers from those outside, such as the head."""
_PLAIN = re.compile(r"[\w.\-]*[\w\-]")


def skips(patterns: tuple[str, ...], module: str) -> bool:
    """Return True if a list of modules not to convert means this one, as in transformers.

    Source: transformers 5.23, ``should_convert_module``. A pattern means the modules that it
    matches from their start up to a dot, and those whose names end with it.
    """
    starts, ends, pattern = _compile_skips(patterns)
    if module.endswith(ends):
        return True
    if pattern is not None and pattern.match(module) is not None:
        return True
    while module and module not in starts:
        module = module.rpartition(".")[0]
    return bool(module)


def has_run(patterns: Iterable[str], module: str) -> bool:
    """Return True if one of these names stands in a module's name, dot to dot."""
    return any(f".{pattern.strip('.')}." in f".{module}." for pattern in patterns)


def targets(patterns: Iterable[str], module: str) -> bool:
    """Return True if compressed-tensors' targets mean this linear layer.

    Source: compressed-tensors, ``utils.match.is_match``: the class, the name, or ``re:`` a pattern.
    """
    for pattern in patterns:
        if pattern.startswith("re:"):
            if compile_pattern(pattern.removeprefix("re:")).match(module):
                return True
        elif pattern in ("Linear", module):
            return True
    return False


def matches_wildcard(patterns: tuple[str, ...], module: str) -> bool:
    """Return True if ModelOpt's wildcards mean this module, or one that it lies in."""
    return bool(patterns) and _compile_wildcards(patterns).match(module) is not None


@lru_cache(maxsize=1024)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a stranger's pattern; raises CheckpointError for one that is wrong, or may hang."""
    repeats = pattern.count("*") + pattern.count("+") + pattern.count("{")
    simple = len(pattern) <= _MAX_PATTERN and repeats <= _MAX_REPEATS
    if simple and not _REPEATED_GROUP.search(pattern):
        try:
            return re.compile(pattern)
        except (re.error, OverflowError, RecursionError):
            pass
    raise CheckpointError(
        f"quantization_config: found the pattern {pattern[:80]!a}, expected a simple regular "
        "expression of module names; correct the config"
    )


@lru_cache(maxsize=8)
def _compile_wildcards(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Compile a list into one expression, as plain names go before those with wildcards."""
    bodies = [".*".join(re.escape(part) for part in re.split(r"\*+", each)) for each in patterns]
    for body in bodies:
        compile_pattern(body)
    return re.compile(rf"(?:{'|'.join(bodies)})(?:\.|$)")


@lru_cache(maxsize=8)
def _compile_skips(
    patterns: tuple[str, ...],
) -> tuple[frozenset[str], tuple[str, ...], re.Pattern[str] | None]:
    """Split patterns into plain names, which are looked up, and one expression of the others."""
    plain = frozenset(pattern for pattern in patterns if _PLAIN.fullmatch(pattern))
    others = [compile_pattern(pattern).pattern for pattern in patterns if pattern not in plain]
    joined = "|".join(f"(?:{pattern})" for pattern in others)
    whole = re.compile(rf"(?:{joined})(?:(?<=\.)|(?=\.|$))") if others else None
    return plain, patterns, whole


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
