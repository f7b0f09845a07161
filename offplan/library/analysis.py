"""The answers to a question: the plan, what could be better, why not."""

from dataclasses import dataclass
from functools import cached_property

from offplan.capabilities.table import Recoding
from offplan.checkpoint.model import Model
from offplan.errors import InfeasibleError, PlanError
from offplan.held.held import hold, recode_stages
from offplan.held.runner import OWN_RUNTIME, Runner
from offplan.held.stage import Stage
from offplan.library.alternatives import Alternative, find_alternatives
from offplan.library.runnable import why_not_run
from offplan.library.shares import StageShare, list_shares
from offplan.machine.name import why_no_run
from offplan.machine.profile import MachineProfile
from offplan.packing_sample import Sample, take_sample
from offplan.plan import Plan
from offplan.planner.find import PlanResult
from offplan.planner.make import make_plan
from offplan.planner.question import Question


@dataclass(frozen=True)
class Analysis:
    """The findings of ``analyze``: a result, why there is none, or what could not be measured."""

    stages: tuple[Stage, ...]
    """Each stage's rank: its weights as they are stored."""
    why_not_run: str | None
    """Why ``run`` cannot execute the model; None where it can."""
    machine: MachineProfile | None
    """The machine's figures; None where there was nothing to measure."""
    result: PlanResult | None = None
    """The plan and its reasons; None where there is none."""
    alternatives: tuple[Alternative, ...] = ()
    """The plans that other checkpoints of the model, of fewer bits, would give here."""
    infeasible: InfeasibleError | None = None
    """Why no plan fits; None where one does."""
    unmeasured: str | None = None
    """The figures that could not be measured, so that nothing was planned; None if all were."""
    runner: Runner = OWN_RUNTIME
    """The runtime or engine that loads and runs them."""

    @cached_property
    def recoded(self) -> tuple[Stage, ...]:
        """The same, with the weights recoded that the plan says."""
        return recode_stages(self.stages, self._recoding, self.runner)

    @property
    def _recoding(self) -> Recoding | None:
        return None if self.result is None else self.result.plan.offload.recoding

    @cached_property
    def sample(self) -> Sample:
        """What a sample of local files shows of the weights that the plan recodes."""
        return take_sample(self.stages[0].model, self._recoding)

    @cached_property
    def shares(self) -> tuple[StageShare, ...]:
        """Each stage's rank: what it holds, and takes by the plan; none for one GPU."""
        plan = None if self.result is None else self.result.plan
        return tuple(list_shares(self.stages, self._linked, plan))

    @cached_property
    def _linked(self) -> MachineProfile | None:
        """The machine as each rank of the plan has it; None without a machine or a plan."""
        if self.result is None or self.machine is None:
            return None
        plan = self.result.plan
        goal = plan.goal
        return self.machine.with_link(plan.offload.store, goal.ranks, goal.host_threads)


def analyze_question(question: Question) -> Analysis:
    """Plan for a question; that no plan fits is a finding like another."""
    try:
        return analyze_result(question, make_plan(question))
    except InfeasibleError as error:
        stage = hold(question.model, stock=question.goal.stock)
        why_not = why_no_run(question.machine.name) or why_not_run(stage, question.workload.context)
        if question.model.gguf is not None:
            why_not = question.model.gguf.remedy
        others = find_alternatives(question, None)
        asked = question.stages, why_not, question.machine
        return Analysis(*asked, alternatives=others, infeasible=error, runner=question.runner)


def analyze_result(question: Question, result: PlanResult) -> Analysis:
    """Look at the plan that answers a question."""
    plan = result.plan
    return Analysis(
        question.stages,
        why_not_plan(question.model, plan),
        question.machine,
        result,
        find_alternatives(question, plan),
        runner=question.runner,
    )


def why_not_plan(model: Model, plan: Plan, *, edited: bool = False) -> str | None:
    """Return why ``run`` cannot execute a model by a plan, None where it can.

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
    stage = hold(model, plan.offload.recoding, stock=plan.goal.stock)
    asked = plan.offload if edited or plan.has_cores else None
    return why_not_run(stage, plan.workload.context, asked, not plan.machine.is_cpu)
