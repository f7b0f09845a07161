"""What steps find of slots whose missed experts are divided: predicted, and by a list."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from benchmarks.divided import DividedSlots
from offplan.capabilities.cached_experts import ExpertSlots
from offplan.costs.cached_experts import find_experts, spread
from offplan.plan import ModelRef
from offplan.routing.profile import make_routing
from tests.costs.builders import moe_model
from tests.tiers import first_quick

NUM_EXPERTS, PER_TOKEN, NUM_STEPS = 64, 6, 1500


def draw(repeat: float) -> np.ndarray[Any, Any]:
    """Choices of tokens, each of which keeps an expert of the token before with a chance."""
    random = np.random.default_rng(0)
    steps = np.empty((NUM_STEPS, 1, 1, PER_TOKEN), np.int16)
    chosen = random.permutation(NUM_EXPERTS)[:PER_TOKEN]
    for number in range(NUM_STEPS):
        kept = chosen[random.random(PER_TOKEN) < repeat]
        others = np.setdiff1d(random.permutation(NUM_EXPERTS), kept, assume_unique=True)
        chosen = np.concatenate([kept, others[: PER_TOKEN - len(kept)]])
        steps[number, 0, 0] = chosen
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", first_quick([12, 32, 50]))
@pytest.mark.parametrize("repeat", first_quick([0.0, 0.5, 0.8]))
def test_they_are_those_of_a_list(repeat: float, num_slots: int) -> None:
    steps, model = draw(repeat), moe_model(2)
    assert model.experts is not None
    experts = replace(model.experts, num_experts=NUM_EXPERTS, num_experts_per_token=PER_TOKEN)
    ref = ModelRef.model_validate(model, from_attributes=True)
    reuse = make_routing(ref, [0], [steps], NUM_EXPERTS).of_batch(1)
    for share, inner in product((0.0, 0.25, 0.5, 0.75), (0, 768)):
        of = ExpertSlots(num_slots, NUM_EXPERTS, (), share, inner)
        slots = DividedSlots(of)
        for step in steps:
            slots.step(step.ravel().tolist())
        found = find_experts(of, experts, reuse, 1)
        misses = PER_TOKEN * NUM_STEPS - slots.counts["hits"]
        assert found.hits + found.misses == pytest.approx(PER_TOKEN)
        # where one is split hardly any enters a slot of those missed: fewer are predicted
        near = 0.25 if of.splits else 0.2
        assert found.misses * NUM_STEPS == pytest.approx(misses, rel=near)
        assert found.by_cores * NUM_STEPS == pytest.approx(slots.by_cores, rel=near)
        uniform = find_experts(of, experts, None, 1)
        assert uniform.hits == pytest.approx(PER_TOKEN * of.num_kept / NUM_EXPERTS)
        if not repeat:
            assert uniform.misses == pytest.approx(found.misses, rel=0.05)


@pytest.mark.parametrize(("chosen", "missed"), [(6.0, 2.5), (5.3, 5.3), (4.0, 4.0), (3.2, 0.0)])
def test_the_spread_has_the_mean_asked_for(chosen: float, missed: float) -> None:
    likely = list(spread(chosen, missed))
    assert sum(each for each, _ in likely) == pytest.approx(1)
    assert sum(each * number for each, number in likely) == pytest.approx(missed)
