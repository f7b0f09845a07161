"""Waits of a decode step for missed experts that the host's cores and the link divide.

The cores multiply a share of the experts that a step misses in a layer, where they lie. The link
brings the others into the slots. Both work at once with each other and with the GPU's products of
the experts that it found, and of shared ones. The layer waits for the longest of the three.
"""

from typing import NamedTuple

from offplan.backends import Backend
from offplan.checkpoint.model import Experts
from offplan.costs.at_use import AtUse
from offplan.costs.cores import CoresUse
from offplan.costs.kept_experts import brought_bytes, find_experts, spread
from offplan.costs.timeline import to_ps
from offplan.expert_slots import ExpertsFound, ExpertSlots
from offplan.machine.profile import MachineProfile

DIVIDING_S = 18e-6
"""Seconds that a layer takes to divide its missed experts, whoever multiplies them.

Source: 12 layers of Qwen3-30B-A3B in FP8 on an H200, with two routings and two shares each. They
took 7 to 23 us a layer beyond what ``Missed`` predicts besides.
"""


class Missed(NamedTuple):
    """The experts that a layer of a decode step misses, and the work meanwhile.

    Shared experts count as the GPU's, also where another rule has the cores multiply them.
    """

    slots: ExpertSlots
    found: ExpertsFound
    chosen: CoresUse
    """Work of the host's cores if they multiplied all experts that the step chooses."""

    @classmethod
    def find(cls, slots: ExpertSlots, experts: Experts, at_use: AtUse) -> "Missed":
        """Predict it for a layer with these slots."""
        found = find_experts(slots, experts, at_use.reuse, at_use.batch)
        by_cores = slots.units if slots.host_share else ()
        return cls(slots, found, at_use.cores((unit, Backend.HOST) for unit in by_cores))

    @property
    def cores(self) -> CoresUse:
        """Work of the host's cores on the missed experts."""
        num_bytes = round(self.slots.expert_bytes * self.found.by_cores)
        return self.chosen._replace(num_bytes=num_bytes, num_products=int(num_bytes > 0))

    def waiting_ps(self, machine: MachineProfile, layer_ps: int, *, copies: bool) -> int:
        """Picoseconds that the layer takes beyond its compute and its reading over the link.

        It is the mean over the numbers of experts that the layer may miss. It is negative where
        products of found and shared experts hide more than the cores are late by. Such products
        take as long as their bytes at the rate of GPU memory, at least; ``layer_ps`` is the compute
        of the whole layer. ``copies`` says whether the step copies through the ring.
        """
        if not self.slots.host_share:
            return 0
        found, expert_bytes, rate = self.found, self.slots.expert_bytes, Backend.UVA.rate(machine)
        link_ps = to_ps(brought_bytes(self.slots, found) / rate.value)
        meanwhile = found.hits * expert_bytes + self.chosen.shared_bytes
        meanwhile_ps = min(layer_ps, to_ps(meanwhile / machine.hbm.value))
        one = self.chosen._replace(num_products=1, shared_bytes=0)
        beside = copies or found.brought > 0
        trip_s = one._replace(num_bytes=0).seconds(machine, beside=beside)
        expert_s = one._replace(num_bytes=expert_bytes).seconds(machine, beside=beside) - trip_s
        longest_s = 0.0
        for likely, missed in spread(found.hits + found.misses, found.misses):
            by_cores = self.slots.count_by_cores(*self.slots.divide(missed))
            cores_s = trip_s + by_cores * expert_s if by_cores else 0.0
            link_s = (missed - by_cores) * expert_bytes / rate.value
            longest_s += likely * max(meanwhile_ps / 1e12, link_s, cores_s)
        return to_ps(longest_s + DIVIDING_S) - meanwhile_ps - link_ps
