"""Texts of unlike lengths together: each as if it were alone, whatever joins, leaves and fails."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from offplan.checkpoint.open import open_model
from offplan.errors import InputError, MemoryLimitError
from offplan.runtime.passes.forward import Forward
from offplan.runtime.rows import Rows
from offplan.runtime.session import Session
from offplan.transformers_private import list_experts
from tests.runtime.conftest import save_tiny
from tests.runtime.greedy import Alone, Greedy
from tests.runtime.plans import CONTEXT, compiled_layers, group, offload, open_session
from tests.tiers import each_value_once, first_quick, others_in_sweep

LONG = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 11, 23, 45, 4, 33, 6, 21, 50, 2, 12]
PROMPTS = [LONG, [58, 9, 7], [2, 38, 4, 6, 2, 19, 44, 31, 40], [17]]
FAMILIES = ["qwen3", "deepseek_v2", "qwen3_moe_tied", "mistral_windowed", "sinks", "soft_caps"]
FAMILIES += ["chunked", "shared_keys", "gptj", "text_part", "linear", "linear_experts"]
FAMILIES += ["dynamic", "longrope", "deepseek_v3"]
CANNOT_WAIT = ("linear", "linear_experts")
"""Families whose texts have to be extended in every step."""


@contextmanager
def greedy(
    name: str, folder: Path, num_rows: int, sizes: Sequence[int] | None = None, *, chunk: int = 64
) -> Iterator[Greedy]:
    """Texts in rows of a tiny model, which are checked in the end."""
    save_tiny(name, folder)
    with open_session(folder, offload(group(2, 1), prefill_chunk=chunk)) as session:
        texts = Greedy(Rows(session, num_rows, sizes=sizes))
        yield texts
        texts.check(Alone(folder, chunk))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunk"),
    each_value_once(product(FAMILIES, [4, 64]), of=[*product(FAMILIES[1::2], [4, 64])]),
)
def test_every_text_is_as_if_alone(tmp_path: Path, name: str, chunk: int) -> None:
    with greedy(name, tmp_path, 3, chunk=chunk) as texts:
        first, second = texts.join(*PROMPTS[:2])
        texts.steps(3)
        (third,) = texts.join(PROMPTS[2])
        texts.step()
        if name not in CANNOT_WAIT:
            texts.step(third)
            texts.step(first, third)
        texts.leave(first)
        texts.steps(4)
        texts.leave(second)
        texts.step()
        (fourth,) = texts.join(PROMPTS[3])
        assert fourth != third
        texts.join(PROMPTS[1])
        texts.steps(5)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_scored_prompt_leaves_the_others_as_they_are(tmp_path: Path, name: str) -> None:
    folder = save_tiny(name, tmp_path)
    with open_session(folder, offload(group(2, 1), prefill_chunk=4)) as session:
        parts = session.prefill_all(torch.tensor([LONG]))
        expected = torch.cat([part[0].clone() for part in parts])
        session.runner.length = 0
        texts, seen = Greedy(Rows(session, 3)), list[torch.Tensor]()
        texts.join(PROMPTS[1])
        texts.step()
        for _ in range(2):  # the second is read as a whole, though a row holds it
            seen.clear()
            texts.rows.score(LONG, None, lambda logits: seen.append(logits.clone()))
            torch.testing.assert_close(torch.cat(seen), expected, atol=1e-4, rtol=1e-4)
            assert texts.rows.num_free == 2
        texts.step()
        texts.join(LONG, PROMPTS[3])
        texts.steps(3)
        with pytest.raises(InputError, match="no row is free"):
            texts.rows.score(LONG, None, seen.append)
        texts.check(Alone(folder, 4))


@pytest.mark.parametrize("name", first_quick(["qwen3", "deepseek_v2"]))
@pytest.mark.slow
def test_texts_that_join_and_leave_at_random(tmp_path: Path, name: str) -> None:
    folder, draw = save_tiny(name, tmp_path), random.Random(5)
    with open_session(folder, offload(group(2, 1), prefill_chunk=7)) as session:
        texts = Greedy(Rows(session, 4, sizes=(1, 2)))
        for _ in range(60):
            kind = draw.choice(["join", "step", "step", "leave"])
            if kind == "join" and texts.rows.num_free:
                count = draw.randint(1, texts.rows.num_free)
                texts.join(
                    *([draw.randrange(3) for _ in range(draw.randint(1, 30))] for _ in range(count))
                )
            elif kind == "leave" and texts.texts:
                texts.leave(draw.choice([*texts.texts]))
            if able := [row for row in texts.texts if texts.rows.length(row) < CONTEXT]:
                texts.step(*draw.sample(able, draw.randint(1, len(able))))
        assert min(texts.read) < 10
        texts.check(Alone(folder, 7))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", first_quick(["qwen3", "deepseek_v2", "mistral_windowed", "linear"])
)
def test_the_next_turn_of_a_chat_reads_what_is_new(tmp_path: Path, name: str) -> None:
    with greedy(name, tmp_path, 1, chunk=3) as texts:
        prompt = LONG[:7]
        for _ in range(3):
            (row,) = texts.join(prompt)
            texts.steps(4)
            prompt = [*texts.leave(row), 11, 12, 13]
        # the last token that a text makes was read by no pass
        assert texts.read == [7, 4, 4]
        texts.join(LONG[:5])  # of the beginning, where a state can go back
        assert texts.read[3:] == [5 if name in ("linear", "mistral_windowed") else 1]


@pytest.mark.slow
def test_a_prompt_goes_on_from_the_row_that_has_most_of_it(tmp_path: Path) -> None:
    with greedy("qwen3", tmp_path, 3) as texts:
        first, second, third = texts.join(LONG[:4], LONG[:9], [40, 41])
        texts.step()
        for row in (first, second, third):
            texts.leave(row)
        assert texts.join([*LONG[:8], 60, 61]) == [second]
        assert texts.join([40, 41, 42]) == [third]
        assert texts.join([7, 7]) == [first]
        assert texts.read[3:] == [2, 1, 2]
        with pytest.raises(InputError, match="1 prompts for 0 free rows of 3"):
            texts.join([1])
        texts.step()


@pytest.mark.parametrize("name", first_quick(["qwen3", "deepseek_v2", "shared_keys", "linear"]))
@pytest.mark.slow
def test_a_prefix_that_another_text_holds_is_copied(tmp_path: Path, name: str) -> None:
    with greedy(name, tmp_path, 4, chunk=3) as texts:
        (first,) = texts.join(LONG[:12])
        texts.steps(3)
        texts.join([*LONG[:9], 40], LONG[:12])
        texts.step()
        (last,) = texts.join([*LONG[:10], 50])
        texts.step()
        # a state or a window that has gone on cannot be that of a shorter text
        moves_on = name in ("linear", "shared_keys")
        assert texts.read == ([12, 10, 12, 11] if moves_on else [12, 1, 1, 1])
        # a free row that holds as much is gone on from
        texts.leave(first)
        texts.leave(last)
        assert texts.join([*LONG[:9], 41]) == [first]
        texts.steps(3)


def note_batches(session: Session) -> list[int]:
    """Return where each step adds how many rows it is for."""
    step, batches = session.runner.step, list[int]()

    def note(tokens: torch.Tensor, *others: Any) -> torch.Tensor:
        batches.append(len(tokens))
        return step(tokens, *others)

    session.runner.step = note  # type: ignore
    return batches


@pytest.mark.slow
def test_a_step_for_fewer_rows_than_there_are(tmp_path: Path) -> None:
    folder = save_tiny("qwen3_moe_tied", tmp_path)
    with open_session(folder, offload(group(2, 1))) as session:
        batches = note_batches(session)
        texts = Greedy(Rows(session, 4, sizes=(1, 2)))
        for prompt in (*PROMPTS[:3], [9, 9]):
            texts.join(prompt)
            texts.step()
        for row in (3, 2, 1):
            texts.leave(row)
            texts.step()
        assert batches == [1, 2, 4, 4, 4, 2, 1]
        texts.check(Alone(folder, 64))


@pytest.mark.slow
def test_a_row_that_is_full_is_left_as_it_is(tmp_path: Path) -> None:
    """Steps of the others write to idle rows, of which one has no place left."""
    with greedy("qwen3", tmp_path, 3) as texts:
        whole = [number % 50 for number in range(CONTEXT)]
        full, almost, other = texts.join(whole, whole[::-1][:-1], [5, 6])
        texts.step(almost, other)
        for row in (full, almost):
            with pytest.raises(InputError, match=f"row {row} has reached the context of 48"):
                texts.step(row)
        for _ in range(3):
            texts.step(other)
        texts.leave(full)
        texts.leave(almost)
        texts.step(other)
        assert texts.join(whole) == [full]
        assert texts.read[3:] == [1]
        with pytest.raises(InputError, match="the prompt has 49 tokens; the plan's context is 48"):
            texts.join([*whole, 1])


@pytest.mark.slow
def test_tokens_on_the_device(tmp_path: Path) -> None:
    with greedy("qwen3", tmp_path, 2) as texts:
        texts.next = lambda row: texts.texts[row][1][-1].argmax()  # type: ignore
        texts.join(*PROMPTS[:2])
        texts.steps(3)
        made = texts.leave(0)
        texts.join([*made, 3])
        assert texts.read[2:] == [2]


class Broken(Exception):
    """Ends a pass within a layer."""


def break_pass(session: Session, layer: int, texts: Greedy, *call: Any) -> None:
    """Have a call of ``texts`` end in a layer."""
    steps = session.runner.layers._steps

    def fail(*_: Any, **__: Any) -> None:
        raise Broken

    own, steps[layer] = steps[layer], fail
    with pytest.raises(Broken):
        call[0](*call[1:])
    steps[layer] = own


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layer"),
    each_value_once(product(["qwen3", "deepseek_v2", "linear", "longrope"], [0, 3])),
)
def test_a_pass_that_fails_leaves_the_other_rows_right(
    tmp_path: Path, name: str, layer: int
) -> None:
    folder = save_tiny(name, tmp_path)
    with open_session(folder, offload(group(2, 1), prefill_chunk=4)) as session:
        texts = Greedy(Rows(session, 3))
        first, second = texts.join(*PROMPTS[:2])
        texts.step()
        break_pass(session, layer, texts, texts.join, PROMPTS[2])
        assert texts.rows.in_use == {first, second}
        texts.step()
        texts.join(PROMPTS[2])
        break_pass(session, layer, texts, texts.step)
        if name in CANNOT_WAIT:
            assert not texts.rows.in_use
            texts.texts.clear()
            texts.join(PROMPTS[0])
            assert texts.read[-1] == len(PROMPTS[0])
        texts.steps(6)
        texts.check(Alone(folder, 4))


def spoil_token(session: Session, token: int) -> None:
    """Have a token make NaN."""
    with torch.inference_mode():
        session.loaded.module.get_input_embeddings().weight[token] = torch.nan


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", first_quick(["qwen3", "deepseek_v2", "mistral_windowed", "sinks", "linear"])
)
def test_a_nan_that_a_text_left_behind_is_not_seen(tmp_path: Path, name: str) -> None:
    """Neither where another text moves to, nor by one that joins there."""
    folder, bad = save_tiny(name, tmp_path), [63] * 30
    with open_session(folder, offload(prefill_chunk=8)) as session:
        spoil_token(session, 63)
        rows = Rows(session, 2, sizes=(1,))
        texts, first = Greedy(rows), rows.join(bad).row
        texts.join(PROMPTS[1])
        rows.leave(first)
        assert "first NaN" in rows.find_nan(bad)
        texts.steps(2)
        texts.join(PROMPTS[2])
        texts.step()
        texts.check(Alone(folder, 8))


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [True, False])
def test_no_text_goes_on_from_one_of_nan(tmp_path: Path, leaves: bool) -> None:
    """Attention weighs tokens to come by zero, so a NaN reaches those before it in its pass."""
    folder = save_tiny("qwen3", tmp_path)
    with open_session(folder, offload()) as session:
        spoil_token(session, 63)
        texts = Greedy(Rows(session, 2))
        bad = texts.rows.join([*LONG[:5], 63, 2]).row
        if leaves:
            texts.rows.leave(bad)
        texts.join(LONG[:7])
        assert texts.read == [7]
        texts.check(Alone(folder, 64))


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [True, False])
def test_no_text_goes_on_from_a_nan_that_no_window_reaches(tmp_path: Path, leaves: bool) -> None:
    """Five windows of 8 tokens do not reach from a prompt's end to a NaN at its beginning."""
    folder = save_tiny("mistral_windowed", tmp_path)
    with open_session(folder, offload(prefill_chunk=4)) as session:
        spoil_token(session, 63)
        texts = Greedy(Rows(session, 2))
        bad = texts.rows.join([*LONG[:2], 63, *(2 * LONG + LONG[:4])])
        assert not bad.logits.isnan().any()
        if leaves:
            texts.rows.leave(bad.row)
        texts.join(LONG[:7])
        assert texts.read == [7]
        texts.check(Alone(folder, 4))


