"""The planner chooses drafts, how many, or none, by an acceptance profile."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offplan.capabilities.drafts import Draft, DraftKind
from offplan.checkpoint.model import Model
from offplan.drafts.acceptance import AcceptanceProfile, dump_acceptance
from offplan.errors import InfeasibleError, InputError
from offplan.library.asking import pose
from offplan.library.draft_advice import advise_drafts
from offplan.machine.profile import MachineProfile
from offplan.plan import Budget, Goal, ModelRef, Workload
from offplan.planner.drafts import list_drafts
from offplan.planner.find import find_plan
from offplan.planner.frontier import find_frontier, find_ram_frontier
from offplan.planner.make import make_plan
from offplan.planner.neighbours import find_neighbours
from offplan.planner.question import Question
from offplan.planner.search import Searcher
from offplan.planner.space import Space
from offplan.routing.profile import dump_routing, make_routing
from tests.costs.builders import (
    DENSE,
    NUM_EXPERTS,
    dense_model,
    make_machine,
    moe_model,
    predicting_model,
)
from tests.planner.cases import budget_for

WORKLOAD = Workload(prompt_tokens=64, output_tokens=101, context=256)
SLOW = make_machine(h2d=1e8, uva=0.9e8)
"""A link that is the limit: a pass of several tokens takes hardly longer than a step."""
SLOW_GPU = make_machine().model_copy(
    update={"matmul": make_machine().matmul.model_copy(update={"value": 1e8})}
)
"""A GPU whose operations are the limit: a pass takes as many steps as it has tokens."""
PLAIN = Goal(packing=False)


@pytest.fixture(autouse=True)
def _small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave graphs out, which take more than all weights of models so small."""
    monkeypatch.setattr("offplan.costs.drafts.GRAPH_BYTES", 0)


def ask(
    model: Model,
    machine: MachineProfile = SLOW,
    chance: float | None = None,
    share: float = 0.5,
    goal: Goal = PLAIN,
    tokens: int = 7,
    kinds: Sequence[DraftKind] = ("ngram",),
    **others: Any,
) -> Question:
    budget = budget_for(model, machine, share, WORKLOAD)
    question = pose(model, machine, WORKLOAD, budget, goal, **others)
    if chance is None:
        return question
    ref = ModelRef.model_validate(model, from_attributes=True)
    first, *more = (
        AcceptanceProfile.of_chance(Draft(kind=kind, tokens=tokens), ref, chance) for kind in kinds
    )
    known = first.join(*more)
    stages = tuple(replace(each, acceptance=known) for each in question.stages)
    return replace(question, stages=stages, acceptance_file="acceptance.yaml")


def test_nothing_is_drafted_where_nothing_is_known() -> None:
    plan = make_plan(ask(dense_model(6))).plan
    assert (plan.offload.draft, plan.prediction.draft, plan.acceptance) == (None, None, None)


def test_drafts_are_chosen_where_the_link_is_the_limit() -> None:
    plain = make_plan(ask(dense_model(6))).plan
    question = ask(dense_model(6), chance=0.8)
    plan = make_plan(question).plan
    assert plan.offload.draft == Draft(kind="ngram", tokens=7)
    assert plan.prediction.objective_s < 0.6 * plain.prediction.objective_s
    assert plan.prediction.gpu_memory.total_bytes <= plan.budget.gpu_memory
    assert plan.acceptance is not None
    assert question.stage.acceptance is not None
    assert plan.acceptance.fingerprint == question.stage.acceptance.fingerprint


@pytest.mark.parametrize("chance", [0.0, 0.3])
def test_none_are_chosen_where_they_lose(chance: float) -> None:
    for model, machine in ((dense_model(6), SLOW_GPU), (moe_model(5), SLOW_GPU)):
        plan = make_plan(ask(model, machine, chance)).plan
        assert plan.offload.draft is None
        assert plan == make_plan(ask(model, machine)).plan.model_copy(
            update={"acceptance": plan.acceptance}
        )


def test_what_is_taken_seldom_is_drafted_by_fewer() -> None:
    """Routed experts are a union: each token more brings more of them."""
    tokens = []
    for chance in (0.1, 0.7, 0.95):
        draft = make_plan(ask(moe_model(5), chance=chance, share=0.4)).plan.offload.draft
        tokens.append(0 if draft is None else draft.tokens)
    assert tokens == sorted(tokens)
    assert tokens[0] < tokens[-1]


