"""Passes of transformers that run in blocks of queries, so that long contexts take little more."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from offplan.checkpoint.open import open_model
from offplan.runtime.stock import bounded
from offplan.runtime.stock.bounded import (
    bound_by_blocks,
    is_bounded,
    list_blocks,
    skipping_repeats,
)
from offplan.runtime.stock.generation import StockGeneration
from offplan.runtime.stock.passes import LiveBytes, count_passes
from tests.runtime.families import make_config, require, save

TOKENS = 301
TOLERANCE = 3e-5


SHARED = {"indexer_types": ["full", "shared", "full", "shared", "shared"]}
FAMILIES = [
    ("deepseek_v4", {}),
    ("deepseek_v32", {}),
    ("glm_moe_dsa", {}),
    ("glm_moe_dsa", SHARED),
    ("axk2", {}),
]


def _build(family: str, **sizes: Any) -> Any:
    """Build a model whose indexers choose few tokens or blocks of many, without equal scores."""
    require(family)
    config = make_config(family, {"index_n_heads": 16, "index_topk": 8, **sizes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for value in model.parameters():
        if value.ndim > 1:
            value.normal_(0, 0.1)
    return model


def _read(model: Any, chunk: int) -> torch.Tensor:
    """Read a text in chunks, and nine tokens behind it; return the logits of all."""
    prompt = torch.randint(3, 60, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    text, made = StockGeneration(model, prompt, TOKENS + 9), []
    for start in range(0, TOKENS, chunk):
        stop = min(start + chunk, TOKENS)
        made.append(text.prefill(start, stop, stop - start))
    made += [text.decode(prompt[:, :1])[:, None] for _ in range(9)]
    return torch.cat(made, 1)


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize(("family", "sizes"), FAMILIES)
def test_blocks_give_what_whole_scores_do(
    family: str, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _build(family, **sizes)
    whole = _read(model, TOKENS)
    bound_by_blocks(model)
    assert torch.equal(_read(model, TOKENS), whole)  # so few tokens run as transformers has them
    monkeypatch.setattr(bounded, "BOUND_BYTES", 2**14)
    assert 0 < _difference(_read(model, TOKENS), whole) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 7, 61, 128])
@pytest.mark.parametrize("family", ["deepseek_v4", "deepseek_v32", "kimi_linear", "nemotron_h"])
def test_chunks_give_what_a_whole_prompt_does(
    family: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _build(family)
    whole = _read(model, TOKENS)
    bound_by_blocks(model)
    monkeypatch.setattr(bounded, "BOUND_BYTES", 2**17)
    assert _difference(_read(model, chunk), whole) < TOLERANCE


def test_other_models_are_left_as_they_are() -> None:
    require("qwen3")
    model = AutoModelForCausalLM.from_config(make_config("qwen3", {}))
    before = model.config._attn_implementation
    bound_by_blocks(model)
    assert not is_bounded(model.config)
    assert model.config._attn_implementation == before


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "context"), [(128, 512), (128, 4096), (1024, 4096)])
@pytest.mark.parametrize(
    "family", ["deepseek_v4", "deepseek_v32", "falcon", "kimi_linear", "nemotron_h", "gemma2"]
)
def test_a_chunk_at_the_end_takes_no_more_than_is_counted(
    family: str, chunk: int, context: int, tmp_path: Path
) -> None:
    require(family)
    folder = save(family, tmp_path)
    passes = count_passes(open_model(str(folder)))
    assert passes.chunk_bytes is not None
    model = AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)
    bound_by_blocks(model)
    text, live, taken = StockGeneration(model, torch.ones(1, context).long(), 8192), LiveBytes(), 0
    with torch.no_grad(), live:
        for start in range(0, context, chunk):
            live.begin()
            text.prefill(start, start + chunk)
            taken = live.peak - text.cache_bytes
        live.begin()
        text.decode(torch.ones(1, 1).long())
        of_step = live.peak - text.cache_bytes
    of_prompt, step = passes.activation_bytes(1, chunk, context)
    # what lives beside a layer is counted where the first of its kind runs; costs double it
    assert taken <= of_prompt * (1 if is_bounded(model.config) else 1.05)
    assert of_step <= max(of_prompt, step)


@pytest.mark.slow
def test_blocks_take_less_than_whole_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    model, taken = _build("deepseek_v4", o_lora_rank=8), []
    bound_by_blocks(model)
    for bound in (sys.maxsize, 2**14):
        text, live = StockGeneration(model, torch.ones(1, 2048).long(), 4096), LiveBytes()
        monkeypatch.setattr(bounded, "BOUND_BYTES", bound)
        with torch.no_grad(), live:
            text.prefill(0, 1536)  # of which the cache keeps views until the next chunk
            text.prefill(1536, 1792)
            live.begin()
            text.prefill(1792, 2048)
            taken.append(live.peak - text.cache_bytes)
    assert taken[1] < 0.6 * taken[0]


def test_blocks_alike_are_left_out_where_they_may_be() -> None:
    every = [slice(0, 4), slice(4, 8), slice(8, 12), slice(12, 14)]
    assert [*list_blocks(14, 4)] == every
    with skipping_repeats():
        assert [*list_blocks(14, 4)] == [*every[:2], every[-1]]
        assert [*list_blocks(12, 4)] == every[:3]
    assert [*list_blocks(14, 4)] == every
