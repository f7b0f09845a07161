"""Weights are computed with as they are stored, and give what their values would."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from offplan import kernel_sizes
from offplan.checkpoint.open import open_model
from offplan.costs.activations import scratch_bytes
from offplan.errors import CheckpointError
from offplan.forms.form import Component
from offplan.runtime.forms.stored import StoredLinear, scratch_size
from tests.checkpoint.quantised import FORMATS, write_quantised
from tests.runtime.families import run_stock
from tests.runtime.plans import group, load, offload, run_greedily
from tests.runtime.quantise import ALONE, FORMS, save_stored
from tests.tiers import each_value_once, first_quick

PROMPT = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 11, 23, 45, 4]])
BATCH = torch.tensor([[3, 14, 15, 9, 26, 40, 33], [58, 9, 7, 9, 3, 21, 17]])
CASES = [("qwen3_moe", form) for form in FORMS] + [
    ("deepseek_v3", "fp8_block"),
    ("deepseek_v32", "fp8_block"),
    ("gpt_oss", "mxfp4"),
    ("gemma4_text", "nvfp4_modelopt"),
    ("qwen3_moe", "modelopt_mixed"),
    *(("glm4_moe", form) for form in ("gptq", "gptq8_v2", "awq")),
]
CASES += [("qwen3", form) for form in ALONE | FORMS]
"""Families and forms; first the one whose experts and other weights are both stored so."""
RUNS: list[tuple[torch.Tensor, int, tuple[str, ...]]] = [
    (PROMPT, 64, ()),
    (PROMPT, 3, ("self_attn",)),
    (BATCH, 64, ("mlp",)),
]
"""Prompts, the chunks that they are read in, and what every second layer offloads."""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form"), each_value_once(CASES))
def test_tokens_are_those_of_the_values(family: str, form: str, tmp_path: Path) -> None:
    # as few layers as every second one of can be offloaded
    sizes: dict[str, Any] = {"num_hidden_layers": 2} if family.startswith("qwen3") else {}
    stored, plain = save_stored(family, form, tmp_path, **sizes)
    stock = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    expected = {id(prompt): run_stock(stock, prompt) for prompt in (PROMPT, BATCH)}
    for prompt, chunk, segments in RUNS:
        got = run_greedily(stored, offload(group(2, 1, *segments), prefill_chunk=chunk), prompt)
        for ours, theirs in zip(got, expected[id(prompt)], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS | ALONE)
def test_random_weights_are_of_ordinary_size(form: str, tmp_path: Path) -> None:
    stored, _ = save_stored("qwen3", form, tmp_path, num_hidden_layers=1)
    loaded = load(open_model(str(stored)), offload(), None)
    linear = [part for part in loaded.module.modules() if isinstance(part, StoredLinear)]
    assert len(linear) == 7
    for each in linear:
        values = each.stored.expand(each, torch.float32)
        assert 0.012 < values.std() < 0.03
        assert values.mean().abs() < 0.1 * values.std()
    loaded.close()


@pytest.mark.parametrize("form", ["fp8_block", "int4_zeros", "nvfp4", "mxfp4_rows"])
@pytest.mark.slow
def test_scratch_of_experts_is_as_large_as_costs_have_it(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, _ = save_stored("qwen3_moe", form, tmp_path, torch.bfloat16, num_hidden_layers=1)
    for num_bytes in (kernel_sizes.EXPERT_SCRATCH_BYTES, 1):
        monkeypatch.setattr(kernel_sizes, "EXPERT_SCRATCH_BYTES", num_bytes)
        loaded = load(open_model(str(stored)), offload(), None)
        sizes = [scratch_size(module) for module in loaded.module.modules()]
        assert 2 * max(sizes) == scratch_bytes(loaded.stage, 10**6)
        loaded.close()


def change(folder: Path, end: str, made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the first stored tensor whose name ends so."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith(end))
    tensors[name] = made(tensors[name])
    save_file(tensors, path, {"format": "pt"})


def edit_state(old: str, new: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(state: torch.Tensor) -> torch.Tensor:
        said = bytes(state.tolist()).decode()
        assert old in said
        return torch.tensor(list(said.replace(old, new).encode()), dtype=torch.uint8)

    return edit


@pytest.mark.parametrize(
    ("family", "form", "end", "made", "why"),
    first_quick(
        [
            ("qwen3", "gptq", "g_idx", lambda index: index + 1, "groups beyond the"),
            ("qwen3", "gptq", "g_idx", lambda index: index - 1, "groups beyond the"),
            ("qwen3", "gptq", "g_idx", lambda index: index * 0, "groups of other than 128 inputs"),
            ("qwen3", "bnb8", "weight_format", lambda _: torch.tensor(2).byte(), "order than rows"),
            ("qwen3", "nf4", "__nf4", edit_state("64", "32"), "has the blocksize 32"),
            ("qwen3", "nf4", "__nf4", edit_state("float32", "float16"), "has the dtype float16"),
            ("qwen3", "nf4_nested", "__nf4", edit_state("256, ", "128, "), "has the "),
            ("qwen3", "nf4", "quant_map", lambda table: table[:8].clone(), "stored as F32"),
            ("qwen3", "fp4", "__fp4", edit_state("{", "["), "no JSON object"),
            ("qwen3", "int8_zeros", "zero_point", lambda zeros: zeros.T.contiguous(), "stored as"),
            ("qwen3", "gptq", "scales", lambda scales: scales.int(), "stored as w4a16"),
            (
                "qwen3_moe",
                "gptq",
                "0.up_proj.scales",
                lambda scales: scales.bfloat16(),
                "stored as",
            ),
            ("qwen3_moe", "nf4", "norm.weight", lambda norm: norm, "Experts is stored as"),
        ]
    ),
)
def test_what_is_not_executed_is_refused(
    family: str,
    form: str,
    end: str,
    made: Callable[[torch.Tensor], torch.Tensor],
    why: str,
    tmp_path: Path,
) -> None:
    stored, _ = save_stored(family, form, tmp_path, num_hidden_layers=1)
    change(stored, end, made)
    with pytest.raises(CheckpointError, match=why):
        load(open_model(str(stored)), offload(), stored)


@pytest.mark.slow
def test_scales_of_a_cache_are_left_out_and_told(tmp_path: Path) -> None:
    stored, _ = save_stored("qwen3", "fp8_tensor", tmp_path)
    expected = run_greedily(stored, offload(group(2, 1)), PROMPT)
    path = stored / "model.safetensors"
    scales = {
        f"model.layers.{layer}.self_attn.{name}_proj.{name}_scale": torch.tensor(0.5)
        for layer in (0, 1)
        for name in ("k", "v")
    }
    save_file(load_file(path) | scales, path, {"format": "pt"})
    model = open_model(stored)
    assert any("4 scales of an FP8 KV cache are stored and not loaded" in n for n in model.notes)
    for ours, before in zip(
        run_greedily(stored, offload(group(2, 1)), PROMPT), expected, strict=True
    ):
        assert torch.equal(ours, before)


def test_zeros_that_the_config_says_are_not_taken_as_the_middle(tmp_path: Path) -> None:
    stored, _ = save_stored("qwen3", "int4_zeros", tmp_path, num_hidden_layers=1)
    path = stored / "model.safetensors"
    kept = {n: t for n, t in load_file(path).items() if not n.endswith("weight_zero_point")}
    save_file(kept, path, {"format": "pt"})
    why = r"fits no known form.*weight_packed I32 \[.*weight_scale BF16"
    with pytest.raises(CheckpointError, match=why):
        load(open_model(str(stored)), offload(), stored)


def test_experts_that_the_config_tells_apart_are_refused(tmp_path: Path) -> None:
    stored, _ = save_stored("qwen3_moe", "fp8_block", tmp_path, num_hidden_layers=1)
    config = json.loads((stored / "config.json").read_text())
    expert = "model.layers.0.mlp.experts.1.up_proj"
    config["quantization_config"]["modules_to_not_convert"] = [expert]
    (stored / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="gate_up_proj is stored as what fits no known form"):
        load(open_model(str(stored)), offload(), stored)


def test_whole_numbers_of_three_bits_are_refused_as_that(tmp_path: Path) -> None:
    stored = write_quantised(tmp_path, FORMATS["auto-round of 3 bits"])
    with pytest.raises(CheckpointError, match=r"is stored as whole numbers of 3 bits, and kernels"):
        load(open_model(str(stored)), offload(), stored)


def test_biases_that_may_be_zeros_are_refused(tmp_path: Path) -> None:
    stored, _ = save_stored("qwen3", "gptq", tmp_path, num_hidden_layers=1)
    path, bias = stored / "model.safetensors", "model.layers.0.mlp.up_proj.bias"
    save_file(load_file(path) | {bias: torch.zeros(64)}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"takes {bias}; old AutoGPTQ stores biases of zeros"):
        load(open_model(str(stored)), offload(), stored)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_codes_of_zero_that_are_all_the_middle_one_are_not_read(
    family: str, tmp_path: Path
) -> None:
    stored, _ = save_stored(family, "gptq", tmp_path, num_hidden_layers=1)
    path = stored / "model.safetensors"
    middle = {
        name: torch.full_like(value, 0x77777777)
        for name, value in load_file(path).items()
        if name.endswith("qzeros")
    }
    other = "model.layers.0.self_attn.o_proj.qzeros"
    middle[other][0, 0] += 1
    save_file(load_file(path) | middle, path, {"format": "pt"})
    loaded = load(open_model(str(stored)), offload(), stored)
    held = {
        f"{name}.{weight.name}": weight
        for name, module in loaded.module.named_modules()
        for weight in (vars(module).get("stored"), *vars(module).get("stored_experts", {}).values())
        if weight is not None
    }
    with_zeros = [name for name, weight in held.items() if Component.ZERO in weight.components]
    assert with_zeros == ["model.layers.0.self_attn.o_proj.weight"]
    assert len(held) > 4
    loaded.close()


def test_values_that_the_config_has_more_done_with_are_refused(tmp_path: Path) -> None:
    _, plain = save_stored("qwen3", "fp8_block", tmp_path, num_hidden_layers=1)
    path = plain / "config.json"
    rounded_at_run = {"quant_method": "bitnet", "quantization_mode": "online"}
    told = json.loads(path.read_text()) | {"quantization_config": rounded_at_run}
    path.write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match=r"bitnet.*does not read"):
        load(open_model(str(plain)), offload(), plain)