@pytest.mark.slow
def test_a_nan_behind_what_a_prompt_shares_keeps_nothing_from_it(tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path)
    with open_session(folder, offload(prefill_chunk=4)) as session:
        spoil_token(session, 63)
        texts = Greedy(Rows(session, 1))
        texts.rows.leave(texts.rows.join([*LONG[:6], 63, 2]).row)
        texts.join(LONG[:7])
        assert texts.read == [3]
        texts.check(Alone(folder, 4))


def test_memory_that_runs_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_session(save_tiny("qwen3", tmp_path), offload()) as session:
        texts = Greedy(Rows(session, 2))
        texts.join(LONG)

        def fail(*_: object, **__: object) -> torch.Tensor:
            raise MemoryError

        monkeypatch.setattr(Forward, "chunk", fail)
        with pytest.raises(MemoryLimitError, match="while reading the prompt"):
            texts.join([1, 2])
        monkeypatch.setattr(Forward, "step", fail)
        with pytest.raises(MemoryLimitError, match="while making a token"):
            texts.step()
        monkeypatch.undo()
        texts.step()


@pytest.mark.slow
def test_what_is_asked_wrongly_changes_nothing(tmp_path: Path) -> None:
    folder = save_tiny("linear", tmp_path)
    with open_session(folder, offload(group(2, 1))) as session:
        with pytest.raises(InputError, match="0 rows: expected 1 or more"):
            Rows(session, 0)
        texts = Greedy(Rows(session, 3))
        first, second = texts.join(*PROMPTS[:2])
        with pytest.raises(InputError, match=f"a step without row {second}: linear attention"):
            texts.rows.step({first: 1})
        for call in (texts.rows.leave, texts.rows.length, lambda row: texts.rows.step({row: 1})):
            with pytest.raises(InputError, match=r"row 2 has no text: expected one of \[0, 1\]"):
                call(2)
        for token in (-1, 64):
            with pytest.raises(InputError, match=f"token {token}; the model has tokens from 0 to"):
                texts.join([1, token])
        with pytest.raises(InputError, match="the prompt has 0 tokens"):
            texts.join([])
        with pytest.raises(InputError, match="a step of no rows"):
            texts.rows.step({})
        texts.step()
        texts.check(Alone(folder, 64))


