"""Costs of products that the host's cores compute where the weights lie.

A layer waits for each: the hand-over's round trip, and the bytes at the rate of the cores. Shared
experts that the device multiplies meanwhile hide as much as their bytes take of GPU memory. Beside
copies to the GPU the cores read more slowly; offplan assumes that copies do not slow down. Source:
12 threads beside copies on an H200's host; the copies kept 52 to 55 of 55 GB/s. A layer's wait for
the cores alone has not been timed.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from offplan.backends import Backend
from offplan.checkpoint.model import Experts
from offplan.checkpoint.model_types import SHARED_BEHIND
from offplan.costs.link import UnitUse
from offplan.costs.term import Errors, Input, show_figure
from offplan.costs.timeline import PassTimes, to_seconds
from offplan.forms.form import Component
from offplan.held.stage import Stage
from offplan.held.unit import Unit
from offplan.kernel_sizes import slowness
from offplan.machine.profile import MachineProfile
from offplan.routing.profile import BatchReuse

MISSED = (
    "mean of max(products meanwhile, link, host's cores) - products meanwhile - link + DIVIDING_S"
)
"""Formula of a layer's wait for missed experts that the host's cores and the link divide."""
WAIT_ERRORS = {Backend.HOST.capability: Errors(0.65, 1.5)}
"""Errors of the time that compute waits for the host's cores, and what else it waits for.

Source: a step of Qwen3-30B on an H100, where their rate was assumed, waited 0.66 of what was
predicted. One of gpt-oss-20b on an H200, where it was measured, waited 1.5 times that.
"""


class CoresUse(NamedTuple):
    """The work of the cores on a layer in a decode step."""

    num_bytes: int
    """Bytes that they read."""
    num_products: int
    """Products that are handed over: the experts of a layer are one."""
    slowness: float
    """Time of reading them, as a multiple of that where each weight meets one row: their mean."""
    shared_bytes: int = 0
    """Bytes of shared experts that the device multiplies while the cores read routed ones."""

    def seconds(self, machine: MachineProfile, *, beside: bool) -> float:
        """Seconds that the layer waits; ``beside`` is said where the step copies, too."""
        meanwhile = self.shared_bytes / machine.hbm.value
        trips_s = self.num_products * machine.cores_trip.value
        return trips_s + max(0.0, self._reading_s(machine, beside=beside) - meanwhile)

    def busy_s(self, machine: MachineProfile, *, beside: bool) -> float:
        """Seconds that the cores work, whatever is multiplied meanwhile."""
        trips_s = self.num_products * machine.cores_trip.value
        return trips_s + self._reading_s(machine, beside=beside)

    def _reading_s(self, machine: MachineProfile, *, beside: bool) -> float:
        rate = machine.cores_rate_beside if beside else machine.cores_rate
        return self.num_bytes * self.slowness / rate.value


def find_use(
    units: Iterable[Unit],
    machine: MachineProfile,
    experts: Experts | None,
    num_tokens: int,
    reuse: BatchReuse | None,
) -> CoresUse:
    """Find what the cores do with units of one layer in a step of so many tokens."""
    taken = list(units)
    uses = [UnitUse(unit, num_tokens, experts, machine, reuse) for unit in taken]
    dense = [
        u for u in taken if not u.is_expert and u.part is Component.WEIGHT and len(u.shape) > 1
    ]
    routed = [use for use in uses if use.unit.is_expert]
    routed_rows = 0.0
    if routed and experts is not None:
        chosen = max(1.0, routed[0].touched * experts.num_experts)
        routed_rows = num_tokens * experts.num_experts_per_token / chosen
    num_bytes, mean = 0.0, 1.0
    for use in uses:
        read, rows = Backend.HOST.link_bytes(use), routed_rows if use.unit.is_expert else num_tokens
        if read:
            num_bytes += read
            own = slowness(rows, codes=use.unit.parameters[0].form.is_rounded)
            mean += read / num_bytes * (own - mean)
    return CoresUse(round(num_bytes), len(dense) + bool(routed), mean)


def list_waits(times: PassTimes, stage: Stage, machine: MachineProfile) -> Iterator[Input]:
    """Yield what layers wait for the cores, and what that follows from, if they do anything."""
    if not times.cores_products:
        return
    formula = "round trips x cores_round_trip + bytes / cores, beside copies where it copies"
    if stage.model.model_type in SHARED_BEHIND:
        formula += ", less shared experts / hbm where they are multiplied meanwhile"
    name, waiting = "host's cores", sum(times.cores_ps)
    if times.missed_ps:
        name += ", beyond what is hidden"
        formula = "of each layer " + MISSED if not waiting else f"{formula}; of missed {MISSED}"
        waiting += sum(times.missed_ps)
    yield Input(name, to_seconds(waiting), "s", formula)
    yield Input("round trips", times.cores_products, "count")
    yield show_figure("cores_round_trip", machine.cores_trip, "s")
    yield Input("bytes read by the host's cores", times.cores_bytes, "bytes")
    yield show_figure("cores", machine.cores_rate, "bytes_per_s")
    yield show_figure("cores_beside_copies", machine.cores_rate_beside, "bytes_per_s")
    if threads := machine.host_threads:
        yield show_figure("host_threads", threads, "count")
