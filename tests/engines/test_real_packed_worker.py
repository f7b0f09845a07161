"""Packed weights under the worker, held against the real package: a real checkpoint is loaded.

On the CPU, which plays the GPU and the host: what is there is a layer's own memory and its copy.
"""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from offplan.backends import Backend
from offplan.checkpoint.open import open_model
from offplan.engines.export import export_plan
from offplan.errors import DriftError, ExportError
from offplan.held.packing import pack_everything
from offplan.plan import Packing, Plan, Rule, Workload, dump_plan
from offplan.unpacked import Unpacked
from tests.engines import real_vllm
from tests.engines.builders import make_plan, prefetch, uva
from tests.engines.real_packed import load as load_alone
from tests.engines.real_packed import register, save, values_of

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
    from vllm.model_executor.offloader import prefetch as real
    from vllm.model_executor.offloader import set_offloader
    from vllm.model_executor.offloader import uva as real_uva

    import offplan.vllm as module

    class Stream:
        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    class OnOneDevice(real._ModuleOffloader):  # type: ignore[misc, name-defined]
        device = property(lambda self: "cpu", lambda self, device: None)

    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Stream)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list, raising=False)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(real, "_ModuleOffloader", OnOneDevice)
    monkeypatch.setattr(real_uva, "is_uva_available", lambda: True)
    monkeypatch.setattr(module, "should_pin_memory", lambda: True)
    monkeypatch.setattr(module, "UVAOffloader", InPlace)
    monkeypatch.setattr(module, "find_place", find_place)
    yield module
    set_offloader(None)


class InPlace:
    """Stands for vLLM's offloader of what is read in place, which moves nothing on a CPU."""

    uva_offloading = True

    def __init__(self, most: int) -> None: ...

    def wrap_modules(self, modules: Iterator[torch.nn.Module]) -> None:
        for module in modules:
            for parameter in module.parameters():
                parameter._vllm_is_uva_offloaded = True  # type: ignore[attr-defined]


def write_plan(folder: Path, packing: Packing | None, *rules: Rule, slots: int = 1) -> Plan:
    """Write a plan for the checkpoint of a folder, into it."""
    model, plan = open_model(str(folder)), make_plan(*rules, prefetch_step=slots)
    named = {"source": str(folder), "headers_sha256": model.headers_sha256}
    changes = {
        "model": plan.model.model_copy(update=named),
        "workload": Workload(prompt_tokens=32, output_tokens=16, context=64),
        "offload": plan.offload.model_copy(update={"packing": packing}),
    }
    plan = plan.model_copy(update=changes)
    (folder / "plan.yaml").write_text(dump_plan(plan))
    return plan


def load(worker: Any, folder: Path) -> tuple[Any, Any]:
    """Load a checkpoint as the exported command and the worker do; return model and offloader."""
    export = export_plan(folder / "plan.yaml", open_model(str(folder)), "vllm-worker")
    config = real_vllm.parse_command(export.command[1:])
    taken = worker.take_plan(config)
    config.quant_config.taken = taken
    offloader = worker.PlanOffloader(taken, lambda: None)
    model = real_vllm.load(config, folder, offloader=offloader)
    offloader.post_init()
    return model, offloader


RULES = {
    "nothing": (),
    "prefetch": (prefetch("mlp", group_size=1),),
    "in place": (uva("self_attn", group_size=1),),
    "both": (prefetch("mlp", group_size=1), uva("self_attn", group_size=2)),
    "some layers": (prefetch("mlp", group_size=2),),
    "whole layers": (prefetch(group_size=1),),
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_what_the_plan_packs_lies_where_the_plan_has_it(
    family: str,
    rules: tuple[Rule, ...],
    tmp_path: Path,
    worker: Any,
    packed: Any,
) -> None:
    """Every parameter, its bytes and its bits; copies of the ring are those of the layer."""
    save(family, tmp_path, num_hidden_layers=4)
    whole = open_model(str(tmp_path))
    plain = load_alone(tmp_path, quantised=False)
    plan = write_plan(tmp_path, pack_everything(whole), *rules)
    model, offloader = load(worker, tmp_path)
    offloader.verify()
    taken = offloader._taken
    for index, layer in enumerate(offloader._layers):
        held = {n: p for n, p in layer.named_parameters() if "_packed" in n}
        assert held.keys() == {n for n in taken.packed[index] if n.endswith("_packed")}
    assert any(taken.packed)
    assert hasattr(model.lm_head, "weight_packed") == taken.packs_head
    for each in offloader.module_offloaders:  # the ring holds one layer at a time
        each.start_onload_to_static()
        got = values_of(packed, each.module)
        index = offloader._layers.index(each.module)
        expected = values_of(packed, plain.model.layers[index])
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], expected[name]) for name in expected)
    for backend in (Backend.PREFETCH, Backend.UVA):
        wants = any(rule.decode is backend for rule in plan.offload.rules)
        assert (
            any(
                name.endswith("_packed")
                for layer in taken.layers
                for name, p in layer.items()
                if p.backend is backend
            )
            == wants
        )


def test_a_weight_that_needs_more_patches_than_the_plan_has_room_for(
    tmp_path: Path, worker: Any
) -> None:
    tensors = save("llama", tmp_path)
    tensors["model.layers.1.mlp.down_proj.weight"][:, 5] = 1e30
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    write_plan(tmp_path, pack_everything(open_model(str(tmp_path))))
    message = "mlp.down_proj.weight_patches of layer 1 takes .*--leave-unpacked"
    with pytest.raises(DriftError, match=message):
        load(worker, tmp_path)
    left = pack_everything(open_model(str(tmp_path)), unpacked=Unpacked(("1.mlp.down_proj",)))
    write_plan(tmp_path, left, prefetch("mlp", group_size=1))
    model, offloader = load(worker, tmp_path)
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
        load(worker, tmp_path)[1].verify()


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


def find_place(parameter: Any, held: Any, blocks: list[range]) -> str:
    """Say where a parameter lies where all memory is the CPU's."""
    if held is not None:
        return "copied through the ring" if parameter.data is not held._cpu_storage else "elsewhere"
    return "read in place" if hasattr(parameter, "_vllm_is_uva_offloaded") else "resident"
