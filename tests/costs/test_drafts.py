"""Passes that check drafts are priced as hand-made lists have them, and a token as their mean."""

from dataclasses import replace

import numpy as np
import pytest

from offplan.capabilities.drafts import Draft, list_pass_sizes
from offplan.checkpoint.architecture import LinearAttention
from offplan.checkpoint.model import KVCache, Model
from offplan.costs.activations import phase_bytes
from offplan.costs.cached_experts import predict_found
from offplan.costs.compute import ModelCompute
from offplan.costs.drafts import GRAPH_BYTES, graph_bytes
from offplan.costs.in_place_costs import AtUse
from offplan.costs.kernels import (
    ATTENTION_EFFICIENCY,
    LAUNCH_S,
    MATMUL_EFFICIENCY,
    layer_seconds,
)
from offplan.costs.predict import derive_prediction, price_stage
from offplan.costs.states import OPERATORS, adding_seconds
from offplan.costs.timeline import to_ps, to_seconds
from offplan.costs.work import PassShape, decode_shape, layer_work
from offplan.drafts.acceptance import AcceptanceProfile
from offplan.drafts.mix import find_mix
from offplan.errors import PlanError
from offplan.held.held import hold
from offplan.held.stage import Stage
from offplan.library.asking import pose
from offplan.machine.profile import load_profile
from offplan.placement import Phase, place
from offplan.plan import Backend, ModelRef, Offload, Plan, Rule, Workload, dump_plan, parse_plan
from offplan.planner.make import make_plan
from offplan.records import load_yaml
from offplan.routing.profile import make_routing
from offplan.upkeep.figures import list_contradictions
from tests.costs.builders import (
    NUM_EXPERTS,
    PER_TOKEN,
    dense_model,
    make_machine,
    moe_model,
    rule,
)
from tests.held import predict
from tests.planner.cases import UNLIMITED
from tests.routing import count_hits

WORKLOAD = Workload(prompt_tokens=64, output_tokens=101, context=256)
MACHINE = make_machine()
DRAFT = Draft(kind="ngram", tokens=7)


def with_chance(stage: Stage, chance: float, draft: Draft = DRAFT) -> Stage:
    ref = ModelRef.model_validate(stage.model, from_attributes=True)
    return replace(stage, acceptance=AcceptanceProfile.of_chance(draft, ref, chance))


def decide(*rules: Rule, draft: Draft | None = DRAFT) -> Offload:
    return Offload(prefill_chunk=64, rules=rules, draft=draft)


def test_streamed_weights_cross_once_a_pass() -> None:
    stage = with_chance(hold(dense_model(6)), 0.8)
    *_, times = price_stage(stage, MACHINE, WORKLOAD, decide(rule()))
    assert times.drafted is not None
    passes = times.drafted.passes
    assert [each.tokens for each in passes] == [1, *list_pass_sizes(DRAFT)] == [1, 2, 4, 8]
    streamed = sum(layer.nbytes for layer in stage.layers)
    (copied,) = {each.taken.copied_bytes for each in passes}
    assert streamed <= copied <= 1.01 * streamed  # each tensor lies on a boundary
    steps = [each.taken.step_ps for each in passes]
    assert steps == sorted(steps)
    # the link is the limit: eight tokens take hardly longer than one
    assert steps[-1] < 1.05 * steps[0]


def test_compute_reads_weights_once_and_multiplies_each_row() -> None:
    """By hand: a layer of dense matrices, and the head, of which every token wants logits."""
    stage, machine = hold(dense_model(1)), make_machine()
    slow = machine.matmul.model_copy(update={"value": machine.hbm.value / 4})  # which is the limit
    machine = machine.model_copy(update={"matmul": slow})
    compute, head = ModelCompute(stage, machine), stage.head
    assert head is not None
    rate = machine.matmul.value
    layers = {}
    for tokens in (1, 2, 4, 8):
        priced = compute.price(decode_shape(WORKLOAD, tokens))
        layers[tokens] = priced.layer_ps[0]
        of_head = head.nbytes + 2 * tokens * min(head.shape) * 2
        multiplying = 2 * head.num_weights * tokens / (rate * MATMUL_EFFICIENCY)
        seconds = max(of_head / machine.hbm.value, multiplying)
        assert priced.outside_ps == pytest.approx(to_ps(seconds), abs=1)
    weights = sum(p.num_weights for p in stage.layers[0].parameters if len(p.shape) > 1)
    pairs = 2 * 4 * (16 + 16) * WORKLOAD.decode_context
    of_token = 2 * weights / (rate * MATMUL_EFFICIENCY) + pairs / (rate * ATTENTION_EFFICIENCY)
    for more, less in ((2, 1), (4, 2), (8, 4)):  # what a pass reads, and launches, cancels out
        added = (layers[more] - layers[less]) / (more - less)
        assert added == pytest.approx(to_ps(of_token), rel=0.02)


