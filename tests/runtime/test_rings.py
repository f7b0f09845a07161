"""Windows in the cache: as stock transformers has it, whatever a ring has overwritten since."""

import random
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from offplan.checkpoint.model import KVCache
from offplan.checkpoint.open import open_model
from offplan.errors import CheckpointError
from offplan.held.held import hold
from offplan.plan import Workload
from offplan.row_cache import RowCache
from offplan.runtime.loading.skeleton import build_skeleton
from offplan.runtime.model.caches import LayerCaches, Position, Ring
from offplan.runtime.passes.chunks import ChunkedTexts, Reading
from offplan.runtime.rows import Rows
from offplan.runtime.session import Session
from tests.runtime.conftest import save_tiny
from tests.runtime.greedy import TOLERANCE, Alone, Greedy
from tests.runtime.plans import CONTEXT, group, offload, open_session
from tests.tiers import each_value_once, first_quick

FAMILIES = ["mistral_windowed", "sinks", "chunked", "soft_caps", "olmo3_windowed"]
SHARED = ["shared_rings", "shared_streams"]
FAMILIES += SHARED
"""Windows of 8 tokens or chunks of 6, in all layers or in some."""
CHUNKS = [8, 1, 3, 6, 7, 64]
PROMPT = [number * number % 61 for number in range(23)]


@cache
def follow_stock(folder: Path, num_steps: int) -> tuple[list[int], torch.Tensor]:
    """Return the greedy text of stock transformers, without a cache, and its logits."""
    stock, tokens = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), [*PROMPT]
    with torch.inference_mode():
        for _ in range(num_steps):
            logits = stock(torch.tensor([tokens]), use_cache=False).logits[0]
            tokens.append(int(logits[-1].argmax()))
    return tokens[:-1], logits[len(PROMPT) - 1 :]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunk"), each_value_once(product(FAMILIES, CHUNKS)))
@pytest.mark.parametrize("batch", [1, 2])
def test_prompts_beyond_a_window(
    tmp_path_factory: pytest.TempPathFactory, name: str, chunk: int, batch: int
) -> None:
    folder = save_once(name, tmp_path_factory)
    tokens, expected = follow_stock(folder, 20)
    with open_session(folder, offload(group(2, 1), prefill_chunk=chunk)) as session:
        texts = torch.tensor([tokens] * batch)
        got = [session.prefill(texts[:, : len(PROMPT)])[0]]
        for number in range(len(PROMPT), len(tokens)):
            got.append(session.decode(texts[:, number : number + 1])[0].clone())
    difference = (torch.stack(got) - expected).abs().max()
    assert float(difference) < TOLERANCE * float(expected.abs().max())


def open_with(folder: Path, chunk: int, context: int) -> Session:
    decision, model = offload(group(2, 1), prefill_chunk=chunk), open_model(str(folder))
    return Session(model, decision, context=context, device="cpu", folder=folder)


_SAVED: dict[str, Path] = {}


def save_once(name: str, factory: pytest.TempPathFactory) -> Path:
    if name not in _SAVED:
        _SAVED[name] = save_tiny(name, factory.mktemp(name))
    return _SAVED[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunk", "context"),
    each_value_once(product([*FAMILIES, "linear"], [8, 3, 64], [CONTEXT, 7])),
)
def test_chats_at_random(
    tmp_path_factory: pytest.TempPathFactory, name: str, chunk: int, context: int
) -> None:
    """Prompts begin as earlier ones, with answers or without, cut short or beyond a window."""
    folder, draw = save_once(name, tmp_path_factory), random.Random(chunk)
    said: list[list[int]] = []

    def make_prompt() -> list[int]:
        before = draw.choice([[], *said[-6:], *(prompt for prompt, _ in texts.texts.values())])
        before = before[: draw.choice([len(before), draw.randint(0, len(before))])]
        new = [draw.randrange(60) for _ in range(draw.choice([1, 2, 5, 12]))]
        return [*before, *new][:context]

    with open_with(folder, chunk, context) as session:
        texts = Greedy(Rows(session, 4, sizes=(1, 2)))
        for _ in range(60):
            kind = draw.choice(["join", "join", "step", "step", "step", "leave"])
            if kind == "join" and texts.rows.num_free:
                count = draw.randint(1, min(2, texts.rows.num_free))
                texts.join(*(make_prompt() for _ in range(count)))
            elif kind == "leave" and texts.texts:
                row = draw.choice([*texts.texts])
                said.append(texts.texts[row][0])
                said.append(texts.leave(row))
            able = [row for row in texts.texts if texts.rows.length(row) < context]
            if name == "linear":
                for row in {*texts.texts} - {*able}:
                    texts.leave(row)
            elif able:
                able = draw.sample(able, draw.randint(1, len(able)))
            if able:
                texts.step(*able)
        all_tokens = sum(len(prompt) for prompt, _ in [*texts.ended, *texts.texts.values()])
        assert sum(texts.read) < all_tokens
        texts.check(Alone(folder, chunk))


