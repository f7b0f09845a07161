"""What a decode step waits for missed experts that the host's cores and the link divide.

Of the experts that a step misses in a layer, the cores multiply a share where they lie, and the
link brings the others into the slots. Both work at once with each other and with the GPU's products
of the experts that it found, and the layer waits for the longest of the three.
"""

from typing import NamedTuple

from offplan.backends import Backend
from offplan.costs.compute import PassCompute
from offplan.costs.cores import CoresUse, find_use
from offplan.costs.link import use_bytes
from offplan.costs.timeline import to_ps
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase, Placement


class Missed(NamedTuple):
    """What a layer of a decode step misses, and what runs meanwhile."""

    link_bytes: int
    """Bytes that the link brings."""
    cores: CoresUse
    """What the host's cores do of the rest."""
    found_bytes: int
    """Bytes of the experts that the step finds in slots."""

    def waiting_ps(self, machine: MachineProfile, layer_ps: int, *, copies: bool) -> int:
        """Picoseconds that the layer takes beyond its compute and its reading over the link.

        They are negative where products of found experts hide more than the cores are late by. Such
        products take as long as their bytes at the rate of GPU memory, at least; ``layer_ps`` is
        the compute of the whole layer. ``copies`` says whether the step copies through the ring.
        """
        if not self.cores.num_products:
            return 0
        link = to_ps(self.link_bytes / Backend.UVA.rate(machine).value)
        beside = copies or self.link_bytes > 0
        by_cores = to_ps(self.cores.seconds(machine, beside=beside))
        meanwhile = min(layer_ps, to_ps(self.found_bytes / machine.hbm.value))
        return max(meanwhile, link, by_cores) - meanwhile - link


def divide(use: CoresUse, missed_bytes: int, host_share: float) -> Missed:
    """Divide missed bytes; ``use`` is what the cores would do with all experts of the step."""
    by_cores = round(host_share * missed_bytes)
    cores = use._replace(num_bytes=by_cores, num_products=int(by_cores > 0))
    return Missed(missed_bytes - by_cores, cores, use.num_bytes - missed_bytes)


def missed_by_layer(
    placement: Placement, stage: Stage, machine: MachineProfile, step: PassCompute
) -> tuple[tuple[int, ...], list[CoresUse]]:
    """Return ``waiting_ps`` of each layer of a decode step, and what the cores do.

    Nothing is returned where no rule has the cores multiply experts that a step misses.
    """
    divided = {n: slots for n, slots in placement.expert_slots.items() if slots.host_share}
    if step.shapes[0].phase is not Phase.DECODE or not divided:
        return (), []
    batch = step.shapes[0].batch
    copies, given = bool(placement.spans(Phase.DECODE)), (stage.experts, batch, stage.reuse(batch))
    found, uses = [0] * len(stage.layers), []
    for number, slots in divided.items():
        missed_bytes = use_bytes(Backend.UVA, machine, slots.units, *given, slots.num_slots)
        use = find_use(slots.units, machine, *given)
        missed = divide(use, missed_bytes, slots.host_share)
        found[number] = missed.waiting_ps(machine, step.layer_ps[number], copies=copies)
        uses.append(missed.cores)
    return tuple(found), uses