def test_a_token_is_the_mean_of_passes_over_what_they_give() -> None:
    stage = with_chance(hold(dense_model(6)), 0.6)
    decision = decide(rule("down_proj", prefill=Backend.UVA, decode=Backend.UVA))
    *_, times = price_stage(stage, MACHINE, WORKLOAD, decision)
    drafted = times.drafted
    assert drafted is not None
    assert stage.acceptance is not None
    mix = find_mix(DRAFT, stage.acceptance, WORKLOAD.num_steps)
    by_size = {each.tokens: each.taken for each in drafted.passes}
    expected = sum(share * float(by_size[size].step_ps) for size, share in mix.shares) / mix.tokens
    assert float(times.token_ps) == pytest.approx(expected)
    request_ps = times.prefill.step_ps + WORKLOAD.num_steps * times.token_ps
    assert times.objective_ps(WORKLOAD) == request_ps


def test_routed_experts_are_a_union_of_the_tokens() -> None:
    """Where each token chooses as the one before, a pass reads no more than a step does."""
    model = moe_model(3)
    ref = ModelRef.model_validate(model, from_attributes=True)
    layers = [layer.index for layer in model.layers if layer.expert_bytes]
    alike = np.tile([0, 1], (32, len(layers), 1, 1)).astype(np.int16)
    turns = np.arange(64).reshape(32, 1, 1, 2) % NUM_EXPERTS
    turns = np.broadcast_to(turns, (32, len(layers), 1, 2)).astype(np.int16)
    for steps, touched in ((alike, (2, 2, 2, 2)), (turns, (2, 4, 8, 8))):
        routing = make_routing(ref, layers, [steps], NUM_EXPERTS)
        stage = replace(hold(model), routing=routing)
        units = [unit for unit in stage.units[1] if unit.is_expert]
        served = [(unit, Backend.UVA) for unit in units]
        of_all = sum(unit.nbytes for unit in units)
        for tokens, distinct in zip((1, 2, 4, 8), touched, strict=True):
            at_use = AtUse(stage, MACHINE, 1, tokens)
            priced = ModelCompute(stage, MACHINE).price(decode_shape(WORKLOAD, tokens))
            read = at_use.read_bytes(served, priced)[Backend.UVA]
            assert read == pytest.approx(of_all * distinct / NUM_EXPERTS, abs=len(units))


@pytest.mark.parametrize("kept", [2, 5])
def test_missed_experts_are_those_of_a_list(kept: int) -> None:
    """Every token passed moves the order of use, and each pass misses a union once."""
    model, random = moe_model(2), np.random.default_rng(3)
    ref = ModelRef.model_validate(model, from_attributes=True)
    drawn = [random.permutation(NUM_EXPERTS)[:PER_TOKEN] for _ in range(160)]
    steps = np.array(drawn, np.int16)[:, None, None]
    stage = replace(hold(model), routing=make_routing(ref, [1], [steps], NUM_EXPERTS))
    slots = Rule(
        cpu_offload_params=("experts",),
        group_size=1,
        num_in_group=1,
        prefill=Backend.UVA,
        decode=Backend.UVA,
        cached_experts=kept,
    )
    placement = place(stage, decide(slots))
    for tokens in (1, 2, 4, 8):
        passes = [
            {int(e) for each in drawn[at : at + tokens] for e in each}
            for at in range(0, len(drawn) - tokens + 1, tokens)
        ]
        found = predict_found(placement, stage, 1, MACHINE, ((tokens, 1.0),))
        assert found is not None
        chosen, hits = sum(map(len, passes)), count_hits(passes, NUM_EXPERTS, kept)
        assert found.hits == pytest.approx(hits / len(passes))
        assert found.misses == pytest.approx((chosen - hits) / len(passes))


