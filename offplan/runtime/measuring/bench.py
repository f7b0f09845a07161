"""Measures what a loaded plan costs: prefill, decode, stalls and the link itself."""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import torch

from offplan.capabilities.way import OWN, Way
from offplan.checkpoint.model import Model
from offplan.drafts.counts import DraftCounts
from offplan.placement import Phase
from offplan.plan import Offload
from offplan.progress import Progress
from offplan.runtime.device import settle
from offplan.runtime.generate import Measured
from offplan.runtime.joined import continue_tokens
from offplan.runtime.measuring.timed_link import Recording, TimedLink, mark, seconds_between
from offplan.runtime.rows import Rows
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
    """Bytes that crossed the link, as ``Session.link_bytes`` counts; None if nobody does."""
    recorded: Recording | None
    """Compute waiting for the link in a request of its own; None if that cannot be told."""
    num_recorded: int = 1
    """Passes in the recording: decode steps, or one prompt."""

    @property
    def stalls_s(self) -> Mapping[int, float] | None:
        """Seconds of a pass that compute waited for the link, by layer."""
        if self.recorded is None:
            return None
        return {
            layer: seconds / self.num_recorded for layer, seconds in self.recorded.stalls_s.items()
        }


@dataclass(frozen=True)
class Measurement:
    """The measured time and memory of one way of running a workload."""

    prefill: PhaseCost
    decode: PhaseCost
    link_bytes_per_s: float | None = None
    """Rate of the plan's own copies, no compute beside them; None if it makes none."""
    gpu_bytes: int | None = None
    """Bytes taken on the card at the peak, the context included; None on the CPU."""
    counts: Mapping[str, Any] = field(default_factory=dict)
    """The counts of executors in a decode step, on average, by capability."""
    drafts: DraftCounts | None = None
    """Drafts that passes checked in a request of its own; None if the plan has none."""
    drafted_s: float | None = None
    """Seconds of a token in that request, on average."""
    notes: Sequence[str] = ()
    """Sentences of executors: the rates by which cores and link divided experts."""
    told: str = ""
    """How another program ran the workload; empty of what runs in this process."""


@dataclass(frozen=True)
class Bench:
    """The question that all ways of running a workload have in common."""

    model: Model
    offload: Offload
    """The plan's decision."""
    context: int
    """Tokens a sequence may reach."""
    device: torch.device
    folder: Path | None
    """Holds the model's files; None for random weights."""
    prompt: torch.Tensor
    """int64, [batch, tokens]."""
    num_steps: int
    """Decode steps that are timed in each request."""
    num_repeats: int
    """Requests that are timed."""
    used_before: int
    """Bytes in use on the card before the process took any."""
    way: Way = OWN
    """The passes that run the model."""
    host_threads: int | None = None
    """Threads of the host's cores, of a plan that has them compute; None for Session's own."""
    record: Callable[[Session], None] | None = None
    """Told of the plan's session once it was measured, whose routing is then recorded."""

    def gpu_bytes(self, peak_in_use: int) -> int | None:
        """Count the bytes in use on the card at the peak that were not in use before."""
        return peak_in_use - self.used_before if self.device.type == "cuda" else None


