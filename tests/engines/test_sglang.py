"""SGLang's flags, and what it cannot be told."""

import pytest

from offplan.checkpoint.model import Model
from offplan.costs.engine_runtime import engine_runtime
from offplan.costs.engine_times import build_engine_pass
from offplan.engines.export import export_plan
from offplan.errors import ExportError
from offplan.placement import Phase, place
from offplan.plan import Plan
from offplan.schedule import Copy
from tests.engines.builders import (
    KIB,
    NUM_EXPERTS,
    deepseek,
    make_plan,
    prefetch,
    qwen3,
    up_to,
    uva,
)


def test_prefetch() -> None:
    """Of its copies there is one more than its step."""
    export = export_plan(make_plan(prefetch("experts"), prefetch_step=2), deepseek(), "sglang")
    assert " ".join(export.flags) == (
        "--offload-group-size 2 --offload-num-in-group 1 --offload-prefetch-step 1 "
        "--disable-shared-experts-fusion"
    )
    assert export.said.more_gpu_bytes == 0
    assert "copy and compute in turns" in export.notes[0]


def test_one_slot_is_two_there() -> None:
    said = export_plan(make_plan(prefetch("experts"), prefetch_step=1), deepseek(), "sglang").said
    assert said.flags["offload-prefetch-step"] == ("1",)
    assert said.more_gpu_bytes == 3 * NUM_EXPERTS * 2 * KIB


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_the_step_is_the_one_that_is_priced(num_slots: int) -> None:
    """Of a captured step's copies there are so many more than layers."""
    plan = make_plan(prefetch("experts", group_size=1, num_in_group=1), prefetch_step=num_slots)
    model = deepseek(5).as_loaded_by("sglang")
    placement, runtime = place(model, plan.offload), engine_runtime(model)
    assert runtime is not None
    priced = build_engine_pass(runtime, placement, len(model.layers), Phase.DECODE)
    num_copies = sum(isinstance(operation, Copy) for operation in priced.operations)
    step = num_copies - len(placement.spans(Phase.DECODE))
    flags = export_plan(plan, model, "sglang").said.flags
    assert flags["offload-prefetch-step"] == (str(step),)


def test_max_bytes() -> None:
    """As many whole GiB as hold what the rule takes, and the largest layer once more."""
    export = export_plan(make_plan(up_to("7GiB")), qwen3(), "sglang")
    assert export.flags == ["--cpu-offload-gb", "1"]
    assert export.said.more_gpu_bytes == 10 * 2 * KIB
    assert "does not read" in export.notes[0]


def test_nothing_offloaded() -> None:
    export = export_plan(make_plan(), qwen3(), "sglang")
    assert export.flags == []
    assert "no flag" in export.notes[0]


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
