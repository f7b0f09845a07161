"""Experts that rules keep one by one: priced as schedules have it, and chosen where they pay."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from offplan.checkpoint.model import Model
from offplan.costs.predict import price_request
from offplan.errors import InputError, PlanError
from offplan.library.asking import pose
from offplan.machine.profile import MachineProfile
from offplan.placement import place
from offplan.plan import Budget, Goal, ModelRef, Offload, Workload
from offplan.planner.frontier import find_frontier
from offplan.planner.make import make_plan
from offplan.planner.patterns import list_patterns
from offplan.planner.prices import NO_RULE, Candidates
from offplan.planner.question import Question
from offplan.planner.search import Searcher
from offplan.planner.space import Space
from offplan.routing.profile import RoutingProfile, make_routing
from tests.costs.builders import (
    DENSE,
    MOE,
    NUM_EXPERTS,
    PER_TOKEN,
    make_machine,
    make_model,
    moe_model,
)
from tests.costs.exact import run_request
from tests.planner.cases import UNLIMITED, WORKLOAD, budget_for

MACHINE = make_machine(h2d=1e9, uva=0.9e9)
SLOW = make_machine(h2d=1e8, uva=0.9e8)
"""A link on which the bytes of tiny experts take longer than a layer's kernels."""
MODELS = [moe_model(5), make_model([DENSE, MOE, MOE] * 2)]
ALL = 2**40


def record(model: Model, *, repeat: float, batch: int = 4) -> RoutingProfile:
    """A profile of tokens that choose the experts of the token before with a chance."""
    random = np.random.default_rng(0)
    layers = [layer.index for layer in model.layers if layer.expert_bytes]
    steps = np.empty((200, len(layers), batch, PER_TOKEN), np.int16)
    for layer in range(len(layers)):
        for sequence in range(batch):
            chosen = random.permutation(NUM_EXPERTS)[:PER_TOKEN]
            for number in range(len(steps)):
                if random.random() > repeat:
                    chosen = random.permutation(NUM_EXPERTS)[:PER_TOKEN]
                steps[number, layer, sequence] = chosen
    ref = ModelRef.model_validate(model, from_attributes=True)
    return make_routing(ref, layers, [steps], NUM_EXPERTS)


def ask(
    model: Model,
    share: float | None,
    kept: object = "auto",
    routing: RoutingProfile | None = None,
    workload: Workload = WORKLOAD,
    machine: MachineProfile = MACHINE,
) -> Question:
    budget = UNLIMITED if share is None else budget_for(model, machine, share, workload)
    goal = Goal.model_validate({"cached_experts": kept, "packing": False})
    question = pose(model, machine, workload, budget, goal)
    return question if routing is None else replace(question, held=question.held.route(routing))


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.data(),
    st.sampled_from(range(len(MODELS))),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([1, 4]),
    st.floats(0.1, 1.2),
)
def test_the_search_prices_them_as_the_schedule_does(
    data: st.DataObject,
    number: int,
    prefetch_step: int,
    has_profile: bool,
    batch: int,
    share: float,
) -> None:
    model = MODELS[number]
    routing = record(model, repeat=0.6) if has_profile else None
    work = Workload(batch=batch, prompt_tokens=600, output_tokens=10, context=700)
    searcher = Searcher(Space(ask(model, None, "auto", routing, work)))
    space = searcher.space
    keeping = [number for number, option in enumerate(space.options) if option.keeps]
    first = data.draw(st.sampled_from(keeping))
    partners = np.flatnonzero(searcher.disjoint[first]).tolist()
    second = data.draw(st.sampled_from([NO_RULE, *partners]))
    patterns = list_patterns(len(model.layers))
    of = [data.draw(st.integers(0, len(patterns.group_size) - 1)) for _ in range(2)]
    of[1] = NO_RULE if second == NO_RULE else of[1]
    setting = data.draw(st.integers(0, len(space.settings) - 1))
    numbers = (setting, prefetch_step, first, of[0], second, of[1])
    candidate = Candidates(*(np.array([number]) for number in numbers))
    off_gpu, *_ = searcher.prices.weigh(candidate)
    spare = int(share * max(0, int(off_gpu[0])))
    fits, slots = searcher.prices.fill(candidate, np.array([spare]))
    assume(fits[0])
    assert slots is not None
    experts = slots.experts[0].tolist()
    few = min(each for each in experts if each)
    more = sum(each > few for each in experts)
    rules = [
        space.options[option].rule(
            int(patterns.group_size[at]), int(patterns.num_in_group[at]), few, more
        )
        for option, at in ((first, of[0]), (second, of[1]))
        if option != NO_RULE
    ]
    chosen = space.settings[setting]
    try:
        placement = place(
            space.stage,
            Offload(
                prefetch_step=prefetch_step,
                prefill_chunk=chosen.prefill_chunk,
                embeddings=chosen.embeddings,
                rules=tuple(rules),
            ),
        )
    except PlanError:  # the second rule takes nothing
        assume(False)
    kept = {layer: slots.num_slots for layer, slots in placement.expert_slots.items()}
    assert [kept.get(layer, 0) for layer in range(len(experts))] == experts
    assert placement.expert_slots_bytes <= spare
    request = placement, space.stage, space.machine, chosen.prefill, space.decode
    prompt_ps, step_ps = run_request(*request)
    found = searcher.prices.price(candidate, slots)
    # misses and what a prompt leaves are rounded to picoseconds by themselves, layer by layer
    rounded_ps = 2 * len(experts)
    assert abs(found[0][0] - prompt_ps) <= rounded_ps
    assert abs(found[1][0] - step_ps) <= rounded_ps
    alone = price_request(*request)
    assert (alone.prefill.step_ps, alone.decode.step_ps) == (prompt_ps, step_ps)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("repeat", [None, 0.0, 0.9])
