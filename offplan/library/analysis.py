"""The answers to a question: the plan, what could be better, why not."""

from dataclasses import dataclass
from functools import cached_property

from offplan.checkpoint.model import Model
from offplan.errors import InfeasibleError, PlanError
from offplan.held.held import hold
from offplan.held.runner import OWN_RUNTIME
from offplan.held.stage import Stage
from offplan.library.alternatives import (
    Alternative,
    TooLarge,
    find_alternatives,
    find_shorter_context,
    find_too_large,
)
from offplan.library.cache_advice import (
    CacheAdvice,
    ContextAdvice,
    advise_cache,
    advise_context,
    find_longest_coded,
)
from offplan.library.draft_advice import DraftAdvice, advise_drafts
from offplan.library.machines import why_unmeasured
from offplan.library.runnable import suit, why_not_run
from offplan.library.shares import StageShare, list_shares
from offplan.machine.name import why_no_run
from offplan.machine.profile import MachineProfile
from offplan.packing_sample import Sample, take_sample
from offplan.plan import Goal, Plan
from offplan.planner.find import PlanResult
from offplan.planner.make import try_plan
from offplan.planner.question import Question


@dataclass(frozen=True)
class Analysis:
    """The findings of ``analyze``: a result, why there is none, or what could not be measured."""

    stage: Stage
    """Weights of a GPU, of a pipeline one of its first stage; all as they are stored."""
    why_not_run: str | None
    """Why ``run`` cannot execute the model; None where it can."""
    question: Question | None = None
    """The question that was asked; None where there was nothing to measure."""
    result: PlanResult | None = None
    """The plan and its reasons; None where there is none."""
    alternatives: tuple[Alternative, ...] = ()
    """The plans that other checkpoints of the model, of fewer bits, would give here."""
    cache_advice: CacheAdvice | None = None
    """The plan that a KV cache in FP8 would give here; None if it is no better."""
    context_advice: ContextAdvice | None = None
    """The plan that a shorter context would give here; None if it is no better."""
    draft_advice: DraftAdvice | None = None
    """The speed that drafts would give; None if nothing is gained, or they are known of."""
    infeasible: InfeasibleError | None = None
    """Why no plan fits; None where one does."""
    longest_context_fp8: int | None = None
    """Tokens of the longest context that fits with a KV cache in FP8; None if that is no longer."""
    unmeasured: str | None = None
    """The figures that could not be measured, so that nothing was planned; None if all were."""
    too_large: TooLarge | None = None
    """The checkpoint of fewest bits where the host's memory is too small for that one, too."""

    @property
    def model(self) -> Model:
        """The model, as it is stored."""
        return self.stage.model

    @property
    def machine(self) -> MachineProfile | None:
        """The machine's figures; None where there was nothing to measure."""
        return None if self.question is None else self.question.machine

    @cached_property
    def sample(self) -> Sample:
        """The findings of a sample of local files on the weights that the plan recodes."""
        return take_sample(
            self.model, None if self.result is None else self.result.plan.offload.recoding
        )

    @cached_property
    def shares(self) -> tuple[StageShare, ...]:
        """A GPU of each stage: what it holds, and takes by the plan; none for one GPU."""
        if self.question is None:
            return ()
        plan = None if self.result is None else self.result.plan
        return tuple(list_shares(self.question.stages, self.question.planned_machine, plan))


def analyze_model(model: Model, goal: Goal) -> Analysis:
    """Look at a model alone, where there is no machine to plan for."""
    way = suit(goal.model_copy(update={"engine": None}), model, 1).way
    stage = hold(model, way=way)
    why_not = why_not_run(stage) if model.gguf is None else model.gguf.remedy
    return Analysis(stage, why_not, unmeasured=why_unmeasured())


def analyze_question(question: Question) -> Analysis:
    """Plan for a question; that no plan fits is a finding like another."""
    try:
        return analyze_result(question, try_plan(question))
    except InfeasibleError as error:
        error.longest_context = find_shorter_context(question)
        longest = find_longest_coded(question, error.longest_context)
        fits = longest == question.workload.context
        stage = hold(question.model, way=question.goal.way)
        why_not = why_no_run(question.machine.name) or why_not_run(stage, question.workload.context)
        if question.model.gguf is not None:
            why_not = question.model.gguf.remedy
        others = find_alternatives(question, None)
        asked = question.stages[0], why_not, question
        return Analysis(
            *asked,
            alternatives=others,
            too_large=None if others or error.ram_bytes is None else find_too_large(question),
            cache_advice=advise_cache(question, None) if fits else None,
            infeasible=error,
            longest_context_fp8=longest,
        )


def analyze_result(question: Question, result: PlanResult) -> Analysis:
    """Look at the plan that answers a question."""
    plan = result.plan
    stage = question.hold(plan.offload)[0] if question.runner is OWN_RUNTIME else None
    return Analysis(
        question.stages[0],
        why_not_plan(question.model, plan, stage),
        question,
        result,
        find_alternatives(question, plan),
        advise_cache(question, plan),
        advise_context(question, plan),
        advise_drafts(question, plan),
    )


def why_not_plan(
    model: Model, plan: Plan, stage: Stage | None = None, *, edited: bool = False
) -> str | None:
    """Return why ``run`` cannot execute a model by a plan, None where it can.

    ``stage`` is what offplan's own runtime holds of the model by the plan, if that is known.
    A decision that was made here has passed the list of refusals. Only what the host's cores are to
    multiply is asked of transformers' class besides: each answer takes a process of its own. Of a
    plan that may be ``edited`` the whole decision is asked.
    """
    if model.gguf is not None:
        return model.gguf.remedy
    if (why := why_no_run(plan.machine.name)) is not None:
        return why
    try:
        plan.require_one_gpu()
    except PlanError as error:
        return str(error)
    stage = stage or hold(model, plan.offload.recoding, plan.goal.way)
    asked = plan.offload if edited or plan.has_cores else None
    return why_not_run(stage, plan.workload.context, asked, not plan.machine.is_cpu)