def bench_session(session: Session, bench: Bench, on_progress: Progress) -> Measurement:
    """Measure requests in a session whose link is a TimedLink.

    That records in one more request, so that its events are in no timed step. Compilation, capture
    and the steps before the ring is steady are left out, and those by which capabilities decide
    what they do. The ring is left in no known state: nothing but ``close`` may follow.

    The context must have room for them. ``on_progress`` hears (requests timed, requests in all).
    Raises MemoryLimitError.
    """
    prompt, num_steps, timed = bench.prompt, bench.num_steps, session.link
    assert isinstance(timed, TimedLink)
    on_progress(0, bench.num_repeats)  # to warm up may take the longest
    session.warm_up(*prompt.shape)

    draw = torch.Generator(bench.device).manual_seed(0)

    def choose(logits: torch.Tensor) -> torch.Tensor:
        if bench.folder is not None:
            return logits.argmax(-1, keepdim=True)
        # random weights find one token the likeliest again and again, whose experts are then kept
        size, width = (len(logits), 1), logits.shape[-1]
        return torch.randint(width, size, generator=draw, device=logits.device)

    def prefill() -> torch.Tensor:
        return choose(session.prefill(prompt))

    def decode(tokens: torch.Tensor) -> torch.Tensor:
        return choose(session.decode(tokens))

    settling = max((each.settling_steps for each in session.loaded.executors.values()), default=0)
    with session.stream():
        requests = ceil(settling / (NUM_WARMUP_STEPS + num_steps))
        time_requests(bench, prefill, decode, requests, lambda *_: None)
        prefill_s, step_s = time_requests(bench, prefill, decode, bench.num_repeats, on_progress)
    notes = session.describe()  # of the timed steps: a later prompt may have rates measured again
    drafted = None if session.draft is None else time_drafts(session, bench)
    with session.stream():
        moved = session.link_bytes
        timed.start()
        tokens = prefill()
        recorded, num_bytes = timed.stop(), session.link_bytes - moved
        prefill_cost = PhaseCost(Spread.of(prefill_s), num_bytes, recorded)
        for _ in range(NUM_WARMUP_STEPS):
            tokens = decode(tokens)
        counts = session.count(1)
        moved = session.link_bytes
        timed.start()
        for _ in range(num_steps):
            tokens = decode(tokens)
        recorded, num_bytes = timed.stop(), (session.link_bytes - moved) // num_steps
        counts = session.count(num_steps, counts)
    decode_cost = PhaseCost(Spread.of(step_s), num_bytes, recorded, num_steps)
    return Measurement(
        prefill_cost,
        decode_cost,
        link_bytes_per_s=time_link(session),
        gpu_bytes=bench.gpu_bytes(session.memory.in_use),
        counts=counts,
        notes=notes,
        drafts=None if drafted is None else drafted.drafts,
        drafted_s=None if drafted is None else drafted.median_step_s,
    )


def time_drafts(session: Session, bench: Bench) -> Measured:
    """Time requests whose tokens are drafted, after one that only warms up."""
    (prompt,) = bench.prompt.tolist()
    rows, measured = Rows(session, 1), Measured()
    rows.warm_up(len(prompt), capture_prompt=True)
    for _ in range(bench.num_repeats):
        for _ in continue_tokens(rows, prompt, 1 + bench.num_steps, measured=measured):
            pass
    return measured


def time_link(session: Session) -> float | None:
    """Time the copies of a pass, decode's if it has any, one behind the other: bytes per second.

    Returns None if there are none. The ring is left in no known state: nothing but ``close`` may
    follow.
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


def time_requests(
    bench: Bench,
    prefill: Callable[[], Any],
    decode: Callable[[Any], Any],
    num_requests: int,
    on_progress: Progress,
) -> tuple[list[float], list[float]]:
    """Time requests, each from an idle device: seconds of each prompt, and of each decode step.

    ``prefill`` begins a request and returns a state, ``decode`` turns a state into the next one;
    both run on the current stream. The steps before the ring is steady are left out.
    ``on_progress`` hears (requests timed, requests in all).
    """
    prefill_s: list[float] = []
    step_s: list[float] = []
    for number in range(num_requests):
        on_progress(number, num_requests)
        settle(bench.device)
        began = mark(bench.device)
        state = prefill()
        read = mark(bench.device)
        for _ in range(NUM_WARMUP_STEPS):
            state = decode(state)
        steps = [mark(bench.device)]
        for _ in range(bench.num_steps):
            state = decode(state)
            steps.append(mark(bench.device))
        settle(bench.device)
        prefill_s.append(seconds_between(began, read))
        step_s += itertools.starmap(seconds_between, itertools.pairwise(steps))
    on_progress(num_requests, num_requests)
    return prefill_s, step_s