def test_a_session_that_is_used_beside_its_rows(tmp_path: Path) -> None:
    with open_session(save_tiny("qwen3", tmp_path), offload()) as session:
        texts = Greedy(Rows(session, 2))
        texts.join(LONG)
        session.prefill(torch.tensor([LONG]))
        with pytest.raises(ValueError, match="has taken the cache of its rows"):
            texts.step()
        assert not texts.rows.in_use
        texts.texts.clear()
        texts.join(LONG)
        texts.step()


def test_prompts_of_one_pass_cross_the_link_once(tmp_path: Path) -> None:
    decision = offload(group(2, 1), prefetch_step=1, prefill_chunk=8)
    with open_session(save_tiny("qwen3", tmp_path), decision) as session:
        texts, moved = Greedy(Rows(session, 4)), list[int]()
        for prompts in (PROMPTS[:3], [[50, 51]]):
            moved.append(-session.link.bytes_moved)
            texts.join(*prompts)
            moved[-1] += session.link.bytes_moved
            texts.step()
        slabs = sum(slab.nbytes for slab in session.loaded.placement.slabs)
        assert 0 < moved[0] <= 2 * slabs
        assert moved[0] <= moved[1] + slabs


def test_what_steps_with_idle_rows_choose_is_not_recorded(tmp_path: Path) -> None:
    """Rows without a text count as copies of one that has one."""
    model = open_model(str(save_tiny("qwen3_moe_tied", tmp_path)))
    options: Any = {"context": CONTEXT, "device": "cpu", "folder": tmp_path, "record_routing": True}
    with Session(model, offload(), **options) as session:
        texts = Greedy(Rows(session, 3))
        texts.rows.warm_up(4)
        texts.join(*PROMPTS[:2])
        texts.step()
        texts.leave(0)
        texts.step()
        assert session.routing is not None
        (steps,) = session.routing.steps
        assert steps.shape[0] == 2
        assert (steps[0][:, 2] == steps[0][:, 0]).all()
        assert (steps[1][:, [0, 2]] == steps[1][:, [1]]).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", first_quick(["qwen3_moe_tied", "deepseek_v2", "sinks", "chunked"]))
