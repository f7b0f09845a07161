"""Two and three rules: priced as the schedule does, by bounds that hold, and none is missed."""

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, islice, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from offplan.planner.candidates import list_candidates
from offplan.planner.combinations import TURNS, Candidate, list_combinations
from offplan.planner.contents import Choice, Pricer
from offplan.planner.problem import Problem
from offplan.planner.relaxation import Turn
from offplan.planner.segments import SegmentClass, segment_classes
from offplan.planner.targets import NEVER, Fastest, Targets

from offplan.checkpoint.model import Model
from offplan.costs.predict import predict, price_request
from offplan.costs.timeline import to_seconds
from offplan.errors import InfeasibleError, PlanError
from offplan.machine.profile import MachineProfile
from offplan.placement import group_units, place_units
from offplan.plan import Backend, Budget, Offload, Prediction, Rule, Workload
from offplan.planner import make_plan, search
from offplan.planner.patterns import group_patterns
from offplan.planner.space import BACKENDS, PREFETCH_STEPS
from offplan.units import format_seconds
from tests.costs.builders import (
    DENSE,
    MOE,
    Shapes,
    dense_model,
    make_machine,
    make_model,
    moe_model,
    rule,
)
from tests.test_planner import WORKLOAD, budget_for, price_everything

MODELS = [dense_model(5), moe_model(5), make_model([DENSE, MOE] * 3)]
PATTERNS = {number: group_patterns(number) for number in (2, 5, 6)}
LONG = Workload(batch=3, prompt_tokens=600, output_tokens=7, context=700)


@st.composite
def choice_lists(draw: st.DrawFn, model: Model) -> tuple[Choice, ...]:
    """One or two rules of the space, whose classes may overlap."""
    classes = st.sampled_from(segment_classes(model))
    patterns = st.sampled_from(PATTERNS[len(model.layers)])
    backends = st.sampled_from(list(product(Backend, Backend)))
    choice = st.builds(lambda c, b, p: Choice(c, *b, p), classes, backends, patterns)
    return tuple(draw(st.lists(choice, min_size=1, max_size=2)))


def price_by_schedule(
    problem: Problem, choices: tuple[Choice, ...], prefetch_step: int, number: int
) -> tuple[Fraction, int, int]:
    """Time of a request, memory taken off the GPU, and host memory, by placement and schedule."""
    model, setting = problem.model, problem.settings[number]
    offload = Offload(
        prefetch_step=prefetch_step,
        prefill_chunk=setting.prefill_chunk,
        embeddings=setting.embeddings,
        rules=tuple(choice.rule() for choice in choices),
    )
    placement = place_units(problem.units, model, offload)
    times = price_request(placement, model, problem.machine, setting.prefill, problem.decode)
    on_gpu = placement.resident_bytes + placement.ring_bytes
    return (
        times.objective_ps(problem.workload.output_tokens),
        model.loaded_bytes - on_gpu - setting.host_bytes,
        placement.offloaded_bytes - setting.host_bytes,
    )


@settings(deadline=None, max_examples=150)
@given(st.data(), st.sampled_from(MODELS), st.integers(1, 4), st.sampled_from([1e8, 5e9, 50e9]))
def test_the_search_prices_as_the_schedule_does(
    data: st.DataObject, model: Model, prefetch_step: int, h2d: float
) -> None:
    machine = make_machine(h2d=h2d, uva=0.7 * h2d)
    problem = Problem(model, machine, LONG, Budget(gpu_memory=2**40))
    choices = data.draw(choice_lists(model))
    number = data.draw(st.integers(0, len(problem.settings) - 1))
    try:
        expected = price_by_schedule(problem, choices, prefetch_step, number)
    except PlanError:  # a rule that takes nothing
        assume(False)
    pricer = Pricer(problem)
    contents = pricer.contents(choices)
    weighed = pricer.weigh(contents, prefetch_step)
    prefill = pricer.prefill_ps(contents, weighed.num_slots, number)
    decode = pricer.decode_ps(contents, weighed.num_slots, number)
    assert (
        prefill + LONG.output_tokens * decode,
        weighed.saved_bytes,
        weighed.host_bytes,
    ) == expected


