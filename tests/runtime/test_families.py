"""No family comes out wrong: it is what stock transformers gives, or refused before loading."""

import importlib.util
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from offplan.checkpoint.model_types import FLOAT32_PARTS_STORED
from offplan.checkpoint.open import open_model
from offplan.held.held import hold
from tests.runtime.families import (
    OWN_SIZES,
    PROMPT,
    PUBLISHED,
    VARIANTS,
    compare,
    compare_rounding,
    draw_weights,
    extend,
    load_stock,
    make_config,
    run_planned,
    run_stock,
)
from tests.runtime.plans import group, offload, open_session
from tests.tiers import others_in_sweep

EXACT = """
afmoe cohere2 deepseek_v2 deepseek_v3 deepseek_v32 ernie4_5_moe flint gemma2 gemma3_text
gemma3n_text gemma4_text glm4_moe glm_moe_dsa gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite_swa
llama llama4_text mimo_v2_flash mixtral olmo3 olmo_hybrid olmoe phi3 phimoe qwen2_moe qwen3
qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
"""
"""Families that people run, and those that ask for something that others do not."""
DOZEN = """
deepseek_v32 gemma3n_text gemma4_text gpt2 gpt_oss gptj llama4_text mimo_v2_flash mixtral
olmo_hybrid phimoe qwen3_next
"""
"""Of those, one for each thing that passes do in more than one way."""
ROUNDED = "deepseek_v3 deepseek_v32 gemma3_text gpt_oss llama olmo_hybrid qwen3_moe"
"""Of those, the ones compared in bfloat16 too: latents, soft caps, sinks, experts and linear
attention."""
REFUSED = {
    "bart": "counts positions by its cache",
    "bloom": "counts positions by its cache",
    "openai-gpt": "given another cache than the model, or none",
    "hy_v4": "layers of the types",
    "jetmoe": "multiplies in a way of their own",
    "falcon": "chooses its attention in a way of its own",
    "longcat_flash": "multiplies in a way of their own",
    "mamba": "layers of the types",
    "minimax": "layers of the types",
}


@pytest.mark.slow
@pytest.mark.parametrize("family", others_in_sweep(EXACT.split(), DOZEN.split()))
def test_a_family_is_exact(family: str) -> None:
    outcome = compare(family, "windows")  # which those without any ignore
    assert outcome.kind == "exact", outcome.why


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("gemma3_text", "longrope in some layers"),
        ("gemma4_text", "shared keys and values"),
        ("glm_moe_dsa", "shared indexers"),
        ("hunyuan_v1_dense", "dynamic with alpha"),
        ("llama", "dynamic"),
        ("phi3", "longrope"),
        ("phimoe", "longrope"),
    ],
)
def test_a_variant_is_exact(family: str, variant: str) -> None:
    outcome = compare(family, variant)
    assert outcome.kind == "exact", outcome.why


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", others_in_sweep(ROUNDED.split(), ["deepseek_v32", "gpt_oss", "olmo_hybrid"])
)
def test_a_family_in_bfloat16_is_as_near_as_stock(family: str) -> None:
    outcome = compare_rounding(family, "windows")
    assert outcome.kind == "exact", outcome.why


