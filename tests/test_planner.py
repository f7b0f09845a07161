"""The planner: exact, within the budget, and honest about what does not fit."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offplan.planner.segments import segment_classes
from offplan.planner.targets import Targets
from pydantic import ValidationError

from offplan.checkpoint.model import Model
from offplan.costs.compute import ModelCompute
from offplan.costs.memory import MARGIN
from offplan.costs.predict import predict
from offplan.errors import InfeasibleError, PlanError
from offplan.machine.profile import LayerTime, MachineProfile, dump_profile, parse_profile
from offplan.placement import group_units
from offplan.plan import Backend, Budget, Offload, Prediction, Rule, Workload, dump_plan
from offplan.planner import make_plan
from offplan.planner.patterns import distinct_patterns, group_patterns
from offplan.planner.space import BACKENDS, PREFETCH_STEPS
from tests.costs.builders import dense_model, make_machine, make_model, moe_model, rule

from tests.costs.builders import DENSE, MOE  # isort: skip

WORKLOAD = Workload(prompt_tokens=600, output_tokens=20, context=700)
UNLIMITED = Budget(gpu_memory=2**40)
MODELS = {"dense": dense_model(4), "moe": moe_model(4)}


def budget_for(
    model: Model, machine: MachineProfile, share: float, workload: Workload = WORKLOAD
) -> Budget:
    """A budget for this share of the layers' weights, beside all that is not weights."""
    smallest = Offload(prefill_chunk=min(512, workload.prompt_tokens))
    terms = predict(model, machine, workload, UNLIMITED, smallest).gpu_memory
    fixed = terms.kv_cache_bytes + terms.activation_bytes + model.outside_bytes
    layers = model.loaded_bytes - model.outside_bytes
    return Budget(gpu_memory=round((fixed + share * layers) / (1 - MARGIN)))


def all_rules(model: Model) -> Iterator[tuple[Rule, ...]]:
    """Every rule of the stated space, without a thought for which could be good."""
    yield ()
    num_layers = len(model.layers)
    for segment_class in segment_classes(model):
        for size in range(1, num_layers + 1):
            for number in range(1, size + 1):
                for prefill, decode in BACKENDS:
                    group = (size, number)
                    segments = segment_class.segments
                    yield (rule(*segments, group=group, prefill=prefill, decode=decode),)
        taken = 0
        for layer in model.layers:
            for unit in filter(segment_class.takes, group_units(layer)):
                taken += unit.nbytes
                yield (
                    Rule(
                        cpu_offload_params=segment_class.segments,
                        max_bytes=taken,
                        prefill=Backend.UVA,
                        decode=Backend.UVA,
                    ),
                )


def price_everything(
    model: Model,
    machine: MachineProfile,
    workload: Workload,
    budget: Budget,
    chunks: tuple[int, ...] = (600, 512),
) -> Iterator[tuple[Offload, Prediction]]:
    """Every plan of at most one rule that fits, priced as a plan is."""
    for rules in all_rules(model):
        uses_ring = any(Backend.PREFETCH in (r.prefill, r.decode) for r in rules)
        for step in PREFETCH_STEPS if uses_ring else (1,):
            for chunk, embeddings in product(chunks, ("device", "host")):
                try:
                    offload = Offload(
                        prefetch_step=step,
                        prefill_chunk=chunk,
                        embeddings=embeddings,
                        store=machine.store,
                        rules=rules,
                    )
                    prediction = predict(model, machine, workload, budget, offload)
                except (PlanError, ValidationError):
                    continue
                if prediction.gpu_memory.total_bytes <= budget.gpu_memory:
                    yield offload, prediction


@pytest.mark.parametrize(
    ("name", "share", "h2d"),
    [("dense", 0.3, 1e9), ("dense", 0.7, 50e9), ("moe", 0.5, 20e9)],
)
def test_search_equals_brute_force(name: str, share: float, h2d: float) -> None:
    model, machine = MODELS[name], make_machine(h2d=h2d, uva=0.8 * h2d)
    budget = budget_for(model, machine, share)
    result = make_plan(model, machine, WORKLOAD, budget)
    everything = price_everything(model, machine, WORKLOAD, budget)
    expected = min(prediction.objective_s for _, prediction in everything)
    best_single = result.plan.prediction.objective_s * result.second_rule_gain
    assert best_single == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("name", "share"), [("dense", 0.3), ("moe", 0.5)])
