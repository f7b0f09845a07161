"""The table of what capabilities cost beyond copies and kernels: each adds its rows."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from offplan.checkpoint.parameter import Parameter
from offplan.costs import cached_experts, cores, packing, parts
from offplan.costs.in_place_costs import CachedTimes
from offplan.costs.term import Errors, Input
from offplan.costs.timeline import PieceTimes
from offplan.costs.work import LayerWork, PassShape

PIECE_TIMES: tuple[Callable[..., Mapping[int, PieceTimes]], ...] = (parts.piece_times,)
"""Given a placement and a pass's compute: the times of layers that stream in pieces, by index."""
GPU_BYTES: tuple[Callable[..., Mapping[str, int]], ...] = (parts.name_bytes,)
"""Given placement, stage, workload and chunk: bytes of GPU memory that passes take, by name."""
CACHED_TIMES: tuple[Callable[..., Iterable[tuple[int, CachedTimes]]], ...] = (
    cached_experts.cached_times,
)
"""Given a placement, what layers read at use, its pricer and a pass's compute: the costs of layers
by what lies in their caches, with their index."""
WAITS: tuple[Callable[..., Iterable[Input]], ...] = (
    cached_experts.list_waits,
    parts.list_waits,
    cores.list_waits,
)
"""Given a pass's times, stage and machine: those that compute waits, beyond those for the link."""
WAIT_ERRORS: Mapping[str | None, Errors] = cores.WAIT_ERRORS
"""Errors of what a decode step waits, by the name of the capability that it waits for."""
MISSES: tuple[Callable[..., tuple[str, tuple[Input, ...]]], ...] = (cached_experts.list_misses,)
"""Given placement, stage, batch, machine and a step's times: words and inputs of the bytes over the
link for what steps miss in caches."""

RECODED_LAYER_BYTES: Callable[[LayerWork, PassShape], float] = packing.layer_bytes
"""Bytes of GPU memory that are as long on their way as recoding makes a layer's pass."""
RECODED_HEAD_BYTES: Callable[[Parameter, PassShape], int] = packing.head_bytes
"""Bytes that a pass takes as long to read of a recoded head, none of whose values it makes."""


class Counts(NamedTuple):
    """What the executor of a capability counts in decode steps, beside what is predicted of it."""

    key: str
    """Its key in what ``run --json`` and ``bench --json`` print."""
    predict: Callable[..., Any]
    """Given placement, stage, batch and machine: predicts the same record for a step; None if there
    is none. Without a machine what follows from its rates is None."""


COUNTS: Mapping[str, Counts] = {
    "cached_experts": Counts("experts", cached_experts.predict_found),
}
"""The counts of each capability that has some, by the name of its executor."""
