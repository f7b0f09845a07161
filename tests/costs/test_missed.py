"""What steps find of slots whose missed experts are divided: predicted, and by a list."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from math import ceil

import numpy as np
import pytest

from benchmarks import traces
from offplan.capabilities.cached_experts import (
    LATER_FADES,
    LATER_PARTS,
    LATER_STEPS,
    MOST_LATER,
    ExpertSlots,
    MissRates,
)
from offplan.checkpoint.model import Experts
from offplan.costs.cached_experts import (
    Missed,
    divide_all,
    find_experts,
    later_parts,
    spread,
)
from offplan.costs.cores import CoresUse
from offplan.costs.in_place_costs import AtUse
from offplan.plan import ModelRef
from offplan.routing.profile import BatchReuse, make_routing
from tests.costs.builders import make_machine, moe_model
from tests.held import open_stage
from tests.tiers import first_quick

NUM_EXPERTS, NUM_STEPS, NUM_BEFORE = 128, 4000, 600
REUSES = {
    "near": ((1, 1, 0.7), (2, 4, 0.15)),
    "far": ((1, 8, 0.2), (9, 64, 0.5)),
}
"""More of ``traces.REUSES``: next to nothing but the last token's, and little of these."""
RATES = {
    # experts of gpt-oss-120b and of Qwen3-30B-A3B in FP8, RTX 4090
    4: (MissRates(15e-6, 220e-6, 560e-6), 2880),
    8: (MissRates(15e-6, 80e-6, 200e-6), 768),
}
"""Rates, and inner columns, by the experts that a token chooses."""


class LaterSlots:
    """A layer's order of use and its slots, by lists: cores and link divide what steps miss."""

    def __init__(self, slots: ExpertSlots, rates: MissRates) -> None:
        self.slots, self.rates = slots, rates
        self.order, self.kept = list(range(slots.num_experts)), set(range(slots.num_kept))
        self.credit, self.brings = 0, True
        self.of_steps, self.counts = Counter[str](), dict[str, float]()
        self.missed = Counter[int]()
        """Steps by how many experts they missed."""

    def step(self, chosen: Iterable[int]) -> None:
        slots, used, num_kept = self.slots, set(chosen), self.slots.num_kept
        recent = len(used & set(self.order[:num_kept]))
        missed = [expert for expert in self.order if expert in used - self.kept]
        by_cores, chunks = slots.divide(len(missed), self.rates)
        by_link = len(missed) - by_cores - (chunks > 0)
        here = (used & self.kept) | set(missed[: min(by_link, num_kept - len(used & self.kept))])
        self.credit = min(self.credit + slots.later, LATER_PARTS * MOST_LATER)
        cores = missed[by_link:]
        later = min(len(cores), self.credit // LATER_PARTS, num_kept - len(here))
        later *= self.brings
        self.credit -= LATER_PARTS * later
        here.update(cores[:later])
        idle = [expert for expert in self.order if expert in self.kept - used]
        self.kept = here.union(idle[: num_kept - len(here)])
        self.order.sort(key=lambda expert: expert not in used)
        self.missed[len(missed)] += 1
        part = slots.count_by_cores(by_cores, chunks)
        for name, more in (("missed", len(missed)), ("later", later), ("by_cores", part)):
            self.counts[name] = self.counts.get(name, 0) + more
        self.of_steps.update(steps=1, used=len(used), recent=recent)
        if self.of_steps["steps"] == LATER_STEPS:
            self.brings = slots.brings_later(self.of_steps["used"], self.of_steps["recent"])
            for name in ("used", "recent"):
                self.of_steps[name] -= self.of_steps[name] // LATER_FADES
            self.of_steps["steps"] = 0


@cache
def draw(reuse: str, per_token: int) -> traces.Trace:
    if reuse == "a bit skewed":
        random = np.random.default_rng(0)
        popular = random.permutation(1 / np.sqrt(np.arange(1, NUM_EXPERTS + 1)))
        drawn = np.log(popular) + random.gumbel(size=(NUM_STEPS, NUM_EXPERTS))
        return np.argsort(-drawn, axis=1)[:, :per_token]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traces, "REUSES", traces.REUSES | REUSES)
        return traces.make_trace(NUM_EXPERTS, per_token, NUM_STEPS, reuse, seed=0)


@cache
def record(reuse: str, per_token: int) -> tuple[Experts, BatchReuse]:
    model = moe_model(2)
    assert model.experts is not None
    experts = replace(model.experts, num_experts=NUM_EXPERTS, num_experts_per_token=per_token)
    ref = ModelRef.model_validate(model, from_attributes=True)
    steps = draw(reuse, per_token).reshape(NUM_STEPS, 1, 1, per_token).astype(np.int16)
    return experts, make_routing(ref, [0], [steps], NUM_EXPERTS).of_batch(1)