def test_nothing_on_a_second_gpu_is_read_in_place(name: str, share: float) -> None:
    """Were it allowed, it would be best: its rate is twice that of copies."""
    model, machine = MODELS[name], make_machine(h2d=5e9, uva=40e9, peer=20e9)
    budget = budget_for(model, machine, share)
    assert Backend.UVA in {rule.decode for rule in plan_rules(model, machine, budget)}
    peer = machine.with_peer_store()
    result = make_plan(model, peer, WORKLOAD, budget)
    plan = result.plan
    assert {(rule.prefill, rule.decode) for rule in plan.offload.rules} == {
        (Backend.PREFETCH, Backend.PREFETCH)
    }
    assert (plan.offload.store, plan.machine.h2d, plan.machine.link) == ("peer", 20e9, "peer GPU")
    everything = price_everything(model, peer, WORKLOAD, budget)
    expected = min(prediction.objective_s for _, prediction in everything)
    best_single = plan.prediction.objective_s * result.second_rule_gain
    assert best_single == pytest.approx(expected, rel=1e-12)


def plan_rules(model: Model, machine: MachineProfile, budget: Budget) -> tuple[Rule, ...]:
    return make_plan(model, machine, WORKLOAD, budget).plan.offload.rules


def test_the_second_gpu_limits_the_store() -> None:
    model, machine = MODELS["dense"], make_machine(peer=20e9, host_memory=1).with_peer_store()
    budget = budget_for(model, machine, 0.3)
    assert make_plan(model, machine, WORKLOAD, budget).plan.budget.host_memory == 2**40
    with pytest.raises(InfeasibleError, match="no plan fits 1 B of peer memory"):
        make_plan(model, machine, WORKLOAD, budget.model_copy(update={"host_memory": 1}))


def test_an_embedding_on_the_host_takes_none_of_a_second_gpu() -> None:
    model, machine = MODELS["dense"], make_machine(peer=20e9).with_peer_store()
    assert model.input_embedding is not None
    missing = model.input_embedding.nbytes // 2
    budget = Budget(gpu_memory=budget_for(model, machine, 1.0).gpu_memory - missing, host_memory=0)
    plan = make_plan(model, machine, WORKLOAD, budget).plan
    assert (plan.offload.rules, plan.offload.embeddings) == ((), "host")
    assert plan.prediction.host_memory_bytes == model.input_embedding.nbytes
    assert plan.prediction.peer_memory_bytes == 0


models = st.sampled_from(
    [dense_model(6), moe_model(6), make_model([MOE] * 3), make_model([DENSE, MOE] * 3)]
)
shares = st.floats(0.05, 1.1)
rates = st.sampled_from([0.5e9, 5e9, 50e9])
workloads = st.builds(
    Workload,
    batch=st.sampled_from([1, 3, 40]),
    prompt_tokens=st.sampled_from([1, 100, 600, 2500]),
    output_tokens=st.sampled_from([1, 50]),
    context=st.just(2600),
)


@settings(deadline=None, max_examples=40)
@given(models, shares, rates, workloads)
def test_plans_keep_the_budget_and_stay_above_the_floor(
    model: Model, share: float, h2d: float, workload: Workload
) -> None:
    machine = make_machine(h2d=h2d)
    budget = budget_for(model, machine, share, workload)
    try:
        result = make_plan(model, machine, workload, budget)
    except InfeasibleError:
        return
    prediction = result.plan.prediction
    assert prediction.gpu_memory.total_bytes <= budget.gpu_memory
    assert result.gap >= 1 - 1e-9
    assert prediction.decode.step_s >= result.floor.decode_s * (1 - 1e-9)
    assert prediction.prefill.step_s >= result.floor.prefill_s * (1 - 1e-9)
    for phase in (prediction.prefill, prediction.decode):
        assert phase.step_s >= phase.bound_s >= phase.compute_s


