"""Experts that rules keep one by one: priced as schedules have it, and chosen where they pay."""

import json
import math
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from offplan.capabilities.cached_experts import LATER_PARTS, ExpertSlots, MissRates
from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.costs.cached_experts import DIVIDING_S, LATER_SHARE
from offplan.costs.compute import ModelCompute
from offplan.costs.pass_times import pass_times
from offplan.costs.predict import derive_prediction, price_request, price_stage
from offplan.costs.work import decode_shape
from offplan.errors import InputError, PlanError
from offplan.held.held import hold
from offplan.library.asking import ask as plan_ask
from offplan.library.asking import pose
from offplan.library.machines import load_machine
from offplan.machine.profile import MachineProfile
from offplan.placement import place
from offplan.plan import Backend, Budget, Goal, ModelRef, Offload, Rule, Workload
from offplan.planner.candidates import NO_RULE, Candidates
from offplan.planner.classes import list_patterns
from offplan.planner.frontier import find_frontier
from offplan.planner.make import make_plan
from offplan.planner.neighbours import find_neighbours
from offplan.planner.question import Question
from offplan.planner.search import Searcher
from offplan.planner.space import Space
from offplan.routed_experts import count_inner
from offplan.routing.profile import RoutingProfile, make_routing
from tests.cli import ROOT
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
from tests.planner.cases import UNLIMITED, WORKLOAD, budget_for, with_cores
from tests.tiers import each_value_once

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
    *,
    cores: bool = False,
) -> Question:
    budget = UNLIMITED if share is None else budget_for(model, machine, share, workload)
    said = {"cached_experts": kept, "packing": False, "host_cores": cores}
    goal = Goal.model_validate(said)
    question = pose(model, machine, workload, budget, goal)
    return replace(question, stages=(replace(question.stage, routing=routing),))