def test_more_memory_is_never_slower_and_none_is_slower_than_without(
    model: Model, repeat: float | None
) -> None:
    routing = None if repeat is None else record(model, repeat=repeat)
    times = []
    for share in np.linspace(0.25, 1.0, 16):
        plain = make_plan(ask(model, share, "off", routing))
        kept = make_plan(ask(model, share, "auto", routing))
        assert kept.best_s <= plain.best_s * (1 + 1e-9)
        assert kept.floor.objective_s <= kept.best_s * (1 + 1e-9)
        times.append(kept.best_s)
    assert times == sorted(times, reverse=True)


def test_reuse_is_what_has_experts_kept() -> None:
    model = moe_model(8)
    routing = record(model, repeat=0.95)
    plain, kept = (
        make_plan(ask(model, 0.5, way, routing, machine=SLOW)).plan for way in ("off", "auto")
    )
    assert any(rule.cached_experts for rule in kept.offload.rules)
    assert kept.prediction.decode.link_bytes < 0.5 * plain.prediction.decode.link_bytes
    assert kept.prediction.gpu_memory.total_bytes <= kept.budget.gpu_memory


def test_a_number_is_kept_as_asked() -> None:
    plan = make_plan(ask(moe_model(5), 0.6, 3)).plan
    assert {rule.cached_experts for rule in plan.offload.rules if rule.cached_experts} == {3}
    taken = [rule for rule in plan.offload.rules if rule.matches("mlp.experts.up_proj.weight")]
    assert all(rule.cached_experts == 3 for rule in taken)


@pytest.mark.parametrize(
    ("model", "goal", "workload", "store", "why"),
    [
        (make_model([DENSE] * 3), "auto", WORKLOAD, "host", "has no routed experts"),
        (moe_model(), 9, WORKLOAD, "host", "a layer of test/model has 8 experts"),
        (moe_model(), "auto", Workload(batch=600), "host", "a batch of 512"),
        (moe_model(), "auto", WORKLOAD, "peer", "the store is peer: take --store host"),
        (replace(moe_model(), dtype="float32"), 3, WORKLOAD, "host", "experts computed in float32"),
        (replace(moe_model(), model_type="gpt_oss"), 3, WORKLOAD, "host", "by transposed values"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    model: Model, goal: object, workload: Workload, store: str, why: str
) -> None:
    asked = Goal.model_validate({"cached_experts": goal})
    machine = make_machine(peer=1e10)
    with pytest.raises(InputError, match=why):
        pose(model, machine, workload, Budget(gpu_memory=ALL), asked, store)  # type: ignore[arg-type]


def test_no_engine_keeps_them() -> None:
    with pytest.raises(ValueError, match="--cached-experts auto with --for vllm: no engine keeps"):
        Goal(cached_experts="auto", engine="vllm")


def test_a_batch_that_was_not_recorded_is_refused() -> None:
    model = moe_model()
    routing, work = record(model, repeat=0.5), Workload(batch=3)
    with pytest.raises(InputError, match="has batches of 1, 2, 4 and none of 3"):
        ask(model, None, "auto", routing, work)


def test_the_frontier_has_them() -> None:
    model = moe_model(8)
    points = find_frontier(ask(model, None, "auto", record(model, repeat=0.9), machine=SLOW))
    assert any(r.cached_experts for point in points for r in point.plan.offload.rules)
