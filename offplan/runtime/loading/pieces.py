"""The views of a parameter that stored tensors fill: stacked, concatenated or both."""

from collections.abc import Sequence

from offplan.runtime.loading.target import Piece, Source
from offplan.transformers_private import Concatenate, MergeModulelist, WeightConverter

Shape = tuple[int, ...]


def arrange(
    converter: WeightConverter | None, sources: Sequence[Source], shapes: Sequence[Shape]
) -> tuple[tuple[Piece, ...], Shape] | None:
    """Find the view of one parameter that each source fills.

    ``shapes`` are the shapes that are assumed of the sources. Returns the views and the parameter's
    shape, None if views will not do.
    """
    if converter is None:
        return tuple(map(Piece, sources)), shapes[-1]
    by_pattern: dict[str, list[Source]] = {}
    for source in sources:
        by_pattern.setdefault(source.pattern, []).append(source)
    # parts of unequal size do not begin at multiples of one size
    if len(set(shapes)) > 1 or not _makes_views(converter, len(by_pattern) == len(sources)):
        return None
    shape, operations = shapes[0], [type(operation) for operation in converter.operations]
    is_stacked = MergeModulelist in operations
    # its dimension counts the stacked one, which the stored tensor has not
    axis = converter.operations[-1].dim - is_stacked if Concatenate in operations else None
    order = [pattern for pattern in converter.source_patterns if pattern in by_pattern]
    pieces = tuple(
        Piece(source, _index(shape, axis, order.index(pattern), number if is_stacked else None))
        for pattern, stack in by_pattern.items()
        for number, source in enumerate(stack)
    )
    whole = list(shape)
    if axis is not None:
        whole[axis] *= len(by_pattern)
    num_stacked = max(map(len, by_pattern.values()))
    return pieces, (*([num_stacked] if is_stacked else []), *whole)


def _makes_views(converter: WeightConverter, is_one_each: bool) -> bool:
    """Return True if a converter only stacks and joins; ``is_one_each``: a tensor a pattern."""
    operations = [type(operation) for operation in converter.operations]
    if operations == [Concatenate]:
        return is_one_each
    if operations in ([MergeModulelist], [MergeModulelist, Concatenate]):
        return bool(converter.operations[0].dim == 0)
    return False


def _index(
    shape: Shape, axis: int | None, place: int, number: int | None
) -> tuple[int | slice, ...]:
    """Select the tensor at this place along ``axis``, within the stack's ``number``."""
    index: list[int | slice] = [slice(None)] * len(shape)
    if axis is not None:
        start = place * shape[axis]
        index[axis] = slice(start, start + shape[axis])
    return (*([] if number is None else [number]), *index)
