"""Rows on a GPU, where their steps are compiled and captured."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from offplan.placement import Phase
from offplan.runtime.passes.executor import Executor
from offplan.runtime.rows import Rows
from offplan.runtime.session import Session
from tests.runtime.conftest import save_tiny
from tests.runtime.plans import group, offload, open_session

pytestmark = pytest.mark.gpu

NAMES = ["qwen3_wide", "deepseek_v2", "mistral_windowed", "sinks", "chunked", "shared_keys"]
NAMES += ["linear", "dynamic", "longrope"]
CANNOT_WAIT = ("linear",)
TEXTS = [
    [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 11, 23, 45, 4, 33, 6, 21, 50, 2, 12, 1, 30, 31, 8, 9, 60],
    [58, 9, 7, 22, 8, 41, 3, 3, 19, 20, 44, 5, 6, 7, 8, 50, 51, 52],
    [2, 38, 4, 6, 2, 19, 44, 31, 40, 11, 12, 13, 14, 15, 16, 17, 18, 19],
]
"""Prompts with the tokens that follow: whatever logits say, these are fed."""
LENGTHS = [20, 3, 9]
"""Tokens of each prompt."""


def read_alone(session: Session, number: int, num_steps: int) -> list[torch.Tensor]:
    """Logits of a text that has a session to itself."""
    text, length = torch.tensor([TEXTS[number]]), LENGTHS[number]
    with session.stream():
        logits = [session.prefill(text[:, :length])[0].cpu()]
        for at in range(length, length + num_steps):
            token = text[:, at : at + 1].to(session.device)
            logits.append(session.decode(token)[0].cpu())
    return logits


class Fed:
    """Texts of TEXTS in rows, with the logits of each."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.logits: dict[int, list[torch.Tensor]] = {}
        self._numbers: dict[int, int] = {}

    def join(self, *numbers: int) -> None:
        prompts = [TEXTS[number][: LENGTHS[number]] for number in numbers]
        every = self.rows.join_all(prompts)
        with self.rows.session.stream():
            for number, joined in zip(numbers, every, strict=True):
                self._numbers[number] = joined.row
                self.logits[number] = [joined.logits.cpu()]

    def step(self, *numbers: int) -> None:
        fed = {
            self._numbers[each]: TEXTS[each][LENGTHS[each] + len(self.logits[each]) - 1]
            for each in numbers
        }
        made = self.rows.step(fed)
        with self.rows.session.stream():
            for each in numbers:
                self.logits[each].append(made[self._numbers[each]].cpu())

    def leave(self, number: int) -> None:
        self.rows.leave(self._numbers.pop(number))


def play(texts: Fed, *, can_wait: bool) -> None:
    """Join, step and leave: steps of one row and of all, with idle rows in between and behind."""
    texts.join(0)
    for _ in range(3):
        texts.step(0)
    texts.join(2)
    texts.step(0, 2)
    texts.join(1)
    if can_wait:
        texts.step(1)
        texts.step(2, 1)
    texts.step(0, 1, 2)
    texts.leave(2)
    texts.step(0, 1)
    texts.leave(0)
    for _ in range(3):
        texts.step(1)


def check(texts: Fed, alone: Session, compare: Any) -> None:
    for number, found in texts.logits.items():
        for ours, theirs in zip(found, read_alone(alone, number, len(found) - 1), strict=True):
            compare(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_every_text_is_as_if_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """And once warmed up, nothing more is captured, whoever joins and leaves."""
    captured: list[Phase] = []
    capture = Executor.capture

    def note(own: Executor, schedule: Any, *others: Any) -> Any:
        captured.append(schedule.phase)
        return capture(own, schedule, *others)

    monkeypatch.setattr(Executor, "capture", note)
    folder, decision = save_tiny(name, tmp_path), offload(group(2, 1), prefill_chunk=4)
    with open_session(folder, decision, "cuda") as session:
        texts = Fed(Rows(session, 3))
        texts.rows.warm_up(5)
        assert captured == [Phase.DECODE] * 2
        play(texts, can_wait=name not in CANNOT_WAIT)
        assert captured == [Phase.DECODE] * 2
    with open_session(folder, decision, "cuda", capture=False) as alone:
        check(texts, alone, lambda *pair: torch.testing.assert_close(*pair, atol=2e-3, rtol=2e-3))


def test_the_kernel_for_latents_knows_each_row(tmp_path: Path) -> None:
    """In bfloat16, which rounds otherwise in a batch of another size."""
    plain, folder = save_tiny("latents_wide", tmp_path / "plain"), tmp_path / "bfloat16"
    AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16).save_pretrained(folder)
    differences: list[float] = []

    def compare(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        distance = (ours.float() - theirs.float()).abs().mean()
        differences.append(float(distance / theirs.float().abs().mean()))

    with open_session(folder, offload(group(2, 1)), "cuda") as session:
        texts = Fed(Rows(session, 3))
        texts.rows.warm_up(5)
        play(texts, can_wait=True)
    with open_session(folder, offload(group(2, 1)), "cuda", capture=False) as alone:
        check(texts, alone, compare)
    # where scores of experts are all but equal, rounding alone moves single logits far
    assert sum(differences) / len(differences) < 0.1, differences


def test_a_prefix_is_read_once(tmp_path: Path) -> None:
    decision = offload(group(2, 1), prefill_chunk=6)
    with (
        open_session(save_tiny("qwen3", tmp_path), decision, "cuda") as session,
        session.stream(),
    ):
        rows = Rows(session, 2)
        text: Sequence[int] = TEXTS[0]
        row, _, num_read = rows.join(text[:20])
        assert num_read == 20
        token = torch.tensor([text[20]], device="cuda")
        rows.step({row: token})
        rows.leave(row)
        again, logits, num_read = rows.join(text)
        assert (again, num_read) == (row, len(text) - 21)
        found = logits.cpu()
    with open_session(tmp_path, decision, "cuda", capture=False) as session, session.stream():
        expected = session.prefill(torch.tensor([[*text]]))[0].cpu()
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)
