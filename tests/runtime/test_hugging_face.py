"""A session as a model of transformers, held against stock."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel, TextIteratorStreamer, pipeline

from offplan.errors import InputError
from offplan.runtime.hugging_face import OffplanForCausalLM
from offplan.runtime.session import Session
from tests.cli import TINY_MOE
from tests.runtime.conftest import save_tiny
from tests.runtime.families import load_stock
from tests.runtime.plans import group, offload, open_session
from tests.tiers import first_quick

PROMPT = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(0))
MIXTURES = ["mixtral", "qwen3_moe_tied", "deepseek_v2", "deepseek_v3", "linear_experts"]
PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture
def session(folder: Path) -> Iterator[Session]:
    with open_session(folder, offload(group(2, 1), prefill_chunk=8)) as session:
        yield session


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_logits_and_loss(session: Session, folder: Path) -> None:
    model, stock = OffplanForCausalLM(session), load_stock(folder)
    with torch.inference_mode():
        expected = stock(PROMPT, labels=PROMPT)
    found = model(PROMPT, labels=PROMPT)
    close(found.logits, expected.logits)
    close(found.loss, expected.loss)
    close(model(PROMPT, logits_to_keep=3).logits, expected.logits[:, -3:])
    at = torch.tensor([1, 5])
    close(model(PROMPT, logits_to_keep=at).logits, expected.logits[:, at])
    close(model(PROMPT, return_dict=False)[0], expected.logits)
    seen = PADDED.bool()
    close(model(PROMPT, attention_mask=PADDED).logits[1], expected.logits[1])
    cut = torch.tensor([[1] * 8 + [0]] * 2)
    assert not model(PROMPT, attention_mask=cut, logits_to_keep=1).logits.any()
    with torch.inference_mode():
        alone = stock(PROMPT[:1, 3:]).logits
    close(model(PROMPT, attention_mask=PADDED).logits[0][seen[0]], alone[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    first_quick(
        [
            {},
            {"do_sample": True, "temperature": 2.0, "top_k": 20},
            {"num_beams": 2},
            {"mask": PADDED},
        ]
    ),
    ids=["greedy", "drawn", "beams", "padded"],
)
def test_generate(session: Session, folder: Path, asked: dict[str, Any]) -> None:
    asked = dict(asked)
    mask = asked.pop("mask", torch.ones_like(PROMPT))
    options = {"attention_mask": mask, "max_new_tokens": 8, "pad_token_id": 0, **asked}
    made = []
    for model in (load_stock(folder), OffplanForCausalLM(session)):
        torch.manual_seed(3)
        made.append(model.generate(PROMPT, eos_token_id=None, **options))
    assert made[1].tolist() == made[0].tolist()


@pytest.mark.slow
def test_a_pipeline_and_a_streamer(capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MOE)
    capfd.readouterr()
    with open_session(TINY_MOE, offload(group(2, 1))) as session:
        model = OffplanForCausalLM(session)
        generate: Any = pipeline("text-generation", model=model, tokenizer=tokenizer)
        assert capfd.readouterr().err == ""  # not all that a pipeline knows
        (made,) = generate("Weights", max_new_tokens=12, do_sample=False)
        assert made["generated_text"] == "Weights that do not"
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        asked = tokenizer("Weights", return_tensors="pt")
        model.generate(**asked, max_new_tokens=5, do_sample=False, streamer=streamer)
        assert "".join(streamer) == " that"
        model(asked.input_ids)  # which takes the cache from the rows, and they take it back
        again = model.generate(**asked, max_new_tokens=5, do_sample=False)
        assert tokenizer.decode(again[0]) == "Weights that"


def test_what_is_refused(session: Session) -> None:
    model = OffplanForCausalLM(session)
    for name in ("output_hidden_states", "output_attentions"):
        with pytest.raises(InputError, match=name):
            model(PROMPT, **{name: True})
    with pytest.raises(InputError, match="inputs_embeds"):
        model(PROMPT, inputs_embeds=torch.zeros(1))
    with pytest.raises(InputError, match="cannot train"):
        model.train()
    with pytest.raises(InputError, match="between others"):
        model(PROMPT, attention_mask=torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9]))
    with pytest.raises(InputError, match=r"computes in torch\.float32"):
        model.to(torch.float16)
    assert model.to("cpu") is model
    with pytest.raises(InputError, match="context is"):
        model(torch.zeros(1, 99, dtype=torch.int64))
    with pytest.raises(InputError, match=r"computes in torch\.float32"):
        model.half()
    assert model.float().cuda().requires_grad_(False) is model


WEIGHTS = re.compile(
    r"(parameters|state_dict(_for_save)?|embeddings|adapters?|buffers|checkpointing_enable|decoder)$"
    r"|^(save_|push_|load_(?!custom)|from_pre|init_weights)"
)
"""Names of methods that would read, change, save or train weights."""


def test_what_would_miss_the_weights_is_refused_by_name(session: Session, tmp_path: Path) -> None:
    model: Any = OffplanForCausalLM(session)
    named = [
        name
        for name in dir(PreTrainedModel)
        if WEIGHTS.search(name) and not name.startswith(("_", "register_"))
    ]
    assert {"parameters", "state_dict", "save_pretrained", "push_to_hub"} <= {*named}
    for name in sorted({*named} - {"num_parameters"}):
        with pytest.raises(InputError, match=f"^{name}: a plan"):
            getattr(model, name)(tmp_path)
    assert [*tmp_path.iterdir()] == []
    assert model.num_parameters() == session.loaded.model.num_parameters
    with pytest.raises(InputError, match=r"^num_parameters: "):
        model.num_parameters(only_trainable=True)


@pytest.mark.parametrize("stock", [False, True], ids=["own", "stock"])
@pytest.mark.parametrize("family", first_quick(MIXTURES))
def test_a_mixture_of_experts_after_a_prompt(family: str, stock: bool, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path)
    asked: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        model = load_stock(folder)
        logits, text = model(PROMPT).logits, model.generate(PROMPT, eos_token_id=None, **asked)
    with open_session(folder, offload(group(2, 1), prefill_chunk=16), stock=stock) as session:
        session.prefill(PROMPT)
        planned = OffplanForCausalLM(session)
        close(planned(PROMPT, logits_to_keep=1).logits, logits[:, -1:])
        assert planned.generate(PROMPT, eos_token_id=None, **asked).tolist() == text.tolist()
