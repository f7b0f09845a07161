"""The line that is fitted to a measured curve."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offplan.machine.curve import CopyRate, fit_latency

MIB = 2**20
H200 = {4096: 0.66e9, 65536: 12e9, 2**18: 36.5e9, MIB: 49.1e9, 4 * MIB: 53.8e9, 64 * MIB: 55.4e9}
"""As measured; rates by size."""


def curve(rates: dict[int, float]) -> list[CopyRate]:
    return [CopyRate(bytes=size, rate=rate, spread=None) for size, rate in sorted(rates.items())]


def error(points: list[CopyRate], latency_s: float, rate: float) -> float:
    return max(abs(latency_s + p.bytes / rate - p.seconds) / p.seconds for p in points)


def test_the_curve_of_an_h200() -> None:
    fit = fit_latency(curve(H200), 55.4e9)
    assert fit.latency_s == pytest.approx(2.4e-6, rel=0.02)
    assert fit.largest_error < 0.01


@given(st.floats(0, 1e-4), st.floats(1e9, 1e12))
def test_a_line_is_found_again(latency_s: float, rate: float) -> None:
    sizes = [MIB * 4**power for power in range(5)]
    fit = fit_latency(curve({n: n / (latency_s + n / rate) for n in sizes}), rate)
    assert fit.latency_s == pytest.approx(latency_s, rel=1e-6, abs=1e-12)
    assert fit.largest_error < 1e-6


SIZES = st.sampled_from([2**power for power in range(12, 28)])


@given(
    st.dictionaries(SIZES, st.floats(1e8, 1e12), min_size=1, max_size=6),
    st.floats(1e9, 1e12),
    st.floats(0, 1e-2),
)
def test_no_latency_fits_better(rates: dict[int, float], rate: float, other_s: float) -> None:
    points = curve(rates)
    fit = fit_latency(points, rate)
    fitted = [point for point in points if point.bytes >= MIB] or points
    assert fit.latency_s >= 0
    assert fit.largest_error == pytest.approx(error(fitted, fit.latency_s, rate), abs=1e-9)
    assert fit.largest_error <= error(fitted, other_s, rate) * (1 + 1e-9) + 1e-9
