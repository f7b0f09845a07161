"""How cores and link divide the experts that a step misses, in experts and in parts of one."""

from dataclasses import replace
from math import comb

import pytest

from offplan.capabilities.cached_experts import ExpertSlots, MissRates
from offplan.capabilities.packing import Packing
from offplan.checkpoint.open import open_model
from offplan.held.held import hold
from offplan.placement import place
from offplan.plan import Offload, Rule
from offplan.routed_experts import count_inner
from tests.cli import ROOT

CONFIGS = ROOT / "benchmarks" / "models"


@pytest.mark.parametrize(
    ("inner", "rates", "divisions"),
    [
        # equal rates: half each, of whole experts or nearly so
        (0, (0, 1, 1), [(0, 0), (0, 0), (1, 0), (1, 0), (2, 0)]),
        (2880, (0, 1, 1), [(0, 0), (0, 11), (1, 0), (1, 11), (2, 0)]),
        # cores half as fast again as the link
        (768, (0, 2, 3), [(0, 0), (0, 4), (1, 1), (1, 5), (2, 2)]),
        (0, (0, 2, 3), [(0, 0), (1, 0), (1, 0), (2, 0), (2, 0)]),
        # one expert goes to whoever is sooner, the trip to the cores included
        (0, (2, 1, 2), [(0, 0), (0, 0), (1, 0), (1, 0), (2, 0)]),
        (2880, (9, 1, 2), [(0, 0), (0, 0), (0, 0), (0, 0), (0, 0)]),
        # what splitting one would save is not worth it
        (2880, (0, 1, 1.01), [(0, 0), (0, 11), (1, 0), (1, 11), (2, 0)]),
        (256, (0, 1, 99), [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0)]),
    ],
)
def test_what_is_missed_is_divided(
    inner: int, rates: tuple[float, float, float], divisions: list[tuple[int, int]]
) -> None:
    slots = ExpertSlots(4, 128, (), True, inner)
    assert [slots.divide(missed, MissRates(*rates)) for missed in range(5)] == divisions
    assert slots.num_kept == 4 - (inner > 0)
    alone = replace(slots, by_cores=False)
    assert alone.divide(4, MissRates(*rates)) == (0, 0)
    assert alone.num_kept == 4


def test_parts_end_nearer_together() -> None:
    """The longer of two that are as fast waits less in the mean, of up to four missed experts."""
    longest, rates = [], MissRates(0.0, 1.0, 1.0)
    for inner in (0, 2880):
        slots = ExpertSlots(4, 128, (), True, inner)
        by_cores = [slots.count_by_cores(*slots.divide(missed, rates)) for missed in range(5)]
        waits = [rates.seconds(missed, part) for missed, part in enumerate(by_cores)]
        longest.append(sum(comb(4, missed) * wait for missed, wait in enumerate(waits)) / 16)
    assert longest[1] == pytest.approx(1.0, rel=0.02)
    assert longest[0] > 1.2 * longest[1]


@pytest.mark.parametrize(
    ("kept", "used", "recent", "brings"),
    [
        # 16 of 128 by chance: of 8192 used 1024, and an eighth of the 16 more
        *((16, 8192, 1024, False), (16, 8192, 1152, False), (16, 8192, 1153, True)),
        # 112 of 128: 7168 of 8192, and an eighth of the misses fewer
        *((112, 8192, 7168, False), (112, 8192, 7296, False), (112, 8192, 7297, True)),
        # 2 of 128: 4 of 256, and chance makes it 10 once in 300 times
        *((2, 256, 5, False), (2, 256, 9, False), (2, 256, 10, True)),
        *((128, 256, 256, False), (0, 256, 0, False)),
    ],
)
def test_what_is_not_used_again_is_not_brought_for_later(
    kept: int, used: int, recent: int, brings: bool
) -> None:
    assert ExpertSlots(kept, 128, (), True).brings_later(used, recent) == brings


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
        }
    )
    model = open_model(str(CONFIGS / "mixtral-8x7b" / "config.json"))
    offload = Offload(prefill_chunk=8, rules=(rule,))
    assert place(hold(model), offload).caches_of(ExpertSlots)[0].splits
    packing = Packing(group_size=1, num_in_group=1)
    packed = place(hold(model, packing), offload.model_copy(update={"packing": packing}))
    assert not any(each.splits for each in packed.caches_of(ExpertSlots).values())


def test_a_part_is_a_part_of_an_expert() -> None:
    slots = ExpertSlots(4, 8, (), True, 512)
    assert slots.count_by_cores(2, 1) == 2.25
