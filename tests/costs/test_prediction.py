"""Prediction layers take the memory and the time that hand-made sums have, and only if asked."""

from dataclasses import replace
from fractions import Fraction

import pytest
from pydantic import ValidationError

from offplan.capabilities.drafts import MOST_DRAFTED, Draft, list_draft_refusals
from offplan.capabilities.way import OWN
from offplan.checkpoint.prediction import PredictionLayers, find_prediction_layers
from offplan.costs.activations import PREDICTION_COPIES, phase_bytes, scratch_bytes
from offplan.costs.compute import ModelCompute, outside_time
from offplan.costs.drafts import GRAPH_BYTES
from offplan.costs.kernels import LAUNCH_S, LAUNCH_SLOWDOWN, MATMUL_EFFICIENCY
from offplan.costs.predict import RequestTimes, derive_prediction, price_drafts, price_stage
from offplan.costs.prediction import DRAFT_OPERATORS, JOINING_KERNELS, add_drafting
from offplan.costs.timeline import to_ps
from offplan.costs.work import PassShape, decode_shape, prefill_shapes
from offplan.drafts.acceptance import AcceptanceProfile
from offplan.errors import InfeasibleError, InputError, PlanError
from offplan.held.held import hold, hold_prediction
from offplan.library.asking import pose
from offplan.library.held_memory import count_held
from offplan.machine.profile import LAUNCHES
from offplan.plan import Budget, Goal, ModelRef, Offload, Workload, dump_plan, parse_plan
from offplan.planner.make import make_plan
from offplan.planner.neighbours import find_neighbours
from offplan.records import load_yaml
from offplan.upkeep.figures import list_contradictions
from tests.costs.builders import (
    DENSE,
    HIDDEN,
    NUM_EXPERTS,
    PER_TOKEN,
    dense_model,
    make_machine,
    predicting_model,
    rule,
)
from tests.held import predict
from tests.planner.cases import UNLIMITED

WORKLOAD = Workload(prompt_tokens=100, output_tokens=101, context=256)
MACHINE = make_machine()
MODEL = predicting_model()
KINDS = [Draft(kind="ngram", tokens=7), *(Draft(kind="mtp", tokens=n) for n in (1, 2, 3))]


def decide(draft: Draft | None, *rules: object) -> Offload:
    return Offload.model_validate({"prefill_chunk": 64, "rules": rules, "draft": draft})


def layers() -> PredictionLayers:
    found = find_prediction_layers(MODEL)
    assert isinstance(found, PredictionLayers)
    return found


def test_memory_has_the_layer_its_cache_and_its_passes() -> None:
    asked = MODEL, MACHINE, WORKLOAD, UNLIMITED
    plain = predict(*asked, decide(None)).gpu_memory
    draft = Draft(kind="mtp", tokens=2)
    taken, of_text = (
        predict(*asked, decide(each)).gpu_memory for each in (draft, Draft(kind="ngram", tokens=3))
    )
    assert taken.resident_bytes - plain.resident_bytes == layers().loaded_bytes
    of_token = layers().block.kv_cache.bytes_per_token
    assert taken.kv_cache_bytes - of_text.kv_cache_bytes == WORKLOAD.context * of_token
    own = hold_prediction(hold(MODEL), draft)
    assert own is not None
    prompt, step = phase_bytes(own, WORKLOAD, 64, Draft(kind="mtp", tokens=MOST_DRAFTED))
    more = step + scratch_bytes(own, 64) + 4 * GRAPH_BYTES
    larger = max(*phase_bytes(hold(MODEL), WORKLOAD, 64, draft))
    reading = prompt + PREDICTION_COPIES * 64 * HIDDEN * 2
    assert reading > prompt
    more += max(larger, reading) - larger
    assert taken.activation_bytes - of_text.activation_bytes == more


