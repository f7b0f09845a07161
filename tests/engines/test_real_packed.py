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
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from offplan.errors import ExportError
from tests.engines.real_packed import MODELS, load, register, save, values_of

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs the package vllm"),
]

ROOT = Path(__file__).parents[2]
DENSE = {"gate_up_proj", "down_proj", "o_proj", "lm_head"}
OF_LATENTS = DENSE | {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "routed_experts"}
PACKED_MODULES = {
    "llama": DENSE | {"qkv_proj"},
    "qwen3": (DENSE | {"qkv_proj"}) - {"lm_head"},
    "qwen3_moe": {"qkv_proj", "o_proj", "lm_head", "routed_experts"},
    "deepseek_v2": OF_LATENTS,
    "deepseek_v3": OF_LATENTS,
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


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_each_of_two_ranks_packs_its_shard(family: str, tmp_path: Path, packed: Any) -> None:
    save(family, tmp_path)
    plain, held = (load_ranks(tmp_path, more) for more in ([], ["--quantization", packed.NAME]))
    for of_plain, of_packed in zip(plain, held, strict=True):
        assert of_plain.keys() == of_packed.keys()
        for name, values in of_plain.items():
            assert torch.equal(of_packed[name], values), name
    one, other = held
    assert not torch.equal(
        *(rank["model.layers.0.self_attn.o_proj.weight"] for rank in (one, other))
    )


def load_ranks(folder: Path, more: list[str]) -> list[dict[str, torch.Tensor]]:
    """Load the two shards of a model, each in a process; return the values of what they hold."""
    words = ["serve", str(folder), "--max-model-len", "64", "--dtype", "bfloat16"]
    words += ["--tensor-parallel-size", "2", *more]
    code = (
        "import json, sys\nfrom pathlib import Path\nimport torch\n"
        "from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod\n"
        "from offplan import vllm_packed\n"
        "from tests.engines import real_packed, real_vllm\n"
        "words, folder, rank = json.loads(sys.argv[1])\n"
        "UnquantizedFusedMoEMethod._setup_kernel = lambda *_, **__: None\n"
        "vllm_packed.register()\n"
        "model = real_vllm.load(real_vllm.parse_command(words), Path(folder), rank)\n"
        "values = real_packed.values_of(vllm_packed, model)\n"
        "torch.save(values, Path(folder) / f'{rank}.pt')\n"
    )
    (folder / "store").unlink(missing_ok=True)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, json.dumps([words, str(folder), rank])],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    for process in started:
        _, told = process.communicate(timeout=300)
        assert process.returncode == 0, told[-2000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


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


@pytest.mark.parametrize(
    ("family", "more", "found"),
    [
        ("qwen3_moe", ["--enable-expert-parallel", "--tensor-parallel-size", "2"], "whole experts"),
        ("llama", ["--dtype", "float16"], "float16 is not supported"),
    ],
)
def test_what_it_does_not_do_is_refused(
    family: str, more: list[str], found: str, tmp_path: Path, packed: Any
) -> None:
    save(family, tmp_path)
    with pytest.raises((ExportError, ValueError), match=found):
        load(tmp_path, *more)


def test_a_quantised_checkpoint_is_refused(packed: Any) -> None:
    with pytest.raises(ExportError, match=r"quantised already \(fp8\)"):
        packed.PackedConfig.from_config({"quant_method": "fp8"})


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


def test_vllm_finds_the_plugin_by_itself(tmp_path: Path) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    point = text.partition('[project.entry-points."vllm.general_plugins"]\n')[2].split("\n")[0]
    folder = tmp_path / "offplan_as_built-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: offplan-as-built\nVersion: 0\n")
    found = point.replace('"', "")
    (folder / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{found}\n")
    code = (
        "from vllm.plugins import load_general_plugins\n"
        "from vllm.model_executor.layers.quantization import get_quantization_config\n"
        "load_general_plugins()\n"
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