def test_memory_has_graphs_logits_and_places_for_rejected_drafts() -> None:
    model = dense_model(4)
    cache = KVCache(bytes_per_token=128, window=32)
    model = replace(model, layers=tuple(replace(each, kv_cache=cache) for each in model.layers))
    asked = model, MACHINE, WORKLOAD, UNLIMITED
    plain = predict(*asked, decide(draft=None)).gpu_memory
    for tokens, places in ((1, 1), (2, 3), (3, 3), (7, 7)):
        draft = Draft(kind="ngram", tokens=tokens)
        taken = predict(*asked, decide(draft=draft)).gpu_memory
        # each layer's window, and the copy from the end of the last prompt
        assert taken.kv_cache_bytes - plain.kv_cache_bytes == 2 * 4 * places * 128
        stage = hold(model)
        (prompt, step), (_, largest) = (
            phase_bytes(stage, WORKLOAD, 64, each) for each in (None, draft)
        )
        graphs = GRAPH_BYTES * 4 * len(list_pass_sizes(draft))
        more = max(prompt, largest) - max(prompt, step) + largest - step + graphs
        assert taken.activation_bytes - plain.activation_bytes == more
        assert largest > step


LINEAR = LinearAttention(2, 4, 16, 8, 4)


def hybrid_model(num_linear: int) -> Model:
    """Return four layers, of which the first ones have a state of 3,000 bytes."""
    model = dense_model(4)
    layers = (
        replace(each, kv_cache=KVCache(state_bytes=3000)) if index < num_linear else each
        for index, each in enumerate(model.layers)
    )
    sizes = {f"linear_{name}": size for name, size in LINEAR._asdict().items()}
    return replace(model, layers=tuple(layers), config={**model.config, **sizes})


def test_hybrids_keep_what_each_token_adds_to_states() -> None:
    asked = hybrid_model(3), MACHINE, WORKLOAD, UNLIMITED
    plain = predict(*asked, decide(draft=None)).gpu_memory
    # keys, values and a decay of each head in float32, and the convolution's inputs
    of_token = 4 * (16 + 8 + 1) * 4 + (2 * 2 * 16 + 4 * 8) * 2
    for tokens, places in ((1, 2), (2, 4), (7, 8)):
        draft = Draft(kind="ngram", tokens=tokens)
        taken = predict(*asked, decide(draft=draft)).gpu_memory
        assert taken.kv_cache_bytes - plain.kv_cache_bytes == 3 * places * of_token
        stage = hold(hybrid_model(3))
        assert graph_bytes(stage, list_pass_sizes(draft)) == GRAPH_BYTES * (4 + 3) * len(
            list_pass_sizes(draft)
        )


def test_prompts_take_the_delta_rule_through_states() -> None:
    """48 heads of 128 x 128 as an H200 was measured, 0.25 and 0.96 ms."""
    machine, stage = load_profile("h200-pcie5"), hold(hybrid_model(1))
    work = layer_work(stage, stage.layers[0])
    work = replace(work, kv_cache=KVCache(state_bytes=4 * 48 * 128 * 128))
    for tokens, measured_s in ((512, 0.25e-3), (2048, 0.956e-3)):
        prompt = PassShape(Phase.PREFILL, 1, tokens, tokens)
        assert layer_seconds(machine, work, prompt).rule == pytest.approx(measured_s, rel=0.05)
        of_others = replace(work, operators={Phase.PREFILL: 1.0}), replace(work, overhead_s=1e-5)
        assert not any(layer_seconds(machine, other, prompt).rule for other in of_others)
        assert not layer_seconds(machine, work, replace(prompt, phase=Phase.DECODE)).rule
        assert not layer_seconds(load_profile("cpu"), work, prompt).rule


