"""The drafts of a plan: those whose passes make a request shortest, or none.

The outer loop of the search is over few numbers of drafted tokens, of the kinds that an acceptance
profile is of. Each is priced for the decision without drafts first. Those that gain are searched in
spaces of their own, the best first, until one of them keeps its promise. Such a search keeps the
segment classes of the decision without drafts, and chooses all else anew: planning takes hardly
longer, and drafts change little in which weights are worth their memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

from offplan.capabilities.drafts import LENGTHS, Draft, DraftKind, pass_tokens
from offplan.costs import predict
from offplan.costs.predict import RequestTimes
from offplan.costs.timeline import to_ps, to_seconds
from offplan.errors import InfeasibleError, PlanError
from offplan.plan import Offload, Plan
from offplan.planner.aims import NEVER, limits_ps
from offplan.planner.classes import SegmentClass
from offplan.planner.find import ALIKE, PlanResult, find_plan
from offplan.planner.question import Question
from offplan.planner.search import Searcher
from offplan.planner.space import Near, Space

CLOSE = 1.1
"""Times a request's seconds within which fewer drafts are priced again for the plan found. Source:
chosen: what the plan without drafts has of them differs by less."""

NEAR = 1.05
"""Times the seconds of a decision with drafts within which plans are looked for first. Source:
chosen: fewer are looked at, and the best is hardly ever further."""


def list_drafts(question: Question) -> tuple[Draft, ...]:
    """List the drafts that plans of a question may have, beside none, in one place each."""
    goal, known = question.goal, question.stage.acceptance
    if goal.draft != "auto" or known is None:
        return ()
    drafts = (
        Draft(kind=profile.kind, tokens=length)
        for profile in known.profiles
        for length in sorted({min(each, profile.tokens) for each in LENGTHS[profile.kind]})
    )
    return tuple(each for each in drafts if knows_passes(question, each))


def knows_passes(question: Question, draft: Draft) -> bool:
    """Return True if the routing profile has the passes of a draft, or there is none."""
    stage, tokens = question.stage, pass_tokens(draft.tokens)
    return stage.routing is None or stage.reuse(1, tokens) is not None


def price_drafts(
    question: Question, offload: Offload, drafts: Sequence[Draft]
) -> Iterator[tuple[Draft, RequestTimes]]:
    """Price a decision with each of some drafts, whether or not the budget is kept.

    Leaves out kinds whose passes do not run its rules.
    """
    if not drafts:  # a pipeline has none
        return
    (stage,) = question.hold(offload)
    asked = stage, question.planned_machine, question.workload, offload
    for _, alike in groupby(drafts, lambda each: each.kind):
        of_kind = [*alike]
        with suppress(PlanError):
            priced = predict.price_drafts(*asked, of_kind)
            yield from ((draft, times) for draft, (*_, times) in zip(of_kind, priced, strict=True))


def choose_drafts(question: Question, plain: PlanResult) -> PlanResult:
    """Return the best plan with drafts where that gains more than plans are alike, else ``plain``.

    ``plain`` is the best plan without drafts. Of each kind the first that gains is searched.
    """
    best, below_s = plain, plain.plan.prediction.objective_s / ALIKE
    ranked = _rank(question, plain.plan.offload, list_drafts(question))
    searched: set[DraftKind] = set()
    for request_s, draft in ranked:
        if request_s >= below_s:
            break
        if draft.kind in searched:
            continue
        found = _find_with(question, plain, draft, request_s, below_s)
        if found is None:
            continue
        searched.add(draft.kind)
        alike = (each for each in ranked if each[1].kind == draft.kind)
        if any(s < CLOSE * request_s and of.tokens < draft.tokens for s, of in alike):
            found = _shorten(question, found)
        best, below_s = found, found.plan.prediction.objective_s
    return best


def _find_with(
    question: Question, plain: PlanResult, draft: Draft, request_s: float, below_s: float
) -> PlanResult | None:
    """Find a plan that checks a draft: the one without, if nothing has to make room, or another."""
    offload = plain.plan.offload
    if not offload.rules:
        decision = offload.model_copy(update={"draft": draft})
        taken = question.predict(decision).gpu_memory.total_bytes
        if taken <= question.budget.gpu_memory:
            plan = question.answer(decision)
            if _keeps_targets(question, plan):
                return replace(plain, plan=plan, best_s=plan.prediction.objective_s)
    return _search(question, plain.plan, draft, request_s, below_s)


def _keeps_targets(question: Question, plan: Plan) -> bool:
    """Return True if a plan keeps the targets: prediction layers make a prompt longer."""
    took = plan.prediction.prefill.step_s, plan.prediction.decode.step_s
    limits = zip(map(to_ps, took), limits_ps(question.goal), strict=True)
    return all(each <= limit for each, limit in limits)


def _rank(
    question: Question, offload: Offload, drafts: Sequence[Draft]
) -> list[tuple[float, Draft]]:
    """Rank drafts of a decision by the seconds of a request, the shortest first."""
    priced = [
        (to_seconds(times.objective_ps(question.workload)), draft)
        for draft, times in price_drafts(question, offload, drafts)
    ]
    return sorted(priced, key=lambda pair: pair[0])


def _shorten(question: Question, found: PlanResult) -> PlanResult:
    """Return a plan with fewer drafts, which take less memory, if its decision gains by them."""
    offload = found.plan.offload
    assert offload.draft is not None, "it was found with drafts"
    most = pass_tokens(offload.draft.tokens)
    drafts = [
        each.with_experts(offload.draft.experts)
        for each in list_drafts(question)
        if each.kind == offload.draft.kind and pass_tokens(each.tokens) <= most
    ]
    _, best = _rank(question, offload, drafts)[0]
    if best == offload.draft:
        return found
    plan = question.answer(offload.model_copy(update={"draft": best}))
    return replace(found, plan=plan, best_s=plan.prediction.objective_s)


def find_only_with(question: Question) -> PlanResult | None:
    """Find a plan with drafts where those without miss a target; None if drafts miss it, too."""
    searchers = [Searcher(Space(question, draft=each)) for each in list_drafts(question)]
    found = []
    for searcher in searchers:
        with suppress(InfeasibleError):
            found.append(_find(searcher, question))
    return min(
        (each for each in found if each is not None),
        key=lambda each: each.plan.prediction.objective_s,
        default=None,
    )


def _search(
    question: Question, plain: Plan, draft: Draft, request_s: float, below_s: float
) -> PlanResult | None:
    """Search the plans that check a draft, near the one without, whose requests are shorter.

    Drafts that cost nothing take hardly any memory: those of the decision without are looked at
    first, whose requests take ``request_s`` if that fits.
    """
    offload, space = plain.offload, Space(question, draft=draft)
    classes = frozenset(SegmentClass(rule.cpu_offload_params) for rule in offload.rules)
    embeddings = None if draft.uses_layers else offload.embeddings
    near = Near(classes, offload.prefill_chunk, embeddings)
    around = Searcher(replace(space, recoding=offload.recoding, near=near), recodes=False)
    with suppress(InfeasibleError):  # more classes may fit
        if classes and not draft.uses_layers:
            found = _find(around, question, min(below_s, NEAR * request_s))
            if found is not None or below_s <= NEAR * request_s:
                return found
        if classes:
            return _find(around, question, below_s)
    with suppress(InfeasibleError):
        return _find(Searcher(space), question, below_s)
    return None


def _find(searcher: Searcher, question: Question, below_s: float = NEVER) -> PlanResult | None:
    """Find a plan as ``find_plan`` does; None if it takes longer, or no session runs it."""
    try:
        found = find_plan(searcher, question, below_s)
    except PlanError:
        return None
    if found is None or found.plan.prediction.objective_s >= below_s:
        return None
    # the search's own value is that of mean passes
    return replace(found, best_s=found.plan.prediction.objective_s)