@pytest.mark.parametrize("name", first_quick(["mistral_windowed", "chunked", "linear"]))
def test_a_chat_goes_on_from_its_last_prompt(tmp_path: Path, name: str) -> None:
    """A template renders the answer again, not always as the model gave it."""
    folder = save_tiny(name, tmp_path)
    with open_session(folder, offload(group(2, 1), prefill_chunk=3)) as session:
        texts = Greedy(Rows(session, 2))
        (row,) = texts.join(PROMPT[:20])
        for _ in range(5):
            texts.step()
        texts.join([*PROMPT[:20], 9, 9, 9])  # beside it: of the checkpoint in use
        texts.step()
        texts.leave(row)
        texts.step()  # which passes the row that is left
        texts.join([*PROMPT[:20], 50, 51])
        texts.step()
        texts.leave(row)
        texts.join([*PROMPT[:20], 50, 51, 52])  # and of the checkpoint that this prompt left
        assert texts.read == [20, 3, 2, 1]
        texts.check(Alone(folder, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral_windowed", "linear"])
def test_of_rows_that_hold_as_much_one_is_gone_on_from(tmp_path: Path, name: str) -> None:
    """One has it at its end, the other, which left before, in its checkpoint."""
    folder = save_tiny(name, tmp_path)
    with open_session(folder, offload(group(2, 1))) as session:
        texts = Greedy(Rows(session, 2))
        (longer,) = texts.join(PROMPT)
        for _ in range(5):
            texts.step()
        texts.join(PROMPT)
        texts.leave(longer)
        texts.leave(1 - longer)
        texts.join([*PROMPT, 50, 51])
        texts.step()
        texts.join([*PROMPT, 52])
        texts.step()
        assert texts.read == [len(PROMPT), len(PROMPT), 2, 1]
        texts.check(Alone(folder, 64))


@pytest.mark.parametrize(
    "name", first_quick([*FAMILIES, "linear", "linear_experts", "qwen3", "deepseek_v2"])
)
@pytest.mark.parametrize("context", [CONTEXT, 5])
def test_what_is_priced_is_allocated(tmp_path: Path, name: str, context: int) -> None:
    folder = save_tiny(name, tmp_path)
    model = open_model(str(folder))
    workload = Workload(batch=3, prompt_tokens=2, output_tokens=2, context=context)
    with Session(model, offload(prefill_chunk=4), context=context, device="cpu", folder=folder) as (
        session
    ):
        session.prefill(torch.tensor([[1, 2]] * 3))
        cache = session.runner.layers.cache
        assert isinstance(cache, LayerCaches)
        assert sum(each.nbytes for each in cache.tensors()) == hold(model).cache_bytes(workload)
        has_ring = any(isinstance(part, Ring) for part in cache.by_layer)
        assert has_ring == (name in FAMILIES and context > 8)


@pytest.mark.parametrize("name", first_quick(SHARED))
def test_keys_that_wait_are_priced(tmp_path: Path, name: str) -> None:
    """What layers hand on of each chunk, beside what the cache keeps."""
    prompt = torch.tensor([PROMPT] * 2)
    with open_session(save_tiny(name, tmp_path), offload(), capture=False) as session:
        session.prefill(prompt)
        forward, row = session.runner.forward, session.loaded.stage.row_cache(CONTEXT)
        kept = {each.untyped_storage().data_ptr() for each in forward.layers.cache.tensors()}
        with torch.inference_mode():
            texts = ChunkedTexts([Reading(prompt)], forward, 5)
            for index in range(len(forward.layers)):
                texts.run_layer(index, None)
        waiting = {
            each.data_ptr(): each.nbytes()
            for chunk in texts._chunks[0]
            for states in chunk.arguments[-1]["shared_kv_states"].values()
            for each in (part.untyped_storage() for part in states)
            if each.data_ptr() not in kept
        }
        assert sum(waiting.values()) == prompt.numel() * row.waiting_token_bytes > 0


@pytest.mark.parametrize(("name", "num_passes"), first_quick([("shared_rings", 4), ("qwen3", 2)]))
def test_prompts_read_together_keep_what_is_priced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, num_passes: int
) -> None:
    """Where keys wait, no more than a chunk of each row; else hidden states of a few times that."""
    with open_session(save_tiny(name, tmp_path), offload(prefill_chunk=2)) as session:
        rows, passes, read = Rows(session, 4), [], session.runner.read

        def note(readings: list[Reading], **others: bool) -> torch.Tensor:
            passes.append(len(readings))
            return read(readings, **others)

        monkeypatch.setattr(session.runner, "read", note)
        rows.join_all([[number] * 6 for number in range(4)])
        assert len(passes) == num_passes


def test_a_ring_hands_on_what_a_chunk_sees() -> None:
    ring = make_ring(5, 2)
    states = torch.arange(40.0).view(2, 1, 20, 1)
    start = 0
    for num_new in (3, 1, 7, 5, 2, 2):
        stop = start + num_new
        new, behind = states[:, :, start:stop], min(start, 4)
        keys, values = ring.extend(new, -new, start, behind)
        assert torch.equal(keys, states[:, :, start - behind : stop])
        assert torch.equal(values, -keys)
        start = stop


def make_ring(num_tokens: int, batch: int) -> Ring:
    position = Position(torch.device("cpu"))
    caches = LayerCaches(RowCache([KVCache(8, window=num_tokens)], 20), position)
    (ring,) = caches.by_layer
    assert isinstance(ring, Ring)
    position.is_chunk = True
    ring.update(torch.zeros(batch, 1, 1, 1), torch.zeros(batch, 1, 1, 1))
    return ring


@pytest.mark.parametrize(
    ("name", "window", "why"),
    first_quick(
        [
            ("shared_rings", None, "layer 4 reads another layer's window"),
            ("mistral_windowed", 8, "layer 4 has a window, and shares or changes what is cached"),
        ]
    ),
)
def test_a_ring_that_others_read_unlike_the_config_is_refused(
    tmp_path: Path, name: str, window: int | None, why: str
) -> None:
    """By the config layer 4 keeps nothing; it reads the ring of layer 2, or keeps its own."""
    model = open_model(str(save_tiny(name, tmp_path)))
    layers = [*model.layers]
    layers[4] = replace(layers[4], kv_cache=KVCache(window=window))
    with pytest.raises(CheckpointError, match=why):
        build_skeleton(replace(model, layers=tuple(layers)))


def test_a_window_that_the_config_does_not_say_is_refused(tmp_path: Path) -> None:
    """A ring of fewer tokens than a layer sees would give wrong answers."""
    model = open_model(str(save_tiny("mistral_windowed", tmp_path)))
    layers = [replace(each, kv_cache=replace(each.kv_cache, window=4)) for each in model.layers]
    with pytest.raises(CheckpointError, match="layer 0 sees 4 tokens, by transformers' class 8"):
        build_skeleton(replace(model, layers=tuple(layers)))