def test_states_go_on_behind_a_pass() -> None:
    compute = ModelCompute(hold(hybrid_model(3)), MACHINE)
    for tokens in (1, 2, 8):
        shape = decode_shape(WORKLOAD, tokens)
        moved_s = 4 * 3 * 3000 / MACHINE.hbm.value
        added_s = adding_seconds(MACHINE, compute.stage, shape)
        assert added_s == (max(moved_s, OPERATORS * LAUNCH_S) if tokens > 1 else 0)
        plain = ModelCompute(hold(hybrid_model(0)), MACHINE).price(shape)
        assert compute.price(shape).outside_ps - plain.outside_ps == to_ps(added_s)


def make(draft: Draft | None = DRAFT) -> Plan:
    question = pose(dense_model(4), MACHINE, WORKLOAD, UNLIMITED)
    plan = make_plan(question).plan
    decision = plan.offload.model_copy(update={"draft": draft})
    return plan.model_copy(
        update={"offload": decision, "prediction": question.predict(decision, plan.budget)}
    )


def test_plans_read_back_and_those_without_the_terms_still_do() -> None:
    plan = make()
    text = dump_plan(plan)
    assert "  draft: {kind: ngram, tokens: 7}\n" in text
    assert dump_plan(parse_plan(load_yaml(text), "plan")) == text
    data = load_yaml(text)
    assert set(data["prediction"].pop("draft")) == {"tokens", "step", "pass_2", "pass_4", "pass_8"}
    before = parse_plan(data, "plan")
    assert (before.offload.draft, before.prediction.draft) == (DRAFT, None)
    assert "draft" not in dump_plan(make(None))


def test_figures_of_a_token_agree_where_compute_and_link_take_turns() -> None:
    """Steps wait for the link, and passes of eight tokens for their products."""
    slow = MACHINE.matmul.model_copy(update={"value": 4e9})
    machine = MACHINE.model_copy(update={"matmul": slow})
    question = pose(dense_model(6), machine, WORKLOAD, UNLIMITED)
    stages = (with_chance(question.stage, 0.9),)
    question = replace(question, stages=stages)
    *_, times = price_stage(stages[0], machine, WORKLOAD, decide(rule()))
    assert times.drafted is not None
    first, *_, last = times.drafted.passes
    assert first.taken.compute_ps < first.taken.awaited_ps
    assert last.taken.compute_ps > last.taken.awaited_ps
    plan = make_plan(question).plan
    decision = decide(rule())
    prediction = question.predict(decision, plan.budget)
    edited = plan.model_copy(update={"offload": decision, "prediction": prediction})
    assert list(list_contradictions(edited)) == []


def test_every_figure_is_a_term() -> None:
    plan = make()
    terms = {term.path: term for term in derive_prediction([hold(dense_model(4))], MACHINE, plan)}
    assert plan.prediction.draft is not None
    assert plan.prediction.draft.pass_8_s == terms["draft.pass_8"].value
    assert plan.prediction.decode.step_s == terms["decode.step"].value
    # nothing is known of them: a token is a step
    assert terms["decode.step"].value == terms["draft.step"].value
    shares = [each for each in terms["draft.tokens"].inputs if each.name == "share of steps"]
    assert [(each.value, each.source) for each in shares] == [
        (1.0, "no acceptance profile: no draft is taken")
    ]


def test_the_time_of_a_pass_is_no_less_than_a_step_s() -> None:
    plan = make()
    draft = plan.prediction.draft
    assert draft is not None
    assert draft.step_s <= (draft.pass_2_s or 0) <= (draft.pass_4_s or 0) <= (draft.pass_8_s or 0)
    assert to_seconds(to_ps(draft.step_s)) == pytest.approx(draft.step_s)


def test_one_list_refuses_what_no_session_runs() -> None:
    model = dense_model(2)
    batched = WORKLOAD.model_copy(update={"batch": 2})
    with pytest.raises(PlanError, match="choose batch 1"):
        predict(model, MACHINE, batched, UNLIMITED, decide())
    layers = decide(draft=Draft(kind="mtp", tokens=1))
    with pytest.raises(PlanError, match="stores no layers that predict"):
        predict(model, MACHINE, WORKLOAD, UNLIMITED, layers)
