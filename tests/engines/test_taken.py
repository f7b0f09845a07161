"""What a plan takes of vLLM's own parameters, and what a worker there refuses."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import yaml

from offplan.capabilities.packing import Packing
from offplan.capabilities.ranks import Ranks
from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.checkpoint.parameter import Parameter
from offplan.engines.export import export_plan, render_export
from offplan.engines.runner import find_runner, lower
from offplan.engines.taken import Taken
from offplan.engines.worker import find_taken
from offplan.errors import ExportError, PlanError
from offplan.forms.form import Component, Form, Kind
from offplan.forms.host_kernels import parts_of
from offplan.held.packing import pack_everything, pack_stage
from offplan.plan import Backend, Goal, Plan, Rule
from tests.engines.builders import (
    deepseek,
    make_plan,
    prefetch,
    qwen3,
    streamed_then_read,
    up_to,
    uva,
)
from tests.held import is_packed

NEWEST = (0, 33, 0)
MODELS = Path(__file__).parents[1] / "models"
KIB = 1024


def take(plan: Plan, model: Model) -> Taken:
    return find_taken(plan, model, NEWEST)


def names(taken: Taken, backend: Backend) -> list[list[str]]:
    return [
        sorted(name for name, parameter in layer.items() if parameter.backend is backend)
        for layer in taken.layers
    ]


def test_two_backends_in_one_layer() -> None:
    taken = take(make_plan(prefetch("mlp"), uva("o_proj", group_size=4)), qwen3())
    mlp = ["mlp.down_proj.weight", "mlp.gate_up_proj.weight"]
    assert names(taken, Backend.PREFETCH) == [[], mlp, [], mlp, [], mlp]
    assert names(taken, Backend.UVA) == [[], [], [], ["self_attn.o_proj.weight"], [], []]
    assert taken.layers[1]["mlp.gate_up_proj.weight"].nbytes == 4 * KIB
    assert (taken.num_slots, taken.ring_bytes) == (2, 12 * KIB)
    assert taken.streams
    assert not taken.reads_experts


def test_layers_that_stream_unlike_parameters_have_buffers_of_their_own() -> None:
    taken = take(make_plan(prefetch("o_proj"), prefetch("down_proj", group_size=3)), qwen3())
    assert taken.ring_bytes == 2 * 4 * KIB


def test_a_rule_for_bytes() -> None:
    taken = take(make_plan(up_to("5KiB", "o_proj")), qwen3())
    assert [len(layer) for layer in taken.layers] == [1, 1, 1, 0, 0, 0]
    assert not taken.streams


def test_a_fused_parameter_within_which_the_bytes_run_out_is_taken() -> None:
    taken = take(make_plan(up_to("3KiB", "self_attn.q_proj", "k_proj", "v_proj")), qwen3())
    assert taken.layers[0]["self_attn.qkv_proj.weight"].nbytes == 6 * KIB
    assert not any(taken.layers[1:])


def test_experts_in_place() -> None:
    taken = take(make_plan(uva("experts")), deepseek())
    experts = [f"mlp.experts.routed_experts.{name}_weight" for name in ("w13", "w2")]
    assert names(taken, Backend.UVA) == [[], *[experts] * 6]
    assert taken.reads_experts


def test_plans_that_take_unlike_things_have_unlike_fingerprints() -> None:
    one, other = (take(make_plan(rule), qwen3()) for rule in (prefetch("mlp"), uva("mlp")))
    assert one.fingerprint == take(make_plan(prefetch("mlp")), qwen3()).fingerprint
    assert one.fingerprint != other.fingerprint


def test_the_embedding_on_the_host() -> None:
    model = qwen3()
    head = model.outside[0]._replace(name="lm_head.weight")
    model = replace(model, outside=(*model.outside, head))
    offload = make_plan().offload.model_copy(update={"embeddings": "host"})
    plan = make_plan().model_copy(update={"offload": offload})
    taken = take(plan, model)
    assert taken.embedding == model.outside[0]
    assert "by row" in taken.describe()
    assert export_plan(plan, model, "vllm-worker").demand.pinned_bytes == 2 * KIB**2


def test_other_tables_on_the_host_are_refused() -> None:
    model = qwen3()
    table = model.outside[0]._replace(name="model.embed_tokens_per_layer.weight")
    config = {**model.config, "model_type": "gemma4_text"}
    model = replace(model, config=config, outside=(*model.outside, table))
    offload = make_plan().offload.model_copy(update={"embeddings": "host"})
    with pytest.raises(ExportError, match=r"input embedding alone.* embed_tokens_per_layer on the"):
        take(make_plan().model_copy(update={"offload": offload}), model)


def test_a_worker_is_started_with_the_plan_and_what_it_needs(tmp_path: Path) -> None:
    """Graphs in one piece where anything streams, kernels that read experts in place once."""
    export = export_plan(
        make_plan(prefetch("self_attn"), uva("experts")), deepseek(), "vllm-worker", file=tmp_path
    )
    assert export.command[-8:] == [
        *("--worker-cls", "offplan.vllm.Worker"),
        *("--compilation-config", '{"cudagraph_mode": "FULL_DECODE_ONLY"}'),
        *("--moe-backend", "triton"),
        *("--additional-config", json.dumps({"offplan": str(tmp_path)})),
    ]
    assert "pip install '.[vllm]'" in export.notes[0]
    read = export_plan(make_plan(uva("mlp")), qwen3(), "vllm-worker", file=tmp_path)
    assert "compilation-config" not in read.options
    nothing = export_plan(make_plan(), qwen3(), "vllm-worker", file=tmp_path)
    assert not nothing.flags
    assert "offplan" not in render_export(nothing, "docker"), "the engine's own image does"
    said = yaml.safe_load(render_export(export, "yaml"))
    assert json.loads(said["additional-config"]) == {"offplan": str(tmp_path)}


REFUSED = {
    "in different places": make_plan(prefetch("q_proj")),
    "self_attn.k_proj.weight resident": make_plan(prefetch("q_proj", "v_proj")),
    "q_proj.weight prefetch": make_plan(prefetch("q_proj"), uva("k_proj", "v_proj", group_size=2)),
    "rule 1 is prefetch in prefill and uva in decode": make_plan(streamed_then_read("mlp")),
}


@pytest.mark.parametrize(("message", "plan"), REFUSED.items(), ids=REFUSED)
def test_refused(message: str, plan: Plan) -> None:
    with pytest.raises(ExportError, match=message):
        take(plan, qwen3())


def test_a_peer_as_the_store_is_refused() -> None:
    plan = make_plan(prefetch("mlp"))
    on_peer = plan.offload.model_copy(update={"store": "peer"})
    with pytest.raises(ExportError, match="a second GPU's memory"):
        take(plan.model_copy(update={"offload": on_peer}), qwen3())


def read_qwen3(
    folder: Path,
    *,
    num_layers: int = 3,
    num_kv_heads: int = 2,
    vocabulary: int = 320,
    is_tied: bool = False,
) -> Model:
    """A small model whose matrices can be packed."""
    data = json.loads((MODELS / "qwen3-8b" / "config.json").read_text())
    data |= {"num_attention_heads": 4, "num_key_value_heads": num_kv_heads, "head_dim": 32}
    data |= {
        "hidden_size": 128,
        "intermediate_size": 256,
        "vocab_size": vocabulary,
        "num_hidden_layers": num_layers,
        "tie_word_embeddings": is_tied,
    }
    data["layer_types"] = data["layer_types"][:num_layers]
    (folder / "config.json").write_text(json.dumps(data))
    return open_model(str(folder / "config.json"))


def pack(plan: Plan, packing: Packing | None) -> Plan:
    return plan.model_copy(update={"offload": plan.offload.model_copy(update={"packing": packing})})


def test_parts_of_move_one_by_one(tmp_path: Path) -> None:
    """A matrix that vLLM fuses has room for the patches of one: less than those of its three."""
    model = read_qwen3(tmp_path)
    plan = pack(make_plan(prefetch("self_attn", group_size=2)), pack_everything(model))
    taken = take(plan, model)
    sizes = parts_of((256, 128))
    expected = {
        f"self_attn.qkv_proj.weight_{name}": prod(sizes[part][1]) * (4 if "patch" in name else 1)
        for name, part in zip(
            ("packed", "exponent", "base", "patches", "patch_blocks"), sizes, strict=True
        )
    }
    found = {n: p.nbytes for n, p in taken.layers[1].items() if "qkv_proj" in n}
    assert found == expected
    assert taken.packed[0].items() >= expected.items(), "what stays is verified too"
    assert "self_attn.q_norm.weight" in taken.layers[1]
    assert taken.packs_head
    assert taken.packs("model.layers.1.mlp.gate_up_proj")
    assert not taken.packs("model.layers.1.mlp.gate")
    assert not taken.packs("model.layers.7.mlp.gate_up_proj")
    assert "of the layers, and the output head, are packed" in taken.describe()
    export = export_plan(plan, model, "vllm-worker", file=tmp_path / "plan.yaml")
    assert export.options["quantization"] == ("offplan_packed",)
    plain = take(pack(plan, None), model)
    assert not plain.packs_any
    assert plain.fingerprint != taken.fingerprint


@pytest.mark.parametrize("ranks", [Ranks(), Ranks(1, 2)], ids=lambda r: r.label)
def test_a_tied_head_stays_as_it_is_stored(ranks: Ranks, tmp_path: Path) -> None:
    """vLLM gathers the rows of the matrix: offplan's own runtime alone has them packed."""
    model = read_qwen3(tmp_path, num_layers=4, is_tied=True)
    goal = Goal(
        engine="vllm-worker", tensor_parallel=ranks.tensor, pipeline_parallel=ranks.pipeline
    )
    stages, runner = lower(model, goal), find_runner(goal.engine)
    assert not any(pack_everything(stage, runner=runner).output_head for stage in stages)
    packing = pack_everything(model)
    assert packing.output_head
    for stage in stages:
        with pytest.raises(PlanError, match="cannot be packed: vllm-worker builds it as it is"):
            pack_stage(stage, packing, runner)