def test_idle_rows_are_sent_where_a_text_is(tmp_path: Path, name: str) -> None:
    """They read no expert that no text reads, and the texts are the same, bit for bit."""
    folder, sent, made = save_tiny(name, tmp_path), list[torch.Tensor](), list[list[torch.Tensor]]()
    for idle in (5, 9):
        with open_session(folder, offload(group(2, 1))) as session:
            texts = Greedy(Rows(session, 3, sizes=()))
            first, second, _ = texts.join(PROMPTS[0], PROMPTS[1], [idle] * 4)
            texts.step()
            texts.leave(first)
            texts.leave(2)
            for experts in list_experts(session.loaded.module):
                experts.register_forward_pre_hook(lambda _, arguments: sent.append(arguments[1]))
            texts.steps(3)
            made.append(texts.texts[second][1])
    assert sent
    assert all((rows == rows[0]).all() for rows in (each.view(3, -1) for each in sent))
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


def test_a_step_of_several_passes_fills_a_row(tmp_path: Path) -> None:
    """Llama 4 knows one position of a pass: a row that one pass has filled is idle in the next."""
    with greedy("chunked", tmp_path, 2) as texts:
        full, other = texts.join([*range(1, CONTEXT)], PROMPTS[1])
        texts.step(full, other)
        texts.step(other)
        text = texts.leave(full)
        texts.join([*text[: CONTEXT - 1], 5])
        texts.step(other)


