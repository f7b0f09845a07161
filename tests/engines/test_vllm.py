"""vLLM's flags: what they say, and that vLLM would read from them what the plan says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offplan.checkpoint.model import Model
from offplan.engines.export import export_notes, export_plan
from offplan.engines.names import vllm_parameters
from offplan.engines.segments import choose_segments
from offplan.errors import ExportError, PlanError
from offplan.plan import Plan
from tests.costs.builders import place_rules
from tests.engines.builders import (
    ATTENTION,
    deepseek,
    dense_names,
    make_model,
    make_plan,
    prefetch,
    qwen3,
    streamed_then_read,
    up_to,
    uva,
)


@pytest.mark.parametrize(
    ("plan", "model", "flags"),
    [
        (
            make_plan(prefetch(group_size=3, num_in_group=2), prefetch_step=2),
            qwen3(),
            "--offload-group-size 3 --offload-num-in-group 2 --offload-prefetch-step 2",
        ),
        (
            make_plan(prefetch("experts"), prefetch_step=3),
            deepseek(),
            "--offload-group-size 2 --offload-num-in-group 1 --offload-prefetch-step 3 "
            "--offload-params experts",
        ),
        (  # six layers: a ring of eight slots is one of six
            make_plan(prefetch("self_attn", group_size=1), prefetch_step=8),
            qwen3(),
            "--offload-group-size 1 --offload-num-in-group 1 --offload-prefetch-step 6 "
            "--offload-params self_attn",
        ),
        (
            make_plan(prefetch("mlp.gate_proj", "mlp.up_proj"), prefetch_step=1),
            qwen3(),
            "--offload-group-size 2 --offload-num-in-group 1 --offload-prefetch-step 1 "
            "--offload-params gate_up_proj",
        ),
        (
            make_plan(prefetch("mlp.experts.gate_proj", "mlp.experts.up_proj"), prefetch_step=1),
            deepseek(),
            "--offload-group-size 2 --offload-num-in-group 1 --offload-prefetch-step 1 "
            "--offload-params w13_weight",
        ),
        (
            make_plan(prefetch("q_a_proj", "kv_a_proj_with_mqa"), prefetch_step=1),
            deepseek(),
            "--offload-group-size 2 --offload-num-in-group 1 --offload-prefetch-step 1 "
            "--offload-params fused_qkv_a_proj",
        ),
        (make_plan(up_to("14 GiB")), qwen3(), "--cpu-offload-gb 14"),
        (
            make_plan(up_to("1.5GiB", "experts")),
            deepseek(),
            "--cpu-offload-gb 1.5 --cpu-offload-params experts",
        ),
        (  # 6 layers x 3 projections x 4 experts x 2 KiB
            make_plan(uva("experts")),
            deepseek(),
            f"--cpu-offload-gb {144 / 2**20} --cpu-offload-params experts",
        ),
        (make_plan(), qwen3(), ""),
    ],
)
def test_flags(plan: Plan, model: Model, flags: str) -> None:
    assert " ".join(export_plan(plan, model, "vllm")) == flags


@pytest.mark.parametrize(
    ("plan", "model", "lost"),
    [
        (make_plan(prefetch("mlp"), prefetch("self_attn")), qwen3(), "one rule"),
        (
            make_plan(streamed_then_read("mlp")),
            qwen3(),
            "one backend for both phases",
        ),
        (make_plan(prefetch("q_proj")), qwen3(), "self_attn.qkv_proj"),
        (make_plan(prefetch("mlp.up_proj")), qwen3(), "mlp.gate_up_proj"),
        (make_plan(prefetch("kv_a_proj_with_mqa")), deepseek(), "fused_qkv_a_proj"),
        (make_plan(uva("experts", group_size=3)), deepseek(), "cannot skip layer 1"),
        (
            make_plan(prefetch("in_proj_qkvz")),
            make_model("X", [[*dense_names(ATTENTION), "linear_attn.in_proj_qkvz.weight"]] * 4),
            "not known what vLLM calls linear_attn.in_proj_qkvz.weight",
        ),
    ],
)
def test_refusals(plan: Plan, model: Model, lost: str) -> None:
    with pytest.raises(ExportError, match=lost):
        export_plan(plan, model, "vllm")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_no_flag_reaches_the_embedding(engine: str) -> None:
    plan = make_plan()
    on_host = plan.offload.model_copy(update={"embeddings": "host"})
    with pytest.raises(ExportError, match="input embedding on the GPU"):
        export_plan(plan.model_copy(update={"offload": on_host}), qwen3(), engine)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_peer_as_the_store_is_refused(engine: str) -> None:
    plan = make_plan(prefetch())
    on_peer = plan.offload.model_copy(update={"store": "peer"})
    with pytest.raises(ExportError, match=f"{engine} offloads to host memory; the plan has a seco"):
        export_plan(plan.model_copy(update={"offload": on_peer}), qwen3(), engine)


def test_unknown_engine() -> None:
    with pytest.raises(ExportError, match="vllm and sglang"):
        export_plan(make_plan(), qwen3(), "tgi")


def test_layers_that_do_not_divide_into_the_slots() -> None:
    uneven = make_plan(prefetch(group_size=1), prefetch_step=4)
    with pytest.raises(ExportError, match="a prefetch_step that divides"):
        export_plan(uneven, qwen3(), "vllm")


def test_notes() -> None:
    even = make_plan(prefetch(group_size=1), prefetch_step=3)
    assert export_notes(even, qwen3(), "vllm") == [
        "vllm sizes its KV cache by flags of its own: the plan's workload is --max-num-seqs 1 "
        "--max-model-len 4096"
    ]
    assert "within layer 1" in export_notes(make_plan(up_to("30KiB")), qwen3(), "vllm")[0]


def read_prefetch_flags(flags: list[str], model: Model) -> set[tuple[int, str]]:
    """Offload what vLLM would: (layer, checkpoint name) of each parameter."""
    values = dict(zip(flags[:6:2], flags[1:6:2], strict=True))
    group, number = int(values["--offload-group-size"]), int(values["--offload-num-in-group"])
    segments = flags[7:]
    return {
        (p.layer, p.parameter.name)
        for p in vllm_parameters(model)
        if p.layer % group >= group - number
        and (not segments or any(f".{s}." in f".{p.name}." for s in segments))
    }


SEGMENTS = ["self_attn", "mlp", "experts", "mlp.experts", "mlp.shared_experts", "down_proj"]
SEGMENTS += [
    "o_proj",
    "mlp.down_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "input_layernorm",
    "mlp.gate",
]


@given(
    st.sampled_from([qwen3(), deepseek()]),
    st.lists(st.sampled_from(SEGMENTS), max_size=3, unique=True),
    st.integers(1, 4).flatmap(lambda g: st.tuples(st.just(g), st.integers(1, g))),
)
def test_vllm_reads_what_the_plan_says(
    model: Model, segments: list[str], pattern: tuple[int, int]
) -> None:
    group_size, num_in_group = pattern
    rule = prefetch(*segments, group_size=group_size, num_in_group=num_in_group)
    try:
        placement = place_rules(model, [rule], 1)
        flags = export_plan(make_plan(rule, prefetch_step=1), model, "vllm")
    except (PlanError, ExportError):  # a rule that takes nothing, or a part of what is fused
        return
    placed = {
        (slab.layer, parameter.name)
        for slab in placement.slabs
        for entry in slab.entries
        for parameter in entry.unit.parameters
    }
    assert read_prefetch_flags(flags, model) == placed


def test_segments_never_match_more_than_wanted() -> None:
    wanted = {"mlp.gate_up_proj.weight", "mlp.down_proj.weight"}
    unwanted = {"mlp.shared_experts.gate_up_proj.weight", "mlp.shared_experts.down_proj.weight"}
    segments = choose_segments(["mlp"], wanted, unwanted)
    assert segments == ["mlp.down_proj", "mlp.gate_up_proj"]
