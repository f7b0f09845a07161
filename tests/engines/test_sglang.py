"""SGLang's flags, and what it cannot be told."""

from pathlib import Path

import pytest

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.costs.engine_times import build_engine_pass
from offplan.engines.export import export_plan
from offplan.engines.runner import find_runner
from offplan.errors import ExportError
from offplan.held.held import hold, hold_whole
from offplan.placement import Phase, place
from offplan.plan import Budget, Plan
from offplan.schedule import Copy
from tests.engines.builders import (
    KIB,
    MLA,
    NUM_EXPERTS,
    deepseek,
    dense_names,
    make_model,
    make_plan,
    prefetch,
    qwen3,
    up_to,
    uva,
)

MODELS = Path(__file__).parent.parent / "models"
GIB = 2**30


def test_prefetch() -> None:
    """Of its copies there is one more than its step, and as many in the pool of captured steps."""
    export = export_plan(make_plan(prefetch("experts"), prefetch_step=2), deepseek(), "sglang")
    assert " ".join(export.flags) == (
        "--offload-group-size 2 --offload-num-in-group 1 --offload-prefetch-step 1 "
        "--disable-prefill-cuda-graph --disable-shared-experts-fusion"
    )
    assert export.demand.more_gpu_bytes == 2 * 3 * NUM_EXPERTS * 2 * KIB
    assert "copy and compute in turns" in export.notes[0]


def test_one_slot_is_two_there() -> None:
    said = export_plan(make_plan(prefetch("experts"), prefetch_step=1), deepseek(), "sglang").demand
    assert said.flags["offload-prefetch-step"] == ("1",)
    assert said.more_gpu_bytes == 3 * 3 * NUM_EXPERTS * 2 * KIB


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_the_step_is_the_one_that_is_priced(num_slots: int) -> None:
    """Of a captured step's copies there are so many more than layers."""
    plan = make_plan(prefetch("experts", group_size=1, num_in_group=1), prefetch_step=num_slots)
    model = deepseek(5)
    stage = hold_whole(model, find_runner("sglang"))
    placement, runtime = place(stage, plan.offload), stage.pass_rules
    assert runtime is not None
    priced = build_engine_pass(runtime, placement, len(model.layers), Phase.DECODE)
    num_copies = sum(isinstance(operation, Copy) for operation in priced.operations)
    step = num_copies - len(placement.spans(Phase.DECODE))
    flags = export_plan(plan, model, "sglang").demand.flags
    assert flags["offload-prefetch-step"] == (str(step),)


def test_max_bytes() -> None:
    """As many GiB as hold what the rule takes, and the largest layer, in both pools, once more."""
    export = export_plan(make_plan(up_to("7GiB")), qwen3(), "sglang")
    assert export.flags == ["--cpu-offload-gb", "1", "--disable-prefill-cuda-graph"]
    assert export.demand.more_gpu_bytes == 2 * 10 * 2 * KIB
    assert "does not read" in export.notes[0]


@pytest.mark.parametrize(("max_bytes", "gib"), [("6GiB", 6), ("6.5GiB", 7)])
def test_whole_gib_are_those_of_the_rule(max_bytes: str, gib: int) -> None:
    """It takes 6.03 and 6.56 GiB; what it takes beyond what SGLang is told may stay on the GPU."""
    model = open_model(str(MODELS / "qwen3-8b" / "config.json"))
    plan = make_plan(up_to(max_bytes))
    plan = plan.model_copy(update={"budget": Budget(gpu_memory=64 * GIB)})
    said = export_plan(plan, model, "sglang").demand
    assert said.flags["cpu-offload-gb"] == (str(gib),)
    layer_bytes = model.layers[0].nbytes
    taken_bytes = sum(slab.nbytes for slab in place(hold(model), plan.offload).slabs)
    assert said.more_gpu_bytes == 2 * layer_bytes + taken_bytes - gib * GIB
    assert gib * GIB <= sum(each.nbytes for each in said.moved) < gib * GIB + layer_bytes
    assert sum(each.nbytes for each in said.moved if each.layer == 0) == layer_bytes


def test_no_gib_reaches_the_experts() -> None:
    """The rule takes part of the first layer, which has none; the first GiB would take all."""
    model = open_model(str(MODELS / "deepseek-v2-lite" / "config.json"))
    with pytest.raises(ExportError, match="copies all routed experts of layer 1"):
        export_plan(make_plan(up_to("100MiB")), model, "sglang")


def test_kv_b_proj_stays_on_the_gpu() -> None:
    """SGLang makes matrices of it there."""
    model = make_model("MiniCPM3ForCausalLM", [dense_names(MLA)] * 2)
    said = export_plan(make_plan(up_to("1GiB")), model, "sglang").demand
    assert not any("kv_b_proj" in each.name for each in said.moved)
    kept = 2 * 2 * KIB
    assert said.more_gpu_bytes == 2 * (model.layers[0].nbytes - kept // 2) + kept


def test_nothing_offloaded() -> None:
    export = export_plan(make_plan(), qwen3(), "sglang")
    assert export.flags == []
    assert "serves one sequence at a time" in export.notes[0]
    assert "no flag" in export.notes[1]


@pytest.mark.parametrize(
    ("plan", "model", "lost"),
    [
        (make_plan(prefetch()), qwen3(), "this model is Qwen3ForCausalLM"),
        (make_plan(prefetch()), deepseek(), "would stay on the GPU"),
        (make_plan(prefetch("mlp.experts.down_proj")), deepseek(), "cannot stay on the GPU"),
        (
            make_plan(prefetch("experts")),
            deepseek(extra=["mlp.experts.down_proj.weight_scale_inv"]),
            "weight_scale_inv of layer 1 would stay",
        ),
        (make_plan(prefetch("experts", group_size=3), prefetch_step=2), deepseek(4), "below its 1"),
        (make_plan(uva()), qwen3(), "reads no group"),
        (make_plan(up_to("7GiB", "mlp")), qwen3(), "segments"),
        (make_plan(up_to("7GiB")), deepseek(), "copies all routed experts of layer 1"),
    ],
)
def test_refusals(plan: Plan, model: Model, lost: str) -> None:
    with pytest.raises(ExportError, match=lost):
        export_plan(plan, model, "sglang")
