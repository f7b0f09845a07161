"""A cache that offplan does not have: its rule alone makes it, all that reads caches asks it."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from offplan.backends import Backend
from offplan.capabilities.cached_experts import ExpertSlots
from offplan.capabilities.rule import LayerExperts, WeightCache
from offplan.costs.memory import list_gpu_memory
from offplan.held.held import hold
from offplan.placement import place
from offplan.plan import Budget, Offload, Rule, Workload
from offplan.report.pictures.layers import pile_layers
from offplan.report.strip import make_layer_strip
from tests.costs.builders import make_machine, moe_model


@dataclass(frozen=True)
class Half:
    """Half of a layer's experts."""

    weight_bytes: int
    name: ClassVar[str] = "halves of layers"

    @property
    def nbytes(self) -> int:
        return self.weight_bytes + 4

    def describe(self) -> str:
        return ", half of it cached"


class HalvesRule(Rule):
    """Has half of the experts that it takes of each layer lie on the GPU as well."""

    @property
    def caches(self) -> bool:
        return True

    @property
    def experts_key(self) -> str:
        return "halves"

    def make_cache(self, experts: LayerExperts, num_before: int) -> WeightCache | None:
        return Half(sum(experts.unit_bytes) // 2)


def test_it_is_counted_and_shown() -> None:
    stage = hold(moe_model(2))
    ways = {"prefill": Backend.PREFETCH, "decode": Backend.UVA}
    pattern = {"cpu_offload_params": ["experts"], "group_size": 2, "num_in_group": 1}
    rule = HalvesRule.model_validate({**pattern, **ways})
    decision = Offload(prefill_chunk=8, rules=(rule,))
    assert [*decision.list_capabilities()] == ["halves"]
    placement = place(stage, decision)
    assert placement.caches_of(ExpertSlots) == {}
    assert all(entry.is_cached for entry in placement.entries)
    half = placement.weight_caches[1]
    assert placement.cached_bytes == {"halves of layers": half.weight_bytes + 4}
    asked = make_machine(), Workload(), Budget(gpu_memory=2**34), 8
    resident = next(list_gpu_memory(placement, stage, *asked))
    assert "+ halves of layers" in resident.formula
    share = 1 - half.weight_bytes / stage.layers[1].nbytes
    assert make_layer_strip(stage, decision).shares == pytest.approx((1.0, share))
    assert pile_layers(stage, placement)[1]["work"] == half.weight_bytes