def test_packing_in_part_is_what_the_plan_says(tmp_path: Path) -> None:
    model = read_qwen3(tmp_path)
    some = Packing(group_size=2, num_in_group=1, leave_unpacked=("mlp.down_proj",))
    taken = take(pack(make_plan(), some), model)
    assert [any(layer) for layer in taken.packed] == [False, True, False]
    assert taken.packs("model.layers.1.self_attn.o_proj")
    assert not taken.packs("model.layers.1.mlp.down_proj")
    assert not taken.packs_head


@pytest.mark.parametrize("ranks", [Ranks(2), Ranks(1, 2), Ranks(2, 2)], ids=lambda r: r.label)
def test_ranks_pack_their_own_shares(ranks: Ranks, tmp_path: Path) -> None:
    """Sizes are those of a share; a stage counts layers anew, but for those that stay by name."""
    model = read_qwen3(tmp_path, num_layers=4, num_kv_heads=4, vocabulary=384)
    some = Packing(
        group_size=2, num_in_group=1, output_head=True, leave_unpacked=("3.mlp.down_proj",)
    )
    goal = Goal(
        engine="vllm-worker", tensor_parallel=ranks.tensor, pipeline_parallel=ranks.pipeline
    )
    plan = pack(make_plan(prefetch("mlp")), some).model_copy(update={"goal": goal})
    last = find_taken(plan, model, NEWEST, ranks, ranks.pipeline - 1)
    assert last.packs_head
    assert last.first_layer == (0 if ranks.pipeline == 1 else 2)
    assert last.packs("model.layers.3.mlp.gate_up_proj")
    assert not last.packs("model.layers.3.mlp.down_proj")
    assert not last.packs("model.layers.2.mlp.gate_up_proj")
    held = last.packed[3 - last.first_layer]
    sizes = parts_of((2 * 256 // ranks.tensor, 128))
    assert held["mlp.gate_up_proj.weight_packed"] == prod(sizes[Component.WEIGHT][1])
    sizes = parts_of((128, 128 // ranks.tensor))
    assert held["self_attn.o_proj.weight_exponent"] == prod(sizes[Component.EXPONENT][1])
    if ranks.pipeline > 1:
        first = find_taken(plan, model, NEWEST, ranks, 0)
        assert first.packs("model.layers.1.mlp.down_proj")
        assert not first.packs_head
        assert not first.packs("model.layers.3.mlp.gate_up_proj")


def test_what_a_share_is_too_small_for_stays(tmp_path: Path) -> None:
    """Of two ranks each has 32 rows of keys, and of what vLLM fuses nothing is packed then."""
    model = read_qwen3(tmp_path)
    goal = Goal(engine="vllm-worker", tensor_parallel=2)
    (stage,), runner = lower(model, goal), find_runner(goal.engine)
    packing = pack_everything(stage, runner=runner)
    assert not packing.output_head, "160 rows"
    packed = pack_stage(stage, packing, runner)
    names = {p.name for layer in packed.layers for p in layer.parameters if is_packed(p)}
    of_mlp = {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert names == {"self_attn.o_proj.weight"} | of_mlp
    plan = pack(make_plan(), packing).model_copy(update={"goal": goal})
    assert find_taken(plan, model, NEWEST, Ranks(2)).packs("model.layers.0.mlp.gate_up_proj")
    whole = pack(make_plan(), pack_everything(model)).model_copy(update={"goal": goal})
    with pytest.raises(PlanError, match=r"head of .* cannot be packed: .*\[160, 128\]"):
        find_taken(whole, model, NEWEST, Ranks(2))


def test_packing_part_of_what_vllm_fuses_is_refused(tmp_path: Path) -> None:
    some = Packing(group_size=1, num_in_group=1, leave_unpacked=("mlp.up_proj",))
    message = "gate_up_proj.weight of layer 0 as one matrix.* .leave_unpacked=mlp.gate_proj"
    with pytest.raises(ExportError, match=message):
        take(pack(make_plan(), some), read_qwen3(tmp_path))


KEPT = {"decode": "uva", "cached_experts": 2}
UNKNOWN = {
    "keeps 2 experts .*cached_experts.* worker in vLLM does not do: .* `engine`": KEPT,
    "keeps 2 experts .*cached_experts.* `engine`": KEPT | {"decode": "host"},
    "has the backend host, which .* worker in vLLM does not have: .* `engine`": {"decode": "host"},
    "experts in 2 parts .* worker in vLLM does not do: .* `engine`": {
        "prefill": "prefetch",
        "decode": "uva",
        "parts": 2,
    },
}


@pytest.mark.parametrize(("message", "how"), UNKNOWN.items(), ids=UNKNOWN)
def test_what_offplans_own_runtime_alone_does_is_refused_by_name(
    message: str, how: dict[str, object]
) -> None:
    said = {"cpu_offload_params": ["experts"], "prefill": "prefetch", "group_size": 1, **how}
    rule = Rule.model_validate({**said, "num_in_group": 1})
    for model in (deepseek(), replace(deepseek(), experts=None)):
        with pytest.raises(ExportError, match=message):
            take(make_plan(rule), model)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            "vllm",
            r"--for vllm-worker --gpu-memory 1GiB\), or start vLLM with --tensor-parallel-size 2$",
        ),
        ("sglang", r"for --tp 2 of sglang, .* --gpu-memory 1GiB\)$"),
    ],
)
def test_plans_for_other_ranks_are_refused(engine: str, message: str) -> None:
    goal = Goal(engine=engine, tensor_parallel=2)
    with pytest.raises(ExportError, match=message):
        take(make_plan(prefetch("mlp")).model_copy(update={"goal": goal}), qwen3())


def test_forms_are_refused() -> None:
    def store(parameter: Parameter) -> Parameter:
        return replace(parameter, form=Form(Kind.MXFP4)) if parameter.is_expert else parameter

    model = deepseek()
    layers = [replace(x, parameters=tuple(map(store, x.parameters))) for x in model.layers]
    model = replace(model, layers=tuple(layers))
    with pytest.raises(ExportError, match="MXFP4, whose sizes vLLM rounds up"):
        take(make_plan(prefetch("experts")), model)
    with pytest.raises(ExportError, match="out anew when it loads"):
        take(make_plan(uva("experts")), model)


def test_a_ring_beyond_the_budget_is_refused() -> None:
    plan = make_plan(prefetch("o_proj"), prefetch("down_proj", group_size=3))
    terms = plan.prediction.gpu_memory.model_copy(update={"total_bytes": 8 * KIB})
    plan = plan.model_copy(
        update={
            "prediction": plan.prediction.model_copy(update={"gpu_memory": terms}),
            "budget": plan.budget.model_copy(update={"gpu_memory": 9 * KIB}),
        }
    )
    with pytest.raises(ExportError, match="more of GPU memory"):
        take(plan, qwen3(5))


def test_page_locked_memory_beyond_the_budget_is_refused() -> None:
    plan = make_plan(prefetch("mlp"))
    budget = plan.budget.model_copy(update={"host_memory": 17 * KIB})
    with pytest.raises(ExportError, match="page-locks 18"):
        take(plan.model_copy(update={"budget": budget}), qwen3())
