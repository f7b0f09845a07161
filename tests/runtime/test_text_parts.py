"""The text part of a multimodal model gives, alone, what all of the model gives for a text."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM

from offplan.checkpoint.architecture import read_architecture
from offplan.checkpoint.open import open_model
from offplan.engines.export import export_plan
from offplan.errors import CheckpointError
from offplan.held.held import hold
from offplan.library.asking import ask
from offplan.library.machines import load_machine
from offplan.library.repricing import price_again
from offplan.library.runnable import find_obstacle
from offplan.plan import Workload
from offplan.planner.make import make_plan
from tests.cli import CLI
from tests.runtime.families import (
    TEXT_PARTS,
    VARIANTS,
    compare,
    compare_stock,
    make_config,
    require,
)
from tests.runtime.plans import offload, open_session
from tests.tiers import first_quick, others_in_sweep

LAST = dict(TEXT_PARTS)
"""One text part of each family."""
RENAMED = "fuyu gemma3 internvl llava llava_next llava_onevision mistral3 qwen2_5_vl qwen2_vl"
"""Families that ``save_pretrained`` gives older names than those of the model's parameters."""
DOZEN = [
    ("cosmos3_edge", "cosmos3_edge_text"),
    ("deepseek_vl_hybrid", "llama"),
    ("fuyu", "persimmon"),
    ("gemma4", "gemma4_text"),
    ("glm4v", "glm4v_text"),
    ("internvl", "gpt_oss"),
    ("lfm2_vl", "lfm2_moe"),
    ("llama4", "llama4_text"),
    ("mistral3", "ministral3"),
    ("qwen2_5_vl", "qwen2_5_vl_text"),
    ("qwen3_5_moe", "qwen3_5_moe_text"),
    ("step3p7", "step3p5"),
]
"""Text parts of every sort: with experts, windows, linear attention, sinks, rotary embeddings of
three axes, keys that layers share; in a part of the config, at its top, and under older names."""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "text"), others_in_sweep(TEXT_PARTS, DOZEN))
def test_a_text_part_is_exact(family: str, text: str) -> None:
    """By offplan's own passes, or else by transformers'."""
    require(family)
    outcome = compare(family, "windows", text=text)  # which those without any ignore
    if outcome.kind == "refused":
        outcome = compare_stock(family, "windows", text=text)
    assert outcome.kind == "exact", outcome.why


@pytest.mark.slow
@pytest.mark.parametrize(("family", "text"), others_in_sweep(TEXT_PARTS, DOZEN))
def test_transformers_own_passes_of_a_text_part(family: str, text: str) -> None:
    """In bfloat16, where what a class keeps in float32 would show."""
    require(family)
    outcome = compare_stock(family, dtype=torch.bfloat16, text=text)
    assert outcome.kind == "exact", outcome.why


@pytest.mark.sweep
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("family", "text"), TEXT_PARTS)
def test_no_text_part_comes_out_wrong(family: str, text: str, variant: str) -> None:
    require(family)
    for outcome in (compare(family, variant, text=text), compare_stock(family, variant, text=text)):
        if outcome.kind == "not built":
            pytest.skip(outcome.why)
        assert outcome.kind in ("exact", "refused"), outcome.why


def use_newer_names(folder: Path) -> None:
    """Rename stored tensors to what the model's parameters are called."""
    weights = folder / "model.safetensors"
    renamings = (
        (r"^language_model\.lm_head", "lm_head"),
        (r"^(language_model\.)?model\.(?!language_model|visual|vision)", "model.language_model."),
        (r"^(?!model\.|lm_head)", "model."),
    )
    renamed = {}
    for name, value in load_file(weights).items():
        for old, new in renamings:
            name = re.sub(old, new, name)
        renamed[name] = value
    assert renamed.keys() != load_file(weights).keys()
    save_file(renamed, weights, {"format": "pt"})


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def flatten(config: dict[str, Any]) -> None:
    """Write a config as Qwen2-VL's on the Hub is: the text's values at the top."""
    text = config.pop("text_config")
    config |= {key: value for key, value in text.items() if key not in ("model_type", "dtype")}
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["rope_theta"]
    config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", others_in_sweep(RENAMED.split(), ["fuyu", "internvl", "mistral3", "qwen2_5_vl"])
)
def test_names_of_the_parameters_themselves(family: str) -> None:
    outcome = compare(family, "untied", text=LAST[family], change=use_newer_names)
    assert outcome.kind == "exact", outcome.why


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl_moe"])
def test_a_head_tied_by_the_config_of_the_whole(family: str) -> None:
    outcome = compare(family, "tied", text=LAST[family])
    assert outcome.kind == "exact", outcome.why


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "mistral3"])
def test_a_head_that_is_stored_though_the_config_ties_it_by_default(family: str) -> None:
    def untie(folder: Path) -> None:
        change_config(folder, lambda config: config.pop("tie_word_embeddings"))

    outcome = compare(family, "untied", text=LAST[family], change=untie)
    assert outcome.kind == "exact", outcome.why


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_a_config_without_a_part_for_the_text(family: str) -> None:
    outcome = compare(
        family,
        "windows",
        text=LAST[family],
        change=lambda folder: change_config(folder, flatten),
    )
    assert outcome.kind == "exact", outcome.why


