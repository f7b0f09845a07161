"""How cores and link divide the experts that a step misses, in experts and in parts of one."""

from math import comb

import pytest

from offplan.capabilities.cached_experts import ExpertSlots
from offplan.capabilities.packing import Packing
from offplan.checkpoint.open import open_model
from offplan.errors import PlanError
from offplan.held.held import hold
from offplan.placement import place
from offplan.plan import Offload, Rule
from offplan.routed_experts import count_inner
from tests.cli import ROOT

CONFIGS = ROOT / "benchmarks" / "models"


@pytest.mark.parametrize(
    ("inner", "share", "divisions"),
    [
        (0, 0.5, [(0, 0), (1, 0), (1, 0), (2, 0), (2, 0)]),
        (2880, 0.5, [(0, 0), (0, 11), (1, 0), (1, 11), (2, 0)]),
        (768, 0.6, [(0, 0), (0, 4), (1, 1), (1, 5), (2, 2)]),
        (256, 0.9, [(0, 0), (1, 0), (2, 0), (2, 1), (3, 1)]),  # nearly all of one is all of it
    ],
)
def test_what_is_missed_is_divided(
    inner: int, share: float, divisions: list[tuple[int, int]]
) -> None:
    slots = ExpertSlots(4, 128, (), share, inner)
    assert [slots.divide(missed) for missed in range(5)] == divisions
    assert slots.num_kept == 4 - (inner > 0)


def test_parts_are_nearer_to_the_share() -> None:
    """The longer of two that are as fast waits less in the mean, of up to four missed experts."""
    longest = []
    for inner in (0, 2880):
        slots = ExpertSlots(4, 128, (), 0.5, inner)
        by_cores = [slots.count_by_cores(*slots.divide(missed)) for missed in range(5)]
        waits = [max(part, missed - part) for missed, part in enumerate(by_cores)]
        longest.append(sum(comb(4, missed) * wait for missed, wait in enumerate(waits)) / 16)
    assert longest[1] == pytest.approx(1.0, rel=0.02)
    assert longest[0] > 1.2 * longest[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "inner"),
    [
        *(("gpt-oss-120b", 2880), ("qwen3-30b-a3b-fp8", 768), ("mixtral-8x7b", 14336)),
        ("ernie-4.5-21b-a3b-gptq", 1536),
    ],
)
def test_inner_columns_are_those_of_the_second_product(name: str, inner: int) -> None:
    stage = hold(open_model(str(CONFIGS / name / "config.json")))
    units = next(of for of in stage.units if any(unit.is_expert for unit in of))
    assert count_inner(stage, [unit for unit in units if unit.is_expert]) == inner


def test_packed_experts_are_not_split() -> None:
    rule = Rule.model_validate(
        {
            "cpu_offload_params": ["experts"],
            "group_size": 1,
            "num_in_group": 1,
            "prefill": "prefetch",
            "decode": "host",
            "cached_experts": 2,
            "host_share": 0.5,
            "split_expert": True,
        }
    )
    model = open_model(str(CONFIGS / "mixtral-8x7b" / "config.json"))
    offload = Offload(prefill_chunk=8, rules=(rule,))
    assert place(hold(model), offload).caches_of(ExpertSlots)[0].splits
    packing = Packing(group_size=1, num_in_group=1)
    with pytest.raises(PlanError, match=r"rule 1 has split_expert, .* cannot be split: they are"):
        place(hold(model, packing), offload.model_copy(update={"packing": packing}))


def test_a_part_is_a_part_of_an_expert() -> None:
    slots = ExpertSlots(4, 8, (), 0.5, 512)
    assert slots.count_by_cores(2, 1) == 2.25
