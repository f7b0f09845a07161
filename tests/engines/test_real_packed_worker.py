"""Packed weights under the worker, held against the real package: a real checkpoint is loaded.

On the CPU, which plays the GPU and the host: what is there is a layer's own memory and its copy.
"""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from offplan.backends import Backend
from offplan.capabilities.packing import Packing, Unpacked
from offplan.capabilities.ranks import Ranks
from offplan.checkpoint.open import open_model
from offplan.engines.engine import join_flags
from offplan.engines.runner import find_runner
from offplan.engines.startup import read_log
from offplan.engines.taken import StageTaken
from offplan.engines.vllm import FACTS, VLLM
from offplan.errors import DriftError, ExportError, PlanError
from offplan.held.packing import pack_everything, pack_stage
from offplan.plan import Plan, Rule
from offplan.upkeep.engine_start import check_start
from tests.engines import real_vllm
from tests.engines.builders import make_plan, prefetch, uva
from tests.engines.real_packed import (
    MODELS,
    load,
    load_planned,
    register,
    run_ranks,
    save,
    stand_in,
    values_by_layer,
    values_of,
    write_plan,
)
from tests.engines.real_vllm import WITH_TOWERS
from tests.held import hold_by

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs the package vllm"),
]


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of packed weights, registered with vLLM."""
    return register(monkeypatch)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The worker's module where what CUDA does happens at once, in this process's memory."""
    from vllm.model_executor.offloader import set_offloader

    yield stand_in(monkeypatch)
    set_offloader(None)


RULES = {
    "nothing": (),
    "prefetch": (prefetch("mlp", group_size=1),),
    "in place": (uva("self_attn", group_size=1),),
    "both": (prefetch("mlp", group_size=1), uva("self_attn", group_size=2)),
    "some layers": (prefetch("mlp", group_size=2),),
    "whole layers": (prefetch(group_size=1),),
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("family", MODELS)
def test_what_the_plan_packs_lies_where_the_plan_has_it(
    family: str,
    rules: tuple[Rule, ...],
    tmp_path: Path,
    worker: Any,
    packed: Any,
) -> None:
    """Every parameter, its bytes and its bits; copies of the ring are those of the layer."""
    save(family, tmp_path, num_hidden_layers=4)
    (whole,) = hold_by(open_model(str(tmp_path)), "vllm-worker")
    plain = load(tmp_path, quantised=False)
    plan = write_plan(tmp_path, pack_everything(whole, runner=find_runner("vllm-worker")), *rules)
    model, offloader = load_planned(worker, tmp_path)
    offloader.verify()
    taken = offloader._taken
    for index, layer in enumerate(offloader._layers):
        held = {n: p for n, p in layer.named_parameters() if "_packed" in n}
        assert held.keys() == {n for n in taken.packed[index] if n.endswith("_packed")}
    assert any(taken.packed)
    assert hasattr(model.lm_head, "weight_packed") == taken.packs_head
    got = values_by_layer(packed, offloader)
    hold_against(got, [values_of(packed, layer) for layer in plain.model.layers])
    for backend in (Backend.PREFETCH, Backend.UVA):
        moves = (rule for rule in plan.offload.rules if rule.decode is backend)
        if family == "gpt_oss":  # whose experts are not packed
            moves = (rule for rule in moves if rule.cpu_offload_params != ("mlp",))
        wants = any(moves)
        assert (
            any(
                name.endswith("_packed")
                for layer in taken.layers
                for name, p in layer.items()
                if p.backend is backend
            )
            == wants
        )


def test_the_embedding_is_read_in_place_beside_a_packed_head(tmp_path: Path, worker: Any) -> None:
    save("llama", tmp_path, num_hidden_layers=4)
    (whole,) = hold_by(open_model(str(tmp_path)), "vllm-worker")
    write_plan(
        tmp_path, pack_everything(whole, runner=find_runner("vllm-worker")), embeddings="host"
    )
    model, offloader = load_planned(worker, tmp_path)
    offloader.verify()
    assert offloader._taken.packs_head
    moved = {n for n, p in model.named_parameters() if hasattr(p, "_vllm_is_uva_offloaded")}
    assert moved == {"model.embed_tokens.weight"}


RANKS = (("llama", Ranks(2)), ("qwen3_moe", Ranks(2, expert=2)), ("deepseek_v3", Ranks(2)))


@pytest.mark.parametrize(("family", "ranks"), RANKS)
def test_each_of_two_ranks_holds_its_shards_where_the_plan_has_them(
    family: str, ranks: Ranks, tmp_path: Path
) -> None:
    """Both load the checkpoint, each in a process: their own bytes, and every bit of them."""
    save(family, tmp_path, num_hidden_layers=4, vocab_size=384)
    rules = prefetch("mlp", group_size=2), uva("self_attn", group_size=1)
    write_plan(tmp_path, pack_everything(open_model(str(tmp_path))), *rules, ranks=ranks)
    code = (
        "model, offloader = real_packed.load_planned("
        "real_packed.stand_in(monkeypatch), folder, rank)\n"
        "offloader.verify()\n"
        "result = real_packed.values_by_layer(packed, offloader), offloader._taken.packed\n"
    )
    held = run_ranks(code, tmp_path)
    words = ["serve", str(tmp_path), "--max-model-len", "64", "--dtype", "bfloat16"]
    code = (
        "model = real_vllm.load(real_vllm.parse_command(arguments), folder, rank)\n"
        "result = [real_packed.values_of(packed, layer) for layer in model.model.layers]\n"
    )
    plain = run_ranks(code, tmp_path, *words, *join_flags(VLLM.divide(ranks)))
    for (layers, parts), expected in zip(held, plain, strict=True):
        hold_against(layers, expected)
        assert all(parts)
        if family == "qwen3_moe":
            sizes = expected[0]["mlp.experts.routed_experts.w2_weight"].shape
            assert tuple(sizes) == (2, 128, 64)
    one, other = (layers[3]["self_attn.o_proj.weight"] for layers, _ in held)
    assert one.shape == other.shape == (128, one.shape[1])
    assert not torch.equal(one, other)


def test_the_log_of_two_ranks_is_held_against_the_plan(tmp_path: Path) -> None:
    """What the worker itself writes, by vLLM's own loggers, once it has loaded its shard."""
    save("llama", tmp_path, num_hidden_layers=4, vocab_size=384)
    rules = prefetch("mlp", group_size=2), uva("self_attn", group_size=1)
    packing = pack_everything(open_model(str(tmp_path)))
    plan = write_plan(tmp_path, packing, *rules, ranks=Ranks(2))
    code = (
        "worker = real_packed.stand_in(monkeypatch)\n"
        "real_packed.start_worker(worker, folder, rank)\n"
        "result = None\n"
    )
    run_ranks(code, tmp_path)
    model, start = open_model(str(tmp_path)), "Initializing a V1 LLM engine (v0.33.0)\n"
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(2)]
    # which vLLM's runner of a GPU says
    loaded = "(Worker_TP0 pid=1) INFO Model loading took 0.01 GiB memory and 0.1 seconds\n"

    def judge(plan: Plan, *texts: str) -> set[str]:
        startup = read_log("vllm", "".join([start, loaded, *texts]))
        found = check_start(plan, model, "vllm-worker", startup)
        return {each.subject for each in found if each.verdict != "holds"}

    assert judge(plan, *logs) == set()
    assert judge(plan) == {"plan"}
    plain = plan.offload.model_copy(update={"packing": None})
    assert judge(plan.model_copy(update={"offload": plain}), *logs) == {"plan"}
    startup = read_log("vllm", "".join(logs))
    assert len(startup.in_force) == 2
    assert "KiB of the layers, and the output head, are packed" in startup.in_force[0]


