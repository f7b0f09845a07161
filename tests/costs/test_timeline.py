"""The timeline against closed forms, and against passes run one after another."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offplan.checkpoint.model import Model
from offplan.costs.lanes import PhaseLanes, trace_prompt, trace_step
from offplan.costs.timeline import PS_PER_S, PassTimes, PhaseTimes, price_decode, price_prefill
from offplan.placement import Phase, Placement, Span
from offplan.plan import Backend
from offplan.schedule import (
    Compute,
    Copy,
    Schedule,
    Wait,
    build_steady_request,
)
from tests.costs.builders import DENSE, dense_model, make_model, place_rules, rule
from tests.costs.strategies import odd_models, place_or_skip, rule_lists


def pass_times(
    compute: list[int], copy: int | dict[int, int], uva: list[int], slowdown: float = 1.0
) -> PassTimes:
    """Times in picoseconds; copies take one time, or one for each layer."""

    def copy_ps(span: Span) -> int:
        return copy if isinstance(copy, int) else copy[span.layer]

    return PassTimes(tuple(compute), 0, tuple(uva), slowdown, sum(uva), copy_ps)


def price_equal(num_slabs: int, group: int, num_slots: int, compute: int, copy: int) -> PhaseTimes:
    num_layers = num_slabs * group
    model = dense_model(num_layers)
    placement = place_rules(model, [rule("mlp", group=(group, 1))], num_slots)
    request = build_steady_request(placement, num_layers)
    return price_decode(request.decode, pass_times([compute] * num_layers, copy, [0] * num_layers))


@pytest.mark.slow
@given(
    st.integers(2, 6),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 50),
    st.integers(1, 300),
)
def test_equal_slabs_follow_the_closed_form(
    turns: int, group: int, num_slots: int, compute: int, copy: int
) -> None:
    """step = n max(x, G c, (x + c) / K), where n is a multiple of K."""
    n = turns * num_slots
    times = price_equal(n, group, num_slots, compute, copy)
    expected = n * max(
        Fraction(copy), Fraction(group * compute), Fraction(copy + compute, num_slots)
    )
    assert times.step_ps == expected
    assert times.bound_ps == max(n * copy, n * group * compute)
    assert times.link_ps == n * copy


@pytest.mark.slow
@given(st.integers(3, 9), st.integers(1, 3), st.integers(1, 50), st.integers(1, 300))
def test_two_slots_reach_the_bound_with_equal_slabs(
    num_slabs: int, group: int, compute: int, copy: int
) -> None:
    """An odd number of slabs gives a slab of the last turn no slot of its own, but no stall."""
    if num_slabs % 2:
        num_slabs += 1
    times = price_equal(num_slabs, group, 2, compute, copy)
    assert times.step_ps == times.bound_ps


def run_decode(schedule: Schedule, times: PassTimes, num_steps: int) -> list[int]:
    """When each of these steps ends, counted by hand from an idle start."""
    compute = link = 0
    done = dict.fromkeys(range(len(schedule.before)), 0)
    ends = []
    for _ in range(num_steps):
        for op in schedule.operations:
            if isinstance(op, Copy):
                link = done[op.slot] = max(link, compute) + times.copy_ps(op.span)
            elif isinstance(op, Wait):
                compute = max(compute, done[op.slot])
            else:
                compute += times.compute_ps[op.layer]
        ends.append(compute)
    return ends


@st.composite
def streamed_models(draw: st.DrawFn) -> tuple[Model, Placement]:
    """Models of some layers with an MLP to stream, and some without."""
    bare = {name: shape for name, shape in DENSE.items() if not name.startswith("mlp.")}
    kinds = draw(st.lists(st.sampled_from([DENSE, bare]), min_size=1, max_size=7))
    model = make_model([DENSE, *kinds])
    return model, place_rules(model, [rule("mlp")], draw(st.integers(1, 4)))


@pytest.mark.slow
@given(st.data(), streamed_models())
def test_steady_step_is_what_many_steps_come_to(
    data: st.DataObject, streamed: tuple[Model, Placement]
) -> None:
    model, placement = streamed
    num_layers = len(model.layers)
    compute = data.draw(st.lists(st.integers(1, 9), min_size=num_layers, max_size=num_layers))
    copies = data.draw(st.lists(st.integers(1, 30), min_size=num_layers, max_size=num_layers))
    times = pass_times(compute, dict(enumerate(copies)), [0] * num_layers)
    schedule = build_steady_request(placement, num_layers).decode
    # small whole numbers settle soon; 60 is a multiple of every period up to 6
    ends = run_decode(schedule, times, 460)
    assert price_decode(schedule, times).step_ps == Fraction(ends[-1] - ends[-61], 60)


def check_lanes(lanes: PhaseLanes, times: PhaseTimes, *, repeats: bool) -> None:
    """The queues do one thing at a time, compute all the time, and in sum what was priced."""
    ps = {
        queue: [
            (round(each.start_s * PS_PER_S, 6), round(each.stop_s * PS_PER_S, 6), each.doing)
            for each in lanes.events
            if each.queue == queue
        ]
        for queue in ("compute", "link")
    }
    for spans in ps.values():
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert all(before[1] == after[0] for before, after in pairwise(ps["compute"]))
    assert ps["compute"][0][0] == 0
    assert ps["compute"][-1][1] == pytest.approx(float(times.step_ps))
    computed = sum(stop - start for start, stop, doing in ps["compute"] if doing == "compute")
    assert computed == pytest.approx(times.compute_ps)
    crossed = sum(stop - start for start, stop, _ in ps["link"])
    assert crossed == pytest.approx(times.link_ps) if repeats else crossed <= times.link_ps + 1e-3


@pytest.mark.slow
@given(st.data(), odd_models(), st.integers(1, 4))
def test_bounds_and_monotony_hold(data: st.DataObject, model: Model, prefetch_step: int) -> None:
    """step >= bound, step >= compute, and a faster link or GPU never hurts, UVA mixed in or not."""
    num_layers = len(model.layers)
    placement = place_or_skip(model, data.draw(rule_lists(num_layers)), prefetch_step)
    request = build_steady_request(placement, num_layers)
    durations = st.lists(st.integers(1, 40), min_size=num_layers, max_size=num_layers)
    compute, copies = data.draw(durations), data.draw(durations)
    slabs = {slab.layer: slab for slab in placement.slabs}
    reads = {
        phase: [
            9 * any(entry.backend(phase) is Backend.UVA for entry in slab.entries)
            if (slab := slabs.get(layer))
            else 0
            for layer in range(num_layers)
        ]
        for phase in Phase
    }

    def price(slower: int) -> tuple[PhaseTimes, PhaseTimes]:
        slow_copies = {layer: copy * slower for layer, copy in enumerate(copies)}
        prefill, decode = (
            pass_times(compute, slow_copies, [read * slower for read in reads[phase]], 1.25)
            for phase in (Phase.PREFILL, Phase.DECODE)
        )
        return (
            price_prefill(request.prefill, prefill),
            price_decode(request.decode, decode),
        )

    prefill, decode = (
        PassTimes(
            tuple(compute),
            7,
            tuple(reads[phase]),
            1.25,
            0,
            lambda span: copies[span.layer],
        )
        for phase in (Phase.PREFILL, Phase.DECODE)
    )
    prompt, step = request.prefill, request.decode
    check_lanes(trace_prompt(prompt, prefill), price_prefill(prompt, prefill), repeats=False)
    check_lanes(trace_step(step, decode), price_decode(step, decode), repeats=True)
    for fast, slow in zip(price(1), price(2), strict=True):
        assert fast.step_ps >= fast.bound_ps >= fast.compute_ps
        assert slow.step_ps >= fast.step_ps
        assert slow.link_ps == 2 * fast.link_ps


def test_reading_in_place_delays_what_is_copied_meanwhile() -> None:
    """The link serves both: a step takes no less than the sum of what crosses it."""
    rules = [
        rule("mlp", group=(2, 1)),
        rule("o_proj", prefill=Backend.UVA, decode=Backend.UVA),
    ]
    placement = place_rules(dense_model(4), rules, 2)
    request = build_steady_request(placement, 4)
    placement_without = place_rules(dense_model(4), rules[1:], 2)
    assert not [op for op in request.decode.operations if isinstance(op, Copy)]  # both own a slot
    times = pass_times([1, 1, 1, 1], 100, [10, 10, 10, 10])
    one_slot = build_steady_request(place_rules(dense_model(4), rules, 1), 4)
    decode = price_decode(one_slot.decode, times)
    assert decode.link_ps == 2 * 100 + 4 * 10
    assert decode.step_ps >= decode.link_ps
    in_place = build_steady_request(placement_without, 4)
    assert price_decode(in_place.decode, times).step_ps == 4 * (1 + 10)


def test_reading_is_slower_where_copies_are_waited_for() -> None:
    in_place = rule("o_proj", prefill=Backend.UVA, decode=Backend.UVA)
    times = pass_times([100] * 4, 30, [10] * 4, slowdown=1.5)
    # a prompt has nothing to copy before its second layer; a step is taken to copy all the time
    for rules, prompt, step in (([in_place], 40, 40), ([in_place, rule("mlp")], 10 + 3 * 15, 60)):
        request = build_steady_request(place_rules(dense_model(4), rules, 2), 4)
        assert price_prefill(request.prefill, times).step_ps == 400 + prompt
        assert price_decode(request.decode, times).step_ps == 400 + step


def test_reading_is_slower_only_until_all_is_copied() -> None:
    rules = [rule("o_proj", prefill=Backend.UVA, decode=Backend.UVA), rule("mlp")]
    request = build_steady_request(place_rules(dense_model(4), rules, 2), 4)
    times = pass_times([100] * 4, 3, [10] * 4, slowdown=1.5)
    assert price_prefill(request.prefill, times).step_ps == 400 + 10 + 3 * 13


def test_prefill_streams_once_a_prompt_and_starts_with_a_warm_ring() -> None:
    placement = place_rules(dense_model(4), [rule("mlp")], 2)
    request = build_steady_request(placement, 4)
    prefill = price_prefill(request.prefill, pass_times([1] * 4, 100, [0] * 4))
    assert prefill.link_ps == 4 * 100
    assert prefill.bound_ps == (4 - 2) * 100  # two layers are there at the start
    # the first copy starts after the first layer; each copy follows another; the last layer runs
    assert prefill.step_ps == 1 + 2 * 100 + 1
    assert prefill.link_bytes == request.prefill.link_bytes


def test_resident_passes_take_their_compute() -> None:
    placement = place_rules(dense_model(3), [], 1)
    request = build_steady_request(placement, 3)
    times = PassTimes((5, 6, 7), 4, (0, 0, 0), 1.0, 0, lambda span: 0)
    assert price_decode(request.decode, times).step_ps == 22
    assert price_prefill(request.prefill, times).step_ps == 22
    assert request.decode.operations == tuple(Compute(layer) for layer in range(3))


def test_the_link_is_copied_over_and_read_over() -> None:
    rules = [rule("o_proj", prefill=Backend.UVA, decode=Backend.UVA), rule("mlp")]
    request = build_steady_request(place_rules(dense_model(4), rules, 1), 4)
    taken = price_decode(request.decode, pass_times([100] * 4, 3, [10] * 4))
    assert (taken.num_copies, taken.copied_ps) == (4, 12)
    assert taken.copied_bytes == request.decode.link_bytes
    assert taken.link_ps == taken.bound_ps - 400 + 52 == 52
    assert taken.link_bytes == request.decode.link_bytes + 40