@pytest.mark.parametrize(
    ("family", "text"),
    first_quick([("paligemma", "gemma"), ("qwen2_audio", "qwen2"), ("llava", "gemma")]),
)
def test_what_is_not_known_to_run_alone_is_refused(family: str, text: str) -> None:
    outcome = compare(family, "plain", text=text)
    assert outcome.kind == "refused"
    assert f"is multimodal ({family}), and its text part ({text}) is not known" in outcome.why


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA in bfloat16, a quarter of which reads images."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llava")
    config = make_config("llava", {}, "llama")
    for name in ("kv_lora_rank", "q_lora_rank"):  # whose latents llama has none of
        delattr(config.text_config, name)
    AutoModelForMultimodalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def test_towers_are_neither_built_nor_loaded(folder: Path) -> None:
    model = open_model(str(folder))
    with open_session(folder, offload()) as session:
        values = session.loaded.module.state_dict().values()
        assert hold(model).loaded_bytes == sum(value.nbytes for value in values)
        assert session.loaded.store.resident.keys() == session.loaded.module.state_dict().keys()
    assert model.tower_bytes == model.total_bytes - hold(model).loaded_bytes > 0
    assert all(layer.kv_cache.bytes_per_token for layer in model.layers)


@pytest.mark.parametrize("engine", [None, "vllm"])
def test_a_plan_counts_towers_where_they_are_loaded(folder: Path, engine: Any) -> None:
    model = open_model(str(folder))
    workload = Workload(prompt_tokens=32, output_tokens=16, context=128)
    question = ask(model, load_machine("cpu"), workload, gpu_memory=2**30, engine=engine)
    plan = make_plan(question).plan
    loaded = hold(model).loaded_bytes if engine is None else model.total_bytes
    assert plan.prediction.gpu_memory.resident_bytes == loaded == question.stage.loaded_bytes
    assert price_again(plan, model) is plan
    assert find_obstacle(question.stage) is None
    assert question.stage.outside_key == hold(model).outside_key
    if engine:
        assert export_plan(plan, model, engine).flags == []


def test_analyze_says_so(cli: CLI, folder: Path) -> None:
    code, out, _ = cli("analyze", folder, "--machine", "cpu")
    assert code == 0
    said = "executes the text part alone; what reads images or sound (29.47 KiB) stays unloaded."
    assert said in " ".join(out.split())


def test_a_checkpoint_of_a_diffusion_model_is_refused_as_that() -> None:
    with pytest.raises(CheckpointError, match=r"found a diffusion model.*'diffusion_gemma'"):
        read_architecture({"model_type": "diffusion_gemma", "text_config": {"num_layers": 2}})


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2"}}, "deepseek_v3"),
        ({"model_type": "minimax_m3_vl", "text_config": {"n": 1}}, "minimax_m3_vl_text"),
        ({"model_type": "step3p7", "num_hidden_layers": 2}, "step3p5"),
    ],
)
def test_text_parts_as_configs_on_the_hub_have_them(config: dict[str, Any], text: str) -> None:
    """Under another type than transformers', without one, and without a part of their own."""
    read = read_architecture(config)
    assert (read.model_type, read.is_multimodal, read.runs_text_alone) == (text, True, True)