def test_no_more_are_tried_than_were_recorded() -> None:
    lengths = {n: [1, n] if n > 1 else [1] for n in (1, 2, 3)} | {5: [1, 3, 5], 7: [1, 3, 7]}
    for recorded, expected in lengths.items():
        question = ask(dense_model(2), chance=0.9, tokens=recorded)
        assert [each.tokens for each in list_drafts(question)] == expected
    off = ask(dense_model(2), chance=0.9, goal=Goal(packing=False, draft="off"))
    assert list_drafts(off) == ()


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.2, 0.6, 1.2])
@pytest.mark.parametrize("chance", [0.4, 0.8])
def test_it_is_hardly_worse_than_the_best_of_whole_searches(chance: float, share: float) -> None:
    for model in (dense_model(6), moe_model(5)):
        question = ask(model, chance=chance, share=share)
        found = make_plan(question).plan.prediction.objective_s
        searched = [
            find_plan(Searcher(Space(question, draft=draft)), question)
            for draft in (None, *list_drafts(question))
        ]
        least = min(each.plan.prediction.objective_s for each in searched if each is not None)
        assert found <= 1.08 * least  # six layers are coarse


@pytest.mark.parametrize("share", [0.5, 1.3])
def test_the_best_of_both_kinds_is_chosen(share: float) -> None:
    """Prediction layers take memory that drafts from the text leave to weights."""
    model = predicting_model(6)
    kinds: tuple[DraftKind, ...] = ("ngram", "mtp")
    plain = make_plan(ask(model, share=share)).plan
    alone = [make_plan(ask(model, share=share, chance=0.8, kinds=[kind])).plan for kind in kinds]
    both = ask(model, share=share, chance=0.8, kinds=kinds)
    plan = make_plan(both).plan
    assert [str(each) for each in list_drafts(both)] == [
        *(f"ngram:{n}" for n in (1, 3, 7)),
        *(f"mtp:{n}" for n in (1, 2, 3)),
    ]
    for kind, each in zip(kinds, alone, strict=True):
        drafts = each.offload.draft
        assert drafts is None or drafts.kind == kind
        assert each.prediction.objective_s <= plain.prediction.objective_s
        assert each.prediction.gpu_memory.total_bytes <= each.budget.gpu_memory
    least = min(each.prediction.objective_s for each in alone)
    assert plan.prediction.objective_s <= 1.01 * least
    assert plan.prediction.gpu_memory.total_bytes <= plan.budget.gpu_memory


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.4, 0.8, 1.3])
def test_prediction_layers_are_searched_for_room(share: float) -> None:
    question = ask(predicting_model(6), chance=0.8, share=share, kinds=["mtp"])
    found = make_plan(question).plan.prediction.objective_s
    searched = [
        find_plan(Searcher(Space(question, draft=draft)), question)
        for draft in (None, *list_drafts(question))
    ]
    least = min(each.plan.prediction.objective_s for each in searched if each is not None)
    assert found <= 1.08 * least


def test_prediction_layers_that_are_asked_for_are_in_every_plan() -> None:
    goal = Goal(packing=False, draft=Draft(kind="mtp", tokens=2))
    question = ask(predicting_model(4), goal=goal, share=1.0)
    plan = make_plan(question).plan
    assert str(plan.offload.draft) == "mtp:2"
    assert plan.prediction.gpu_memory.total_bytes <= plan.budget.gpu_memory
    changes = {each.change for each in find_neighbours(question, plan)}
    assert {"without draft", "draft tokens 2 -> 1", "draft tokens 2 -> 3"} <= changes
    nothing = replace(question, budget=Budget(gpu_memory=2**18))
    with pytest.raises(InfeasibleError, match="prediction layers, KV cache, activations"):
        make_plan(nothing)


