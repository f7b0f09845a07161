"""What moves from one decision to another, in parameters, layers and bytes."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.held.unit import group_units
from offplan.plan import Backend, Offload, Plan, Rule, load_plan
from offplan.upkeep.comparing import Move, compare_plans
from tests.checkpoint.quantised import FORMATS, write_quantised
from tests.cli import ROOT, TINY_MOE

PLAN = load_plan(ROOT / "plans" / "tiny-moe.yaml")
ALL = Rule(group_size=1, num_in_group=1, prefill=Backend.PREFETCH, decode=Backend.PREFETCH)
HALF = ALL.model_copy(update={"group_size": 2})


def with_rules(*rules: Rule, **changes: object) -> Plan:
    offload = Offload.model_validate({**dict(PLAN.offload), "rules": rules, **changes})
    return PLAN.model_copy(update={"offload": offload})


def moves(before: Plan, after: Plan, model: Model) -> Sequence[Move]:
    found = compare_plans(before, after, model).moves
    assert found is not None
    return found


def test_what_takes_another_way_moves() -> None:
    model = open_model(str(TINY_MOE))
    in_place = ALL.model_copy(update={"decode": Backend.UVA, "cpu_offload_params": ("o_proj",)})
    experts = HALF.model_copy(update={"cpu_offload_params": ("experts",)})
    found = moves(with_rules(HALF), with_rules(in_place, experts, embeddings="host"), model)
    by_name = {(each.parameter, each.before): each for each in found}
    assert by_name["model.embed_tokens", "GPU"].after == "host (by row)"
    ways = [each for each in found if each.parameter == "self_attn.o_proj"]
    assert [(each.layers, each.before) for each in ways] == [
        ((0, 2, 4), "GPU"),
        ((1, 3, 5), "host (prefetch, prefetch)"),
    ]
    assert not [each for each in found if "mlp.experts" in each.parameter]
    back = moves(with_rules(in_place, experts, embeddings="host"), with_rules(HALF), model)
    assert [(each.after, each.before) for each in back] == [
        (each.before, each.after) for each in found
    ]


@pytest.mark.parametrize("name", ["fp8 blocks", "gptq", "compressed-tensors nvfp4"])
def test_codes_and_scales_move_together(tmp_path: Path, name: str) -> None:
    model = open_model(str(write_quantised(tmp_path, FORMATS[name])))
    found = moves(with_rules(), with_rules(ALL), model)
    units = [unit for layer in model.layers for unit in group_units(layer)]
    assert sum(each.num_bytes for each in found) == sum(unit.nbytes for unit in units)
    names = [(each.parameter, each.layers) for each in found]
    assert len(names) == len(set(names))
