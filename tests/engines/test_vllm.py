"""vLLM's flags: what they say, and that vLLM would read from them what the plan says."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offplan.capabilities.drafts import Draft
from offplan.capabilities.packing import Packing
from offplan.checkpoint.model import Model
from offplan.checkpoint.parameter import Parameter
from offplan.engines.engine import EngineDemand
from offplan.engines.export import export_plan
from offplan.engines.names import EngineParameter, choose_segments, engine_parameters
from offplan.engines.runner import find_runner
from offplan.engines.vllm import FACTS
from offplan.errors import ExportError, PlanError
from offplan.forms.form import Form, Kind
from offplan.held.held import hold, hold_whole
from offplan.plan import Budget, Plan
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
        # 6 layers x 10 parameters x 2 KiB: what the rule takes, not what it may take
        (make_plan(up_to("14 GiB")), qwen3(), f"--cpu-offload-gb {120 / 2**20:.15g}"),
        (  # 25 KiB of a layer of 20: one parameter over
            make_plan(up_to("25KiB")),
            qwen3(),
            f"--cpu-offload-gb {26 / 2**20:.15g}",
        ),
        (  # 6 layers x 3 projections x 4 experts x 2 KiB
            make_plan(uva("experts")),
            deepseek(),
            f"--cpu-offload-gb {144 / 2**20} --cpu-offload-params experts --moe-backend triton",
        ),
        (make_plan(), qwen3(), ""),
    ],
)
def test_flags(plan: Plan, model: Model, flags: str) -> None:
    assert " ".join(export_plan(plan, model, "vllm").flags) == flags


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
        (make_plan(prefetch()), make_model("X", [dense_names(ATTENTION)] * 4), "how vLLM builds X"),
        (
            make_plan(prefetch("mlp")),
            make_model("KimiLinearForCausalLM", [dense_names(ATTENTION)] * 4),
            "KimiLinearForCausalLM",
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
    with pytest.raises(ExportError, match="keeps embeddings on the GPU"):
        export_plan(plan.model_copy(update={"offload": on_host}), qwen3(), engine)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_peer_as_the_store_is_refused(engine: str) -> None:
    plan = make_plan(prefetch())
    on_peer = plan.offload.model_copy(update={"store": "peer"})
    with pytest.raises(ExportError, match="offloads to host memory; the plan has a second"):
        export_plan(plan.model_copy(update={"offload": on_peer}), qwen3(), engine)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_packing_is_refused(engine: str) -> None:
    plan = make_plan(prefetch())
    packed = plan.offload.model_copy(update={"packing": Packing(group_size=1, num_in_group=1)})
    with pytest.raises(ExportError, match=r"holds every weight as it is .* `packing=False`"):
        export_plan(plan.model_copy(update={"offload": packed}), qwen3(), engine)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "vllm-worker"])
def test_drafts_are_refused(engine: str) -> None:
    plan = make_plan(prefetch())
    drafted = plan.offload.model_copy(update={"draft": Draft(kind="ngram", tokens=3)})
    with pytest.raises(ExportError, match=r"has `draft: ngram`, and offplan's own runtime alone"):
        export_plan(plan.model_copy(update={"offload": drafted}), qwen3(), engine)


def test_unknown_engine() -> None:
    with pytest.raises(ExportError, match="vllm, vllm-worker, sglang"):
        export_plan(make_plan(), qwen3(), "tgi")


def test_layers_that_do_not_divide_into_the_slots() -> None:
    uneven = make_plan(prefetch(group_size=1), prefetch_step=4)
    with pytest.raises(ExportError, match="a prefetch_step that divides 6, or a newer"):
        export_plan(uneven, qwen3(), "vllm==0.29.1")
    assert "4" in export_plan(uneven, qwen3(), "vllm==0.30").flags


@pytest.mark.parametrize(
    ("version", "lost"),
    [
        ("0.24.3", "offplan knows 0.25.0 to 0.33.0"),
        ("0.34", "what vLLM 0.34 does with its flags is not known"),
        ("newest", "write a version as vllm==0.31"),
        ("", "write a version as vllm==0.31"),
        ("0.32", "once for each token"),
    ],
)
def test_versions_that_cannot(version: str, lost: str) -> None:
    with pytest.raises(ExportError, match=lost):
        export_plan(make_plan(uva("experts")), deepseek(), f"vllm=={version}")


def test_the_second_runner_is_kept_from_ignoring_flags() -> None:
    plan = make_plan(prefetch(), prefetch_step=1)
    old, new = (export_plan(plan, qwen3(), f"vllm==0.{minor}") for minor in (27, 28))
    assert old.demand.environment == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert not new.demand.environment


def test_ungated_projections_keep_their_name() -> None:
    names = [name for name in dense_names(ATTENTION) if "gate_proj" not in name]
    model = make_model("NemotronForCausalLM", [names] * 4)
    assert export_plan(make_plan(prefetch("mlp.up_proj")), model, "vllm").flags[-1] == "mlp.up_proj"


def test_names_of_an_architecture() -> None:
    model = make_model("GptOssForCausalLM", [dense_names(ATTENTION)] * 4)
    assert export_plan(make_plan(prefetch("self_attn")), model, "vllm").flags[-1] == "attn"


def test_towers_would_be_read_in_place_first() -> None:
    model = qwen3()
    model = replace(model, towers=frozenset(tensor.name for tensor in model.outside))
    with pytest.raises(ExportError, match="what reads images"):
        export_plan(make_plan(uva("mlp")), model, "vllm")
    assert export_plan(make_plan(uva("mlp")), model, "vllm==0.28").flags
    assert export_plan(make_plan(prefetch("mlp")), model, "vllm").flags


def test_copies_never_cross_the_end_of_a_breakable_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FACTS, "breakable", ["Qwen3ForCausalLM"])
    with pytest.raises(ExportError, match="breakable CUDA graphs"):
        export_plan(make_plan(prefetch()), qwen3(), "vllm")
    assert export_plan(make_plan(uva()), qwen3(), "vllm").flags


def test_forms_that_loading_lays_out_anew_are_refused() -> None:
    model = with_form(deepseek(), Form(Kind.NF4))
    with pytest.raises(ExportError, match="of layer 1, stored as nf4"):
        export_plan(make_plan(prefetch("experts")), model, "vllm")
    model = with_form(deepseek(), Form(Kind.FP8_BLOCK, (128, 128)))
    assert export_plan(make_plan(prefetch("experts")), model, "vllm").flags
    with pytest.raises(ExportError, match="stored as fp8_block, out anew"):
        export_plan(make_plan(uva("experts")), model, "vllm")


def test_experts_of_mxfp4_are_rounded_up_by_their_kernels() -> None:
    """From 240 to 256, by 120 to 128: 16 more of 225 parts, those that stay included."""
    model = with_form(deepseek(3), Form(Kind.MXFP4, (1, 32)))
    plan = make_plan(prefetch("experts"), prefetch_step=1)
    said = export_plan(plan, model, "vllm").demand
    assert said.flags["moe-backend"] == ("marlin",)
    assert {each.name.rpartition(".")[2]: each.nbytes for each in said.moved} == {
        "w13_weight": 2 * 4 * 2048 * 256 * 128 // (240 * 120),
        "w2_weight": 4 * 2048 * 256 * 128 // (240 * 120),
    }
    # one layer moves into its slot, the other stays
    assert said.more_gpu_bytes == pytest.approx(2 * 3 * 4 * 2048 * (256 * 128 / 240 / 120 - 1), 1)
    with pytest.raises(ExportError, match="stored as mxfp4, out anew"):
        export_plan(plan, model, "vllm==0.32")
    with pytest.raises(ExportError, match="stored as mxfp4, out anew"):
        export_plan(make_plan(uva("experts")), model, "vllm")


def with_form(model: Model, form: Form) -> Model:
    """The model with its experts stored in a form, of hidden size 240 and intermediate size 120."""

    def store(parameter: Parameter) -> Parameter:
        if not parameter.is_expert:
            return parameter
        shape = (240, 120) if "down_proj" in parameter.name else (120, 240)
        return replace(parameter, form=form, logical_shape=shape)

    layers = [replace(each, parameters=tuple(map(store, each.parameters))) for each in model.layers]
    return replace(model, layers=tuple(layers))


def test_latent_attention_keeps_a_copy_of_kv_b_proj() -> None:
    plain, loaded = (hold_whole(deepseek(), find_runner(engine)) for engine in (None, "vllm"))
    # 7 layers of KIB weights of two bytes
    assert loaded.loaded_bytes - plain.loaded_bytes == 7 * 2 * 1024
    full = make_plan(prefetch("experts"), prefetch_step=1)
    memory = full.prediction.gpu_memory.model_copy(update={"total_bytes": 2**30})
    prediction = full.prediction.model_copy(update={"gpu_memory": memory})
    full = full.model_copy(update={"prediction": prediction})
    assert export_plan(full, deepseek(), "vllm").notes  # less than is printed
    tight = full.model_copy(update={"budget": Budget(gpu_memory=2**30 - 2**21)})
    with pytest.raises(ExportError, match="vLLM takes 14 KiB more of GPU memory"):
        export_plan(tight, deepseek(), "vllm")


def test_pages_are_locked_in_powers_of_two() -> None:
    # w13 of 2 x 4 x 2 KiB and w2 of 8 KiB stay; gate_up_proj of 4 KiB and down_proj of 2, too
    plan = make_plan(prefetch("experts", "q_a_proj", "kv_a_proj_with_mqa"), prefetch_step=1)
    said = export_plan(plan, deepseek(6), "vllm").demand
    assert said.pinned_bytes == 3 * (16 + 8 + 4) * 1024
    three = replace(said.moved[0], nbytes=3000)
    assert EngineDemand(moved=(three, three)).pinned_bytes == 2 * 4096
    tight = plan.model_copy(update={"budget": Budget(gpu_memory=2**30, host_memory=80 * 1024)})
    with pytest.raises(ExportError, match="page-locks 84 KiB, each parameter rounded up"):
        export_plan(tight, deepseek(6), "vllm")


def test_a_slot_has_a_buffer_for_each_shape() -> None:
    """Of layers that differ vLLM has both: a dense MLP's beside the experts'."""
    said = export_plan(
        make_plan(prefetch(group_size=1), prefetch_step=1), deepseek(2), "vllm"
    ).demand
    dense = sum(p.nbytes for p in said.moved if p.layer == 0 and p.name.startswith("mlp."))
    assert said.more_gpu_bytes == dense == 6 * 1024


def test_notes() -> None:
    notes = export_plan(make_plan(up_to("30KiB")), qwen3(), "vllm").notes
    assert "within layer 1, where the bytes run out" in notes[0]
    assert "up to 10 KiB more" in notes[0]
    assert "vLLM serves one sequence at a time" in notes[1]
    assert "page-locks up to" in notes[2]


@given(st.sampled_from([qwen3(), deepseek()]), st.integers(1, 200), st.randoms())
@pytest.mark.slow
def test_vllm_never_leaves_more_on_the_gpu(model: Model, kib: int, random: Random) -> None:
    """In whatever order it has a layer's parameters, and however many of them it takes."""
    rule = up_to(f"{kib}KiB")
    said = export_plan(make_plan(rule), model, "vllm").demand
    planned = sum(slab.nbytes for slab in place_rules(model, [rule], 1).slabs)
    limit = int(float(said.flags["cpu-offload-gb"][0]) * 2**30)
    parameters = list(engine_parameters(hold(model), {}))
    random.shuffle(parameters)
    taken: list[EngineParameter] = []
    for each in sorted(parameters, key=lambda each: each.layer):
        if sum(p.nbytes for p in taken) < limit:
            taken.append(each)
    assert sum(p.nbytes for p in taken) >= planned
    assert set(taken) <= set(said.moved)


