"""What a ring's slots hold: sizes that rules share, and what a decode step finds there."""

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from offplan.planner.combinations import list_combinations
from offplan.planner.contents import Choice, Pricer
from offplan.planner.options import are_disjoint
from offplan.planner.passes import PassBounds
from offplan.planner.problem import KindCosts, Problem
from offplan.planner.slots import Slots, kept_ps

from offplan.plan import Backend, Budget, Workload
from tests.costs.builders import DENSE, MOE, dense_model, make_machine, make_model, moe_model

WORKLOAD = Workload(batch=3, prompt_tokens=600, output_tokens=7, context=700)
PROBLEMS = [
    Problem(model, make_machine(h2d=5e9, uva=4e9), WORKLOAD, Budget(gpu_memory=2**40))
    for model in (dense_model(5), moe_model(5), make_model([DENSE, MOE] * 3))
]
KEPT, IN_PLACE = (Backend.PREFETCH, Backend.UVA), (Backend.UVA, Backend.UVA)


OPTIONS = [list_combinations(problem).options for problem in PROBLEMS]
cases = st.sampled_from(range(len(PROBLEMS)))


@st.composite
def rules(draw: st.DrawFn, case: int) -> list[tuple[int, int]]:
    """One to three rules that have no parameter in common: the option and group of each."""
    options = OPTIONS[case]
    number = st.integers(0, len(options) - 1)
    chosen = draw(st.lists(number, min_size=1, max_size=3, unique=True))
    assume(are_disjoint([options[option] for option in chosen]))
    return [(option, draw(st.integers(0, len(options[option].groups) - 1))) for option in chosen]


@settings(deadline=None, max_examples=60)
@given(st.data(), cases)
def test_slots_hold_what_rules_take_of_a_layer(data: st.DataObject, case: int) -> None:
    problem, options, chosen = PROBLEMS[case], OPTIONS[case], data.draw(rules(case))
    slots = Slots(options, problem.layers_of_kind)
    streamed = [options[option].layers[group] for option, group in chosen]
    found = 0
    for rule, (option, _) in enumerate(chosen):
        shared = slots.shared(tuple(number for number, _ in chosen[:rule]), option)
        assert shared == sorted(shared, reverse=True)
        for num_bytes, layers, before in shared:
            for each in (rule, *before):
                layers &= streamed[each]
            found = max(found, num_bytes if layers else 0)
    expected = max(
        sum(
            options[option].costs[kind].slab_bytes
            for (option, _), layers in zip(chosen, streamed, strict=True)
            if layers >> layer & 1
        )
        for layer, kind in enumerate(problem.kind_of)
    )
    assert found == expected
    # laid out together they take no less
    pricer = Pricer(problem)
    contents = pricer.contents(
        [
            Choice(options[n].segment_class, *KEPT, options[n].groups[group][1])
            for n, group in chosen
        ]
    )
    assert found <= max(content.prompt_bytes for content in contents)


@settings(deadline=None, max_examples=60)
@given(st.data(), cases, st.integers(1, 4))
def test_what_the_ring_keeps_is_what_a_step_is_spared(
    data: st.DataObject, case: int, num_slots: int
) -> None:
    problem, options, chosen = PROBLEMS[case], OPTIONS[case], data.draw(rules(case))
    backends = [data.draw(st.sampled_from([KEPT, IN_PLACE])) for _ in chosen]
    contents = Pricer(problem).contents(
        [
            Choice(options[option].segment_class, *each, options[option].groups[group][1])
            for (option, group), each in zip(chosen, backends, strict=True)
        ]
    )
    streamed = [
        (options[option].layers[group], options[option].costs)
        for (option, group), each in zip(chosen, backends, strict=True)
        if each is KEPT
    ]
    last = [content for content in contents if content.prompt_bytes][-num_slots:]
    spared_ps = sum(content.step.uva_ps - content.kept_uva_ps for content in last)
    slack_ps = PassBounds(problem).slack_ps[0][1]
    assert abs(kept_ps(streamed, problem.kind_of, num_slots) - spared_ps) <= slack_ps


@settings(deadline=None, max_examples=60)
@given(st.data(), cases, st.integers(0, 4))
def test_further_rules_leave_less_of_the_first(
    data: st.DataObject, case: int, num_slots: int
) -> None:
    problem, options = PROBLEMS[case], OPTIONS[case]
    streamed = [
        (options[option].layers[group], options[option].costs)
        for option, group in data.draw(rules(case))
    ]
    for number in range(len(streamed)):
        first, others = streamed[:number], streamed[number:]
        none_of_others = [
            (layers, [without_reading(kind) for kind in costs]) for layers, costs in others
        ]
        among = kept_ps([*first, *none_of_others], problem.kind_of, num_slots)
        assert among <= kept_ps(first, problem.kind_of, num_slots)


def without_reading(costs: KindCosts) -> KindCosts:
    return replace(costs, decode_uva_ps=0)
