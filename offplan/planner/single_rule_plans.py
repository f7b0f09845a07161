"""First rules: what a budget leaves of a space's rules, in each setting and with each ring."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offplan.planner.aims import NEVER, Floats
from offplan.planner.candidates import NO_RULE, Ints, choose
from offplan.planner.estimates import Rules, estimate
from offplan.planner.in_place import InPlace, InPlaceRules
from offplan.planner.prices import Prices
from offplan.planner.space import PREFETCH_STEPS, Room


class Rows(NamedTuple):
    """Plans of one rule or two that are not priced yet: arrays of an entry for each."""

    prompt_ps: Floats
    """The estimated time of the prompt."""
    step_ps: Floats
    setting: Ints
    num_slots: Ints
    """Slots of the ring; 0 if nothing streams."""
    first: Ints
    """The rule, by number."""
    second: Ints
    """The second rule; NO_RULE for none."""
    lacking_bytes: Floats
    """Bytes that the first rule leaves to be taken off the GPU."""
    is_plan: NDArray[np.bool_]
    """True if the first rule is a plan alone."""


@dataclass(frozen=True)
class SingleRulePlans:
    """Plans of at most one rule that fit a budget, and rules that a second one may complete."""

    in_place: list[InPlace]
    """Plans that copy nothing."""
    rows: Rows
    num_candidates: int
    """Plans of at most one rule that fit."""
    gpu_lack: float
    """Bytes of GPU memory that the plan of at most one rule lacks that is nearest to fitting."""
    host_lack: float
    """Bytes of the store that those lack that fit the GPU; 0 once one fits."""


def list_single_rule_plans(
    prices: Prices, rules: Rules, in_place: InPlaceRules, room: Room
) -> SingleRulePlans:
    """List what a budget leaves: of two rules one frees at least half of what both have to."""
    space, every = prices.space, in_place.plans(room)
    gpu_lacks = [np.array([each.gpu_lack for each in every])]
    host_lacks = [np.array([each.host_lack for each in every])]
    fitting = [each for each in every if each.gpu_lack <= 0 and each.host_lack <= 0]
    found, num_candidates = [], len(fitting)
    for num_slots in (0, *PREFETCH_STEPS):
        turns = rules.loads.prompt_turns[0, :-1]
        chosen = np.flatnonzero(turns == 0) if num_slots == 0 else np.arange(len(turns))
        first, setting = (
            each.ravel() for each in np.meshgrid(chosen, np.arange(len(space.settings)))
        )
        of_rule = rules.loads.unit_bytes[setting, first]
        ring = num_slots * rules.loads.slot_bytes[setting, first]
        lacking = (
            room.lacking_bytes[setting] + prices.padding_bytes[rules.option[first]] + ring - of_rule
        )
        on_host = rules.loads.slab_bytes[setting, first] - room.host_bytes[setting]
        # with as many slots as layers every layer would own one: resident in all but name
        alone = (turns[first] > num_slots) | (num_slots == 0)
        gpu_lacks.append(lacking[alone])
        host_lacks.append(on_host[alone])
        fits = alone & (lacking <= 0) & (on_host <= 0)
        num_candidates += int(rules.num_patterns[first[fits]].sum())
        rows = np.flatnonzero(fits | (lacking < of_rule) & (on_host <= 0))
        first, setting, slots = first[rows], setting[rows], np.full(len(rows), num_slots)
        times = estimate(
            prices, choose(rules.loads, setting, first), setting, slots, -lacking[rows]
        )
        second = np.full(len(rows), NO_RULE)
        found.append(Rows(*times, setting, slots, first, second, lacking[rows], fits[rows]))
    lacks, on_hosts = np.concatenate(gpu_lacks), np.concatenate(host_lacks)
    return SingleRulePlans(
        fitting,
        Rows(*map(np.concatenate, zip(*found, strict=True))),
        num_candidates,
        gpu_lack=max(0.0, lacks.min(initial=NEVER)),
        host_lack=max(0.0, on_hosts[lacks <= 0].min(initial=NEVER)),
    )
