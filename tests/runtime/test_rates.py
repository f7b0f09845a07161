"""Rates by which cores and link divide missed experts."""

from functools import partial
from pathlib import Path

import pytest

from offplan.capabilities.cached_experts import ExpertSlots, MissRates
from offplan.hostmem.busy import Watch
from offplan.machine.profile import ASSUMED_CORES, ASSUMED_TRIP
from offplan.runtime.cached_experts.executor import describe_division, list_shares
from offplan.runtime.cached_experts.rates import (
    MOST_TRIES,
    RATES,
    STREAM_TRIP_S,
    Remeasuring,
    Timed,
    assume,
    find,
    measure,
    scale,
)

SLOTS = ExpertSlots(4, 8, (6_000_000, 18_000_000), by_cores=True)


def test_what_is_assumed_is_what_a_profile_assumes() -> None:
    rates = assume(SLOTS)
    assert rates.trip_s == ASSUMED_TRIP.value
    assert rates.cores_s == pytest.approx(3e6 / ASSUMED_CORES.value)
    assert rates.link_s == pytest.approx(3e6 / 25e9)


@pytest.mark.parametrize("most", [1, 4, 8])
def test_rates_are_found_in_spite_of_samples_that_took_long(most: int) -> None:
    asked = []

    def time_experts(number: int, num_experts: int) -> Timed:
        asked.append((number, num_experts))
        late = 5e-3 * (number in (0, 3, 7))
        return Timed(9e-6 + 1e-4 * num_experts + late, 2e-4 + late)

    rates, spread = measure(time_experts, most)
    assert rates == pytest.approx((9e-6 + STREAM_TRIP_S, 1e-4, 2e-4))
    assert spread < 1e-9
    assert {num for _, num in asked} == {1, max(2, most)}
    assert len(asked) == 21


def test_rates_of_a_machine_that_wavers_are_none_below_zero() -> None:
    rates, _ = measure(lambda _, num: Timed(1e-3 if num == 1 else 4e-4, 2e-4), 4)
    assert rates.cores_s > 0
    assert rates.trip_s >= 0


@pytest.fixture
def idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept before, others keep no core busy, and nobody sleeps."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    monkeypatch.setattr(Watch, "_count", lambda watch: vars(watch).update(num_busy=0.0))
    monkeypatch.setattr("time.sleep", lambda seconds: None)


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize(
    ("num_busy", "wavering"), [(0.0, ()), (2.0, ()), (0.0, (1, 4)), (0.0, (1,)), (0.0, (4,))]
)
def test_rates_that_others_disturb_are_measured_again(
    monkeypatch: pytest.MonkeyPatch, num_busy: float, wavering: tuple[int, ...]
) -> None:
    """Also where samples of one expert alone waver, by which a hand-over is told."""
    monkeypatch.setattr(Watch, "_count", lambda watch: vars(watch).update(num_busy=num_busy))
    asked = []

    def time_experts(number: int, num_experts: int) -> Timed:
        asked.append(number)
        return Timed(1e-4 * num_experts * (1 + (num_experts in wavering and number % 2)), 2e-4)

    found = [find({"gpu": 1}, time_experts, 4) for _ in range(2)]
    is_kept = not num_busy and not wavering
    assert len(asked) == (21 if is_kept else 2 * MOST_TRIES * 21)
    assert found[0] == found[1]
    assert (found[0].why_doubtful is None) == is_kept
    assert found[0].rates.link_s == 2e-4


@pytest.mark.usefixtures("idle")
def test_what_disturbs_the_first_measurement_is_waited_for() -> None:
    """As a session that has just loaded: its rates would give the cores nothing to multiply."""
    asked = []

    def time_experts(number: int, num_experts: int) -> Timed:
        asked.append(number)
        late = 3e-3 * (len(asked) < 8)
        return Timed(2e-4 * num_experts + late, 3e-4)

    found = find({"gpu": 1}, time_experts, 4)
    assert found.why_doubtful is None
    assert found.rates == pytest.approx((STREAM_TRIP_S, 2e-4, 3e-4))
    assert len(asked) == 42
    assert find({"gpu": 1}, time_experts, 4) == found
    assert len(asked) == 42


@pytest.mark.usefixtures("idle")
def test_rates_of_long_handovers_are_not_kept() -> None:
    """Samples that are all alike, of cores whose threads each wait for their core."""
    late_s = 3e-3
    found = find({"gpu": 1}, lambda _, num: Timed(2e-4 * num + late_s, 3e-4), 4)
    assert found.why_doubtful == "measured while a hand-over took 3.0 ms"
    asked = []

    def time_experts(number: int, num_experts: int) -> Timed:
        asked.append(number)
        return Timed(2e-4 * num_experts + late_s, 3e-4)

    late_s = 4e-3  # still worse: the rates of before are the better ones
    assert find({"gpu": 1}, time_experts, 4, found) == found
    assert len(asked) == 21
    late_s = 0.0
    better = find({"gpu": 1}, time_experts, 4, found)
    assert better.why_doubtful is None
    assert better.rates == pytest.approx((STREAM_TRIP_S, 2e-4, 3e-4))
    assert find({"gpu": 1}, time_experts, 4) == better
    assert len(asked) == 42


def test_disturbed_rates_are_measured_again_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 10.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    again, due = Remeasuring(), []
    while now < 300:
        if again.is_due():
            due.append(now)
        now += 0.5
    assert due == [11, 13, 17, 25, 41, 73, 133, 193, 253]


def test_a_batch_takes_the_cores_longer() -> None:
    rates = MissRates(1e-5, 1e-4, 2e-4)
    by_codes = partial(scale, rates, codes=True)
    assert by_codes(128, 8, 1) == rates
    assert by_codes(8, 2, 24).cores_s == pytest.approx(2.25e-4, rel=0.01)  # six rows each
    assert by_codes(4, 4, 30).cores_s == pytest.approx(10e-4)
    assert scale(rates, 4, 4, 10, codes=False).cores_s == pytest.approx(2e-4)


def test_a_division_is_said() -> None:
    rates = MissRates(1e-5, 1e-4, 2e-4)
    said = describe_division(SLOTS, rates, list_shares(SLOTS, rates).tolist())
    assert said == (
        "Of the experts that a layer misses the host's cores multiply 1 of 1, 1 of 2, 2 of 3, 3 of "
        "4, 3 of 5, 4 of 6, 5 of 7, 5 of 8. An expert of one token takes them 100 us, and 10 us "
        "to hand over; the link takes 200 us."
    )


def test_rates_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    rates = MissRates(1e-5, 1e-4, 2e-4)
    assert RATES.find({"gpu": 1}) is None
    assert RATES.keep({"gpu": 1}, rates)
    assert RATES.find({"gpu": 1}) == rates
    assert RATES.find({"gpu": 2}) is None
    RATES.keep({"gpu": 1}, rates._replace(link_s=-1.0))
    assert RATES.find({"gpu": 1}) is None