@pytest.mark.parametrize("ranks", [Ranks(1, 2), Ranks(2, 2)], ids=lambda ranks: ranks.label)
def test_each_stage_packs_by_its_own_layers(
    ranks: Ranks, tmp_path: Path, worker: Any, packed: Any
) -> None:
    """Patterns start anew in each stage; what stays as it is stored goes by the whole model's."""
    save("llama", tmp_path, num_hidden_layers=4, vocab_size=384, num_key_value_heads=4)
    some = Packing(
        group_size=2, num_in_group=1, output_head=True, leave_unpacked=("3.mlp.down_proj",)
    )
    write_plan(tmp_path, some, prefetch("mlp", group_size=1), ranks=ranks)
    for stage in range(2):
        model, offloader = load_planned(worker, tmp_path, stage=stage)
        offloader.verify()
        layer = 2 * stage + 1
        names = {name for name, _ in model.named_parameters() if name.endswith("_packed")}
        expected = {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}
        expected -= {"mlp.down_proj"} if stage else set()
        head = {"lm_head.weight_packed"} if stage else set()
        assert names == {f"model.layers.{layer}.{name}.weight_packed" for name in expected} | head
        flags = join_flags(VLLM.divide(ranks))
        plain = load(tmp_path, *flags, quantised=False, stage=stage).model.layers
        built = [values_of(packed, each) for each in plain[2 * stage : 2 * stage + 2]]
        hold_against(values_by_layer(packed, offloader), built)


