"""Prompts, and the tokenizers that read them, from files that may hold anything."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.errors import InputError
from tests.cli import TINY_MOE

pytest.importorskip("transformers")

from offplan.runtime.prompts import load_tokenizer, read_prompt


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """A copy of the tiny checkpoint."""
    shutil.copytree(TINY_MOE, tmp_path / "copy")
    return open_model(str(tmp_path / "copy"))


@pytest.mark.parametrize(
    "content", ["", "[]", "null", "{}", '{"model": 1}', '{"version": [], "model": null}', "\xff"]
)
def test_tokenizer_of_odd_content(model: Model, content: str) -> None:
    Path(model.source, "tokenizer.json").write_text(content, "latin-1")
    with pytest.raises(InputError) as raised:
        load_tokenizer(model)
    assert "has no tokenizer that can be read" in str(raised.value)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("alone", [False, True])
def test_no_tokenizer_and_no_weights_either(model: Model, alone: bool) -> None:
    for path in Path(model.source).glob("*token*"):
        path.unlink()
    if alone:
        model = open_model(f"{model.source}/config.json")
    with pytest.raises(InputError) as raised:
        load_tokenizer(model)
    assert ("has neither weights nor a tokenizer" if alone else "has no tokenizer") in str(
        raised.value
    )


def test_tokens_that_the_model_does_not_know(model: Model) -> None:
    known = replace(model, config={**model.config, "vocab_size": 3})
    with pytest.raises(InputError, match="the model has tokens up to 2"):
        read_prompt(known, load_tokenizer(model), "Weights")


@pytest.mark.parametrize("key", ["image_token_id", "video_token_id"])
def test_tokens_that_stand_for_an_image(model: Model, key: str) -> None:
    tokenizer = load_tokenizer(model)
    token = int(tokenizer("Weights").input_ids[-1])
    reading = replace(model, config={"model_type": "qwen2_vl", "vision_config": {}, key: token})
    with pytest.raises(InputError, match=rf"token {token} \({key}\), which stands for"):
        read_prompt(reading, tokenizer, "Weights")
    other = replace(reading, config={**reading.config, key: 10**6})
    assert read_prompt(other, tokenizer, "Weights")[0, -1] == token
