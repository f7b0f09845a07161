"""Bytes that kernels read in place."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offplan.checkpoint.model import Experts, Model
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tensors import TensorInfo
from offplan.costs.compute import ModelCompute
from offplan.costs.link import REREADS, TILE_ROWS, reread_factor
from offplan.costs.pass_times import pass_times
from offplan.costs.timeline import PassTimes
from offplan.costs.work import PassShape
from offplan.held.held import hold
from offplan.held.unit import Unit
from offplan.machine.curve import Reread, Rereads
from offplan.machine.profile import Figure, InPlaceRead, MachineProfile
from offplan.placement import Phase, Placement
from offplan.plan import Backend
from tests.costs.builders import make_machine, moe_model, place_rules, rule, use_bytes

uva_bytes = partial(use_bytes, Backend.UVA)

EXPERTS = Experts(64, 6, 1000)
MACHINE = make_machine()
POINTS = [(point.rows, point.factor) for point in REREADS]


@pytest.mark.parametrize(("rows", "factor"), [(1, 1), (64, 1), *POINTS])
def test_measured_points_are_met_or_each_tile_reads(rows: int, factor: float) -> None:
    assert reread_factor(MACHINE, rows) == pytest.approx(max(factor, rows / TILE_ROWS))


def test_beyond_the_points_the_slope_goes_on() -> None:
    machine = with_rereads((1, 1.0), (128, 10.0), (512, 20.0))
    assert reread_factor(machine, 2048) == pytest.approx(40)
    steep = with_rereads((1, 1.0), (8794, 1.0), (8795, 54.0))
    assert reread_factor(steep, 10 * 8795) == pytest.approx(max(540, 10 * 8795 / TILE_ROWS))


def with_rereads(*points: tuple[int, float]) -> MachineProfile:
    table = tuple(Reread(rows=rows, factor=factor) for rows, factor in points)
    figure = Figure[Rereads](
        value=table, basis="measured", source="a test", samples=None, spread=None
    )
    return MACHINE.model_copy(update={"uva_rereads": figure})


@st.composite
def tables(draw: st.DrawFn) -> MachineProfile:
    rows = draw(st.lists(st.integers(1, 10_000), min_size=2, max_size=6, unique=True))
    factors = st.lists(st.floats(1, 100), min_size=len(rows), max_size=len(rows))
    return with_rereads(*zip(sorted(rows), sorted(draw(factors)), strict=True))


@given(st.just(MACHINE) | tables(), st.floats(0.01, 1e6), st.floats(0.01, 1e6))
def test_more_rows_never_read_less(machine: MachineProfile, a: float, b: float) -> None:
    less, more = (reread_factor(machine, rows) for rows in sorted((a, b)))
    assert 1 <= less <= more * (1 + 1e-12)


def test_a_profile_may_have_measured_its_own() -> None:
    machine = with_rereads((1, 1.0), (128, 1.5), (512, 6.0))
    assert [reread_factor(machine, rows) for rows in (0.5, 1, 512)] == [1.0, 1.0, 6.0]
    assert reread_factor(machine, 256) == pytest.approx(3)
    assert uva_bytes(machine, [make_unit((32_000,))], None, 128) == 96_000


@pytest.mark.parametrize(
    ("num_tokens", "is_expert", "expected"),
    [
        (1, False, 64_000),
        (256, False, 128_000),
        (1, True, 6_000),  # six experts of 64
        (1000, True, 64_000),  # all experts, 94 tokens each: no tile is read twice
        (3840, True, 64_000),  # 360 tokens each
        (7680, True, 128_000),  # 720
    ],
)
def test_experts_cross_as_tokens_touch_them(
    num_tokens: int, is_expert: bool, expected: int
) -> None:
    unit = make_unit((20, 25) if is_expert else (32_000,), 64 if is_expert else 1)
    assert uva_bytes(MACHINE, [unit], EXPERTS, num_tokens) == pytest.approx(expected, abs=1)


def test_what_a_products_own_shape_read_counts_at_its_tokens() -> None:
    dense, experts = make_unit((160, 200)), make_unit((20, 25), 64)
    reads = [
        InPlaceRead(shape=(160, 200), tokens=512, factor=3),
        InPlaceRead(shape=(64, 20, 25), tokens=512, factor=1.5),
    ]
    machine = MACHINE.model_copy(update={"in_place_reads": tuple(reads)})
    assert uva_bytes(machine, [dense], EXPERTS, 512) == 3 * 64_000
    assert uva_bytes(machine, [experts], EXPERTS, 512) == pytest.approx(96_000, abs=1)
    assert uva_bytes(machine, [dense, experts], EXPERTS, 512) == 3 * 64_000 + 96_000
    assert uva_bytes(machine, [dense], EXPERTS, 256) == use_bytes(
        Backend.UVA, MACHINE, [dense], None, 256
    )


def make_unit(shape: tuple[int, ...], num_experts: int = 1) -> Unit:
    """A bfloat16 parameter; of several experts, a tensor for each."""
    tensors = tuple(TensorInfo(f"{number}", "BF16", shape) for number in range(num_experts))
    return Unit(0, (Parameter("w", tensors, is_expert=num_experts > 1),))


def test_only_what_the_phase_reads_in_place_counts() -> None:
    model = moe_model(3)
    placement = place_rules(model, [rule("shared_experts", decode=Backend.UVA)], 1)
    decode, prefill = (
        find_times(model, placement, PassShape(phase, 1, 1, 1))
        for phase in (Phase.DECODE, Phase.PREFILL)
    )
    # the last layer's stay in the one slot after prefill
    assert (decode.read_by[Backend.UVA], prefill.read_by[Backend.UVA]) == (24576, 0)
    assert [each > 0 for each in decode.uva_ps] == [False, True, False]


def test_each_chunk_reads_for_itself() -> None:
    model = moe_model(3)
    placement = place_rules(model, [rule("mlp", prefill=Backend.UVA, decode=Backend.UVA)], 1)
    chunks = [PassShape(Phase.PREFILL, 1, tokens, 300) for tokens in (200, 100)]
    together, first, second = (
        find_times(model, placement, *some) for some in (chunks, chunks[:1], chunks[1:])
    )
    assert together.uva_bytes == first.uva_bytes + second.uva_bytes > 0
    for whole, *parts in zip(together.uva_ps, first.uva_ps, second.uva_ps, strict=True):
        assert 0 < whole == pytest.approx(sum(parts), abs=1)  # each is rounded


def find_times(model: Model, placement: Placement, *shapes: PassShape) -> PassTimes:
    stage = hold(model)
    return pass_times(placement, stage, MACHINE, ModelCompute(stage, MACHINE).price(*shapes))
