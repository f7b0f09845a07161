"""Logits that are NaN end a generation with an error that names the layer."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from offplan.errors import NotANumberError
from offplan.runtime.generate import generate
from offplan.runtime.joined import generate_texts
from offplan.runtime.rows import Rows
from offplan.runtime.texts import Text
from tests.runtime.conftest import save_tiny
from tests.runtime.plans import group, offload, open_session
from tests.tiers import first_quick

PROMPT = torch.tensor([[3, 14, 15, 9, 26, 5, 35]])
LAYER = "model.layers.2."


def edit(folder: Path, name: str, change: Callable[[torch.Tensor], object]) -> None:
    """Change one stored tensor in place, in the shard that has it."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shard = folder / index[name]
    tensors = load_file(shard)
    change(tensors[name])
    save_file(tensors, shard, metadata={"format": "pt"})


def spoil_one(weight: torch.Tensor) -> None:
    weight[3, 5] = torch.nan


def overflow(weight: torch.Tensor) -> None:
    weight.zero_()[0, :2] = 3e38


@pytest.mark.slow
@pytest.mark.parametrize("prefill_chunk", [2, 64])
@pytest.mark.parametrize(
    ("weight", "change", "found"),
    [
        (f"{LAYER}mlp.up_proj.weight", spoil_one, r"layer 2 gives the first NaN\."),
        (
            f"{LAYER}mlp.down_proj.weight",
            overflow,
            "layer 3 gives the first NaN, after layer 2 gave infinite values",
        ),
        ("model.norm.weight", lambda weight: weight.fill_(torch.nan), "the final norm or the"),
        ("model.embed_tokens.weight", lambda w: w.fill_(torch.nan), "the input embedding gives"),
    ],
)
def test_a_prompt(
    tmp_path: Path,
    weight: str,
    change: Callable[[torch.Tensor], object],
    found: str,
    prefill_chunk: int,
) -> None:
    edit(save_tiny("qwen3", tmp_path), weight, change)
    decision = offload(group(2, 1), prefill_chunk=prefill_chunk)
    with (
        open_session(tmp_path, decision) as session,
        pytest.raises(NotANumberError, match=f"^sequence 0: the logits .* NaN.*{found}"),
    ):
        next(generate(session, PROMPT, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", first_quick(["qwen3", "linear", "dynamic"]))
def test_a_step(tmp_path: Path, name: str) -> None:
    """A token that is only met in the third step; the first tokens are given all the same."""
    folder = save_tiny(name, tmp_path)
    with open_session(folder, offload(group(2, 1))) as session:
        expected = torch.cat(list(generate(session, PROMPT[:1], 6))).tolist()
    bad = next(t for t in expected[1:] if t not in expected[:1] + PROMPT[0].tolist())
    made: list[int] = []
    edit(folder, "model.embed_tokens.weight", lambda weight: weight[bad].fill_(torch.nan))
    with open_session(folder, offload(group(2, 1))) as session:
        with pytest.raises(NotANumberError, match="the input embedding gives the first NaN"):
            made.extend(int(token) for token in generate(session, PROMPT[:1], 6))
        assert made == expected[: expected.index(bad) + 1]
        # what was found out leaves the session as good as before
        assert int(next(generate(session, PROMPT[:1], 1))) == expected[0]


def test_one_row_of_a_batch(tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path)
    edit(folder, "model.embed_tokens.weight", lambda weight: weight[58].fill_(torch.nan))
    prompts = torch.tensor([[3, 14, 15], [9, 7, 58]])
    with open_session(folder, offload()) as session:
        with pytest.raises(NotANumberError, match=r"^sequence 1: ") as caught:
            next(generate(session, prompts, 4))
        assert caught.value.numbers == [1]


class Numbers:
    """Decodes tokens as their numbers."""

    def decode(self, tokens: list[int], **_: object) -> str:
        return "".join(f"{token}." for token in tokens)


def test_texts(tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path)
    edit(folder, "model.embed_tokens.weight", lambda weight: weight[58].fill_(torch.nan))
    prompts = [[3, 14, 15], [9, 7], [58, 7], [9, 7]]
    texts = [Text(Numbers(), p, num_tokens=3, number=n) for n, p in enumerate(prompts)]
    with (
        open_session(folder, offload()) as session,
        pytest.raises(NotANumberError, match=r"^text 2: ") as caught,
    ):
        for _ in generate_texts(Rows(session, 2), texts):
            pass
    assert (caught.value.numbers, [text.num_made for text in texts]) == ([2], [3, 3, 0, 3])