class WithoutRows:
    """A runner that has no rows."""

    def __init__(self, runner: Any) -> None:
        for name in ("prefill", "decode", "captures_prompt", "close", "tokens_embedded"):
            setattr(self, name, getattr(runner, name))


@pytest.mark.slow
def test_a_runner_without_rows_has_one_text_at_a_time(tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path)
    with open_session(folder, offload(group(2, 1))) as session:
        session.runner = WithoutRows(session.runner)  # type: ignore
        with pytest.raises(InputError, match=r"2 rows: .* has caches of transformers' own"):
            Rows(session, 2)
        texts = Greedy(Rows(session, 1))
        texts.rows.warm_up(CONTEXT - 1)
        texts.join(LONG)
        texts.steps(3)
        made = texts.leave(0)
        texts.join([*made, 1])
        assert texts.read == [len(LONG), len(made) + 1]
        texts.step()
        texts.check(Alone(folder, 64))


@pytest.mark.slow
def test_passes_of_transformers_own_have_one_text_at_a_time(tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path)
    with open_session(folder, offload(group(2, 1)), stock=True) as session:
        texts = Greedy(Rows(session, 1))
        texts.rows.warm_up(5)
        for prompt in PROMPTS[:2]:
            (row,) = texts.join(prompt)
            texts.steps(3)
            texts.leave(row)
        assert texts.read == [len(each) for each in PROMPTS[:2]]
        texts.check(Alone(folder, 64))


@pytest.mark.parametrize("name", first_quick(["qwen3", "deepseek_v2", "linear", "shared_keys"]))
@pytest.mark.slow
def test_texts_lie_where_the_smallest_step_finds_them(tmp_path: Path, name: str) -> None:
    folder = save_tiny(name, tmp_path)
    with open_session(folder, offload(group(2, 1))) as session:
        batches = note_batches(session)
        texts = Greedy(Rows(session, 4, sizes=(1, 2)))
        texts.join(*PROMPTS)
        texts.step()
        texts.leave(0)
        texts.step()
        ended = texts.leave(2)
        texts.step()
        texts.step()
        texts.leave(1)
        texts.step()
        assert batches == [4, 4, 2, 2, 1]
        # a state or a window that has gone on cannot be that of a shorter text
        assert texts.join([*ended, 5], LONG) == [2, 0]
        moves_on = name in ("linear", "shared_keys")
        assert texts.read[4:] == [2, len(LONG) if moves_on else 1]
        texts.steps(3)
        texts.check(Alone(folder, 64))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", others_in_sweep(["qwen3", "chunked", "deepseek_v2", "linear"], ["qwen3", "linear"])
)
def test_no_row_is_compiled_for(tmp_path: Path, name: str) -> None:
    """What the first texts have compiled serves every row, position and length of a text."""
    folder = save_tiny(name, tmp_path)
    with compiled_layers(), open_session(folder, offload(group(2, 1), prefill_chunk=5)) as session:
        texts = Greedy(Rows(session, 3))
        texts.rows.warm_up(11)
        compiled = counters["stats"]["unique_graphs"]
        for prompt in PROMPTS[:3]:
            texts.join(prompt)
            texts.step()
        texts.leave(0)
        texts.step()
        texts.leave(1)
        texts.step()
        texts.join(PROMPTS[0])
        texts.step()
        assert counters["stats"]["unique_graphs"] == compiled > 0
        texts.check(Alone(folder, 5))