@pytest.mark.parametrize(("share", "place"), [(0.2, "host"), (2.0, "device")])
@pytest.mark.parametrize("is_asked", [True, False])
def test_experts_of_prediction_layers_are_on_the_host_where_memory_is_short(
    is_asked: bool, share: float, place: str
) -> None:
    draft = Draft(kind="mtp", tokens=2)
    if is_asked:
        question = ask(predicting_model(6), goal=Goal(packing=False, draft=draft), share=share)
    else:
        question = ask(predicting_model(24, DENSE), chance=0.9, share=share, kinds=["mtp"])
    plan = make_plan(question).plan
    assert plan.prediction.gpu_memory.total_bytes <= plan.budget.gpu_memory
    assert plan.offload.draft is not None
    assert plan.offload.draft.experts == place
    changes = {each.change for each in find_neighbours(question, plan)}
    other = "host -> device" if place == "host" else "device -> host"
    assert {each for each in changes if "experts" in each} == {f"draft experts {other}"}


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.2, 0.5, 1.0, 2.0])
def test_both_places_of_experts_are_searched_together(share: float) -> None:
    """The plan is as good as the better one of both places, each searched alone."""
    draft = Draft(kind="mtp", tokens=2)
    question = ask(predicting_model(5), goal=Goal(packing=False, draft=draft), share=share)
    found = make_plan(question).plan.prediction.objective_s
    searched = []
    for experts in ("device", "host"):
        space = Space(question, draft=draft)
        placed = {each: size for each, size in space.drafts.items() if each.experts == experts}
        vars(space)["drafts"] = placed
        with suppress(InfeasibleError):
            searched.append(find_plan(Searcher(space), question))
    least = min(each.plan.prediction.objective_s for each in searched if each is not None)
    assert found <= 1.01 * least


def test_experts_of_prediction_layers_keep_to_the_memory_of_the_host() -> None:
    goal = Goal(packing=False, draft=Draft(kind="mtp", tokens=2))
    question = ask(predicting_model(6), goal=goal, share=0.7)
    plan = make_plan(question).plan
    assert plan.offload.draft is not None
    assert plan.offload.draft.experts == "host"
    taken = plan.prediction.host_memory_bytes
    budgets = (
        question.budget.model_copy(update={"host_memory": int(share * taken)})
        for share in (1.0, 0.9)
    )
    enough, less = (replace(question, budget=budget) for budget in budgets)
    assert make_plan(enough).plan.offload == plan.offload
    with pytest.raises(InfeasibleError, match="of host memory"):
        make_plan(less)


def test_asked_drafts_are_in_every_plan() -> None:
    goal = Goal(packing=False, draft=Draft(kind="ngram", tokens=3))
    question = ask(dense_model(6), goal=goal)
    plan = make_plan(question).plan
    assert plan.offload.draft == goal.draft
    assert plan.prediction.gpu_memory.total_bytes <= plan.budget.gpu_memory
    changes = {each.change for each in find_neighbours(question, plan)}
    assert {"without draft", "draft tokens 3 -> 1", "draft tokens 3 -> 7"} <= changes
    points = (*find_frontier(question), *find_ram_frontier(question))
    assert {point.plan.offload.draft for point in points} == {goal.draft}


def test_a_target_may_be_kept_by_drafts_alone() -> None:
    model = dense_model(6)
    step_s = make_plan(ask(model)).plan.prediction.decode.step_s
    goal = Goal(packing=False, max_tpot=0.6 * step_s)
    with pytest.raises(InfeasibleError, match="no plan reaches"):
        make_plan(ask(model, goal=goal))
    plan = make_plan(ask(model, chance=0.8, goal=goal)).plan
    assert plan.offload.draft is not None
    assert plan.prediction.decode.step_s <= 0.6 * step_s


def test_what_no_session_runs_is_refused_by_name(tmp_path: Path) -> None:
    model = dense_model(2)
    ref = ModelRef.model_validate(model, from_attributes=True)
    path = tmp_path / "acceptance.yaml"
    known = AcceptanceProfile.of_chance(Draft(kind="ngram", tokens=3), ref, 0.5)
    path.write_text(dump_acceptance(known))
    draft = Draft(kind="ngram", tokens=3)
    batched = WORKLOAD.model_copy(update={"batch": 2})
    budget = budget_for(model, SLOW, 0.5, WORKLOAD)
    for said, workload, given, why in (
        ({"draft": draft}, batched, None, "`draft=ngram:3` with `batch=2`"),
        ({}, batched, str(path), "acceptance.yaml`: `draft=ngram:1` with `batch=2`"),
        ({"engine": "vllm"}, WORKLOAD, str(path), "`draft=ngram:1` with `engine=vllm`"),
        ({"objective": "throughput"}, WORKLOAD, str(path), "with `objective=throughput`"),
        ({"draft": Draft(kind="mtp", tokens=1)}, WORKLOAD, None, "stores no layers that predict"),
        ({"draft": Draft(kind="mtp", tokens=1)}, WORKLOAD, str(path), "is of ngram drafts"),
    ):
        goal = Goal.model_validate({"packing": False, **said})
        with pytest.raises(InputError, match=why):
            pose(model, SLOW, workload, budget, goal, acceptance_file=given)
    goal = Goal(packing=False, draft=Draft(kind="mtp", tokens=1))
    with pytest.raises(InputError, match="is of ngram drafts"):
        pose(predicting_model(), SLOW, WORKLOAD, budget, goal, acceptance_file=str(path))
    # what is off is known of in vain
    off = Goal(packing=False, draft="off")
    pose(model, SLOW, batched, budget, off, acceptance_file=str(path))


