"""Texts of unlike lengths together: each as if it were alone, whatever joins, leaves and fails."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from offplan.runtime.rows import Rows
from tests.runtime.conftest import save_tiny
from tests.runtime.plans import CONTEXT, group, offload, open_session

TOLERANCE = 1e-4
"""Part of the largest logit by which float32 logits may differ: sums are made in another order."""
LONG = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 11, 23, 45, 4, 33, 6, 21, 50, 2, 12]
PROMPTS = [LONG, [58, 9, 7], [2, 38, 4, 6, 2, 19, 44, 31, 40], [17]]
FAMILIES = ["qwen3", "deepseek_v2", "qwen3_moe_tied", "mistral_windowed", "sinks", "soft_caps"]
FAMILIES += ["chunked", "shared_keys", "gptj", "text_part", "linear", "linear_experts"]
FAMILIES += ["dynamic", "longrope", "deepseek_v3"]
CANNOT_WAIT = ("linear", "linear_experts")
"""Families whose texts have to be extended in every step."""


class Alone:
    """What follows a text that has a session to itself."""

    def __init__(self, folder: Path, chunk: int) -> None:
        self._session = open_session(folder, offload(prefill_chunk=chunk))

    def check(self, prompt: Sequence[int], found: Sequence[torch.Tensor]) -> list[int]:
        """Compare logits, those of the prompt and of each greedy token; return the tokens."""
        logits, tokens = self._session.prefill(torch.tensor([[*prompt]])), list[int]()
        for number, ours in enumerate(found):
            if number:
                logits = self._session.decode(torch.tensor([tokens[-1:]]))
            scale = float(logits.abs().max())
            assert float((ours - logits[0]).abs().max()) < TOLERANCE * scale, number
            assert int(ours.argmax()) == int(logits.argmax())
            tokens.append(int(logits.argmax()))
        return tokens


class Greedy:
    """Texts in rows, each with the logits that it was given."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.read: list[int] = []
        self.texts: dict[int, tuple[list[int], list[torch.Tensor]]] = {}
        self.ended: list[tuple[list[int], list[torch.Tensor]]] = []

    def join(self, *prompts: list[int]) -> list[int]:
        joined = self.rows.join_all(prompts)
        for each, prompt in zip(joined, prompts, strict=True):
            self.texts[each.row] = prompt, [each.logits]
        self.read += [each.tokens_read for each in joined]
        return [each.row for each in joined]

    def step(self, *rows: int) -> None:
        chosen = rows or tuple(self.texts)
        made = self.rows.step({row: self.next(row) for row in chosen})
        for row in chosen:
            self.texts[row][1].append(made[row].clone())

    def next(self, row: int) -> int:
        return int(self.texts[row][1][-1].argmax())

    def leave(self, row: int) -> list[int]:
        """End a text; return its prompt and all tokens that followed, the last one included."""
        self.rows.leave(row)
        prompt, logits = self.texts.pop(row)
        self.ended.append((prompt, logits))
        return prompt + [int(each.argmax()) for each in logits]

    def check(self, alone: Alone) -> None:
        for row in [*self.texts]:
            self.leave(row)
        for prompt, logits in self.ended:
            alone.check(prompt, logits)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_text_is_as_if_alone(tmp_path: Path, name: str, chunk: int) -> None:
    folder = save_tiny(name, tmp_path)
    with open_session(folder, offload(group(2, 1), prefill_chunk=chunk)) as session:
        texts = Greedy(Rows(session, 3))
        first, second = texts.join(*PROMPTS[:2])
        for _ in range(3):
            texts.step()
        (third,) = texts.join(PROMPTS[2])
        texts.step()
        if name not in CANNOT_WAIT:
            texts.step(third)
            texts.step(first, third)
        texts.leave(first)
        for _ in range(4):
            texts.step()
        texts.leave(second)
        texts.step()
        (fourth,) = texts.join(PROMPTS[3])
        assert fourth != third
        texts.join(PROMPTS[1])
        for _ in range(5):
            texts.step()
        texts.check(Alone(folder, chunk))


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v2"])
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
