"""Bytes that kernels read in place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offplan.checkpoint.model import Experts
from offplan.costs.link import REREADS, reread_factor, uva_bytes, uva_bytes_by_layer
from offplan.costs.work import PassShape
from offplan.placement import Phase
from offplan.plan import Backend
from tests.costs.builders import moe_model, place_rules, rule

EXPERTS = Experts(64, 6, 1000)


@pytest.mark.parametrize(("rows", "factor"), [(1, 1), (64, 1), *REREADS])
def test_measured_points_are_met(rows: int, factor: float) -> None:
    assert reread_factor(rows) == pytest.approx(factor)


def test_beyond_the_points_the_slope_goes_on() -> None:
    assert reread_factor(8192) == pytest.approx(17 * (17 / 5) ** 0.5)


@given(st.floats(1, 1e6), st.floats(1, 1e6))
def test_more_rows_never_read_less(a: float, b: float) -> None:
    assert reread_factor(min(a, b)) <= reread_factor(max(a, b)) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("num_tokens", "is_expert", "expected"),
    [
        (1, False, 64_000),
        (256, False, 128_000),
        (1, True, 6_000),  # six experts of 64
        (1000, True, 64_000),  # all experts, 94 tokens each: no tile is read twice
    ],
)
def test_experts_cross_as_tokens_touch_them(
    num_tokens: int, is_expert: bool, expected: int
) -> None:
    assert uva_bytes(64_000, is_expert, EXPERTS, num_tokens) == pytest.approx(expected, abs=1)


def test_only_what_the_phase_reads_in_place_counts() -> None:
    model = moe_model(3)
    placement = place_rules(model, [rule("shared_experts", decode=Backend.UVA)], 1)
    decode, prefill = (
        uva_bytes_by_layer(placement, model.experts, 3, [PassShape(phase, 1, 1, 1)])
        for phase in (Phase.DECODE, Phase.PREFILL)
    )
    assert decode == (0, 24576, 0)  # the last layer's stay in the one slot after prefill
    assert prefill == (0, 0, 0)


def test_each_chunk_reads_for_itself() -> None:
    model = moe_model(3)
    placement = place_rules(model, [rule("mlp", prefill=Backend.UVA, decode=Backend.UVA)], 1)
    chunks = [PassShape(Phase.PREFILL, 1, tokens, 300) for tokens in (200, 100)]
    together, first, second = (
        uva_bytes_by_layer(placement, model.experts, 3, some)
        for some in (chunks, chunks[:1], chunks[1:])
    )
    assert together == tuple(map(sum, zip(first, second, strict=True)))
