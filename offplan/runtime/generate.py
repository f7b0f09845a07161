"""Generation, timed: the device is never kept waiting for the host."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from offplan.drafts.counts import DraftCounts
from offplan.errors import NotANumberError
from offplan.runtime.sampling import NO_TOKEN, Choose, check_tokens, choose_likeliest, mark_nan
from offplan.runtime.session import NUM_WARMUP_STEPS, Session


@dataclass
class Measured:
    """The cost of a generation, by the host's clock; filled while tokens are taken."""

    first_token_s: float = 0.0
    """Seconds from the request to its first token on the host."""
    step_s: list[float] = field(default_factory=list)
    """Seconds of each further token, from the one before it; of a pass that makes several, its part
    of each."""
    prefill_link_bytes: int = 0
    """Bytes that crossed the link for the prompt, as ``Session.link_bytes`` counts them."""
    decode_link_bytes: int = 0
    """Bytes that crossed the link in all decode steps together."""
    num_decodes: int = 0
    """Decode steps that were begun: one more than were read where a token ended the text."""
    drafts: DraftCounts = field(default_factory=DraftCounts)
    """Drafts that passes have checked."""

    @property
    def step_link_bytes(self) -> int | None:
        """Bytes that crossed the link in a decode step, on average; None if there was none.

        Where passes have checked drafts, they are those of a token.
        """
        number = len(self.step_s) if self.drafts.num_passes else self.num_decodes
        return self.decode_link_bytes // number if number else None

    @property
    def median_step_s(self) -> float | None:
        """Seconds of the median decode step after NUM_WARMUP_STEPS; None if there was none.

        Where passes have checked drafts, it is the mean: no pass is like the others.
        """
        steady = self.step_s[NUM_WARMUP_STEPS:] or self.step_s
        if not steady:
            return None
        return statistics.fmean(steady) if self.drafts.num_passes else statistics.median(steady)


def generate(
    session: Session,
    prompt: torch.Tensor,
    num_tokens: int,
    measured: Measured | None = None,
    stop_tokens: frozenset[int] = frozenset(),
    *,
    choose: Choose = choose_likeliest,
) -> Iterator[torch.Tensor]:
    """Yield up to ``num_tokens`` tokens that follow ``prompt`` (int64, [batch, tokens]).

    Each is int64 of shape [batch] on the CPU, and what ``choose`` makes of the logits.
    ``choose(logits, rows)`` is called with logits of [batch, vocabulary] on the session's device
    and the rows whose token is wanted. It returns tokens, int64 of [batch, 1] on that device. Ends
    early once every sequence has made one of ``stop_tokens``. ``measured`` is filled while tokens
    are taken. Runs on the session's stream and waits for each token; the next step is queued before
    it is read. Prompts of unlike lengths are for ``generate_texts``.

    Raises NotANumberError in place of the tokens of a pass whose logits are NaN in a row that has
    not ended. The device finds that out, and the host reads it with the tokens. The session then
    runs that pass once more, and the error names the layer that gave the first NaN.

    Raises what ``Session.prefill``, ``decode`` and ``check`` raise, when the token in question is
    taken, and InputError for what ``choose`` returns in another shape or type.
    """
    measured = Measured() if measured is None else measured
    rows, ended = range(len(prompt)), set[int]()
    # Page-locked once, before anything is queued: a later allocation would wait for the device.
    on_gpu = session.device.type == "cuda"
    host = torch.empty(num_tokens, len(prompt), dtype=torch.int64, pin_memory=on_gpu)
    began = time.perf_counter()
    moved = session.link_bytes
    with session.stream():
        logits = session.prefill(prompt)
        tokens = choose(logits, rows)
        check_tokens(tokens, logits)
        arrival = Arrival(mark_nan(tokens, logits), host[0])
    measured.prefill_link_bytes = session.link_bytes - moved
    for step in range(num_tokens):
        arrived, moved = arrival, session.link_bytes
        if step + 1 < num_tokens:
            with session.stream():  # never across a yield: the caller has a stream of its own
                logits = session.decode(tokens)
                tokens = choose(logits, rows)
                check_tokens(tokens, logits)
                arrival = Arrival(mark_nan(tokens, logits), host[step + 1])
            measured.decode_link_bytes += session.link_bytes - moved
            measured.num_decodes += 1
        token, now = arrived.wait()
        session.check()
        if step == 0:
            measured.first_token_s = now - began
        else:
            measured.step_s.append(now - began)
        began, made = now, token.tolist()
        if failed := [r for r, each in enumerate(made) if each == NO_TOKEN and r not in ended]:
            fed = host[:step].clamp(min=0).T
            cause = session.find_nan(torch.cat([prompt.cpu(), fed], 1))
            raise NotANumberError(cause, failed, [f"sequence {row}" for row in failed])
        yield token
        ended |= {row for row in rows if made[row] in stop_tokens}
        if len(ended) == len(token):
            return


class Arrival:
    """Tokens, or other small answers of the device, on their way to the host."""

    def __init__(self, tokens: torch.Tensor, host: torch.Tensor) -> None:
        self._host = host
        host.copy_(tokens, non_blocking=True)
        self._moment = time.perf_counter()
        self._event = torch.cuda.current_stream().record_event() if tokens.is_cuda else None

    def wait(self) -> tuple[torch.Tensor, float]:
        """Return the tokens, of shape [batch], and when they arrived, by ``perf_counter``."""
        if self._event is not None:  # else they were there at once, before the next step was made
            self._event.synchronize()
            self._moment, self._event = time.perf_counter(), None  # others may ask again
        return self._host.clone(), self._moment