@settings(deadline=None, max_examples=25)
@given(
    st.data(),
    st.sampled_from(MODELS),
    st.floats(0.1, 0.9),
    st.sampled_from([1e8, 5e9, 50e9]),
    st.sampled_from([WORKLOAD, LONG]),
    st.sampled_from([2, 3]),
)
def test_bounds_hold(
    data: st.DataObject, model: Model, share: float, h2d: float, workload: Workload, num_rules: int
) -> None:
    """A combination's bound is no more than its candidates', and theirs no more than their time."""
    machine = make_machine(h2d=h2d, uva=0.9 * h2d)
    problem = Problem(model, machine, workload, budget_for(model, machine, share, workload))
    found, pricer = list_combinations(problem), Pricer(problem)
    goal = Fastest(problem.weights)
    bounds = list(found.bounds(num_rules, goal, NEVER))
    assume(bounds)
    for number in data.draw(st.lists(st.integers(0, 10**6), min_size=5, max_size=20)):
        combined = bounds[number % len(bounds)]
        candidates = list(islice(list_candidates(found, combined, goal, NEVER), 2000))
        for candidate in candidates[:10] + candidates[-3:]:
            # both are sums of floats, whose slack is much more than their rounding
            assert combined.bound <= candidate.bound * (1 + 1e-12)
            contents = pricer.contents(found.choices(combined, candidate))
            weighed = pricer.weigh(contents, combined.num_slots)
            prefill = pricer.prefill_ps(contents, weighed.num_slots, combined.setting)
            decode = pricer.decode_ps(contents, weighed.num_slots, combined.setting)
            assert candidate.decode_ps <= decode
            assert candidate.bound <= goal.value(prefill, decode)


@settings(deadline=None, max_examples=15)
@given(
    st.data(),
    st.sampled_from(MODELS),
    st.floats(0.1, 0.95),
    st.sampled_from([1e8, 5e9, 50e9]),
    st.sampled_from([WORKLOAD, LONG]),
    st.sampled_from([2, 3]),
    st.booleans(),
)
def test_no_better_plan_is_passed_over(
    data: st.DataObject,
    model: Model,
    share: float,
    h2d: float,
    workload: Workload,
    num_rules: int,
    has_targets: bool,
) -> None:
    """Any plan of the space is a candidate of its combination for whatever it is better than."""
    machine = make_machine(h2d=h2d, uva=0.9 * h2d)
    problem = Problem(model, machine, workload, budget_for(model, machine, share, workload))
    found, pricer = list_combinations(problem), Pricer(problem)
    anything = Fastest(problem.weights)
    bounds = list(found.bounds(num_rules, anything, NEVER))
    assume(bounds)
    for number in data.draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=4)):
        combined = bounds[number % len(bounds)]
        groups = tuple(
            data.draw(st.integers(0, len(found.options[option].groups) - 1))
            for option in combined.options
        )
        choices = found.choices(combined, Candidate(0, 0, groups))
        contents = pricer.contents(choices)
        weighed = pricer.weigh(contents, combined.num_slots)
        prompt_users = sum(content.prompt_bytes > 0 for content in contents)
        step_users = sum(content.step_bytes > 0 for content in contents)
        setting = problem.settings[combined.setting]
        if (
            weighed.saved_bytes < setting.lacking_bytes
            # resident in all but name
            or 0 < max(prompt_users, step_users) <= combined.num_slots
            or (step_users > combined.num_slots) is not (TURNS[combined.turn] is Turn.TURNS)
        ):
            continue
        prefill = pricer.prefill_ps(contents, weighed.num_slots, combined.setting)
        decode = pricer.decode_ps(contents, weighed.num_slots, combined.setting)
        limits = (float(prefill), float(decode) * (1 + 1e-12)) if has_targets else (NEVER, NEVER)
        goal = Fastest(problem.weights, limits)
        limit = float(goal.value(prefill, decode)) * (1 + 1e-12)
        again = [each for each in found.bounds(num_rules, goal, limit) if each[1:] == combined[1:]]
        assert len(again) == 1
        listed = list_candidates(found, again[0], goal, limit)
        assert groups in {candidate.groups for candidate in listed}


