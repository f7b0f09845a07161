"""Texts whose tokens are drafted, right or wrong as a test says."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from offplan.capabilities.drafts import Draft
from offplan.capabilities.way import OWN, Way
from offplan.checkpoint.open import open_model
from offplan.plan import Offload
from offplan.runtime.rows import Rows
from offplan.runtime.session import Session
from tests.runtime.plans import CONTEXT

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 11]
FED = torch.randint(3, 60, (CONTEXT - len(PROMPT),), generator=torch.Generator().manual_seed(3))
"""Tokens behind the prompt, up to the end of the context."""


def drafting(decision: Offload, tokens: int = 7) -> Offload:
    """Return the same decision with drafts."""
    draft = Draft(kind="ngram", tokens=tokens)
    return decision.model_copy(update={"draft": draft})


def open_drafted(folder: Path, decision: Offload, way: Way = OWN, **more: Any) -> Session:
    model, device = open_model(str(folder)), more.pop("device", "cpu")
    return Session(model, decision, context=CONTEXT, device=device, folder=folder, way=way, **more)


class Scripted:
    """Drafts a known text, of which it makes every token wrong that is not ``right``."""

    def __init__(self, text: Sequence[int], right: Sequence[bool]) -> None:
        self._text, self._right = text, right
        self._num_taken = 0

    def extend(self, tokens: Sequence[int]) -> None:
        self._num_taken += len(tokens)

    def propose(self, most: int) -> list[int]:
        at = self._num_taken
        return [
            token if self._right[(at + place) % len(self._right)] else (token + 1) % 60
            for place, token in enumerate(self._text[at : at + most])
        ]


def feed_steps(session: Session) -> torch.Tensor:
    """Logits behind each token of FED, of a step each: [tokens, vocabulary]."""
    rows = Rows(session, 1)
    row = rows.join(PROMPT).row
    with session.stream():
        made = [rows.step({row: token})[row].clone() for token in FED.tolist()]
        return torch.stack(made).cpu()


def feed_passes(session: Session, seed: int) -> tuple[torch.Tensor, list[int]]:
    """Logits of the same tokens, of passes with drafts that are right up to a random place.

    Also counts passes by their number of tokens.
    """
    draw, rows, fed = random.Random(seed), Rows(session, 1), FED.tolist()
    row, made, at, passes = rows.join(PROMPT).row, [], 0, [0] * 9
    while at < len(fed):
        most = min(rows.count_checked(row), len(fed) - at)
        number = draw.randint(1, most)
        passes[number] += 1
        right = draw.randint(1, number)
        with session.stream():
            if number == 1:
                made.append(rows.step({row: fed[at]})[row][None].clone())
            else:
                wrong = [(token + 1) % 60 for token in fed[at + right : at + number]]
                logits = rows.check(row, [*fed[at : at + right], *wrong])
                made.append(logits[:right].clone())
                rows.take(row, number, right, has_nan=bool(draw.randint(0, 1)))
        at += right
    assert rows.length(row) == CONTEXT
    with session.stream():
        return torch.cat(made).cpu(), passes
