"""Drafts, reported with what they would give where nothing is known of them."""

from dataclasses import dataclass

from offplan.capabilities.drafts import LENGTHS, Draft, DraftKind, list_places
from offplan.costs.timeline import to_seconds
from offplan.drafts.acceptance import AcceptanceProfile
from offplan.drafts.mix import find_mix
from offplan.plan import ModelRef, Plan
from offplan.planner.drafts import knows_passes, price_drafts
from offplan.planner.question import Question

CHANCES = (0.6, 0.8)
"""Acceptances of which the answer tells. Source: chosen: text that repeats some, and much."""
WORTH_TELLING = 1.1
"""Times by which tokens come faster at the larger of CHANCES, so that drafts are reported. Source:
chosen."""


@dataclass(frozen=True)
class DraftAdvice:
    """The speed of a plan's decision with drafts, if each were taken by the same chance."""

    draft: str
    """The drafts as ``--draft`` takes them: those that give most at the larger chance."""
    chances: tuple[float, ...]
    tokens_per_s: tuple[float, ...]
    """Tokens a second by each chance."""


def advise_drafts(question: Question, plan: Plan) -> DraftAdvice | None:
    """Find what drafts would give a plan, where nothing is known of how often they are taken.

    A model's own prediction layers come first, whose drafts need no text that repeats itself. None
    where drafts gain less than WORTH_TELLING, where no session checks them, on the CPU, and where
    they were asked for.
    """
    goal, profile = question.goal, question.stage.acceptance
    is_usual = goal.draft == "auto" and profile is None and not goal.targets
    if not is_usual or goal.objective != "latency" or not plan.workload.num_steps:
        return None
    if question.machine.is_cpu:
        return None
    kinds: tuple[DraftKind, ...] = ("mtp", "ngram")
    advice = (_advise(question, plan, kind) for kind in kinds)
    return next((each for each in advice if each is not None), None)


def _advise(question: Question, plan: Plan, kind: DraftKind) -> DraftAdvice | None:
    """Find what drafts of a kind would give; None where that is too little, or none run.

    The plan's decision is priced as it is, which takes no search: what drafts take of memory beyond
    the budget crosses the link in each pass. Where prediction layers displace weights, as large a
    part of these crosses as of those that are off the GPU.
    """
    drafts = tuple(Draft(kind=kind, tokens=length) for length in LENGTHS[kind])
    if any(question.goal.list_draft_refusals(drafts[0], question.asked)):
        return None
    drafts = tuple(each for each in drafts if knows_passes(question, each))
    priced = dict(price_drafts(question, plan.offload, drafts))
    if not priced:
        return None
    known = [_assume(question, drafts[-1], chance) for chance in CHANCES]

    def token_s(draft: Draft, profile: AcceptanceProfile, lacking_s: float = 0.0) -> float:
        mix = find_mix(draft, profile, plan.workload.num_steps)
        drafted = priced[draft].drafted
        assert drafted is not None, "drafts are priced"
        return to_seconds(drafted.with_mix(mix).token_ps) + lacking_s / mix.tokens

    def lacking_s(draft: Draft) -> float:
        taken = question.predict(plan.offload.model_copy(update={"draft": draft})).gpu_memory
        lacking = max(0, taken.total_bytes - plan.budget.gpu_memory)
        drafted, stored = priced[draft].drafted, plan.stored_bytes
        if draft.uses_layers and drafted is not None and stored:
            crossing = drafted.passes[-1].taken.link_bytes / stored
            lacking = round(min(1.0, crossing) * lacking)
        return lacking / question.planned_machine.h2d.value

    best = min(priced, key=lambda draft: token_s(draft, known[-1]))
    lacking = {best: lacking_s(best)}
    if lacking[best]:  # experts of a prediction layer may lie on the host
        _, *others = list_places(best, question.model)
        priced |= price_drafts(question, plan.offload, others)
        lacking |= {each: lacking_s(each) for each in others}
    best = min(lacking, key=lambda draft: token_s(draft, known[-1], lacking[draft]))
    speeds = tuple(1 / token_s(best, profile, lacking[best]) for profile in known)
    if speeds[-1] * plan.prediction.decode.step_s < WORTH_TELLING:
        return None
    return DraftAdvice(str(best), CHANCES, speeds)


def _assume(question: Question, most: Draft, chance: float) -> AcceptanceProfile:
    model = ModelRef.model_validate(question.model, from_attributes=True)
    return AcceptanceProfile.of_chance(most, model, chance)