def all_combinations(model: Model, num_rules: int) -> Iterator[tuple[Rule, ...]]:
    """All rules of the stated space together, written down without the planner's help."""
    for classes in combinations(segment_classes(model), num_rules):
        taken = [
            unit.parameters
            for segment_class in classes
            for layer in model.layers
            for unit in filter(segment_class.takes, group_units(layer))
        ]
        if len(taken) != len(set(taken)):
            continue
        for groups in product(*(spread_groups(model, segment_class) for segment_class in classes)):
            for backends in product(BACKENDS, repeat=num_rules):
                yield tuple(
                    rule(*segment_class.segments, group=group, prefill=prefill, decode=decode)
                    for segment_class, group, (prefill, decode) in zip(
                        classes, groups, backends, strict=True
                    )
                )


def spread_groups(model: Model, segment_class: SegmentClass) -> list[tuple[int, int]]:
    """Group sizes and numbers: the smallest groups that take as many layers of each kind."""
    having = [
        layer.key if any(map(segment_class.takes, group_units(layer))) else None
        for layer in model.layers
    ]
    groups: dict[tuple[str, ...], tuple[int, int]] = {}
    for size in range(1, len(having) + 1):
        for number in range(1, size + 1):
            chosen = rule(group=(size, number))
            keys = [key for i, key in enumerate(having) if key and chosen.selects_layer(i)]
            groups.setdefault(tuple(sorted(keys)), (size, number))
    groups.pop((), None)
    return list(groups.values())


def price_pairs(
    model: Model, machine: MachineProfile, workload: Workload, budget: Budget
) -> Iterator[Prediction]:
    """Every pair that fits, priced as a plan is."""
    for rules in all_combinations(model, 2):
        uses_ring = any(Backend.PREFETCH in (r.prefill, r.decode) for r in rules)
        for step, embeddings in product(PREFETCH_STEPS if uses_ring else (1,), ("device", "host")):
            offload = Offload(
                prefetch_step=step, prefill_chunk=512, embeddings=embeddings, rules=rules
            )
            prediction = predict(model, machine, workload, budget, offload)
            if prediction.gpu_memory.total_bytes <= budget.gpu_memory:
                yield prediction