def test_without_such_drafts_nothing_changes() -> None:
    named = [each for each in MODEL.outside if each.name not in MODEL.not_loaded]
    without = replace(MODEL, outside=tuple(named), not_loaded=frozenset())
    for draft in (None, KINDS[0]):
        asked = MACHINE, WORKLOAD, UNLIMITED, decide(draft, rule())
        assert predict(MODEL, *asked) == predict(without, *asked)


def use_s(shape: PassShape) -> float:
    """Return the seconds of a use of the layer: its block, and the projection by hand."""
    block = ModelCompute(hold(layers().model), MACHINE).price(shape).layer_ps[0]
    rows, weights = shape.num_tokens, 2 * HIDDEN * HIDDEN
    reading = 2 * (weights + 3 * rows * HIDDEN) / MACHINE.hbm.value
    multiplying = 2 * weights * rows / (MACHINE.matmul.value * MATMUL_EFFICIENCY)
    joining = JOINING_KERNELS * LAUNCH_SLOWDOWN * MACHINE.layer_overhead.value / LAUNCHES
    return block / to_ps(1.0) + max(reading, multiplying) + joining


@pytest.mark.parametrize("draft", KINDS[1:])
def test_each_draft_is_a_use_of_the_layer(draft: Draft) -> None:
    stage, compute = hold(MODEL), ModelCompute(hold(MODEL), MACHINE)
    one = decode_shape(WORKLOAD)
    choosing = outside_time(MACHINE, stage, one).seconds + DRAFT_OPERATORS * LAUNCH_S
    for tokens in (2, 4):
        shape = decode_shape(WORKLOAD, tokens)
        plain = compute.price(shape)
        drafted = add_drafting(stage, MACHINE, plain, draft)
        number = min(draft.tokens, tokens - 1)
        chained = (number - 1) * use_s(replace(shape, tokens=1))
        expected = to_ps(use_s(shape) + chained + number * choosing)
        assert drafted.drafting_ps == pytest.approx(expected, rel=1e-3)
        assert drafted.resident_ps == plain.resident_ps + drafted.drafting_ps
        assert not drafted.measured


def test_a_step_without_drafts_waits_for_others_to_be_read_with() -> None:
    stage, shape = hold(MODEL), decode_shape(WORKLOAD)
    priced = add_drafting(stage, MACHINE, ModelCompute(stage, MACHINE).price(shape), KINDS[1])
    assert priced.drafting_ps == pytest.approx(to_ps(use_s(replace(shape, tokens=8)) / 8), abs=1)


def test_a_prompt_is_read_chunk_by_chunk() -> None:
    stage, shapes = hold(MODEL), prefill_shapes(WORKLOAD, 64)
    assert len(shapes) == 2
    prompt = ModelCompute(stage, MACHINE).price(*shapes)
    read = add_drafting(stage, MACHINE, prompt, KINDS[1])
    assert read.drafting_ps == pytest.approx(to_ps(sum(map(use_s, shapes))), abs=2)


ON_HOST = Draft(kind="mtp", tokens=2, experts="host")


def test_experts_on_the_host_leave_the_device_for_its_memory() -> None:
    asked = MODEL, MACHINE, WORKLOAD, UNLIMITED
    device, host = (
        predict(*asked, decide(each, rule("down_proj")))
        for each in (Draft(kind="mtp", tokens=2), ON_HOST)
    )
    experts_bytes = layers().block.expert_bytes
    assert 0 < experts_bytes < layers().loaded_bytes
    assert device.gpu_memory.resident_bytes - host.gpu_memory.resident_bytes == experts_bytes
    assert host.host_memory_bytes - device.host_memory_bytes == experts_bytes
    for term in ("ring_bytes", "kv_cache_bytes", "activation_bytes", "overhead_bytes"):
        assert getattr(device.gpu_memory, term) == getattr(host.gpu_memory, term)
    # everything resident, both take as long: the rest is waiting for the link
    for phase in ("prefill", "decode"):
        one, other = getattr(device, phase), getattr(host, phase)
        assert one.compute_s == other.compute_s
        assert one.step_s < other.step_s
        assert one.link_bytes < other.link_bytes