def test_prediction_layers_that_read_prompts_keep_a_target_of_theirs() -> None:
    model, share = predicting_model(24, DENSE), 2.0
    drafted = make_plan(ask(model, chance=0.9, kinds=["mtp"], share=share)).plan
    first_s = drafted.prediction.prefill.step_s
    assert drafted.offload.draft is not None
    assert not drafted.offload.rules
    goal = Goal(packing=False, max_ttft=0.999 * first_s)
    plan = make_plan(ask(model, chance=0.9, kinds=["mtp"], share=share, goal=goal)).plan
    assert plan.prediction.prefill.step_s < 0.999 * first_s


@pytest.mark.parametrize("kinds", [("ngram", "mtp"), ("mtp", "ngram")])
def test_a_kind_that_no_layers_draft_leaves_the_other(kinds: Sequence[DraftKind]) -> None:
    plan = make_plan(ask(dense_model(6), chance=0.8, kinds=kinds)).plan
    assert plan.offload.draft is not None
    assert plan.offload.draft.kind == "ngram"


def test_a_routing_profile_without_passes_is_refused(tmp_path: Path) -> None:
    model = moe_model(3)
    ref = ModelRef.model_validate(model, from_attributes=True)
    layers = [layer.index for layer in model.layers if layer.expert_bytes]
    random = np.random.default_rng(0)
    steps = random.permuted(np.tile(np.arange(NUM_EXPERTS), (40, len(layers), 1, 1)), axis=-1)
    made = make_routing(ref, layers, [steps[..., :2].astype(np.int16)], NUM_EXPERTS)
    before = made.model_copy(update={"offplan_routing": 1, "passes": ()})
    for name, profile in (("new", made), ("old", before)):
        (tmp_path / name).write_text(dump_routing(profile))
    budget = budget_for(model, SLOW, 0.5, WORKLOAD)
    goal = Goal(packing=False, draft=Draft(kind="ngram", tokens=3))
    pose(model, SLOW, WORKLOAD, budget, goal, routing_file=str(tmp_path / "new"))
    with pytest.raises(InputError, match="has no experts of passes of 4 tokens"):
        pose(model, SLOW, WORKLOAD, budget, goal, routing_file=str(tmp_path / "old"))
    # without drafts it serves as before
    pose(model, SLOW, WORKLOAD, budget, PLAIN, routing_file=str(tmp_path / "old"))


def test_the_answer_tells_of_drafts_only_where_they_gain() -> None:
    question = ask(dense_model(6))
    plan = make_plan(question).plan
    advice = advise_drafts(question, plan)
    assert advice is not None
    assert advice.draft == "ngram:7"
    step_s = plan.prediction.decode.step_s
    assert 1 / step_s < advice.tokens_per_s[0] < advice.tokens_per_s[1]
    # what is promised is what a plan with a profile of that chance gives, or a little less
    known = make_plan(ask(dense_model(6), chance=0.8)).plan.prediction.decode.step_s
    assert advice.tokens_per_s[1] * known <= 1.1
    predicting = ask(predicting_model(12, DENSE))
    own = advise_drafts(predicting, make_plan(predicting).plan)
    assert own is not None
    assert own.draft.startswith("mtp:")
    for other in (
        ask(dense_model(6), SLOW_GPU),
        ask(dense_model(6), chance=0.8),
        ask(dense_model(6), goal=Goal(packing=False, draft="off")),
    ):
        assert advise_drafts(other, make_plan(other).plan) is None
