"""What generation configs, which may hold anything, say about what may follow."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.errors import InputError

pytest.importorskip("transformers")

from offplan.runtime.prompts import load_tokenizer
from offplan.runtime.rules import TokenRules, read_rules

END = 256
"""The end token of the tiny checkpoint's configs and of its tokenizer."""


@pytest.fixture
def model(copy: Path) -> Model:
    return open_model(str(copy))


def read(model: Model, content: object) -> TokenRules:
    text = content if isinstance(content, str) else json.dumps(content)
    Path(model.source, "generation_config.json").write_text(text)
    return read_rules(model, load_tokenizer(model))


@pytest.mark.parametrize(
    "content",
    [
        *("[]", "1", "", "null", '{"eos', '{"max_new_tokens": "x"}'),
        *(f'{{"eos_token_id": {odd}}}' for odd in ('"x"', "[[1]]", "true", "1.5", "1" + "0" * 99)),
        *(f'{{"repetition_penalty": {odd}}}' for odd in ('"1.1"', "0", "NaN", "1e999", "[1.1]")),
        '{"suppress_tokens": ["a"]}',
        '{"begin_suppress_tokens": "a"}',
        '{"min_new_tokens": "5"}',
        '{"min_length": 1.5}',
        '{"stop_strings": [1]}',
    ],
)
def test_odd_content(model: Model, content: str) -> None:
    with pytest.raises(InputError, match=r"generation_config.json.*correct it, or fetch it again"):
        read(model, content)


def test_what_is_heeded(model: Model) -> None:
    content = {"eos_token_id": [3, None], "repetition_penalty": 2, "suppress_tokens": [7, 8]}
    more = {"begin_suppress_tokens": [9], "min_length": 4, "min_new_tokens": 5, "stop_strings": "."}
    expected = TokenRules(frozenset({3, END}), (".",), 2.0, (7, 8), (9,), 4, 5)
    assert read(model, content | more) == expected


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
        {"max_length": 3, "max_new_tokens": 2, "num_beams": 1, "no_repeat_ngram_size": 0},
        {"guidance_scale": 1.0, "use_cache": False, "cache_implementation": "hybrid", "new": [1]},
        {"num_beams": None, "bad_words_ids": None, "stop_strings": None},
    ],
)
def test_what_changes_no_greedy_text(model: Model, content: dict[str, Any]) -> None:
    assert read(model, content) == TokenRules(frozenset({END}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_beams", 4),
        ("no_repeat_ngram_size", 2),
        ("encoder_repetition_penalty", 1.2),
        ("bad_words_ids", [[5]]),
        ("forced_eos_token_id", 2),
        ("guidance_scale", 1.5),
        ("watermarking_config", {"greenlist_ratio": 0.25}),
        ("penalty_alpha", 0.6),
        ("max_time", 5.0),
    ],
)
def test_what_is_not_heeded_is_refused(model: Model, key: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"generation_config.json has {key} .* does not support"):
        read(model, {key: value})


def test_the_config_speaks_where_there_is_no_generation_config(model: Model) -> None:
    config = {**model.config, "repetition_penalty": 1.5, "eos_token_id": 3}
    old = replace(model, config=config)
    assert read(old, {"eos_token_id": 4}) == TokenRules(frozenset({4, END}))
    Path(model.source, "generation_config.json").unlink()
    tokenizer = load_tokenizer(model)
    assert read_rules(old, tokenizer) == TokenRules(frozenset({3, END}), repetition_penalty=1.5)
    with pytest.raises(InputError, match=r"the config of .* has num_beams 2"):
        read_rules(replace(old, config={**config, "num_beams": 2}), tokenizer)
