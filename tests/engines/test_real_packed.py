"""Packed weights inside vLLM, held against the real package: its loader, its layers, real files.

On the CPU, where the values are expanded and multiplied in plain torch; the kernels have tests of
their own.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from offplan.errors import ExportError
from tests.engines.real_packed import (
    MODELS,
    ROOT,
    load,
    register,
    run_ranks,
    save,
    store_codes,
    values_of,
)

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs the package vllm"),
]

DENSE = {"gate_up_proj", "down_proj", "o_proj", "lm_head"}
OF_LATENTS = DENSE | {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "routed_experts"}
PACKED_MODULES = {
    "llama": DENSE | {"qkv_proj"},
    "qwen3": (DENSE | {"qkv_proj"}) - {"lm_head"},
    "qwen3_moe": {"qkv_proj", "o_proj", "lm_head", "routed_experts"},
    "deepseek_v2": OF_LATENTS,
    "deepseek_v3": OF_LATENTS,
    "gpt_oss": {"qkv_proj", "o_proj"},
}


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, registered with vLLM."""
    return register(monkeypatch)


def list_packed(model: Any) -> set[str]:
    """Return the last names of modules that hold packed weights, each once."""
    names = [name for name, _ in model.named_parameters() if name.endswith("_packed")]
    return {name.split(".")[-2] for name in names}


@pytest.mark.parametrize("family", MODELS)
def test_every_bit_is_what_vllm_loads(family: str, tmp_path: Path, packed: Any) -> None:
    save(family, tmp_path, vocab_size=300)  # vLLM pads the head, which no file fills
    model, plain = load(tmp_path), load(tmp_path, quantised=False)
    got, expected = values_of(packed, model), values_of(packed, plain)
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        filled = 300 if name.startswith("lm_head") else None
        assert torch.equal(got[name][:filled], values[:filled]), name
    assert list_packed(model) == PACKED_MODULES[family]
    assert {each.device.type for each in model.parameters()} == {"cpu"}