def hold_against(
    layers: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]
) -> None:
    """Hold the values of layers against others, bit by bit."""
    for got, wanted in zip(layers, expected, strict=True):
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)


PACKABLE = {
    **{"hidden_size": 128, "intermediate_size": 256, "vocab_size": 320, "head_dim": 64},
    **{"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
}
"""Sizes that can be packed."""
KNOWN = [name for name in (*FACTS["usual"], *FACTS["renamed"]) if name not in WITH_TOWERS]


@pytest.mark.parametrize("architecture", KNOWN)
def test_vllm_packs_exactly_what_the_plan_does(
    architecture: str, tmp_path: Path, packed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that can be packed of each architecture, as its classes are built on the meta device."""
    for name, size in PACKABLE.items():
        monkeypatch.setitem(real_vllm.SIZES, name, size)
    if architecture.startswith("Qwen3_5"):
        pytest.importorskip("torchvision")  # as vLLM's module of these models does
    model = open_model(str(real_vllm.write_config(tmp_path, architecture)))
    (stage,), runner = hold_by(model, "vllm-worker"), find_runner("vllm-worker")
    packing = pack_everything(stage, runner=runner)
    offload = make_plan().offload.model_copy(update={"packing": packing})
    if architecture == "GPT2LMHeadModel":  # which stores its matrices transposed
        with pytest.raises(PlanError, match="packing takes nothing"):
            pack_stage(stage, packing, runner)
        return
    taken = StageTaken.find(offload, pack_stage(stage, packing, runner), (0, 33, 0)).taken
    words = ["serve", str(tmp_path), "--max-model-len", "64", "--dtype", "bfloat16"]
    words += ["--load-format", "dummy", "--quantization", "offplan_packed"]
    config = real_vllm.parse_command(words)
    config.quant_config.taken = taken
    built = real_vllm.build(config, None, tmp_path)
    methods = packed.PackedLinear, packed.PackedExperts
    found = [
        name
        for name, module in built.named_modules()
        if isinstance(getattr(module, "quant_method", None), methods)
    ]
    heads = [name for name in found if not any(part.isdecimal() for part in name.split("."))]
    names = {
        (index, part.rpartition(".")[0]) for index, of in enumerate(taken.packed) for part in of
    }
    assert len(found) - len(heads) == len(names)
    assert len(heads) == taken.packs_head


def test_a_weight_that_needs_more_patches_than_the_plan_has_room_for(
    tmp_path: Path, worker: Any
) -> None:
    tensors = save("llama", tmp_path)
    tensors["model.layers.1.mlp.down_proj.weight"][:, 5] = 1e30
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    write_plan(tmp_path, pack_everything(open_model(str(tmp_path))))
    message = "mlp.down_proj.weight_patches of layer 1 takes .*--leave-unpacked"
    with pytest.raises(DriftError, match=message):
        load_planned(worker, tmp_path)
    left = pack_everything(open_model(str(tmp_path)), unpacked=Unpacked(("1.mlp.down_proj",)))
    write_plan(tmp_path, left, prefetch("mlp", group_size=1))
    model, offloader = load_planned(worker, tmp_path)
    offloader.verify()
    held = dict(model.named_parameters())
    assert "model.layers.1.mlp.down_proj.weight" in held
    assert "model.layers.0.mlp.down_proj.weight_packed" in held


def test_what_is_packed_beyond_the_plan_is_an_error(
    tmp_path: Path, worker: Any, packed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("llama", tmp_path)
    write_plan(tmp_path, Packing(group_size=2, num_in_group=1))
    monkeypatch.setattr(packed.PackedConfig, "taken", property(lambda _: None, lambda *_: None))
    with pytest.raises(DriftError, match="of layer 0 is packed, expected it as it is stored"):
        load_planned(worker, tmp_path)[1].verify()


@pytest.mark.parametrize(
    ("packs", "words", "message"),
    [
        (True, [], "no --quantization offplan_packed, by which the plan packs"),
        (False, ["--quantization", "offplan_packed"], "quantisation while loading"),
    ],
)
def test_the_option_and_the_plan_belong_together(
    packs: bool, words: list[str], message: str, tmp_path: Path, worker: Any
) -> None:
    save("llama", tmp_path)
    whole = pack_everything(open_model(str(tmp_path)))
    write_plan(tmp_path, whole if packs else None, prefetch("mlp", group_size=1))
    named = json.dumps({"offplan": str(tmp_path / "plan.yaml")})
    command = ["serve", str(tmp_path), "--dtype", "bfloat16", "--max-model-len", "64"]
    config = real_vllm.parse_command([*command, "--additional-config", named, *words])
    with pytest.raises(ExportError, match=message):
        worker.take_plan(config)
