"""What a plan takes of vLLM's own parameters, and what a worker there refuses."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import yaml

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.checkpoint.parameter import Parameter
from offplan.engines.export import export_plan
from offplan.engines.formats import render_export
from offplan.engines.taken import Taken
from offplan.engines.worker import find_taken
from offplan.errors import ExportError
from offplan.forms.form import Form, Kind
from offplan.forms.packed import packed_parts
from offplan.held.packing import pack_everything
from offplan.plan import Backend, Goal, Packing, Plan
from tests.engines.builders import (
    deepseek,
    make_plan,
    prefetch,
    qwen3,
    streamed_then_read,
    up_to,
    uva,
)

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


def read_qwen3(folder: Path) -> Model:
    """A model of three layers whose matrices can be packed."""
    data = json.loads((MODELS / "qwen3-8b" / "config.json").read_text())
    data |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    data |= {
        "hidden_size": 128,
        "intermediate_size": 256,
        "vocab_size": 320,
        "num_hidden_layers": 3,
    }
    data["layer_types"] = data["layer_types"][:3]
    (folder / "config.json").write_text(json.dumps(data))
    return open_model(str(folder / "config.json"))


def pack(plan: Plan, packing: Packing | None) -> Plan:
    return plan.model_copy(update={"offload": plan.offload.model_copy(update={"packing": packing})})


def test_packed_parts_move_one_by_one(tmp_path: Path) -> None:
    """A matrix that vLLM fuses has room for the patches of one: less than those of its three."""
    model = read_qwen3(tmp_path)
    plan = pack(make_plan(prefetch("self_attn", group_size=2)), pack_everything(model))
    taken = take(plan, model)
    sizes = packed_parts((256, 128))
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
    assert "of the layers are packed" in taken.describe()
    export = export_plan(plan, model, "vllm-worker", file=tmp_path / "plan.yaml")
    assert export.options["quantization"] == ("offplan_packed",)
    plain = take(pack(plan, None), model)
    assert not plain.packs_any
    assert plain.fingerprint != taken.fingerprint


def test_packing_in_part_is_what_the_plan_says(tmp_path: Path) -> None:
    model = read_qwen3(tmp_path)
    some = Packing(group_size=2, num_in_group=1, leave_unpacked=("mlp.down_proj",))
    taken = take(pack(make_plan(), some), model)
    assert [any(layer) for layer in taken.packed] == [False, True, False]
    assert taken.packs("model.layers.1.self_attn.o_proj")
    assert not taken.packs("model.layers.1.mlp.down_proj")
    assert not taken.packs_head


def test_packing_part_of_what_vllm_fuses_is_refused(tmp_path: Path) -> None:
    some = Packing(group_size=1, num_in_group=1, leave_unpacked=("mlp.up_proj",))
    message = "gate_up_proj.weight of layer 0 as one matrix.* --leave-unpacked mlp.gate_proj"
    with pytest.raises(ExportError, match=message):
        take(pack(make_plan(), some), read_qwen3(tmp_path))


def test_kept_experts_and_the_hosts_cores_are_refused_by_name() -> None:
    rules = {
        "keeps 2 experts .*cached_experts.* again with --for": uva("experts").model_copy(
            update={"cached_experts": 2}
        ),
        "has the backend host.* again with --for": uva("mlp").model_copy(
            update={"decode": Backend.HOST}
        ),
    }
    for message, rule in rules.items():
        plan = make_plan(uva("mlp"))
        offload = plan.offload.model_copy(update={"rules": (rule,)})
        with pytest.raises(ExportError, match=message):
            take(plan.model_copy(update={"offload": offload}), deepseek())


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
