"""Prompts in parts: chosen where a prompt would read weights again, and refused by name."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.errors import ExportError, InputError
from offplan.library.asking import ask as plan_ask
from offplan.library.asking import pose
from offplan.library.machines import load_machine
from offplan.plan import Budget, Goal, Workload
from offplan.planner.find import SOONER
from offplan.planner.make import make_plan
from offplan.planner.neighbours import find_neighbours
from offplan.planner.parts import MOST_LONGER
from offplan.planner.question import Question
from tests.costs.builders import DENSE, dense_model, make_machine, make_model
from tests.planner.cases import budget_for

WIDE = {
    **{name: shape for name, shape in DENSE.items() if not name.startswith("mlp.")},
    "mlp.experts.down_proj.weight": (1024, 1024),
    "mlp.experts.gate_up_proj.weight": (2048, 1024),
    "mlp.gate.weight": (8, 1024),
}
"""A layer whose experts are far more than what its tokens hold."""
WORKLOAD = Workload(batch=1, prompt_tokens=2500, output_tokens=20, context=2600)
MACHINE = make_machine(h2d=1e9, uva=0.9e9)


def ask(share: float, parts: str, **said: object) -> Question:
    model = make_model([WIDE] * 6)
    goal = Goal.model_validate({"packing": False, "parts": parts, **said})
    return pose(model, MACHINE, WORKLOAD, budget_for(model, MACHINE, share, WORKLOAD), goal)


@pytest.mark.slow
def test_no_plan_is_slower_for_parts_and_small_budgets_are_far_sooner() -> None:
    times: list[float] = []
    for share in np.linspace(0.08, 1.0, 10):
        plans = [make_plan(ask(share, parts)).plan for parts in ("off", "auto")]
        without, plan = plans
        times.append(plan.prediction.objective_s)
        assert plan.prediction.objective_s <= 1.0101 * without.prediction.objective_s
        assert not any(rule.parts for rule in without.offload.rules)
        assert plan.prediction.gpu_memory.total_bytes <= plan.budget.gpu_memory
        if any(rule.parts for rule in plan.offload.rules):
            is_faster = plan.prediction.objective_s <= without.prediction.objective_s
            sooner = plan.prediction.prefill.step_s / without.prediction.prefill.step_s
            assert is_faster or sooner <= 1 - SOONER
        if share < 0.2:  # not a slot for a whole layer
            assert any(rule.parts for rule in plan.offload.rules)
            assert plan.prediction.prefill.step_s < 0.6 * without.prediction.prefill.step_s
    assert all(after <= 1.0101 * before for before, after in pairwise(times))


def test_a_prompt_that_reads_again_and_again_reads_once() -> None:
    reads = []
    for parts in ("off", "auto"):
        predicted = make_plan(ask(0.08, parts)).plan.prediction
        reads.append(predicted.prefill.link_bytes / predicted.host_memory_bytes)
    assert reads[0] > 2
    assert reads[1] < 1.01


def test_chunks_wait_in_groups_where_all_of_them_do_not_fit() -> None:
    """The parts cross twice, and the prompt is done in half of the time all the same."""
    model = make_model([WIDE] * 6)
    several = Workload(batch=4, prompt_tokens=4096, output_tokens=20, context=4148)
    budget = budget_for(model, MACHINE, 0.1, several)
    plans = []
    for parts in ("off", "auto"):
        goal = Goal.model_validate({"packing": False, "parts": parts})
        question = pose(model, MACHINE, several, budget, goal)
        plans.append(make_plan(question).plan)
    (rule,) = (rule for rule in plans[1].offload.rules if rule.parts)
    assert rule.tokens_at_once is not None
    without, inside = (plan.prediction.prefill for plan in plans)
    # chunks of half as many tokens, whose tiles are emptier, compute for a fifth longer
    assert inside.link_bytes < 0.2 * without.link_bytes
    assert inside.step_s < without.step_s / 2
    changes = [each.change for each in find_neighbours(question, plans[1])]
    assert any("without tokens_at_once" in change for change in changes)
    told = rule.describe()
    assert f"again for every {rule.tokens_at_once:,} tokens of a sequence" in told


@pytest.mark.parametrize("longer", [4, 5])
def test_longer_prompts_than_planned_stay_within_the_budget(longer: int) -> None:
    """Each meets the parts in groups of as many tokens as were planned; of few groups alone."""
    model = make_model([WIDE] * 6)
    workload = WORKLOAD.model_copy(update={"context": longer * WORKLOAD.prompt_tokens})
    budget = budget_for(model, MACHINE, 0.08, workload)
    goal = Goal.model_validate({"packing": False, "parts": "auto"})
    offload = make_plan(pose(model, MACHINE, workload, budget, goal)).plan.offload
    at_once = [rule.tokens_at_once for rule in offload.rules if rule.tokens_at_once is not None]
    assert len(at_once) == (longer <= MOST_LONGER)
    assert all(tokens <= WORKLOAD.prompt_tokens for tokens in at_once)


def test_neighbours_step_through_parts() -> None:
    question = ask(0.1, "auto")
    plan = make_plan(question).plan
    (parts,) = {rule.parts for rule in plan.offload.rules if rule.parts}
    changes = [each.change for each in find_neighbours(question, plan)]
    assert any(f"parts {parts} -> " in change for change in changes)
    assert any(change.endswith("without parts") for change in changes)


def test_questions_that_cannot_have_parts() -> None:
    with pytest.raises(InputError, match="has no routed experts: leave `parts` out"):
        pose(dense_model(2), MACHINE, WORKLOAD, Budget(gpu_memory=2**30), Goal(parts="auto"))
    with pytest.raises(ValueError, match="no engine streams a layer's experts in parts"):
        Goal(parts="auto", engine="vllm")
    machine = load_machine("rtx4090")
    with pytest.raises(InputError, match="`parts=auto` with `engine=vllm`"):
        plan_ask(dense_model(2), machine, parts="auto", engine="vllm")


def test_parts_are_allowed_wherever_they_can_be() -> None:
    machine, experts = load_machine("rtx4090"), make_model([WIDE] * 2)

    def is_allowed(model: Model, **asked: Any) -> bool:
        return plan_ask(model, machine, WORKLOAD, **asked).goal.parts == "auto"

    assert is_allowed(experts)
    assert not is_allowed(experts, parts="off")
    assert not is_allowed(experts, engine="vllm")
    assert not is_allowed(dense_model(2))


def test_engines_refuse_parts_by_name() -> None:
    from offplan.engines.engine import require_stored_weights
    from offplan.engines.vllm import VLLM

    offload = make_plan(ask(0.1, "auto")).plan.offload
    with pytest.raises(ExportError, match=r"in \d+ parts \(parts\), .* plan again with `engine`"):
        require_stored_weights(offload, VLLM)


def test_what_parts_of_all_layers_spare_counts_as_room(tmp_path: Path) -> None:
    """gpt-oss of 6 small layers: parts of them all need no room for values of a whole layer."""
    published = Path("benchmarks/models/gpt-oss-20b/config.json").read_text("utf-8")
    small = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
    small |= {"hidden_size": 1024, "intermediate_size": 1024, "num_local_experts": 64}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024}
    small |= {"pad_token_id": 0, "eos_token_id": 1}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(published) | small), "utf-8")
    workload = Workload(batch=1, prompt_tokens=16, output_tokens=13, context=64)
    asked = plan_ask(
        open_model(str(config)), load_machine("h200-pcie5"), workload, gpu_memory=1040 * 2**20
    )
    plan = make_plan(asked).plan
    assert plan.prediction.gpu_memory.total_bytes <= 1040 * 2**20
    assert any(rule.parts for rule in plan.offload.rules)


def test_parts_are_priced_beside_dense_layers() -> None:
    """DeepSeek-V3's first layers are dense: its experts spare more than their parts take."""
    published = open_model("benchmarks/models/deepseek-v3-8-layers/config.json")
    workload = Workload(batch=1, prompt_tokens=16, output_tokens=4, context=400)
    plans = [
        make_plan(
            plan_ask(
                published,
                load_machine("h200-pcie5"),
                workload,
                gpu_memory=12 * 2**30,
                host_cores=False,
                parts=parts,
            )
        )
        for parts in ("off", "auto")
    ]
    without, best = (each.plan.prediction.objective_s for each in plans)
    assert best <= 1.01 * without
    assert all(each.gap >= 1 for each in plans)
