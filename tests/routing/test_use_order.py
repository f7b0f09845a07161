"""The order of use gives the hits of caches of every size, also where a step overflows them."""

import numpy as np
import pytest

from offplan.routing.use_order import UseOrder, measure_reuse
from tests.routing import count_hits


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_experts", "num_chosen", "batch"), [(8, 2, 1), (16, 4, 3), (5, 5, 2)])
def test_hits_are_those_of_each_cache(
    num_experts: int, num_chosen: int, batch: int, seed: int
) -> None:
    random, num_layers, num_steps = np.random.default_rng(seed), 2, 60
    trace = make_trace(random, num_steps, num_layers, batch, num_experts, num_chosen)
    reuse = measure_reuse(trace, num_experts, batch)
    for layer in range(num_layers):
        steps = [set(map(int, step[layer].ravel())) for step in trace]
        for num_kept in range(num_experts + 1):
            hits = count_hits(steps, num_experts, num_kept)
            assert reuse.distances[layer, :num_kept].sum() == hits
        assert reuse.first_uses[layer] == len(set().union(*steps))
        assert reuse.choices[layer] == sum(map(len, steps))
    assert reuse.num_steps == num_steps


def make_trace(
    random: np.random.Generator,
    num_steps: int,
    num_layers: int,
    batch: int,
    num_experts: int,
    num_chosen: int,
) -> np.ndarray:
    """Make choices of [steps, layers, sequences, choices], distinct within a token, some liked."""
    likes = random.gumbel(size=(num_layers, 1, num_experts)) * 2
    noise = random.gumbel(size=(num_steps, num_layers, batch, num_experts))
    return np.argsort(-(likes + noise), axis=-1)[..., :num_chosen].astype(np.int16)


def test_a_step_moves_to_the_front_in_the_order_that_it_had() -> None:
    order = UseOrder(num_layers=1, num_experts=6)
    for step, expected in (
        ([4, 2], [2, 4, 0, 1, 3, 5]),  # never used: by index
        ([5, 4], [4, 5, 2, 0, 1, 3]),
        ([3, 3], [3, 4, 5, 2, 0, 1]),  # chosen twice counts once
    ):
        order.take(np.array([step]))
        assert order.order.tolist() == [expected]
    assert order.reuse.distances.tolist() == [[0, 1, 0, 0, 0, 0]]
    assert order.reuse.first_uses.tolist() == [4]


def test_each_group_of_sequences_has_an_order_of_its_own() -> None:
    trace = make_trace(np.random.default_rng(0), 30, 2, 5, 8, 2)
    pairs = measure_reuse(trace, 8, 2)
    alone = [measure_reuse(trace[:, :, begin : begin + 2], 8, 2) for begin in (0, 2)]
    assert pairs.num_steps == 60
    assert (pairs.distances == alone[0].distances + alone[1].distances).all()