@pytest.mark.parametrize(
    ("model", "share", "h2d"),
    [
        (dense_model(3), 0.1, 10e9),
        (make_model([DENSE, MOE]), 0.7, 1e9),
    ],
)
def test_two_rules_equal_brute_force(
    model: Model, share: float, h2d: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MOST_RULES", 2)
    machine, workload = make_machine(h2d=h2d, uva=0.8 * h2d), Workload(prompt_tokens=512)
    budget = budget_for(model, machine, share, workload)
    plan = make_plan(model, machine, workload, budget).plan
    priced = price_everything(model, machine, workload, budget, chunks=(512,))
    single = best(prediction for _, prediction in priced)
    pair = best(price_pairs(model, machine, workload, budget))
    assert pair < single, "choose a case that a second rule is worth"
    assert plan.prediction.objective_s == pytest.approx(pair, rel=1e-12)
    assert len(plan.offload.rules) == 2


def best(predictions: Iterator[Prediction]) -> float:
    return min(prediction.objective_s for prediction in predictions)


@pytest.mark.parametrize("h2d", [1e9, 20e9])
def test_targets_equal_brute_force(h2d: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest within targets, or the nearest to them: as if every plan were looked at."""
    monkeypatch.setattr(search, "MOST_RULES", 2)
    model, workload = make_model([DENSE, MOE]), Workload(prompt_tokens=512)
    machine = make_machine(h2d=h2d, uva=0.8 * h2d, gpu_memory=2**23)
    budget = budget_for(model, machine, 0.7, workload)
    priced = price_everything(model, machine, workload, budget, chunks=(512,))
    single = [prediction for _, prediction in priced]
    everything = [*single, *price_pairs(model, machine, workload, budget)]
    limits = [
        sorted({getattr(each, phase).step_s for each in everything})
        for phase in ("prefill", "decode")
    ]
    for ttft, tpot in product(*([times[0] / 2, times[9], times[99]] for times in limits)):
        targets = Targets(ttft, tpot)

        def fastest(plans: list[Prediction], limits: Targets = targets) -> float:
            kept = (p.objective_s for p in plans if excess(p, limits) <= 1)
            return min(kept, default=float("inf"))

        try:
            found = make_plan(model, machine, workload, budget, targets).plan.prediction
        except InfeasibleError as error:
            assert fastest(everything) == float("inf")
            nearest = min(everything, key=lambda p: excess(p, targets))
            reached = max(excess(p, targets) for p in everything if describe(p) in str(error))
            assert reached == pytest.approx(excess(nearest, targets), rel=1e-9)
            continue
        assert excess(found, targets) <= 1
        assert found.objective_s == pytest.approx(fastest(everything), rel=1e-12)


@pytest.mark.parametrize(
    ("layers", "share", "h2d", "uva", "num_rules"),
    [
        ([DENSE, MOE], 0.15, 5e9, 4e9, 3),
        ([DENSE, MOE], 0.3, 1e9, 0.8e9, 3),
        ([DENSE, MOE], 0.75, 1e9, 0.8e9, 3),
        ([MOE, MOE], 0.4, 50e9, 40e9, 2),
    ],
)
def test_three_rules_equal_brute_force(
    layers: list[Shapes], share: float, h2d: float, uva: float, num_rules: int
) -> None:
    model, workload = make_model(layers), Workload(prompt_tokens=512)
    machine = make_machine(h2d=h2d, uva=uva)
    budget = budget_for(model, machine, share, workload)
    problem = Problem(model, machine, workload, budget)
    pricer, patterns = Pricer(problem), group_patterns(len(layers))
    by_group = {(pattern.group_size, pattern.num_in_group): pattern for pattern in patterns}

    def objectives(rules: tuple[Rule, ...]) -> Iterator[float]:
        choices = tuple(
            Choice(
                SegmentClass(rule.cpu_offload_params),
                rule.prefill,
                rule.decode,
                by_group[rule.group_size or 0, rule.num_in_group or 0],
            )
            for rule in rules
        )
        contents = pricer.contents(choices)
        for step, (number, setting) in product(PREFETCH_STEPS, enumerate(problem.settings)):
            weighed = pricer.weigh(contents, step)
            if weighed.saved_bytes >= setting.lacking_bytes:
                prefill = pricer.prefill_ps(contents, weighed.num_slots, number)
                decode = pricer.decode_ps(contents, weighed.num_slots, number)
                yield to_seconds(prefill + workload.output_tokens * decode)

    two, three = (
        min(time for rules in all_combinations(model, number) for time in objectives(rules))
        for number in (2, 3)
    )
    assert (three < two) == (num_rules == 3), "choose a case of so many rules"
    result = make_plan(model, machine, workload, budget)
    assert len(result.plan.offload.rules) == num_rules
    assert result.plan.prediction.objective_s == pytest.approx(min(two, three), rel=1e-12)
    assert "no plan of up to three rules" in " ".join(result.reasons)


@pytest.mark.parametrize("h2d", [1e9, 20e9])
def test_three_rules_never_lose_by_memory(h2d: float) -> None:
    model, machine = make_model([DENSE, *[MOE] * 6]), make_machine(h2d=h2d, uva=0.9 * h2d)
    shares = [number / 6 for number in range(1, 6)]
    results = [
        make_plan(model, machine, LONG, budget_for(model, machine, share, LONG)) for share in shares
    ]
    assert {result.max_rules for result in results} == {3}
    assert 3 in {len(result.plan.offload.rules) for result in results}
    times = [result.plan.prediction.objective_s for result in results]
    assert times == sorted(times, reverse=True)


def excess(prediction: Prediction, targets: Targets) -> float:
    assert targets.max_ttft_s is not None
    assert targets.max_tpot_s is not None
    return max(
        prediction.prefill.step_s / targets.max_ttft_s,
        prediction.decode.step_s / targets.max_tpot_s,
    )


def describe(prediction: Prediction) -> str:
    """What the error says of the nearest plan."""
    first, other = prediction.prefill.step_s, prediction.decode.step_s
    return f"first token after {format_seconds(first)} and takes {format_seconds(other)} a token"