def test_experts_of_codes_stay_as_they_are_stored(
    tmp_path: Path, packed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of gpt-oss, which vLLM's own method of the checkpoint holds and multiplies."""
    save("gpt_oss", tmp_path)
    stored = store_codes(tmp_path)
    with caplog.at_level("INFO", "vllm.offplan"):
        model, plain = load(tmp_path), load(tmp_path, quantised=False)
    assert list_packed(model) == PACKED_MODULES["gpt_oss"]
    assert not list_packed(plain)
    assert "mlp.experts stays as it is stored: " in caplog.text
    got, expected = values_of(packed, model), values_of(packed, plain)
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(got[name], values), name
    held = got["model.layers.1.mlp.experts.routed_experts.w13_weight"]
    codes = stored["model.layers.1.mlp.experts.gate_up_proj_blocks"].flatten(2)
    _, rows, columns = codes.shape  # the kernels' sizes are larger
    assert torch.equal(held[:, :rows, :columns], codes)


def test_weights_that_no_loader_filled_are_an_error(
    tmp_path: Path, packed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss' own loader writes its experts past those of parameters, which nothing would pack."""
    save("gpt_oss", tmp_path)
    monkeypatch.setattr(
        packed.PackedConfig,
        "_of_experts",
        lambda _, layer, prefix: packed.PackedExperts(layer.moe_config, prefix),
    )
    with pytest.raises(ExportError, match=r"vLLM loaded 0 of \d+ weights of model.layers.0.mlp"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "more"),
    [("llama", []), ("qwen3_moe", []), ("qwen3_moe", ["--enable-expert-parallel"])],
    ids=["dense", "experts", "whole experts"],
)
def test_each_of_two_ranks_packs_its_shard(family: str, more: list[str], tmp_path: Path) -> None:
    save(family, tmp_path)
    words = ["serve", str(tmp_path), "--max-model-len", "64", "--dtype", "bfloat16"]
    words += ["--tensor-parallel-size", "2", *more]
    code = (
        "model = real_vllm.load(real_vllm.parse_command(arguments), folder, rank)\n"
        "result = real_packed.values_of(packed, model)"
    )
    plain = run_ranks(code, tmp_path, *words)
    held = run_ranks(code, tmp_path, *words, "--quantization", "offplan_packed")
    for of_plain, of_packed in zip(plain, held, strict=True):
        assert of_plain.keys() == of_packed.keys()
        for name, values in of_plain.items():
            assert torch.equal(of_packed[name], values), name
    split = [name for name in held[0] if name.endswith(("o_proj.weight", "w2_weight"))]
    assert split
    assert not any(torch.equal(held[0][name], held[1][name]) for name in split)


@pytest.mark.parametrize("num_rows", [1, 3, 70])
def test_a_linear_layer_multiplies_by_its_values(
    num_rows: int, tmp_path: Path, packed: Any
) -> None:
    save("llama", tmp_path)
    model = load(tmp_path)
    values, x = values_of(packed, model), torch.randn(num_rows, 128, dtype=torch.bfloat16)
    layers = {"model.layers.1.self_attn.qkv_proj": None, "model.layers.0.mlp.gate_up_proj": None}
    for name in (*layers, "lm_head"):
        layer = model.get_submodule(name)
        bias = torch.randn(len(values[f"{name}.weight"]), dtype=torch.bfloat16)
        for each in (None, bias):
            made = layer.quant_method.apply(layer, x, each)
            assert torch.equal(made, torch.nn.functional.linear(x, values[f"{name}.weight"], each))


def test_experts_multiply_by_their_values(tmp_path: Path, packed: Any) -> None:
    save("qwen3_moe", tmp_path)
    model = load(tmp_path)
    (name, layer), *_ = (
        (name, each)
        for name, each in model.named_modules()
        if isinstance(getattr(each, "quant_method", None), packed.PackedExperts)
    )
    w13, w2 = (values_of(packed, model)[f"{name}.{each}_weight"].float() for each in ("w13", "w2"))
    x, chosen = torch.randn(5, 128, dtype=torch.bfloat16), torch.randint(0, 4, (5, 2))
    shares = torch.rand(5, 2)
    made = layer.quant_method.apply(layer, x, shares, chosen, None, None)
    for token in range(5):
        expected = torch.zeros(128)
        for share, expert in zip(shares[token], chosen[token], strict=True):
            gate, up = (w13[expert] @ x[token].float()).chunk(2)
            expected += share * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
        assert torch.allclose(made[token].float(), expected, atol=0.02, rtol=0.02)


def test_a_head_is_filled_in_host_memory(
    tmp_path: Path, packed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever memory the others are made in; the GPU has no room for it unpacked."""
    from vllm.model_executor.model_loader.reload import layerwise

    made, materialize = {}, layerwise.materialize_layer

    def note(layer: Any, info: Any) -> None:
        made[type(layer).__name__] = info.restore_device
        info.restore_device = torch.device("cpu")
        materialize(layer, info)

    def record(model: Any) -> None:
        for module in model.modules():
            layerwise.get_layerwise_info(module).restore_device = torch.device("cuda")

    monkeypatch.setattr(layerwise, "materialize_layer", note)
    monkeypatch.setattr(
        "vllm.model_executor.model_loader.utils.record_metadata_for_reloading", record
    )
    save("llama", tmp_path)
    load(tmp_path)
    assert made.pop("ParallelLMHead") == torch.device("cpu")
    assert made
    assert {*made.values()} == {torch.device("cuda")}


class OnGpu(torch.Tensor):
    """Stands for a tensor of a GPU, where there is none."""

    is_cuda = True


@pytest.mark.parametrize(
    ("is_read", "num_pairs", "has_others", "told"),
    [
        (False, 4, False, (False, "whole")),
        (True, 4, False, (False, "gathered")),
        (True, 5, False, (True, "whole")),
        (True, 4, True, (True, "whole")),
    ],
)
def test_few_experts_in_host_memory_are_copied_first_and_of_many_nothing_crosses_twice(
    packed: Any,
    monkeypatch: pytest.MonkeyPatch,
    is_read: bool,
    num_pairs: int,
    has_others: bool,
    told: tuple[bool, str],
) -> None:
    """As the runtime reads them, by whose rules plans are priced."""
    from offplan.runtime.forms import gather, operators, pairs

    layer = SimpleNamespace(local_num_experts=4, expert_map=torch.arange(4) if has_others else None)
    for part in packed.PARTS:
        value = torch.nn.Parameter(torch.zeros(4, 1), requires_grad=False)
        if is_read:
            value._vllm_is_uva_offloaded = True
        setattr(layer, packed.name_part("w2_weight", part), value)
    begins = {"whole": torch.zeros(5), "gathered": torch.ones(5)}
    found = []

    def multiply(_: Any, parts: Any, x: Any, order: Any, starts: Any, *, in_place: bool) -> None:
        found.append((in_place, next(n for n, each in begins.items() if starts is each)))

    monkeypatch.setattr(pairs, "sort_pairs", lambda experts, _: (experts, experts, begins["whole"]))
    monkeypatch.setattr(gather, "gather", lambda parts, *_: (parts, begins["gathered"]))
    monkeypatch.setattr(operators, "multiply", multiply)
    experts = torch.zeros(num_pairs).as_subclass(OnGpu)
    packed._multiplier(layer, experts)("w2", experts)
    assert found == [told]


def test_ranks_multiply_by_their_own_experts(tmp_path: Path, packed: Any) -> None:
    """What two ranks make of whole experts, each of its half, adds up to what one makes of all."""
    save("qwen3_moe", tmp_path)
    layer = next(m for m in load(tmp_path).modules() if hasattr(m, "w13_weight_packed"))
    x, chosen = torch.randn(5, 128, dtype=torch.bfloat16), torch.randint(0, 4, (5, 2))
    shares = torch.rand(5, 2)
    made = []
    for experts in (range(4), range(1, 3), (0, 3)):
        numbers = torch.tensor([*experts])
        own = SimpleNamespace(**{n: p[numbers] for n, p in layer.named_parameters() if "_w" in n})
        own.local_num_experts, own.activation = len(numbers), layer.activation
        own.apply_router_weight_on_input, own.moe_config = False, layer.moe_config
        own.expert_map = torch.full((4,), -1, dtype=torch.int32)
        own.expert_map[numbers] = torch.arange(len(numbers), dtype=torch.int32)
        made.append(layer.quant_method.apply(own, x, shares, chosen, None, None).float())
    assert torch.allclose(made[0], made[1] + made[2], atol=0.02, rtol=0.02)
    assert made[1].any()


def test_what_cannot_be_packed_stays_and_is_listed(
    tmp_path: Path, packed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save("llama", tmp_path, intermediate_size=200)
    with caplog.at_level("INFO", "vllm.offplan"):
        model = load(tmp_path)
    assert list_packed(model) == {"qkv_proj", "o_proj", "down_proj", "lm_head"}
    assert "model.layers.0.mlp.gate_up_proj stays as it is stored: 400 rows of 128" in caplog.text


def test_weights_that_need_patches_are_packed_all_the_same(tmp_path: Path, packed: Any) -> None:
    tensors = save("llama", tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name][:, 5] = 1e30
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = load(tmp_path)
    assert torch.equal(values_of(packed, model)[name], tensors[name])


def test_another_type_is_refused(tmp_path: Path) -> None:
    save("llama", tmp_path)
    with pytest.raises(ValueError, match="float16 is not supported"):
        load(tmp_path, "--dtype", "float16")


def test_experts_under_data_parallelism_are_refused(packed: Any) -> None:
    moe = SimpleNamespace(moe_parallel_config=SimpleNamespace(dp_size=2))
    with pytest.raises(ExportError, match="under data parallelism: leave out --data-parallel-size"):
        packed.PackedConfig()._of_experts(SimpleNamespace(moe_config=moe), "experts")


def test_a_quantised_checkpoint_is_refused(packed: Any) -> None:
    with pytest.raises(ExportError, match=r"quantised already \(fp8\)"):
        packed.PackedConfig.from_config({"quant_method": "fp8"})


def test_a_quantised_checkpoint_does_not_take_the_place_of_the_option(
    tmp_path: Path, packed: Any
) -> None:
    """vLLM gives a checkpoint's own method to whoever asks for another, without a word."""
    save("llama", tmp_path)
    path = tmp_path / "config.json"
    stored = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stored}))
    with pytest.raises(ExportError, match=r"quantised already \(fp8\)"):
        load(tmp_path)