def test_each_use_reads_the_experts_that_its_tokens_touch() -> None:
    """By hand: by one token and by two all experts differ, by many a share has been touched."""
    stage, compute, block = hold(MODEL), ModelCompute(hold(MODEL), MACHINE), layers().block

    def touched_bytes(num_tokens: int) -> float:
        share = 1 - (1 - PER_TOKEN / NUM_EXPERTS) ** num_tokens
        return share * block.expert_bytes

    for tokens in (2, 4):
        plain = compute.price(decode_shape(WORKLOAD, tokens))
        priced = add_drafting(stage, MACHINE, plain, ON_HOST)
        chained = (min(2, tokens - 1) - 1) * touched_bytes(1)
        assert priced.drafting_bytes == pytest.approx(touched_bytes(tokens) + chained, abs=4)
        device = add_drafting(stage, MACHINE, plain, Draft(kind="mtp", tokens=2))
        assert replace(priced, drafting_bytes=0) == device
    step = add_drafting(stage, MACHINE, compute.price(decode_shape(WORKLOAD)), ON_HOST)
    assert step.drafting_bytes == pytest.approx(touched_bytes(8) / 8, abs=4)
    shapes = prefill_shapes(WORKLOAD, 64)
    prompt = add_drafting(stage, MACHINE, compute.price(*shapes), ON_HOST)
    expected = sum(touched_bytes(each.tokens) for each in shapes)
    assert prompt.drafting_bytes == pytest.approx(expected, rel=1e-3)
    # with nothing else over the link each byte takes the time of reading in place
    *_, times = price_stage(stage, MACHINE, WORKLOAD, decide(ON_HOST))
    for taken, priced in ((times.prefill, prompt), (times.decode, step)):
        reading = to_ps(priced.drafting_bytes / MACHINE.uva.value)
        assert taken.step_ps == priced.resident_ps + reading
        assert (taken.link_bytes, taken.link_ps) == (priced.drafting_bytes, reading)


def test_a_plan_with_experts_on_the_host_reads_back_and_explains_itself() -> None:
    goal = Goal(packing=False, draft=ON_HOST)
    plan = make_plan(pose(MODEL, MACHINE, WORKLOAD, UNLIMITED, goal)).plan
    text = dump_plan(plan)
    assert "draft: {kind: mtp, tokens: 2, experts: host}\n" in text
    assert dump_plan(parse_plan(load_yaml(text), "plan")) == text
    assert list(list_contradictions(parse_plan(load_yaml(text), "plan"))) == []
    counted = count_held(plan, MODEL).prediction
    assert counted.gpu_memory == plan.prediction.gpu_memory
    assert counted.host_memory_bytes == plan.prediction.host_memory_bytes > 0
    terms = {term.path: term for term in derive_prediction([hold(MODEL)], MACHINE, plan)}
    inputs = {
        path: {each.name: each.value for each in terms[path].inputs}
        for path in ("gpu_memory.resident", "host_memory", "prefill.link_bytes", "draft.pass_4")
    }
    experts_bytes = layers().block.expert_bytes
    rest = layers().loaded_bytes - experts_bytes
    assert inputs["gpu_memory.resident"]["prediction layers"] == rest
    assert inputs["host_memory"]["experts of prediction layers"] == experts_bytes
    name = "of what is read in place, the prediction layers'"
    assert inputs["prefill.link_bytes"][name] == terms["prefill.link_bytes"].value
    assert inputs["draft.pass_4"]["of link bytes, the prediction layers'"] > 0


def test_too_little_host_memory_for_the_experts_is_said() -> None:
    machine, needed = make_machine(host_memory=10_000), layers().block.expert_bytes
    asked = MODEL, machine, WORKLOAD, Budget(gpu_memory=2**40, host_memory=10_000)
    with pytest.raises(InfeasibleError, match="`experts: host` of the draft needs") as caught:
        make_plan(pose(*asked, Goal(packing=False, draft=ON_HOST)))
    assert caught.value.shortfall_bytes == needed - 10_000