@pytest.mark.slow
@pytest.mark.parametrize("family", REFUSED)
def test_a_family_is_refused(family: str) -> None:
    outcome = compare(family, "plain")
    assert outcome.kind == "refused"
    assert REFUSED[family] in outcome.why


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["tied", "untied"])
def test_stock_zeroes_the_paddings_row_of_youtu(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/families.md says; no text of the comparison has the token."""
    token, name = 1, "model.embed_tokens.weight"
    monkeypatch.setitem(OWN_SIZES, "youtu", {**OWN_SIZES["youtu"], "pad_token_id": token})

    def look(folder: Path) -> None:
        assert load_file(folder / "model.safetensors")[name][token].all()
        assert not load_stock(folder).get_parameter(name)[token].any()

    def zero(folder: Path) -> None:
        path = folder / "model.safetensors"
        weights = {name: weight.clone() for name, weight in load_file(path).items()}
        weights[name][token] = 0
        save_file(weights, path, {"format": "pt"})

    as_stored = compare("youtu", variant, change=look).kind
    assert as_stored == ("wrong" if variant == "tied" else "exact")
    assert compare("youtu", variant, change=zero).kind == "exact"


DOCS = Path(__file__).parents[2] / "docs"


def test_the_docs_say_what_is_tested_here() -> None:
    own = yaml.safe_load((DOCS / "families.yaml").read_text("utf-8"))["own"]
    assert set(EXACT.split()) <= set(own["exact"])
    assert set(REFUSED) <= {family for families in own["refused"].values() for family in families}


@pytest.mark.slow
def test_the_page_is_made_of_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("make_families", DOCS / "make_families.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    assert capsys.readouterr().out == (DOCS / "families.md").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "gemma3_text"])
def test_attention_to_both_sides_is_refused(family: str) -> None:
    outcome = compare(family, "to both sides")
    assert outcome.kind == "refused"
    assert "tokens behind its own" in outcome.why


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_encoders_that_may_be_decoders_are_refused(family: str) -> None:
    outcome = compare(family, "as a decoder")
    assert outcome.kind == "refused"
    assert "keeps its layers where `run` does not look" in outcome.why


KEPT = [
    (family, torch.bfloat16)
    for family in FLOAT32_PARTS_STORED
    if family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # text parts have tests of their own
]
KEPT += [(family, torch.float16) for family in ("afmoe", "gpt_oss")]  # the final norm too


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), KEPT)
def test_what_is_kept_in_float32(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(make_config(family, {}), dtype=dtype)
    stock.to(dtype).save_pretrained(tmp_path)  # also what the class makes in float32
    if family in PUBLISHED:
        PUBLISHED[family](tmp_path)
    with open_session(tmp_path, offload(group(1, 1)), stock=family in PUBLISHED) as session:
        session.prefill(PROMPT)
        state = session.loaded.module.state_dict(keep_vars=True).values()
        held = {id(value): value.nbytes for value in state}  # a tie has two names
        assert hold(session.loaded.model).loaded_bytes == sum(held.values())


@pytest.mark.slow
def test_keys_that_are_stored_and_shared_are_not_loaded(tmp_path: Path) -> None:
    config = make_config("gemma3n_text", {"num_kv_shared_layers": 0, "kv_lora_rank": None})
    model = draw_weights(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    model.config.num_kv_shared_layers = 3
    model.save_pretrained(tmp_path)
    found = open_model(str(tmp_path))
    assert len(found.not_loaded) == 3 * len(["k_proj", "k_norm", "v_proj"])
    kept = [layer.kv_cache.bytes_per_token for layer in found.layers]
    assert kept == [2 * 2 * 8 * 4] * 2 + [0] * 3
    assert [layer.kv_cache.window for layer in found.layers] == [512, None, 512, None, None]
    expected = run_stock(load_stock(tmp_path), PROMPT)
    got = run_planned(tmp_path, extend(PROMPT, expected), offload(group(2, 1), prefill_chunk=3))
    torch.testing.assert_close(torch.stack(got), torch.stack(expected))


@pytest.mark.sweep
@pytest.mark.parametrize("variant", ["plain", "windows"])
@pytest.mark.parametrize("family", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_no_family_is_further_away_than_stock(family: str, variant: str) -> None:
    outcome = compare_rounding(family, variant)
    if outcome.kind == "not built":
        pytest.skip(outcome.why)
    assert outcome.kind in ("exact", "refused"), outcome.why


@pytest.mark.sweep
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_no_family_comes_out_wrong(family: str, variant: str) -> None:
    outcome = compare(family, variant)
    if outcome.kind == "not built":
        pytest.skip(outcome.why)
    assert outcome.kind in ("exact", "refused"), outcome.why