def test_other_versions_do_not_have_it(
    monkeypatch: pytest.MonkeyPatch, packed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def register(name: str) -> Any:
        raise AssertionError(name)

    monkeypatch.setattr(packed, "vllm_version", "0.34.0+cu130")
    monkeypatch.setattr(packed, "register_quantization_config", register)
    with caplog.at_level("WARNING", "vllm.offplan"):
        packed.register()
    assert "found vLLM 0.34.0+cu130" in caplog.text
    assert "0.33.0" in caplog.text


OF_WORKER = """
from contextlib import suppress
from types import SimpleNamespace
from vllm.v1.worker.worker_base import WorkerWrapperBase
config = SimpleNamespace(
    enable_trace_function_call_for_thread=lambda: None,
    parallel_config=SimpleNamespace(worker_cls="nowhere.Worker"),
)
with suppress(ImportError):
    WorkerWrapperBase().init_worker([{"vllm_config": config}])
"""
LOADS = {
    "a fresh process": "from vllm.plugins import load_general_plugins\nload_general_plugins()\n",
    "a worker's process": OF_WORKER,
}


@pytest.mark.parametrize("loads", LOADS.values(), ids=LOADS)
def test_vllm_finds_the_plugin_by_itself(loads: str, tmp_path: Path) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    point = text.partition('[project.entry-points."vllm.general_plugins"]\n')[2].split("\n")[0]
    folder = tmp_path / "offplan_as_built-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: offplan-as-built\nVersion: 0\n")
    found = point.replace('"', "")
    (folder / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{found}\n")
    code = (
        f"{loads}from vllm.model_executor.layers.quantization import get_quantization_config\n"
        "print(get_quantization_config('offplan_packed').__module__)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    told = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip().endswith("offplan.vllm_packed")
