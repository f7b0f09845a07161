"""What engines take for experts stored as MXFP4, on the GPU though nothing of them moves."""

import json
from pathlib import Path

import pytest

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.engines.export import export_plan
from offplan.engines.names import Kernels, engine_parameters, lay_out_experts
from offplan.engines.runner import find_runner, lower
from offplan.engines.startup import Startup
from offplan.engines.vllm import ANY_KERNELS, MARLIN_KERNELS
from offplan.errors import ExportError
from offplan.held.held import hold, hold_whole
from offplan.held.stage import Stage
from offplan.plan import Budget, Goal, Rule
from offplan.upkeep.engine_start import check_start
from tests.engines.builders import make_plan, prefetch, up_to
from tests.engines.configs import STORED_CODES

NUM_EXPERTS = 4


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """gpt-oss of hidden size 64 and intermediate size 160: five blocks."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**STORED_CODES, "intermediate_size": 160}))
    return open_model(str(path))


@pytest.mark.parametrize(
    ("kernels", "gate_up", "down", "bias_bytes"),
    [
        (MARLIN_KERNELS, 256, 256, 2),
        (ANY_KERNELS, 256, 256, 4),
        (Kernels(gate_up=64, down=512), 192, 512, 4),
    ],
)
def test_sizes_are_rounded_up(
    model: Model, kernels: Kernels, gate_up: int, down: int, bias_bytes: int
) -> None:
    """A weight takes half a byte, and 32 of them a byte for their scale."""
    laid_out = lay_out_experts(engine_parameters(hold(model), {}), kernels)
    found = {e.name.rpartition(".")[2]: e.nbytes for e in laid_out.values() if e.layer == 0}
    assert found == {
        "w13_weight": NUM_EXPERTS * 2 * gate_up * 256 // 2,
        "w13_weight_scale": NUM_EXPERTS * 2 * gate_up * 256 // 32,
        "w13_bias": NUM_EXPERTS * 2 * gate_up * bias_bytes,
        "w2_weight": NUM_EXPERTS * 256 * down // 2,
        "w2_weight_scale": NUM_EXPERTS * 256 * down // 32,
        "w2_bias": NUM_EXPERTS * 256 * bias_bytes,
    }


def growth(stage: Stage, kernels: Kernels) -> int:
    laid_out = lay_out_experts(engine_parameters(stage, {}), kernels)
    return sum(after.nbytes - before.nbytes for before, after in laid_out.items())


@pytest.mark.parametrize(
    "rules",
    [[], [prefetch("o_proj")], [up_to("1KiB", "self_attn")]],
    ids=["none", "copied", "read"],
)
def test_experts_that_stay_are_counted(model: Model, rules: list[Rule]) -> None:
    plan = make_plan(*rules, prefetch_step=1)
    more = growth(hold(model), ANY_KERNELS)
    export = export_plan(plan, model, "vllm")
    assert export.demand.more_gpu_bytes == pytest.approx(more, abs=256)  # slots are aligned
    assert "moe-backend" not in export.demand.flags
    assert any("stored as MXFP4" in note for note in export.notes)
    assert any("more than the plan predicts" in note for note in export.notes)
    tight = plan.model_copy(update={"budget": Budget(gpu_memory=more // 2)})
    with pytest.raises(ExportError, match="more of GPU memory"):
        export_plan(tight, model, "vllm")
    older = export_plan(plan, model, "vllm==0.32").demand
    assert older.more_gpu_bytes == pytest.approx(growth(hold(model), Kernels()), abs=256)


def test_a_log_may_have_them_as_large_as_that(model: Model) -> None:
    plan = make_plan().model_copy(update={"budget": Budget(gpu_memory=2**40)})
    least, more = (
        hold_whole(model, find_runner("vllm")).loaded_bytes,
        growth(hold(model), ANY_KERNELS),
    )

    def verdict(loaded_bytes: int) -> str:
        found = check_start(plan, model, "vllm==0.33", Startup(loaded_bytes=loaded_bytes))
        return next(each.verdict for each in found if each.subject == "GPU memory")

    assert [verdict(least), verdict(least + more), verdict(least + more + 2**25)] == [
        *("holds", "holds", "drift")
    ]


def test_the_largest_stage_counts(model: Model) -> None:
    """Of five layers the first stage of vLLM's has three."""
    goal = Goal(engine="vllm", tensor_parallel=2, pipeline_parallel=2)
    plan = make_plan().model_copy(update={"goal": goal})
    stages = lower(model, goal)
    assert len(stages) == 2
    more = [growth(stage, ANY_KERNELS) for stage in stages]
    assert export_plan(plan, model, "vllm").demand.more_gpu_bytes == max(more) == more[0]
    assert more[0] * 2 == more[1] * 3


def test_ranks_of_sglang_that_have_whole_experts_expand_them(model: Model) -> None:
    plan = make_plan().model_copy(update={"budget": Budget(gpu_memory=2**40)})
    assert export_plan(plan, model, "sglang").demand.more_gpu_bytes == growth(
        hold(model), Kernels()
    )
    goal = Goal(engine="sglang", tensor_parallel=2, expert_parallel=2)
    stages = lower(model, goal)
    said = export_plan(plan.model_copy(update={"goal": goal}), model, "sglang").demand
    assert said.more_gpu_bytes == growth(stages[0], Kernels(code_growth=4))
