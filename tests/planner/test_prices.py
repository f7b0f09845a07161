"""What the search weighs, prices and estimates: as placements and schedules have it."""

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from offplan.costs.activations import activation_bytes
from offplan.costs.compute import ModelCompute
from offplan.costs.memory import list_gpu_memory
from offplan.costs.predict import price_request
from offplan.costs.term import least_that
from offplan.costs.work import decode_shape, prefill_shapes
from offplan.errors import PlanError
from offplan.held.held import hold
from offplan.library.asking import pose
from offplan.placement import Placement, place
from offplan.plan import Backend, Goal, Offload, Rule, Workload
from offplan.planner.candidates import NO_RULE, Candidates, Ints, choose
from offplan.planner.classes import list_patterns
from offplan.planner.estimates import estimate, most_rounded_ps
from offplan.planner.prices import Prices
from offplan.planner.search import Searcher
from offplan.planner.space import Space
from tests.costs.builders import DENSE, MOE, dense_model, make_machine, make_model, moe_model
from tests.costs.exact import run_request
from tests.planner.cases import UNLIMITED, WORKLOAD, uneven_models

FIXED = [dense_model(5), moe_model(5), make_model([DENSE, MOE] * 3)]
WORKLOADS = [
    WORKLOAD,
    Workload(batch=3, prompt_tokens=2500, output_tokens=7, context=2600),
    Workload(batch=40, prompt_tokens=1, output_tokens=1, context=8),
]


class Case(NamedTuple):
    """A plan of a space, by numbers: NO_RULE where it has no second rule."""

    setting: int
    prefetch_step: int
    taken: tuple[tuple[int, int], ...]
    """The option and pattern of each rule."""

    def candidates(self) -> Candidates:
        both = (*self.taken, (NO_RULE, NO_RULE))[:2]
        numbers = (self.setting, self.prefetch_step, *both[0], *both[1])
        return Candidates(*(np.array([number]) for number in numbers))

    def place(self, prices: Prices) -> Placement:
        space = prices.space
        patterns = list_patterns(len(space.kind_of))
        setting = space.settings[self.setting]
        rules = [
            prices.options[option].rule(
                int(patterns.group_size[pattern]), int(patterns.num_in_group[pattern])
            )
            for option, pattern in self.taken
        ]
        offload = Offload(
            prefetch_step=self.prefetch_step,
            prefill_chunk=setting.prefill_chunk,
            embeddings=setting.embeddings,
            rules=tuple(rules),
        )
        return place(space.stage, offload)


@st.composite
def searchers(draw: st.DrawFn) -> Searcher:
    """Spaces of models with several kinds of layers."""
    model = draw(st.sampled_from(FIXED) | uneven_models())
    h2d, share = draw(st.sampled_from([1e8, 5e9, 50e9])), draw(st.sampled_from([0.7, 1.0, 1.3]))
    workload = draw(st.sampled_from(WORKLOADS))
    engine = draw(st.sampled_from([None, "vllm", "sglang"]))
    in_parts = engine is None and model.experts is not None and draw(st.booleans())
    goal = Goal(
        engine=engine,
        host_cores=engine is None and draw(st.booleans()),
        parts="auto" if in_parts else "off",
    )
    machine = make_machine(h2d=h2d, uva=share * h2d)
    rates = {"host_reads": 1.2 * h2d, "cores": 0.8 * h2d}
    machine = machine.model_copy(
        update={key: machine.h2d.model_copy(update={"value": rate}) for key, rate in rates.items()}
    )
    return Searcher(Space(pose(model, machine, workload, UNLIMITED, goal)))


def draw_options(draw: Callable[..., Any], searcher: Searcher) -> list[int]:
    """Choose one option, or two that have no parameter in common; one for an engine."""
    numbers = st.integers(0, len(searcher.prices.options) - 1)
    first = draw(numbers)
    if searcher.space.question.runner.name is not None:
        # SGLang reads no group of layers in place, and its flags cannot say one
        option = searcher.prices.options[first]
        assume(option.decode is Backend.PREFETCH or searcher.space.question.runner.name == "vllm")
        return [first]
    partners = np.flatnonzero(searcher.disjoint[first]).tolist()
    return [
        first,
        *draw(st.lists(st.sampled_from(partners), max_size=1) if partners else st.just([])),
    ]


def weigh(searcher: Searcher, case: Case) -> tuple[Ints, Ints, Ints]:
    candidates, prices = case.candidates(), searcher.prices
    return prices.weigh(prices.number_all(candidates), candidates.prefetch_step)


def least_own_bytes(searcher: Searcher, case: Case) -> int:
    """Bytes that numbers of rules take on the GPU: with fewer a plan does not fit."""
    candidates, prices = case.candidates(), searcher.prices

    def fits(spare: int) -> bool:
        return bool(prices.spend(candidates, np.array([spare]))[0][0])

    return least_that(fits, -1, 2**40)


def price(searcher: Searcher, case: Case) -> tuple[float, float]:
    """Price one plan as the search does."""
    candidates, prices = case.candidates(), searcher.prices
    numbers = prices.number_all(candidates)
    _, own = prices.spend(candidates, np.zeros(1, dtype=np.int64))
    prompt_ps, step_ps = prices.price(numbers, candidates.setting, candidates.prefetch_step, own)
    return float(prompt_ps[0]), float(step_ps[0])