def test_experts_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValidationError, match="alone have experts"):
        Draft.model_validate({"kind": "ngram", "tokens": 3, "experts": "host"})
    dense = predicting_model(last=DENSE)
    with pytest.raises(PlanError, match="with `experts: host`: the prediction layer"):
        predict(dense, MACHINE, WORKLOAD, UNLIMITED, decide(ON_HOST))
    with pytest.raises(InputError, match="no routed experts"):
        pose(dense, MACHINE, WORKLOAD, UNLIMITED, Goal(packing=False, draft=ON_HOST))
    goal = Goal(packing=False, draft=ON_HOST.with_experts("device"))
    question = pose(dense, MACHINE, WORKLOAD, UNLIMITED, goal)
    plan = make_plan(question).plan
    assert plan.offload.draft == goal.draft
    changes = {each.change for each in find_neighbours(question, plan)}
    assert "draft tokens 2 -> 3" in changes
    assert not any("experts" in each for each in changes)
    moved = plan.offload.model_copy(update={"draft": ON_HOST})
    with pytest.raises(PlanError, match="no routed experts"):
        count_held(plan.model_copy(update={"offload": moved}), dense)


def list_times(times: RequestTimes) -> list[Fraction]:
    drafted = () if times.drafted is None else times.drafted.passes
    decode = (times.decode, *(each.taken for each in drafted))
    return [each.step_ps for each in (times.prefill, *decode)] + [times.token_ps]


def test_drafts_that_are_priced_together_are_as_each_alone() -> None:
    ref = ModelRef.model_validate(MODEL, from_attributes=True)
    kinds = [AcceptanceProfile.of_chance(each, ref, 0.7) for each in (KINDS[0], KINDS[3])]
    known = kinds[0].join(kinds[1])
    for rules in ((), (rule(),), (rule("down_proj"), rule("gate_proj", "up_proj"))):
        together = price_drafts(
            replace(hold(MODEL), acceptance=known),
            *(MACHINE, WORKLOAD, decide(None, *rules), [None, *KINDS]),
        )
        for draft, (*_, times) in zip([None, *KINDS], together, strict=True):
            stage = replace(hold(MODEL), acceptance=known)
            *_, alone = price_stage(stage, MACHINE, WORKLOAD, decide(draft, *rules))
            assert list_times(times) == list_times(alone)


def test_a_plan_reads_back_and_holds_what_it_predicts() -> None:
    goal = Goal(packing=False, draft=Draft(kind="mtp", tokens=2))
    question = pose(MODEL, MACHINE, WORKLOAD, UNLIMITED, goal)
    plan = make_plan(question).plan
    text = dump_plan(plan)
    assert "draft: {kind: mtp, tokens: 2}\n" in text
    assert dump_plan(parse_plan(load_yaml(text), "plan")) == text
    assert count_held(plan, MODEL).prediction.gpu_memory == plan.prediction.gpu_memory
    terms = {term.path: term for term in derive_prediction([hold(MODEL)], MACHINE, plan)}
    inputs = {
        path: {each.name: each.value for each in terms[path].inputs}
        for path in ("gpu_memory.resident", "prefill.compute", "draft.pass_4")
    }
    assert inputs["gpu_memory.resident"]["prediction layers"] == layers().loaded_bytes
    assert inputs["prefill.compute"]["prediction layers"] > 0
    assert inputs["draft.pass_4"]["of compute, the prediction layers'"] > 0


def test_what_no_session_drafts_is_refused() -> None:
    draft = KINDS[1]
    assert list(list_draft_refusals(draft, MODEL, way=OWN, batch=1, store="host")) == []
    asked = MACHINE, WORKLOAD, UNLIMITED, decide(draft)
    with pytest.raises(PlanError, match="stores no layers that predict"):
        predict(dense_model(2), *asked)
