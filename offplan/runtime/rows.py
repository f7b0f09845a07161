"""Texts of unlike lengths that are generated together: a row of the cache for each."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from offplan.errors import InputError
from offplan.runtime.session import Session


class Joined(NamedTuple):
    """A text that has just been given a row."""

    row: int
    """The row of the cache, from 0 on, by which ``Rows`` knows the text from here on."""
    logits: torch.Tensor
    """Logits that follow the prompt, [vocabulary], on the device, the caller's own."""
    tokens_read: int
    """Tokens of the prompt that the pass read; the row's cache had the others already."""


class Rows:
    """The rows of a session's cache, each with a text of its own length.

    Texts join and leave between steps. A prompt is read by a pass of its own into its row; a step
    then extends all texts together. While there are ``Rows`` of a session, nobody else may call its
    ``prefill`` and ``decode``. Works on the session's stream: read logits and make tokens inside
    ``session.stream()``. Not for several threads at once.

    A call that raises leaves the other texts as they were, ready for the next call. Where that
    cannot be, as where a step has changed the states of linear attention, the rows are emptied:
    afterwards ``in_use`` names the texts that are still there.
    """

    def __init__(self, session: Session, num_rows: int) -> None:
        """Share the cache of ``session`` among up to ``num_rows`` texts at a time.

        A plan has memory for as many as its workload's batch. Raises InputError for fewer than one.
        """
        if num_rows < 1:
            raise InputError(f"{num_rows} rows: expected 1 or more")
        self._session = session
        self.num_rows = num_rows
        """Texts that can be there at a time."""
        self._texts: dict[int, list[int]] = {}

    @property
    def in_use(self) -> frozenset[int]:
        """Rows that have a text."""
        return frozenset(self._texts)

    @property
    def num_free(self) -> int:
        """Texts that could join now."""
        return self.num_rows - len(self._texts)

    def length(self, row: int) -> int:
        """Return the tokens of a row's text so far; ``session.context`` is the most."""
        return len(self._texts[row])

    def join(self, prompt: Sequence[int]) -> Joined:
        """Read a prompt into a free row.

        Of the free rows it takes the one whose cache holds most of the prompt's beginning, and
        reads the rest alone. A state that cannot go back, as linear attention has, serves a prompt
        that goes on from all of it. Raises InputError for a prompt that is empty or beyond the
        context, and where no row is free, MemoryLimitError.
        """
        (joined,) = self.join_all([prompt])
        return joined

    def join_all(self, prompts: Sequence[Sequence[int]]) -> list[Joined]:
        """Read several prompts into free rows, in one pass over the weights; as ``join`` does.

        Weights that are off the GPU cross the link once for all of the prompts: join those that
        wait together. Raises what ``join`` raises, for all of them before any is read; where the
        pass fails none has joined.
        """
        if len(prompts) > self.num_free:
            raise InputError(
                f"{len(prompts)} prompts for {self.num_free} free rows of {self.num_rows}: let a "
                "text leave first"
            )
        for prompt in prompts:
            if not 0 < len(prompt) <= self._session.context:
                raise InputError(
                    f"the prompt has {len(prompt)} tokens; the plan's context is "
                    f"{self._session.context}"
                )
        free = [row for row in range(self.num_rows) if row not in self._texts]
        joined = []
        for row, prompt in zip(free, prompts, strict=False):
            joined.append(Joined(row, self._read(prompt), len(prompt)))
            self._texts[row] = list(prompt)
        return joined

    def step(self, tokens: Mapping[int, int | torch.Tensor]) -> dict[int, torch.Tensor]:
        """Extend the texts of some rows by a token each, in one pass; the others stay as they are.

        A token is a number, or a tensor of one element on the device: then nothing waits for the
        host. Returns the logits that follow, [vocabulary] for each row, on the device, overwritten
        by the next call. Raises InputError for a row that has no text and for a text that has
        reached the context, before anything is changed, MemoryLimitError.

        Where a model's states cannot stay as they are (linear attention), the texts of all rows in
        use have to be extended; InputError otherwise.
        """
        for row in tokens:
            if row not in self._texts:
                raise InputError(f"row {row} has no text: expected one of {sorted(self._texts)}")
            if len(self._texts[row]) >= self._session.context:
                raise InputError(
                    f"the text of row {row} has reached the context of "
                    f"{self._session.context} tokens"
                )
        made = {}
        for row, token in tokens.items():
            self._texts[row].append(int(token))
            made[row] = self._read(self._texts[row])
        return made

    def leave(self, row: int) -> None:
        """Free a row; its cache stays for a later prompt that begins as its text does.

        Raises InputError for a row that has no text.
        """
        if row not in self._texts:
            raise InputError(f"row {row} has no text: expected one of {sorted(self._texts)}")
        del self._texts[row]

    def _read(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._session.prefill(torch.tensor([list(tokens)]))[0].clone()
