"""SGLang's flags, and what it cannot be told."""

import pytest

from offplan.checkpoint.model import Model
from offplan.engines.export import export_notes, export_plan
from offplan.errors import ExportError
from offplan.plan import Plan
from tests.engines.builders import deepseek, make_plan, prefetch, qwen3, up_to, uva


def test_prefetch() -> None:
    flags = export_plan(make_plan(prefetch("experts"), prefetch_step=2), deepseek(), "sglang")
    assert " ".join(flags) == (
        "--offload-group-size 2 --offload-num-in-group 1 --offload-prefetch-step 2"
    )


def test_max_bytes() -> None:
    assert export_plan(make_plan(up_to("7GiB")), qwen3(), "sglang") == ["--cpu-offload-gb", "7"]


def test_nothing_offloaded() -> None:
    assert export_plan(make_plan(), qwen3(), "sglang") == []
    assert "no flag" in export_notes(make_plan(), qwen3(), "sglang")[0]


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
        (make_plan(prefetch("experts"), prefetch_step=3), deepseek(), "below its 3"),
        (make_plan(uva()), qwen3(), "reads no group"),
        (make_plan(up_to("7GiB", "mlp")), qwen3(), "segments"),
        (make_plan(up_to("7GiB")), deepseek(), "copies all routed experts of layer 1"),
        (make_plan(up_to("7GB")), qwen3(), "whole number of GiB"),
    ],
)
def test_refusals(plan: Plan, model: Model, lost: str) -> None:
    with pytest.raises(ExportError, match=lost):
        export_plan(plan, model, "sglang")


def test_notes() -> None:
    plan = make_plan(prefetch("experts"), prefetch_step=2)
    assert "24 KiB more" in export_notes(plan, deepseek(), "sglang")[0]
    assert "does not read" in export_notes(make_plan(up_to("1GiB")), qwen3(), "sglang")[0]
