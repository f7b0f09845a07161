"""What checkpoints of fewer bits would give, sized from the model's own shapes."""

import json
from pathlib import Path
from typing import Any

import pytest

from offplan.checkpoint.group import group_parameters
from offplan.checkpoint.open import open_model
from offplan.checkpoint.requantise import requantise
from tests.cli import CLI, ROOT, TINY_MOE

MODELS = ROOT / "benchmarks" / "models"


def strip_quantisation(name: str, folder: Path) -> Path:
    """Write the config of a benchmark's model as that of its unquantised checkpoint."""
    config = json.loads((MODELS / name / "config.json").read_text("utf-8"))
    config.pop("quantization_config")
    path = folder / "config.json"
    path.write_text(json.dumps({**config, "dtype": "bfloat16"}), "utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bits"), [("qwen3-8b-fp8", 8), ("qwen3-32b-w4a16", 4)])
def test_a_checkpoint_is_sized_as_the_published_one(tmp_path: Path, name: str, bits: int) -> None:
    published = open_model(MODELS / name / "config.json")
    made = requantise(open_model(strip_quantisation(name, tmp_path)), bits)
    assert made is not None
    assert made.total_bytes == published.total_bytes
    assert [layer.key for layer in made.layers] == [layer.key for layer in published.layers]
    assert requantise(published, bits) is None


def test_groups_divide_what_they_can(tmp_path: Path) -> None:
    """Experts of 704 columns are in groups of 64, which W4A16 checkpoints of theirs have."""
    path = tmp_path / "config.json"
    config = json.loads((MODELS / "qwen3-30b-a3b-fp8" / "config.json").read_text("utf-8"))
    del config["quantization_config"]
    path.write_text(json.dumps({**config, "moe_intermediate_size": 704}), "utf-8")
    model = open_model(path)
    made = requantise(model, 4)
    assert made is not None
    assert made.total_bytes < 0.3 * model.total_bytes


@pytest.mark.slow
def test_the_answer_reports_what_fewer_bits_would_give(
    cli: CLI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offplan.library.analysis.why_not_plan", lambda *_: None)
    # all of the card, without what is left to its display
    machine = ("--machine", "rtx4060,ram=64GiB", "--gpu-memory", "8GiB")
    asked = (strip_quantisation("qwen3-8b-fp8", tmp_path), *machine)
    told = " ".join(cli("analyze", *asked).out.split())
    assert "A checkpoint of this model in fewer bits would give here: FP8 (8.788 GiB) " in told
    assert "tokens a second with nothing on the host. Its answers differ" in told
    assert "Look for a repository of this model with FP8 or GPTQ, AWQ, W4A16" in told
    data = json.loads(cli("analyze", *asked, "--json").out)
    step_s = data["plan"]["prediction"]["decode"]["step_s"]
    found = {each["bits"]: each for each in data["alternatives"]}
    assert all(each["tokens_per_s"] * step_s >= 1.5 for each in found.values())
    assert found[4]["host_bytes"] == 0
    # an answer that fewer bits do not change, and one of which no plan fits
    assert (
        "in fewer bits"
        not in cli("analyze", *asked[:1], "--machine", "rtx4090", "--for", "vllm").out
    )
    told = " ".join(cli("analyze", *asked, "--host-memory", "1GiB").out.split())
    assert told.startswith("Does not run on NVIDIA GeForce RTX 4060 as asked: no plan fits 1 GiB")
    assert ". 4 bits fit and give " in told
    assert "Look for a repository of this model with GPTQ, AWQ, W4A16, MXFP4 or NVFP4" in told
    assert "no plan fits" in told.lower()


@pytest.mark.slow
def test_groups_that_do_not_divide_a_matrix_do_not_stop_the_hint(tmp_path: Path) -> None:
    """No groups divide 10,952 inner columns."""
    config = {
        "model_type": "glm4_moe",
        "hidden_size": 256,
        "intermediate_size": 10952,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "n_routed_experts": 8,
        "vocab_size": 512,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    model = open_model(str(tmp_path / "config.json"))
    made = requantise(model, 4)
    assert made is not None
    # the weight that stays as it is, and all others in some 4.1 bits
    left, other = 256 * 10952, model.num_parameters - 256 * 10952 - 2 * 512 * 256
    assert made.total_bytes == pytest.approx(2 * left + other * 4.125 / 8 + 4 * 512 * 256, rel=0.05)


@pytest.mark.slow
def test_a_config_of_float32_is_planned_as_bfloat16(
    cli: CLI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offplan.library.analysis.why_not_run", lambda *_: None)
    path = strip_quantisation("qwen3-8b-fp8", tmp_path)
    config = json.loads(path.read_text("utf-8"))
    del config["dtype"]
    config["num_hidden_layers"] = 12
    path.write_text(json.dumps({**config, "torch_dtype": "float32"}), "utf-8")
    asked = ("plan", path, "--machine", "rtx4060,ram=64GiB")
    code, _, err = cli(*asked)
    assert (code, "Its weights are float32, twice the bytes of bfloat16" in err) == (0, True)
    plan = tmp_path / "plan.yaml"
    code, _, err = cli(*asked, "--dtype", "bfloat16", "-o", plan)
    assert (code, "Its weights are" in err) == (0, False)
    assert "dtype: bfloat16" in plan.read_text("utf-8")
    assert cli("check", plan, "--file-only").code == 0
    assert cli("replan", plan).out == plan.read_text("utf-8")
    code, _, err = cli("plan", TINY_MOE, "--machine", "cpu", "--dtype", "float32")
    assert (code, "--dtype is for a config.json alone" in err) == (2, True)


def test_fewer_bits_are_computed_in_the_type_that_was_asked_for(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256}
    config |= {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    for name in ("float32", "bfloat16"):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "config.json"
        path.write_text(json.dumps({**config, "dtype": name}), "utf-8")
    asked = open_model(tmp_path / "float32" / "config.json", dtype="bfloat16")
    stated = open_model(tmp_path / "bfloat16" / "config.json")
    assert asked.headers_sha256 == stated.headers_sha256
    made = [requantise(model, 4) for model in (asked, stated)]
    assert [model.dtype for model in made if model is not None] == ["bfloat16"] * 2
    assert asked.key == stated.key, "its config now states what was asked for"


def test_layers_alike_are_sized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(TINY_MOE)
    grouped: list[str] = []

    def note(prefix: str, *asked: Any) -> Any:
        grouped.append(prefix)
        return group_parameters(prefix, *asked)

    monkeypatch.setattr("offplan.checkpoint.requantise.group_parameters", note)
    made = requantise(model, 8)
    assert made is not None
    assert sorted(grouped) == ["model.layers.0", "model.layers.1"]
    assert [len(layer.parameters) for layer in made.layers] == [
        len(layer.parameters) for layer in model.layers
    ]
    assert len({id(p) for layer in made.layers for p in layer.parameters}) == sum(
        len(layer.parameters) for layer in made.layers
    )