@cache
def make_searcher(number: int, has_profile: bool, batch: int, cores: bool) -> Searcher:
    """Make it once for all examples alike, most of whose time it would take."""
    model = MODELS[number]
    routing = record(model, repeat=0.6) if has_profile else None
    work = Workload(batch=batch, prompt_tokens=600, output_tokens=10, context=700)
    machine = with_cores(MACHINE, cores=2e9, cores_round_trip=1e-6) if cores else MACHINE
    return Searcher(Space(ask(model, None, "auto", routing, work, machine, cores=cores)))


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.data(),
    st.sampled_from(range(len(MODELS))),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([1, 4]),
    st.floats(0.1, 1.2),
    st.booleans(),
)
def test_the_search_prices_them_as_the_schedule_does(
    data: st.DataObject,
    number: int,
    prefetch_step: int,
    has_profile: bool,
    batch: int,
    share: float,
    cores: bool,
) -> None:
    searcher = make_searcher(number, has_profile, batch, cores)
    model, space = MODELS[number], searcher.space
    keeping = [
        number
        for number, option in enumerate(searcher.prices.options)
        if option.has_curve and option.decode.is_by_cores == cores
    ]
    first = data.draw(st.sampled_from(keeping))
    partners = np.flatnonzero(searcher.disjoint[first]).tolist()
    second = data.draw(st.sampled_from([NO_RULE, *partners]))
    patterns = list_patterns(len(model.layers))
    of = [data.draw(st.integers(0, len(patterns.group_size) - 1)) for _ in range(2)]
    of[1] = NO_RULE if second == NO_RULE else of[1]
    setting = data.draw(st.integers(0, len(space.settings) - 1))
    taken = (setting, prefetch_step, first, of[0], second, of[1])
    candidate = Candidates(*(np.array([number]) for number in taken))
    numbers = searcher.prices.number_all(candidate)
    off_gpu, *_ = searcher.prices.weigh(numbers, candidate.prefetch_step)
    spare = int(share * max(0, int(off_gpu[0])))
    fits, own = searcher.prices.spend(candidate, np.array([spare]))
    assume(fits[0])
    assert own is not None
    experts = own.cache_sizes[0].tolist()
    few = min(each for each in experts if each)
    more = sum(each > few for each in experts)
    rules = [
        searcher.prices.options[option].rule(
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
    kept = {layer: slots.num_slots for layer, slots in placement.caches_of(ExpertSlots).items()}
    assert [kept.get(layer, 0) for layer in range(len(experts))] == experts
    assert sum(placement.cached_bytes.values()) <= spare
    request = placement, space.stage, space.machine, chosen.prefill, space.decode
    prompt_ps, step_ps = run_request(*request)
    found = searcher.prices.price(numbers, candidate.setting, candidate.prefetch_step, own)
    # misses and what a prompt leaves are rounded to picoseconds by themselves, layer by layer
    rounded_ps = 2 * len(experts)
    assert abs(found[0][0] - prompt_ps) <= rounded_ps
    assert abs(found[1][0] - step_ps) <= rounded_ps
    alone = price_request(*request)
    assert (alone.prefill.step_ps, alone.decode.step_ps) == (prompt_ps, step_ps)


@pytest.mark.parametrize(("model", "repeat"), each_value_once(product(MODELS, (None, 0.0, 0.9))))
@pytest.mark.slow
def test_more_memory_is_never_slower_and_none_is_slower_than_without(
    model: Model, repeat: float | None
) -> None:
    routing = None if repeat is None else record(model, repeat=repeat)
    times = []
    for share in np.linspace(0.25, 1.0, 8):
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


@pytest.mark.slow
def test_the_cores_and_the_link_divide_what_is_missed() -> None:
    model, machine = moe_model(8), with_cores(SLOW, cores=1e8, cores_round_trip=1e-6)
    # steps that miss one expert alone have nothing to divide
    work = WORKLOAD.model_copy(update={"batch": 4})
    results = {
        (way, cores): make_plan(ask(model, 0.5, way, None, work, machine=machine, cores=cores))
        for way in ("off", "auto")
        for cores in (False, True)
    }
    rules = [rule for result in results.values() for rule in result.plan.offload.rules]
    assert not any(rule.later_experts for rule in rules)  # no profile says that it pays
    divided = results.pop(("auto", True))
    # a layer waits half as long where the cores are as fast as the link; a prompt does not
    assert divided.best_s < 0.85 * min(each.best_s for each in results.values())
    assert divided.floor.objective_s <= divided.best_s * (1 + 1e-9)


@pytest.mark.slow
def test_the_link_brings_for_later_what_it_is_idle_for() -> None:
    """By a plan's own step, which what it brings delays."""
    model, machine = moe_model(8), with_cores(SLOW, cores=1e8, cores_round_trip=1e-6)
    question = ask(model, 0.5, routing=record(model, repeat=0.6), machine=machine, cores=True)
    plan = make_plan(question).plan
    (rule,) = (rule for rule in plan.offload.rules if rule.divides_missed)
    placement, _, _, times = price_stage(question.stage, machine, question.workload, plan.offload)
    slots = placement.caches_of(ExpertSlots).values()
    assert {each.later for each in slots} == {round(LATER_PARTS * (rule.later_experts or 0))}
    idle_s = (float(times.decode.step_ps) - times.decode.awaited_ps) / 1e12
    quota_s = (rule.later_experts or 0) * sum(each.expert_bytes for each in slots) / 1e8
    assert 0.8 * LATER_SHARE * idle_s - 1e-9 <= quota_s <= LATER_SHARE * idle_s
    brought = times.decode.times.later_bytes
    assert 0 < brought / 1e8 <= LATER_SHARE * idle_s + 1e-9
    read = times.decode.copied_bytes + times.decode.times.uva_bytes
    assert plan.prediction.decode.link_bytes == read + brought
    terms = {each.path: each for each in derive_prediction(question.stages, machine, plan)}
    named = [each.name for each in terms["decode.link_bytes"].inputs]
    assert "brought for later" in named


@pytest.mark.slow
def test_copies_for_later_that_pay_little_are_left_out() -> None:
    """Tokens that choose a tenth of their experts again would wait longer for the copies."""
    model, machine = moe_model(8), with_cores(SLOW, cores=1e8, cores_round_trip=1e-6)
    question = ask(model, 0.5, routing=record(model, repeat=0.1), machine=machine, cores=True)
    plan = make_plan(question).plan
    (number,) = (n for n, rule in enumerate(plan.offload.rules) if rule.divides_missed)
    rules = list(plan.offload.rules)
    assert rules[number].later_experts is None
    rules[number] = rules[number].model_copy(update={"later_experts": 0.5})
    brings = question.predict(plan.offload.model_copy(update={"rules": tuple(rules)}))
    assert brings.decode.step_s >= plan.prediction.decode.step_s


@pytest.mark.slow
def test_what_is_used_again_is_brought_for_later() -> None:
    model, machine = moe_model(8), with_cores(SLOW, cores=1e8, cores_round_trip=1e-6)
    question = ask(model, 0.5, routing=record(model, repeat=0.6), machine=machine, cores=True)
    plan = make_plan(question).plan
    (none,) = (
        each
        for each in find_neighbours(question, plan)
        if each.change.endswith("without later_experts")
    )
    assert none.prediction.objective_s > 1.1 * plan.prediction.objective_s


@pytest.mark.slow
def test_a_real_model_is_divided_by_default() -> None:
    """gpt-oss misses few experts a layer, which whole ones divide unevenly."""
    model = open_model(str(ROOT / "benchmarks" / "models" / "gpt-oss-120b" / "config.json"))
    machine = load_machine("rtx4090-pcie4,ram=96GiB")
    question = plan_ask(model, machine, Workload())
    assert question.goal.host_cores
    plan = make_plan(question).plan
    (rule,) = (rule for rule in plan.offload.rules if rule.divides_missed)
    assert rule.later_experts is None
    assert plan.prediction.gpu_memory.total_bytes <= plan.budget.gpu_memory
    slots = place(question.stage, plan.offload).caches_of(ExpertSlots).values()
    assert all(each.inner == 2880 and each.splits for each in slots)
    alone = make_plan(plan_ask(model, machine, Workload(), host_cores=False)).plan
    assert plan.prediction.decode.step_s < 0.5 * alone.prediction.decode.step_s


@pytest.mark.slow
def test_experts_whose_rows_are_inputs_are_not_the_cores(tmp_path: Path) -> None:
    """gpt-oss in bfloat16, whose matrices are stored as [experts, in, out]."""
    config = ROOT / "benchmarks" / "models" / "gpt-oss-20b" / "config.json"
    said = json.loads(config.read_text("utf-8"))
    del said["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(said), "utf-8")
    model, machine = open_model(str(tmp_path / "config.json")), load_machine("rtx4090-pcie4")
    plan = make_plan(plan_ask(model, machine, Workload(), host_cores=True)).plan
    experts = [rule for rule in plan.offload.rules if rule.matches("mlp.experts.down_proj")]
    assert experts
    assert not any(rule.decode.is_by_cores for rule in experts)
    stage = hold(model)
    assert count_inner(stage, [unit for unit in stage.units[0] if unit.is_expert]) == 2880


@pytest.mark.parametrize("shared_behind", [False, True])
def test_a_step_waits_for_the_longest_of_three(shared_behind: bool) -> None:
    """Candidate and shared experts are one of them, where the block multiplies these last."""
    machine = with_cores(SLOW, cores=1e8, cores_round_trip=1e-5, hbm=1e9)
    model = make_model([MOE])
    if shared_behind:
        model = replace(model, model_type="deepseek_v2")
    question = ask(model, 0.5, machine=machine)
    stage, batch = question.stage, question.workload.batch
    shared_s = sum(p.nbytes for p in stage.layers[0].parameters if "shared" in p.name) / 1e9
    assert shared_s
    waiting = {}
    for cores in (None, 2e7, 5e7, 1e8, 1e9):
        decode = Backend.UVA if cores is None else Backend.HOST
        rate = cores or 1e8
        machine = with_cores(SLOW, cores=rate, cores_round_trip=1e-5, hbm=1e9)
        rule = Rule.model_validate(
            {
                "cpu_offload_params": ["experts"],
                "group_size": 1,
                "num_in_group": 1,
                "prefill": "uva",
                "decode": decode,
                "cached_experts": NUM_EXPERTS // 2,
            }
        )
        placement = place(stage, Offload(prefill_chunk=600, rules=(rule,)))
        step = ModelCompute(stage, machine).price(decode_shape(question.workload))
        times = pass_times(placement, stage, machine, step)
        expert_bytes = placement.caches_of(ExpertSlots)[0].expert_bytes
        found_s = PER_TOKEN * batch * expert_bytes / 2 / 1e9 + shared_behind * shared_s
        found_s = min(found_s, step.layer_ps[0] / 1e12)
        waits = {"link": 0.0, "cores": 0.0, "longest": 0.0}
        for missed in range(PER_TOKEN * batch + 1):  # half of the choices, by uniform routing
            likely = math.comb(PER_TOKEN * batch, missed) / 2 ** (PER_TOKEN * batch)
            rates = MissRates(1e-5, expert_bytes / rate, expert_bytes / 0.9e8)
            ways = range(missed + 1 if cores else 1)
            by_cores = min(ways, key=lambda number: rates.seconds(missed, number))
            link_s = (missed - by_cores) * expert_bytes / 0.9e8
            cores_s = by_cores * expert_bytes / rate + 1e-5 if by_cores else 0
            longest_s = max(found_s, link_s, cores_s)
            for name, each in (("link", link_s), ("cores", by_cores), ("longest", longest_s)):
                waits[name] += likely * each
        waited_s = (times.uva_ps[0] + times.busy_ps[0] - times.keeping_ps[0]) / 1e12
        expected_s = step.layer_ps[0] / 1e12 + waits["link"]
        if cores:
            expected_s += waits["longest"] - found_s - waits["link"] + DIVIDING_S
        assert waited_s == pytest.approx(expected_s, rel=1e-6)
        assert times.cores_bytes == pytest.approx(waits["cores"] * expert_bytes, abs=1)
        assert times.uva_bytes == pytest.approx(waits["link"] * 0.9e8, abs=1)
        waiting[cores] = waited_s
    assert waiting[1e9] < waiting[1e8] < waiting[5e7] < waiting[None]


@pytest.mark.parametrize(
    ("cores", "machine", "gib"),
    each_value_once(
        (cores, *case)
        for case in (
            *(("rtx4090-pcie4", 4), ("rtx4090-pcie4", 12)),
            *(("h200-pcie5", 6), ("h200-pcie5", 26)),
        )
        for cores in (False, True)
    ),
)
@pytest.mark.slow
def test_no_plan_of_a_real_model_is_slower_for_it(machine: str, gib: int, cores: bool) -> None:
    """By uniform routing, the least that kept experts promise."""
    model = open_model(str(ROOT / "tests/models/deepseek-v2-lite/config.json"))
    profile = load_machine(machine)
    plain, kept = (
        make_plan(
            plan_ask(model, profile, gpu_memory=gib * 2**30, cached_experts=way, host_cores=cores)
        )
        for way in ("off", "auto")
    )
    assert kept.best_s <= plain.best_s
    assert kept.plan.prediction.objective_s <= 1.01 * plain.plan.prediction.objective_s


def test_a_number_is_kept_as_asked() -> None:
    plan = make_plan(ask(moe_model(5), 0.6, 3)).plan
    assert {rule.cached_experts for rule in plan.offload.rules if rule.cached_experts} == {3}
    taken = [rule for rule in plan.offload.rules if rule.matches("mlp.experts.up_proj.weight")]
    assert all(rule.cached_experts == 3 for rule in taken)


def turned_model() -> Model:
    model = moe_model()
    return replace(model, config={**model.config, "model_type": "gpt_oss"})


@pytest.mark.parametrize(
    ("model", "goal", "workload", "store", "why"),
    [
        (make_model([DENSE] * 3), "auto", WORKLOAD, "host", "has no routed experts"),
        (moe_model(), 9, WORKLOAD, "host", "a layer of test/model has 8 experts"),
        (moe_model(), "auto", Workload(batch=600), "host", "a batch of 512"),
        (moe_model(), "auto", WORKLOAD, "peer", "the store is peer: take `store=host`"),
        (replace(moe_model(), dtype="float32"), 3, WORKLOAD, "host", "experts computed in float32"),
        (turned_model(), 3, WORKLOAD, "host", "by transposed values"),
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
    with pytest.raises(ValueError, match="`cached_experts=auto` with `engine=vllm`: no"):
        Goal(cached_experts="auto", engine="vllm")


def test_a_batch_that_was_not_recorded_is_refused() -> None:
    model = moe_model()
    routing, work = record(model, repeat=0.5), Workload(batch=3)
    with pytest.raises(InputError, match="has batches of 1, 2, 4 and none of 3"):
        ask(model, None, "auto", routing, work)


@pytest.mark.slow
def test_a_plan_that_keeps_a_target_is_found(tmp_path: Path) -> None:
    """The first rule leaves memory free, but is no plan alone: nothing streams through its ring."""
    stored = ROOT / "benchmarks" / "models" / "qwen3-30b-a3b-fp8" / "config.json"
    config = json.loads(stored.read_text("utf-8"))
    config.pop("quantization_config")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "dtype": "bfloat16"}), "utf-8")
    machine = load_machine("rtx3080ti-pcie4")
    memory = round(0.652 * machine.profile.gpu_memory.value)
    work = Workload(prompt_tokens=8192, output_tokens=16, context=8208)
    asked: dict[str, Any] = {"gpu_memory": memory, "cached_experts": 16, "max_tpot_s": 0.1587}
    plan = make_plan(plan_ask(open_model(str(path)), machine, work, **asked)).plan
    assert plan.prediction.decode.step_s <= 0.1587


@pytest.mark.slow
def test_the_frontier_has_them() -> None:
    model = moe_model(8)
    points = find_frontier(ask(model, None, "auto", record(model, repeat=0.9), machine=SLOW))
    assert any(r.cached_experts for point in points for r in point.plan.offload.rules)
