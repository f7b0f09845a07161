"""Rates by which cores and link divide missed experts: measured where a session runs, and kept."""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from offplan.capabilities.cached_experts import ExpertSlots, MissRates
from offplan.disk_cache import KeptAnswers
from offplan.hostmem.busy import Watch, spread_of_half
from offplan.hostmem.hardware import name_hardware
from offplan.kernel_sizes import ASSUMED_CORES_BYTES_PER_S, ASSUMED_TRIP_S, slowness

ASSUMED_LINK_BYTES_PER_S = 25e9
"""Bytes of experts that cross the link where nothing was measured. Source: PCIe 4 x16."""
STREAM_TRIP_S = 5e-6
"""Part of a hand-over that a stream takes, beside what the host is timed with.

Source: estimated; of 8.0 us on an H200's host a coordinator that the host rings for takes 3.
"""
NUM_SAMPLES = 10
MOST_TRIES, BETWEEN_TRIES_S = 4, 0.3
"""Measurements that a session makes at most, and the seconds between them. Source: chosen."""
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 60.0
"""Seconds before disturbed rates are measured again beside requests, at first and at last.

They double each time. Source: chosen; a measurement takes 0.25 s, of a request that comes then.
"""
MOST_TRIP_S, MOST_TRIP_SHARE = 500e-6, 0.25
"""Seconds of a hand-over, and its share of an expert's, up to which rates are not disturbed.

Source: chosen; hosts of H200s take 25 to 40 us, and 2 to 3 ms while something disturbs them. Of a
large expert, what it takes alone beyond its share of several counts as hand-over, too.
"""
_MOST_BYTES = 1 << 10


def assume(slots: ExpertSlots) -> MissRates:
    """Assume what nobody has measured, by the bytes of an expert."""
    rates = ASSUMED_CORES_BYTES_PER_S, ASSUMED_LINK_BYTES_PER_S
    cores_s, link_s = (slots.expert_bytes / rate for rate in rates)
    return MissRates(ASSUMED_TRIP_S, cores_s, link_s)


def scale(
    rates: MissRates, num_experts: int, num_chosen: int, batch: int, *, codes: bool
) -> MissRates:
    """Return the rates of a batch, whose rows choose ``num_chosen`` experts each by chance.

    ``rates`` are of one row. An expert that more rows share takes the cores longer, one that is
    stored as ``codes`` sooner so.
    """
    num_used = num_experts * (1 - (1 - num_chosen / num_experts) ** batch)
    rows = batch * num_chosen / max(num_used, 1.0)
    return rates._replace(cores_s=rates.cores_s * slowness(rows, codes=codes))


class Timed(NamedTuple):
    """Seconds of one exchange with the cores, and of an expert that meanwhile crossed the link."""

    cores_s: float
    link_s: float


class Found(NamedTuple):
    """Rates of one row, and what makes them doubtful."""

    rates: MissRates
    why_doubtful: str | None
    """Beside what they were measured, which disturbed them; None for nothing."""


class Remeasuring:
    """Says when rates that were disturbed are to be measured again: ever more seldom."""

    def __init__(self) -> None:
        """The first time has just been."""
        self._pause_s = FIRST_PAUSE_S
        self._at = time.monotonic() + self._pause_s

    def is_due(self) -> bool:
        """Return True if it is time, and take it that the caller measures then."""
        if time.monotonic() < self._at:
            return False
        self._pause_s = min(2 * self._pause_s, MOST_PAUSE_S)
        self._at = time.monotonic() + self._pause_s
        return True


def find(
    question: Mapping[str, Any],
    time_experts: Callable[[int, int], Timed],
    most: int,
    before: Found | None = None,
) -> Found:
    """Find the rates that a question names, or measure them as ``measure`` does.

    Where something disturbs them they are measured again, for a session may have just loaded.
    Source: an H200's host, where the first exchanges behind loading took 2 to 3 ms, and those half
    a second later 0.2. What disturbs them is not known. Rates that stay disturbed are used, and not
    kept. They are measured once more with these as ``before``.
    """
    if (kept := RATES.find(question)) is not None:
        return Found(kept, None)
    tried = [] if before is None else [before]
    for number in range(MOST_TRIES if before is None else 1):
        if number:
            time.sleep(BETWEEN_TRIES_S)
        with Watch() as watch:
            rates, spread = measure(time_experts, most)
            watch.note(spread)
        why = watch.why
        if why is None and rates.trip_s > max(MOST_TRIP_S, MOST_TRIP_SHARE * rates.cores_s):
            why = f"measured while a hand-over took {rates.trip_s * 1e3:.1f} ms"
        if why is None:
            RATES.keep(question, rates)
            return Found(rates, None)
        tried.append(Found(rates, why))
    return min(tried, key=lambda found: sum(found.rates))


def measure(time_experts: Callable[[int, int], Timed], most: int) -> tuple[MissRates, float]:
    """Measure what missed experts take, of one row; return it with the largest spread of samples.

    ``time_experts`` times the nth sample, of so many experts that no sample before has read,
    ``most`` at most. What one expert takes beyond its share of several is the hand-over.
    """
    few, many = 1, max(most, 2)
    time_experts(0, many)  # threads wake, and memory is found
    samples = {
        number: [time_experts(1 + at, number) for at in range(NUM_SAMPLES)]
        for number in (few, many)
    }
    cores = {
        number: statistics.median(each.cores_s for each in found)
        for number, found in samples.items()
    }
    link_s = statistics.median(each.link_s for found in samples.values() for each in found)
    cores_s = max((cores[many] - cores[few]) / (many - few), 0.1 * cores[many] / many)
    trip_s = max(cores[few] - cores_s, 0.0) + STREAM_TRIP_S
    spreads = [
        spread_of_half(each) for found in samples.values() for each in zip(*found, strict=True)
    ]
    return MissRates(trip_s, cores_s, link_s), max(spreads)


def _encode(rates: MissRates) -> bytes:
    return json.dumps([*rates]).encode()


def _decode(content: bytes) -> MissRates:
    rates = MissRates(*map(float, json.loads(content)))
    if not all(0 <= each < 10 for each in rates):
        raise ValueError
    return rates


RATES = KeptAnswers("expert-rates", _MOST_BYTES, _encode, _decode)
"""Rates that were measured: the same machine divides alike in each session."""


def name_question(
    slots: ExpertSlots,
    stored: Sequence[tuple[Any, ...]],
    by: Mapping[str, Any],
    device: torch.device,
) -> Mapping[str, Any]:
    """Name all that measured rates depend on: the machine, the experts as stored.

    ``by`` names what multiplies them.
    """
    return name_hardware(device) | {
        "torch": torch.__version__,
        "by": dict(by),
        "experts": [slots.num_experts, slots.expert_bytes],
        "stored": [[str(part) for part in each] for each in stored],
    }
