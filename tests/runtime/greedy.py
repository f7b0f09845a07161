"""Texts in rows of a session that each take the likeliest token, and each by itself beside them."""

from collections.abc import Sequence
from pathlib import Path

import torch

from offplan.runtime.rows import Rows
from tests.runtime.plans import offload, open_session

TOLERANCE = 1e-4
"""Part of the largest logit by which float32 logits may differ: sums are made in another order."""


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

    def steps(self, number: int) -> None:
        """Make steps of all texts."""
        for _ in range(number):
            self.step()

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
