"""The table of what capabilities cost beyond copies and kernels: each adds its rows."""

from collections.abc import Callable, Iterable, Mapping

from offplan.costs import parts
from offplan.costs.term import Input
from offplan.costs.timeline import PieceTimes

PIECE_TIMES: tuple[Callable[..., Mapping[int, PieceTimes]], ...] = (parts.piece_times,)
"""Given a placement and a pass's compute: the times of layers that stream in pieces, by index."""
GPU_BYTES: tuple[Callable[..., Mapping[str, int]], ...] = (parts.name_bytes,)
"""Given placement, stage, workload and chunk: bytes of GPU memory that passes take, by name."""
WAITS: tuple[Callable[..., Iterable[Input]], ...] = (parts.list_waits,)
"""Given a pass's times: those that compute waits, beyond those for the link."""