@pytest.mark.slow
@settings(max_examples=100)
@given(st.data(), searchers(), st.integers(1, 4))
def test_the_search_prices_as_the_schedule_does(
    data: st.DataObject, searcher: Searcher, prefetch_step: int
) -> None:
    space = searcher.space
    stage, machine = space.stage, space.machine
    patterns = st.integers(0, len(list_patterns(len(stage.layers)).group_size) - 1)
    number = data.draw(st.integers(0, len(space.settings) - 1))
    options = draw_options(data.draw, searcher)
    case = Case(number, prefetch_step, tuple((each, data.draw(patterns)) for each in options))
    try:
        placement = case.place(searcher.prices)
    except PlanError:  # a rule that takes nothing
        assume(False)
    setting = space.settings[number]
    request = placement, stage, machine, setting.prefill, space.decode
    prompt_ps, step_ps = run_request(*request)
    assert price(searcher, case) == (prompt_ps, float(step_ps))
    alone = price_request(*request)
    assert (alone.prefill.step_ps, alone.decode.step_ps) == (prompt_ps, step_ps)

    off_gpu, on_host, _ = weigh(searcher, case)
    on_gpu = placement.resident_bytes + placement.ring_bytes
    workload, chunk = space.question.workload, setting.prefill_chunk
    terms = list_gpu_memory(placement, stage, machine, workload, UNLIMITED, chunk)
    held = next(each.value for each in terms if each.path == "gpu_memory.activations")
    held -= activation_bytes(stage, workload, chunk)
    own_bytes = least_own_bytes(searcher, case)
    assert [off_gpu[0] - own_bytes] == [stage.loaded_bytes - setting.host_bytes - on_gpu - held]
    if searcher.space.question.runner.name is None:
        assert on_host.tolist() == [placement.slab_bytes]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_copies_of_unlike_size_follow_an_engine_s_last_layers_in_its_order(engine: str) -> None:
    """Five layers, which four slots do not divide: what is copied last ends the prompt."""
    model, machine = make_model([DENSE, MOE, MOE, DENSE, MOE]), make_machine(h2d=1e9, uva=1e9)
    question = pose(model, machine, WORKLOAD, UNLIMITED, Goal(engine=engine))
    searcher = Searcher(Space(question))
    space = searcher.space
    everything = next(
        number
        for number, option in enumerate(searcher.prices.options)
        if not option.segment_class.segments and option.prefill is Backend.PREFETCH
    )
    for pattern, num_slots in product(range(len(list_patterns(5).group_size)), (2, 3, 4)):
        case = Case(0, num_slots, ((everything, pattern),))
        placement, prompt = case.place(searcher.prices), space.settings[0].prefill
        times = run_request(placement, space.stage, space.machine, prompt, space.decode)
        assert price(searcher, case) == (times[0], float(times[1]))


@pytest.mark.slow
@settings(max_examples=40)
@given(st.data(), searchers())
def test_a_plan_takes_no_less_than_its_estimate(data: st.DataObject, searcher: Searcher) -> None:
    """But for what is rounded."""
    space, rules = searcher.space, searcher.rules
    setting = data.draw(st.integers(0, len(space.settings) - 1))
    numbers = [
        data.draw(st.sampled_from(np.flatnonzero(rules.option == option).tolist()))
        for option in draw_options(data.draw, searcher)
    ]
    taken = tuple(
        (int(rules.option[rule]), int(rules.patterns[rules.first_pattern[rule]]))
        for rule in numbers
    )
    num_turns = int(weigh(searcher, Case(setting, 0, taken))[2][0])
    assume(num_turns != 1)  # fewer slots than layers that stream, as the space has it
    num_slots = data.draw(st.integers(1, min(4, num_turns - 1))) if num_turns else 0
    where = np.array([setting])
    loads = [choose(rules.loads, where, np.array([rule])) for rule in (*numbers, NO_RULE)]
    both = loads[0].with_second(loads[1])
    exact_ps = price(searcher, Case(setting, num_slots, taken))
    for least_ps, took_ps in zip(
        estimate(searcher.prices, both, where, np.array([num_slots])), exact_ps, strict=True
    ):
        assert least_ps[0] <= took_ps + most_rounded_ps(space)


def test_what_int64_cannot_add_up_is_priced_in_larger_units() -> None:
    """A prompt of weeks, whose plan somebody wrote by hand."""
    stage, machine = hold(dense_model(5)), make_machine(gpu=1e-3)
    workload = Workload(batch=2**13, prompt_tokens=2**18, output_tokens=2, context=2**19)
    way = {"group_size": 2, "num_in_group": 1, "prefill": "prefetch", "decode": "prefetch"}
    offload = Offload(prefill_chunk=2**18, rules=(Rule.model_validate(way),))
    placement, compute = place(stage, offload), ModelCompute(stage, machine)
    prompt, step = compute.price(*prefill_shapes(workload, 2**18)), decode_shape(workload)
    request = placement, stage, machine, prompt, compute.price(step)
    alone, exact = price_request(*request), run_request(*request)
    assert exact[0] > 2**60
    assert float(alone.prefill.step_ps) == pytest.approx(float(exact[0]))
    assert float(alone.decode.step_ps) == pytest.approx(float(exact[1]), rel=1e-3)