@settings(deadline=None, max_examples=12)
@given(models, shares, st.floats(0, 0.5), rates, workloads, st.sampled_from([None, 0.8, 1.0]))
def test_more_memory_a_faster_link_or_gpu_is_never_slower(
    model: Model, share: float, more: float, h2d: float, workload: Workload, strict: float | None
) -> None:
    machine = make_machine(h2d=h2d, uva=h2d)
    less, targets = budget_for(model, machine, share, workload), Targets()
    try:
        before = make_plan(model, machine, workload, less).plan.prediction.objective_s
        if strict is not None:
            step_s = make_plan(model, machine, workload, less).plan.prediction.decode.step_s
            targets = Targets(max_tpot_s=strict * step_s)
            kept = make_plan(model, machine, workload, less, targets).plan
            before = kept.prediction.objective_s
    except InfeasibleError:
        return
    roomier = budget_for(model, machine, share + more, workload)
    faster = make_machine(h2d=1.3 * h2d, uva=1.2 * h2d)
    for result in (
        make_plan(model, machine, workload, roomier, targets),
        make_plan(model, faster, workload, less, targets),
        make_plan(model, make_machine(h2d=h2d, uva=h2d, gpu=1.5), workload, less, targets),
    ):
        assert result.plan.prediction.objective_s <= before * (1 + 1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_what_fits_is_not_offloaded(name: str) -> None:
    result = make_plan(MODELS[name], make_machine(), WORKLOAD, UNLIMITED)
    assert result.plan.offload.rules == ()
    assert result.plan.prediction.decode.link_bytes == 0
    assert result.gap == pytest.approx(1)
    assert "everything fits" in result.reasons[0]


def test_one_byte_too_few_offloads_something() -> None:
    model, machine = MODELS["dense"], make_machine()
    chunked = Workload(prompt_tokens=512, output_tokens=20, context=700)
    budget = budget_for(model, machine, 1.0, chunked)
    assert make_plan(model, machine, chunked, budget).plan.offload.rules == ()
    tight = Budget(gpu_memory=budget.gpu_memory - 200)
    assert make_plan(model, machine, chunked, tight).plan.prediction.host_memory_bytes > 0


@pytest.mark.parametrize("name", MODELS)
def test_shortfall_is_exactly_what_is_missing(name: str) -> None:
    model, machine = MODELS[name], make_machine()
    tight = Budget(gpu_memory=200_000)
    with pytest.raises(InfeasibleError, match="no plan fits") as error:
        make_plan(model, machine, WORKLOAD, tight)
    assert error.value.shortfall_bytes is not None
    enough = tight.gpu_memory + error.value.shortfall_bytes
    make_plan(model, machine, WORKLOAD, Budget(gpu_memory=enough + 2))
    with pytest.raises(InfeasibleError):
        make_plan(model, machine, WORKLOAD, Budget(gpu_memory=enough - 10))


def test_host_memory_is_kept() -> None:
    model, machine = MODELS["dense"], make_machine()
    budget = budget_for(model, machine, 0.5)
    needed = make_plan(model, machine, WORKLOAD, budget).plan.prediction.host_memory_bytes
    limited = Budget(gpu_memory=budget.gpu_memory, host_memory=needed // 3)
    with pytest.raises(InfeasibleError, match="host memory") as error:
        make_plan(model, machine, WORKLOAD, limited)
    assert error.value.shortfall_bytes is not None
    assert 0 < error.value.shortfall_bytes < needed
    roomy = Budget(
        gpu_memory=budget.gpu_memory, host_memory=needed // 3 + error.value.shortfall_bytes
    )
    plan = make_plan(model, machine, WORKLOAD, roomy).plan
    assert roomy.host_memory is not None
    assert plan.prediction.host_memory_bytes <= roomy.host_memory


def test_an_embedding_on_the_host_spares_a_rule() -> None:
    """What is missing is less than the embedding: reading its rows beats moving any layer."""
    model, machine = MODELS["dense"], make_machine()
    assert model.input_embedding is not None
    chunked = Workload(prompt_tokens=512, output_tokens=20, context=700)
    budget = budget_for(model, machine, 1.0, chunked)
    tight = Budget(gpu_memory=budget.gpu_memory - model.input_embedding.nbytes // 2)
    result = make_plan(model, machine, chunked, tight)
    plan, row = result.plan, model.input_embedding.nbytes // model.input_embedding.shape[0]
    assert (plan.offload.rules, plan.offload.embeddings) == ((), "host")
    assert plan.prediction.decode.link_bytes == row
    assert plan.prediction.prefill.link_bytes == 512 * row
    assert plan.prediction.host_memory_bytes == model.input_embedding.nbytes
    assert any("input embedding" in reason for reason in result.reasons)


def test_a_tied_embedding_stays_on_the_gpu() -> None:
    model = MODELS["dense"]
    tied = replace(model, outside=model.outside[1:])
    assert tied.input_embedding is None
    plan = make_plan(tied, make_machine(), WORKLOAD, budget_for(tied, make_machine(), 0.5)).plan
    assert plan.offload.embeddings == "device"


def test_machine_limits_the_budget() -> None:
    model = MODELS["dense"]
    limit = budget_for(model, make_machine(), 0.5).gpu_memory
    machine = make_machine(gpu_memory=limit, host_memory=10**9)
    plan = make_plan(model, machine, WORKLOAD, UNLIMITED).plan
    assert plan.budget == Budget(gpu_memory=limit, host_memory=10**9)
    assert plan.prediction.gpu_memory.total_bytes <= limit


def test_same_input_gives_the_same_bytes() -> None:
    plans = {
        dump_plan(make_plan(moe_model(5), make_machine(), WORKLOAD, budget).plan)
        for budget in [budget_for(moe_model(5), make_machine(), 0.5)] * 3
    }
    assert len(plans) == 1


@settings(deadline=None, max_examples=10)
@given(models, shares, rates, workloads)
def test_a_saved_profile_gives_the_same_plan(
    model: Model, share: float, h2d: float, workload: Workload
) -> None:
    times = [
        LayerTime(
            layer=key, phase="decode", batch=1, tokens=1, context=2600, seconds=h2d / 1e15 / 3
        )
        for key in ModelCompute(model, make_machine()).works
    ]
    machine = make_machine(h2d=h2d / 3, uva=h2d / 7, layer_times=times)
    budget = budget_for(model, machine, share, workload)
    read = parse_profile(dump_profile(machine), "saved")
    assert read.fingerprint == machine.fingerprint
    try:
        plan = make_plan(model, machine, workload, budget).plan
    except InfeasibleError:
        return
    assert dump_plan(make_plan(model, read, workload, budget).plan) == dump_plan(plan)
    memory = plan.prediction.gpu_memory.model_dump()
    assert memory.pop("total_bytes") == sum(memory.values())


def test_plan_names_model_and_machine() -> None:
    machine = make_machine()
    plan = make_plan(MODELS["moe"], machine, WORKLOAD, UNLIMITED).plan
    assert plan.machine.fingerprint == machine.fingerprint
    assert plan.model.source == "test/model"
    assert plan.workload == WORKLOAD


def test_classes_have_the_shortest_names() -> None:
    dense = {segment_class.segments for segment_class in segment_classes(dense_model(2))}
    assert dense >= {
        (),
        ("mlp",),
        ("self_attn",),
        ("k_proj", "q_proj", "v_proj"),
        ("o_proj",),
        ("gate_proj", "up_proj"),
        ("down_proj",),
        ("mlp", "self_attn"),
    }
    moe = {segment_class.segments for segment_class in segment_classes(moe_model(3))}
    assert moe >= {(), ("experts",), ("experts.down_proj",), ("shared_experts",), ("mlp",)}
    # one of gate and up of the routed experts cannot be chosen alone
    assert not [segments for segments in moe if segments == ("experts.up_proj",)]


def test_patterns_are_all_and_distinct() -> None:
    patterns = group_patterns(5)
    assert len(patterns) == 15
    for pattern in patterns:
        chosen = rule(group=(pattern.group_size, pattern.num_in_group))
        bits = sum(1 << layer for layer in range(5) if chosen.selects_layer(layer))
        assert pattern.layers == bits
    distinct = distinct_patterns(patterns, 0b11010)
    assert len({pattern.layers for pattern in distinct}) == len(distinct)
    assert all(pattern.layers & ~0b11010 == 0 for pattern in distinct)
