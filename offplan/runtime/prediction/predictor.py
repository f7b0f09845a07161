"""A loaded prediction layer behind the passes of its model: it drafts tokens of one text.

Entry i of its KV cache is made of the hidden state of token i and of token i + 1. The hidden states
of passes wait until the token behind each is known, and are read together. Each drafted token is an
entry more, of the layer's own output; the next text's tokens are written over it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from offplan.capabilities.drafts import MOST_DRAFTED, PASS_TOKENS, pass_tokens
from offplan.runtime.faults import find_cause
from offplan.runtime.loading.loaded import LoadedModel
from offplan.runtime.passes.chunks import Reading
from offplan.runtime.passes.runner import ModelRunner
from offplan.runtime.prediction.skeleton import JoinedInput

MOST_WAITING = 1 + MOST_DRAFTED
"""Hidden states that wait: as many as one pass makes. So many steps read them once."""


@contextmanager
def _drafts_may_end() -> Iterator[None]:
    """Have the text go on without drafts where memory runs out inside the block."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if find_cause(error) is None:
            raise


class Predictor:
    """Drafts by a prediction layer; works on the current stream, in inference mode."""

    def __init__(
        self, loaded: LoadedModel, runner: ModelRunner, main: PreTrainedModel, context: int
    ) -> None:
        """Run ``loaded`` by its own ``runner``, for texts of up to ``context`` tokens.

        ``main`` is the model that it drafts for, whose last norm is watched from now on: none of
        its passes may be captured yet.
        """
        self._loaded, self._runner, self._context = loaded, runner, context
        self._head: nn.Module = main.get_output_embeddings()
        joined = loaded.module.get_input_embeddings()
        assert isinstance(joined, JoinedInput)
        self._joined, device = joined, loaded.store.device
        weight = joined.hidden_norm.weight
        assert isinstance(weight, torch.Tensor)
        size = 1, MOST_WAITING, len(weight)
        self._made, self._waiting, self._fed = (
            torch.zeros(size, dtype=weight.dtype, device=device) for _ in range(3)
        )
        joined.follow(main.get_input_embeddings(), self._fed)
        self._norm: nn.Module = main.get_decoder().norm
        self._norm.register_forward_hook(self._see)
        self._tokens = torch.zeros(1, MOST_WAITING, dtype=torch.int64, device=device)
        """The token behind each hidden state that waits; that of the last is not known."""
        self._num_read = 0
        """Entries of the text in the cache."""
        self._num_waiting = 0
        """Hidden states that wait behind them."""
        self._is_lost = True
        """True if a pass was missed, and nothing is drafted until a text begins."""

    @property
    def tokens_embedded(self) -> int:
        """Rows of the input embedding that its passes have read."""
        return self._runner.tokens_embedded

    def close(self) -> None:
        """Give back its graphs, caches and weights; the device must be idle."""
        self._runner.close()
        self._loaded.close()

    def read(self, chunks: Sequence[torch.Tensor], tokens: torch.Tensor, start: int) -> None:
        """Read a prompt's ``tokens``, int64 of [1, new], from ``start`` of its text on.

        ``chunks`` are their hidden states ahead of the model's last norm, each [1, some, hidden].
        """
        if len(tokens) > 1:
            self._is_lost = True
            return
        known = self._num_read + (0 if self._is_lost else self._num_waiting)
        self._is_lost = True  # unless all of it is done
        if start > known:
            return
        with _drafts_may_end():
            self._read_prompt(chunks, tokens, start)

    def _read_prompt(
        self, chunks: Sequence[torch.Tensor], tokens: torch.Tensor, start: int
    ) -> None:
        self._runner.allocate(1)
        if start > self._num_read:
            # the text goes on from where an earlier one was left
            self._num_waiting = start - self._num_read
            self._read_waiting(tokens[:, :1])
        # else the entry before it may be of the earlier text's next token, which changes no text
        self._num_read, self._num_waiting = start, 0
        stop = start + tokens.shape[1]
        for hidden in chunks:
            states = self._norm(hidden)
            at = self._num_read - start
            following = tokens[:, 1 + at : 1 + at + states.shape[1]]
            if following.shape[1]:
                self._joined.hidden = states
                try:
                    reading = Reading(following, self._num_read)
                    self._runner.read([reading], may_capture=False)
                finally:
                    self._joined.hidden = self._fed
            self._num_read += following.shape[1]
        self._waiting[:, :1].copy_(states[:, -1:])
        self._num_waiting, self._is_lost = 1, self._num_read + 1 != stop

    def note(self, fed: torch.Tensor, position: int, num_taken: int = 1) -> None:
        """Note a pass of the text that was fed tokens, int64 of [1, new], from ``position`` on.

        The first ``num_taken`` of them are the text's.
        """
        if self._is_lost or position != self._num_read + self._num_waiting:
            self._is_lost = True
            return
        self._is_lost = True  # unless all of it is done
        with _drafts_may_end():
            self._note(fed, num_taken)

    def _note(self, fed: torch.Tensor, num_taken: int) -> None:
        if self._num_waiting:
            if self._num_waiting + num_taken > MOST_WAITING:
                self._read_waiting(fed[:, :1])
            else:
                self._tokens[:, self._num_waiting - 1].copy_(fed[:, 0])
        first, stop = self._num_waiting, self._num_waiting + num_taken
        self._waiting[:, first:stop].copy_(self._made[:, :num_taken])
        self._tokens[:, first : stop - 1].copy_(fed[:, 1:num_taken])
        self._num_waiting, self._is_lost = stop, False

    def propose(self, token: int, length: int, most: int) -> list[int]:
        """Draft up to ``most`` tokens behind ``token``, behind ``length`` tokens that passes read.

        None where a pass was missed, or memory runs out. Waits for the device.
        """
        known = self._num_read + self._num_waiting
        if self._is_lost or known != length or not self._num_waiting or most < 1:
            return []
        self._is_lost = True  # unless all of it is done
        drafted: list[int] = []
        with _drafts_may_end():
            drafted = self._draft(token, most)
            self._is_lost = False
        return drafted

    def _draft(self, token: int, most: int) -> list[int]:
        made = self._read_waiting(torch.tensor([[token]]).to(self._tokens.device))
        drafts = [self._choose(made)]
        for place in range(most - 1):
            self._fed[:, :1].copy_(made)
            made = self._pass(drafts[-1], self._num_read + place, 1)
            drafts.append(self._choose(made))
        drafted: list[int] = torch.cat(drafts, 1)[0].tolist()
        return drafted

    def warm_up(self, num_tokens: int, times: int) -> None:
        """Run passes of each size behind ``num_tokens`` tokens, which captures them.

        Forgets the text.
        """
        self._is_lost = True
        self._runner.allocate(1)
        self._fed.zero_()
        for size in (1, *PASS_TOKENS):
            for _ in range(times * (num_tokens + size <= self._context)):
                self._choose(self._pass(self._tokens[:, :size], num_tokens, size))

    def _read_waiting(self, last: torch.Tensor) -> torch.Tensor:
        """Read all that waits, whose last token, int64 of [1, 1], is known now.

        Returns what comes out for the last, [1, 1, hidden], overwritten by the next pass.
        """
        number = self._num_waiting
        self._tokens[:, number - 1 : number].copy_(last)
        done = 0
        while done < number:
            left, at = number - done, self._num_read + done
            size = pass_tokens(left - 1)
            if at + size > self._context:  # what pads a pass has no place
                size = left = 1
            # what pads it must be no NaN, by which attention would weigh zero
            self._fed.zero_()
            self._fed[:, :left].copy_(self._waiting[:, done : done + left])
            made = self._pass(self._tokens[:, done : done + size], at, left)
            done += left
        self._num_read, self._num_waiting = self._num_read + number, 0
        return made

    def _pass(self, tokens: torch.Tensor, at: int, num_real: int) -> torch.Tensor:
        """Run one pass of tokens, int64 of [1, new], and what was fed beside them.

        Returns what comes out for the last real one, [1, 1, hidden].
        """
        made = self._runner.check(tokens, at, num_real)
        return made[None, num_real - 1 : num_real]

    def _choose(self, made: torch.Tensor) -> torch.Tensor:
        """Return the likeliest token, int64 of [1, 1]."""
        logits: torch.Tensor = self._head(made)
        return logits.argmax(-1)

    def _see(self, module: nn.Module, given: object, made: torch.Tensor) -> None:
        """Keep what a step gives behind the model's last norm, [1, new, hidden]."""
        if len(made) == 1 and made.shape[1] <= MOST_WAITING:
            self._made[:, : made.shape[1]].copy_(made)
