"""Figures that only measuring gives: read, printed, counted, shown, and refused out of order."""

import io

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from rich.console import Console

from offplan.errors import ProfileError
from offplan.machine.profile import (
    MachineProfile,
    dump_profile,
    load_profile,
    parse_profile,
    profile_schema,
)
from offplan.records import load_yaml
from offplan.report.machine import machine_payload, render_machine

MEASURED: dict[str, object] = {
    "h2d_curve": [{"bytes": 4096, "rate": 1e9, "spread": 0.01}, {"bytes": 2**20, "rate": 2e9}],
    "h2d_pageable_curve": [{"bytes": 4096, "rate": "10 GB/s"}],
    "d2h_curve": [{"bytes": "4 KiB", "rate": 1e9}],
    "h2d_concurrent": [
        {"device": 0, "rate": 1e9, "num_gpus": 2},
        {"device": 1, "rate": 2e9, "num_gpus": 2, "spread": 0.5},
        *({"device": number, "rate": 5e8, "num_gpus": 4} for number in range(4)),
    ],
    "peer": 396e9,
    "peer_latency": "10 us",
    "peer_curve": [{"bytes": 4096, "rate": 1e9}],
    "uva_rereads": [{"rows": 1, "factor": 1}, {"rows": 4096, "factor": 17.5}],
    "uva_beside_copies": 44e9,
    "pinning": 12e9,
    "ranks_overhead": "700 MiB",
    "numa_node": 0,
    "numa_nodes": 2,
}
"""The figures that older profiles do not have."""


def with_figures(figures: dict[str, object]) -> MachineProfile:
    data = load_profile("h200-pcie5").model_dump(exclude_none=True)
    for name, value in figures.items():
        data[name] = {"value": value, "basis": "measured", "source": "a test", "samples": 7}
    return parse_profile(yaml.safe_dump(data), "a profile")


@pytest.mark.parametrize("name", MEASURED)
def test_measured_figures_read_back_and_count(name: str) -> None:
    older = load_profile("h200-pcie5")
    assert getattr(older, name) is None
    profile = with_figures({name: MEASURED[name]})
    Draft202012Validator(profile_schema()).validate(load_yaml(dump_profile(profile)))
    again = parse_profile(dump_profile(profile), "copy")
    assert again == profile
    assert again.fingerprint == profile.fingerprint != older.fingerprint


def test_samples_and_spread_are_optional_and_count() -> None:
    profile = load_profile("h200-pcie5")
    figure = profile.h2d.model_copy(update={"samples": 7, "spread": 0.004})
    assert (profile.h2d.samples, profile.h2d.spread) == (None, None)
    changed = profile.model_copy(update={"h2d": figure})
    assert "spread: 0.004" in dump_profile(changed)
    assert parse_profile(dump_profile(changed), "copy") == changed
    assert changed.fingerprint != profile.fingerprint


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("h2d_curve", [], "at least 1"),
        ("h2d_curve", [{"bytes": 8, "rate": 1}, {"bytes": 8, "rate": 2}], "sizes .* increase"),
        ("h2d_curve", [{"bytes": 0, "rate": 1}], "bytes"),
        ("uva_rereads", [{"rows": 1, "factor": 1}], "at least 2"),
        ("uva_rereads", [{"rows": 1, "factor": 0.5}, {"rows": 2, "factor": 1}], "factor"),
        ("uva_rereads", [{"rows": 1, "factor": 2}, {"rows": 2, "factor": 1}], "not decrease"),
        ("uva_rereads", [{"rows": 2, "factor": 1}, {"rows": 1, "factor": 1}], "rows must"),
    ],
)
def test_tables_out_of_order_are_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(ProfileError, match=f"{name}.*{message}"):
        with_figures({name: value})


def test_every_figure_is_shown() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render_machine(with_figures(MEASURED)))
    shown = console.export_text()
    for text in (
        "17.5x at 4096 rows",
        "1 GB/s the slowest of 2; 500 MB/s the slowest of 4",
        "396 GB/s",
        "12 GB/s",
    ):
        assert text in shown
    assert machine_payload(load_profile("h200-pcie5")).keys() >= MEASURED.keys()


@pytest.mark.slow
@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_one_copy_saves_a_latency_against_two(a: int, b: int) -> None:
    # the planner's bounds rest on this
    machine = load_profile("h200-pcie5")
    apart = machine.copy_seconds(a) + machine.copy_seconds(b)
    assert machine.copy_seconds(a + b) == pytest.approx(apart - machine.copy_latency.value)
    assert machine.copy_seconds(a) >= a / machine.h2d.value
