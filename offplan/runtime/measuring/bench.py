"""Measures what a loaded plan costs: prefill, decode, stalls and the link itself."""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from offplan.errors import InputError
from offplan.placement import Phase
from offplan.runtime.device import settle
from offplan.runtime.measuring.moments import Moment, mark, seconds_between
from offplan.runtime.measuring.timed_link import TimedLink
from offplan.runtime.session import NUM_WARMUP_STEPS, Session
from offplan.schedule import Copy, Wait, slots_of

NUM_LINK_ROUNDS = 3
"""Times that everything a pass streams is copied to time the link alone."""


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one thing, in seconds."""

    median_s: float
    min_s: float
    max_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        """Sum up one or more measurements."""
        return cls(statistics.median(seconds), min(seconds), max(seconds))


@dataclass(frozen=True)
class PhaseCost:
    """The measured cost of one phase (decode: one step; prefill: the whole prompt)."""

    step: Spread
    link_bytes: int | None
    """Bytes that crossed the link, as ``Session.link_bytes`` counts; None where nobody does."""
    stalls_s: Mapping[int, float] | None
    """Seconds that compute waited for the link, by layer; None where they cannot be told."""


@dataclass(frozen=True)
class BenchCost:
    """The measured cost of one way of running a workload."""

    prefill: PhaseCost
    decode: PhaseCost
    link_bytes_per_s: float | None = None
    """Rate of the plan's own copies, no compute beside them; None if it makes none."""


@dataclass
class Timings:
    """Seconds of requests as they are taken; each request adds its own."""

    prefill_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    def add(self, moments: Sequence[Moment], steps: Sequence[Moment]) -> None:
        """Add the two moments around a prompt, and those around and between decode steps."""
        self.prefill_s.append(seconds_between(*moments))
        self.step_s += [seconds_between(a, b) for a, b in itertools.pairwise(steps)]


def bench_session(
    session: Session, timed: TimedLink, prompt: torch.Tensor, num_steps: int, num_repeats: int
) -> BenchCost:
    """Measure ``num_repeats`` requests of ``prompt`` (int64, [batch, tokens]) and their steps.

    ``timed`` is the link that times waits in ``session``; it records in one more request, so that
    its events are in no timed step. Compilation, capture and the steps before the ring is steady
    are left out. The ring is left in no known state: nothing but ``close`` may follow.

    Raises InputError when the context has no room for the steps, MemoryLimitError.
    """
    check_room(session.context, prompt.shape[1], num_steps)
    session.warm_up(*prompt.shape)
    timings = Timings()
    for _ in range(num_repeats):
        prefill_bytes, decode_bytes = _time_request(session, prompt, num_steps, timings)
    prefill_stalls, decode_stalls = _time_stalls(session, timed, prompt, num_steps)
    return BenchCost(
        prefill=PhaseCost(Spread.of(timings.prefill_s), prefill_bytes, prefill_stalls),
        decode=PhaseCost(Spread.of(timings.step_s), decode_bytes // num_steps, decode_stalls),
        link_bytes_per_s=time_link(session),
    )


def check_room(context: int, prompt_tokens: int, num_steps: int) -> None:
    """Raise InputError unless the steps to be timed fit the context."""
    room = context - prompt_tokens - NUM_WARMUP_STEPS
    if room < num_steps:
        raise InputError(
            f"{prompt_tokens} prompt tokens, {NUM_WARMUP_STEPS} steps of warm-up and {num_steps} "
            f"timed ones exceed the plan's context of {context}: lower --steps, or plan with a "
            "larger --context"
        )


def _time_request(
    session: Session, prompt: torch.Tensor, num_steps: int, timings: Timings
) -> tuple[int, int]:
    """Time one request from an idle device; return bytes moved for the prompt and the steps."""
    device = session.device
    settle(device)
    with session.stream():
        start = session.link_bytes
        began = mark(device)
        tokens = session.prefill(prompt).argmax(-1, keepdim=True)
        read = mark(device)
        prefill_bytes = session.link_bytes - start
        for _ in range(NUM_WARMUP_STEPS):
            tokens = session.decode(tokens).argmax(-1, keepdim=True)
        start = session.link_bytes
        steps = [mark(device)]
        for _ in range(num_steps):
            tokens = session.decode(tokens).argmax(-1, keepdim=True)
            steps.append(mark(device))
        decode_bytes = session.link_bytes - start
    settle(device)
    timings.add((began, read), steps)
    return prefill_bytes, decode_bytes


def _time_stalls(
    session: Session, timed: TimedLink, prompt: torch.Tensor, num_steps: int
) -> tuple[dict[int, float], dict[int, float]]:
    """Return seconds of stalls by layer: the prompt's, and a decode step's on average."""
    settle(session.device)
    with session.stream():
        timed.start()
        tokens = session.prefill(prompt).argmax(-1, keepdim=True)
        prefill = timed.stop()
        for _ in range(NUM_WARMUP_STEPS):
            tokens = session.decode(tokens).argmax(-1, keepdim=True)
        timed.start()
        for _ in range(num_steps):
            tokens = session.decode(tokens).argmax(-1, keepdim=True)
        decode = timed.stop()
    return prefill, {layer: seconds / num_steps for layer, seconds in decode.items()}


def time_link(session: Session) -> float | None:
    """Time the copies of a pass, decode's if it has any, one behind the other: bytes per second.

    None if there are none. The ring is left in no known state: nothing but ``close`` may follow.
    """
    placement = session.loaded.placement
    slots = slots_of(placement, Phase.DECODE) or slots_of(placement, Phase.PREFILL)
    if not slots:
        return None
    rates = []
    for _ in range(NUM_LINK_ROUNDS):
        settle(session.device)
        moved = session.link.bytes_moved
        with session.stream():
            began = mark(session.device)
            for slot, span in slots.values():
                session.link.copy(Copy(slot, span))
            # copies are done in the order they were asked for: the last one ends them all
            session.link.wait(Wait(slot, span))
            ended = mark(session.device)
        settle(session.device)
        rates.append((session.link.bytes_moved - moved) / seconds_between(began, ended))
    return statistics.median(rates)


def time_forward(
    device: torch.device,
    prefill: Callable[[], Any],
    decode: Callable[[Any], Any],
    num_steps: int,
    num_repeats: int,
) -> BenchCost:
    """Measure requests of a model that offplan does not run.

    ``prefill`` begins a request and returns a state, ``decode`` turns a state into the next one;
    both run on the current stream. The first request is not timed.
    """
    timings = Timings()
    for repeat in range(num_repeats + 1):
        settle(device)
        began = mark(device)
        state = prefill()
        read = mark(device)
        for _ in range(NUM_WARMUP_STEPS):
            state = decode(state)
        steps = [mark(device)]
        for _ in range(num_steps):
            state = decode(state)
            steps.append(mark(device))
        settle(device)
        if repeat:
            timings.add((began, read), steps)
    return BenchCost(
        prefill=PhaseCost(Spread.of(timings.prefill_s), None, None),
        decode=PhaseCost(Spread.of(timings.step_s), None, None),
    )