ALL_REUSES = ["published", "none", "near", "far", "skewed", "a bit skewed"]


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", first_quick([42, 16, 80]))
@pytest.mark.parametrize("per_token", [4, 8])
@pytest.mark.parametrize("reuse", first_quick(ALL_REUSES))
def test_they_are_those_of_a_list(reuse: str, per_token: int, num_slots: int) -> None:
    """Once the slots are full: by how many are missed, and what the layer waits for them.

    Where the link brings about as many for later as are missed, a little more or less of either
    decides whether slots fill: a list and its prediction differ most there.
    """
    experts, recorded = record(reuse, per_token)
    rates, inner = RATES[per_token]
    for quota in (0.5, 1.0, 2.0, 8.0):
        slots = ExpertSlots(num_slots, NUM_EXPERTS, (), True, inner, int(LATER_PARTS * quota))
        listed = LaterSlots(slots, rates)
        for number, step in enumerate(draw(reuse, per_token).tolist()):
            if number == NUM_BEFORE:
                listed.counts.clear()
                listed.missed.clear()
            listed.step(step)
        steps = NUM_STEPS - NUM_BEFORE
        found = find_experts(slots, experts, recorded, 1, rates)
        assert found.hits + found.misses == pytest.approx(per_token)
        near = 0.05 if quota >= 2 else 0.13
        assert found.misses == pytest.approx(listed.counts["missed"] / steps, rel=near)
        by_cores = divide_all(slots, rates, per_token).by_cores
        waits = np.array([rates.seconds(m, part) for m, part in enumerate(by_cores.tolist())])
        waited = sum(waits[m] * count for m, count in listed.missed.items()) / steps
        assert spread(per_token, found.misses) @ waits == pytest.approx(waited, rel=near)
        assert found.by_cores == pytest.approx(listed.counts["by_cores"] / steps, rel=near + 0.02)
        if found.later:
            # where reuse is hardly more than by chance, the list brings some at times alone
            most = 1.13 * found.later
            assert listed.counts["later"] / steps <= most
            if reuse in ("published", "near", "skewed"):
                assert found.later == pytest.approx(listed.counts["later"] / steps, rel=0.13)


def test_all_that_enter_slots_are_as_recorded() -> None:
    experts, reuse = record("published", 4)
    rates, inner = RATES[4]
    slots = ExpertSlots(40, NUM_EXPERTS, (), True, inner, LATER_PARTS * MOST_LATER)
    found = find_experts(slots, experts, reuse, 1, rates)
    assert found.hits == pytest.approx(4 * reuse.hit_rate(slots.num_kept), rel=0.01)
    assert found.later == pytest.approx(divide_all(slots, rates, 4).mean(4, found.misses)[1])
    whole = find_experts(replace(slots, by_cores=False), experts, reuse, 1)
    assert (whole.hits, whole.by_cores, whole.later) == (4 * reuse.hit_rate(40), 0, 0)


def test_a_profile_without_ages_will_do() -> None:
    experts, reuse = record("published", 8)
    rates, inner = RATES[8]
    slots = ExpertSlots(42, NUM_EXPERTS, (), True, inner, LATER_PARTS)
    told = find_experts(slots, experts, reuse, 1, rates).misses
    untold = find_experts(slots, experts, reuse.model_copy(update={"again": None}), 1, rates)
    assert untold.misses == pytest.approx(told, rel=0.1)


def test_uniform_routing_brings_nothing_for_later() -> None:
    experts, _ = record("none", 4)
    rates, inner = RATES[4]
    slots = ExpertSlots(42, NUM_EXPERTS, (), True, inner, LATER_PARTS)
    found = find_experts(slots, experts, None, 1, rates)
    assert (found.hits, found.later) == (pytest.approx(4 * 41 / NUM_EXPERTS), 0)
    assert 0 < found.by_cores < found.misses


def test_rows_of_sequences_miss_as_those_of_a_pass() -> None:
    stage, machine = open_stage("benchmarks/models/gpt-oss-20b/config.json"), make_machine()
    assert stage.experts is not None
    slots = ExpertSlots(1, stage.experts.num_experts, (1 << 20,), by_cores=True)
    of_sequences, of_pass = (
        Missed.predict(slots, AtUse(stage, machine, *sizes), CoresUse(1 << 20, 1, 1.0))
        for sizes in ((2, 1), (1, 2))
    )
    assert of_sequences == of_pass


def test_an_idle_link_brings_more() -> None:
    machine = make_machine(h2d=1e9)
    # a millisecond for each expert of all layers, and 0.85 of what is idle is used
    parts = [later_parts(seconds * 1e12, 10**6, machine) for seconds in (-1, 0, 1e-3, 4e-3, 1)]
    assert parts == [0, 0, 13, 54, LATER_PARTS * MOST_LATER]


@pytest.mark.parametrize(("chosen", "missed"), [(6.0, 2.5), (5.3, 5.3), (4.0, 4.0), (3.2, 0.0)])
def test_the_spread_has_the_mean_asked_for(chosen: float, missed: float) -> None:
    likely = spread(chosen, missed)
    assert likely.sum() == pytest.approx(1)
    assert likely @ np.arange(ceil(chosen) + 1) == pytest.approx(missed)