def read_prefetch_flags(said: EngineDemand, model: Model) -> set[tuple[int, str]]:
    """Offload what vLLM would: (layer, checkpoint name) of each parameter."""
    group, number = (
        int(said.flags[f"offload-{name}"][0]) for name in ("group-size", "num-in-group")
    )
    segments = said.flags.get("offload-params", ())
    return {
        (each.layer, parameter.name)
        for each in engine_parameters(hold(model), {})
        if each.layer % group >= group - number
        and (not segments or any(f".{s}." in f".{each.name}." for s in segments))
        for parameter in each.parameters
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


@pytest.mark.slow
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
        said = export_plan(make_plan(rule, prefetch_step=1), model, "vllm").demand
    except (PlanError, ExportError):  # a rule that takes nothing, or a part of what is fused
        return
    placed = {
        (slab.layer, parameter.name)
        for slab in placement.slabs
        for entry in slab.entries
        for parameter in entry.unit.parameters
    }
    assert read_prefetch_flags(said, model) == placed
    assert {(each.layer, p.name) for each in said.moved for p in each.parameters} == placed


def test_segments_never_match_more_than_wanted() -> None:
    wanted = {"mlp.gate_up_proj.weight", "mlp.down_proj.weight"}
    unwanted = {"mlp.shared_experts.gate_up_proj.weight", "mlp.shared_experts.down_proj.weight"}
    segments = choose_segments(["mlp"], wanted, unwanted)
    assert segments == ["mlp.down_proj", "mlp.gate_up_proj"]
