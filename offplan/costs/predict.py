"""Predicted costs of an offload decision: memory terms, both phases, the objective."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, cached_property, partial
from typing import Any

from offplan.capabilities.drafts import Draft, list_pass_sizes
from offplan.costs.calls import list_calls
from offplan.costs.compute import ModelCompute
from offplan.costs.drafts import DraftedPass, DraftedTimes, list_drafted
from offplan.costs.engine_times import add_up_engine, engine_pass_times
from offplan.costs.memory import list_gpu_memory, list_stores
from offplan.costs.pass_compute import PassCompute
from offplan.costs.pass_times import add_drafting_times, pass_times
from offplan.costs.phase_terms import list_phase
from offplan.costs.prediction import add_drafting
from offplan.costs.steady import price_plan
from offplan.costs.term import Input, Term
from offplan.costs.timeline import (
    WAITING,
    PassTimes,
    PhaseTimes,
    add_up,
    add_up_prompt,
    price_decode,
    price_prefill,
    to_seconds,
)
from offplan.costs.work import decode_shape, prefill_shapes
from offplan.drafts.mix import ONE_BY_ONE
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase, Placement, place
from offplan.plan import Budget, Correction, Offload, Plan, Prediction, Workload
from offplan.refusals import require_runnable
from offplan.schedule import build_steady_request


@dataclass(frozen=True)
class RequestTimes:
    """The times of both phases of one request."""

    prefill: PhaseTimes
    decode: PhaseTimes
    """Times of a step, without drafts."""
    drafted: DraftedTimes | None = None
    """Times of all passes of decode; None if no pass checks drafts."""

    @property
    def token_ps(self) -> Fraction:
        """Picoseconds of a token behind the first."""
        return self.decode.step_ps if self.drafted is None else self.drafted.token_ps

    def objective_ps(self, workload: Workload) -> Fraction:
        """Picoseconds of a request: the prompt, which gives the first token, and all others."""
        return self.prefill.step_ps + workload.num_steps * self.token_ps


def price_request(
    placement: Placement,
    stage: Stage,
    machine: MachineProfile,
    prefill: PassCompute,
    decode: PassCompute,
) -> RequestTimes:
    """Price one request among many like it, by what runs the model: a batch of one plan."""
    return Decided(stage, machine, placement).price(prefill, [decode])[0]


@dataclass
class Decided:
    """A decision on a stage, whatever its drafts; it remembers the times of passes."""

    stage: Stage
    machine: MachineProfile
    placement: Placement
    _times: dict[PassCompute, PassTimes] = field(default_factory=dict)
    _priced: dict[tuple[PassCompute, PassCompute], RequestTimes] = field(default_factory=dict)

    @cached_property
    def compute(self) -> ModelCompute:
        """Prices passes with everything resident."""
        return ModelCompute(self.stage, self.machine)

    def price(self, prefill: PassCompute, steps: Sequence[PassCompute]) -> list[RequestTimes]:
        """Price requests of one prompt, each with decode steps of its own size."""
        new = [each for each in dict.fromkeys(steps) if (prefill, each) not in self._priced]
        found = self._price(prefill, new) if new else []
        self._priced |= zip([(prefill, each) for each in new], found, strict=True)
        return [self._priced[prefill, each] for each in steps]

    def _price(self, prefill: PassCompute, steps: Sequence[PassCompute]) -> list[RequestTimes]:
        engine, num_passes, placement = self.stage.pass_rules, len(prefill.shapes), self.placement
        prompt, *passes = map(self._find_times, (prefill, *steps))
        if engine is not None:
            (step,) = passes
            prompt_ps, (step_ps,) = price_plan(engine, placement, prompt, passes, num_passes)
            add_up_phase = partial(add_up_engine, engine, placement)
            first = add_up_phase(Phase.PREFILL, prompt, prompt_ps, num_passes)
            return [RequestTimes(first, add_up_phase(Phase.DECODE, step, step_ps, 1))]
        calls = list_calls(self.stage, num_passes)
        request = build_steady_request(placement, len(self.stage.layers), calls, num_passes)
        if calls is not None:
            first = price_prefill(request.prefill, prompt)
            return [RequestTimes(first, price_decode(request.decode, each)) for each in passes]
        prompt_ps, steps_ps = price_plan(None, placement, prompt, passes, num_passes)
        first = add_up_prompt(request.prefill, prompt, prompt_ps)
        return [
            RequestTimes(first, add_up(request.decode, step, step_ps, WAITING))
            for step, step_ps in zip(passes, steps_ps, strict=True)
        ]

    def _find_times(self, priced: PassCompute) -> PassTimes:
        """Find the times of a pass, which differ behind its layers alone by what drafts it."""
        engine = self.stage.pass_rules
        of_layers = replace(priced, drafting_ps=0, drafting_bytes=0)
        asked = self.placement, self.stage, self.machine, of_layers
        if of_layers not in self._times:
            self._times[of_layers] = (
                pass_times(*asked) if engine is None else engine_pass_times(engine, *asked)
            )
        return add_drafting_times(self._times[of_layers], self.machine, priced)


PricedStage = tuple[Placement, PassCompute, PassCompute, RequestTimes]
"""A decision's placement on a stage, its prompt and step, resident and so placed."""


def price_stage(
    stage: Stage, machine: MachineProfile, workload: Workload, offload: Offload
) -> PricedStage:
    """Place a decision on a stage, and price its prompt and decode step, resident and so placed.

    Raises PlanError for rules that do not fit the model.
    """
    return price_drafts(stage, machine, workload, offload, [offload.draft])[0]


def price_drafts(
    stage: Stage,
    machine: MachineProfile,
    workload: Workload,
    offload: Offload,
    drafts: Sequence[Draft | None],
) -> list[PricedStage]:
    """Price a decision as ``price_stage`` does with each of some drafts in place of its own."""
    decided = _decide(stage, machine, offload)
    placement = decided.placement
    for draft in drafts:
        decision = offload.model_copy(update={"draft": draft})
        require_runnable(
            stage, placement, decision, batch=workload.batch, on_gpu=not machine.is_cpu
        )
    resident = cache(decided.compute.price)
    passes = []
    for draft in drafts:
        sizes = (1, *list_pass_sizes(draft))
        shapes = prefill_shapes(workload, offload.prefill_chunk)
        of_draft = [shapes, *((decode_shape(workload, tokens),) for tokens in sizes)]
        passes.append([add_drafting(stage, machine, resident(*each), draft) for each in of_draft])
    by_prompt: dict[PassCompute, list[PassCompute]] = {}
    for prompt, *steps in passes:
        by_prompt.setdefault(prompt, []).extend(steps)
    for prompt, steps in by_prompt.items():  # passes of all drafts at once
        decided.price(prompt, steps)
    found = []
    for draft, (prompt, *steps) in zip(drafts, passes, strict=True):
        priced = decided.price(prompt, steps)
        times = priced[0]
        if draft is not None:
            of_steps = (
                DraftedPass(each.shapes[0].tokens, 0.0, each, taken.decode)
                for each, taken in zip(steps, priced, strict=True)
            )
            drafted = DraftedTimes(ONE_BY_ONE, tuple(of_steps))
            times = replace(times, drafted=drafted.with_mix(stage.mix(draft, workload)))
        found.append((placement, prompt, steps[0], times))
    return found


def _decide(stage: Stage, machine: MachineProfile, offload: Offload) -> Decided:
    """Place a decision on a stage. The last one is kept, which is priced with several drafts."""
    asked = stage, machine, offload.model_copy(update={"draft": None})
    kept, decided = stage.memo.get(Decided, (None, None))
    if kept is None or kept[0] is not stage or kept[1] is not machine or kept[2] != asked[2]:
        decided = Decided(stage, machine, place(stage, offload))
        stage.memo[Decided] = asked, decided
    found: Decided = decided
    return found


@dataclass(frozen=True)
class Derivation:
    """The numbers of a prediction."""

    terms: tuple[Term, ...]
    measured: bool
    """True if all compute was measured; else it is estimated."""
    corrections: Mapping[Phase, Correction | None] = field(default_factory=dict)
    """What measured layers of other models changed about the compute of each phase."""

    def predict(self) -> Prediction:
        """Return the numbers as a plan records them."""
        figures: dict[str, Any] = {"basis": "measured" if self.measured else "estimated"}
        for term in self.terms:
            section, _, name = term.path.rpartition(".")
            (figures.setdefault(section, {}) if section else figures)[name] = term.value
        for phase, correction in self.corrections.items():
            figures[phase.value]["correction"] = correction
        return Prediction.model_validate(figures)


def predict(
    stages: Sequence[Stage],
    machine: MachineProfile,
    workload: Workload,
    budget: Budget,
    offload: Offload,
) -> Prediction:
    """Predict what an offload decision costs, whether or not it keeps the budget.

    The budget only sets the memory margin. Host memory is that of all GPUs, and GPU memory that of
    a GPU of the stage that takes most. A pass goes through the stages of a pipeline one after the
    other. Raises PlanError for rules that do not fit the model.
    """
    asked = machine, workload, budget, offload
    return _join([derive_stage(stage, *asked) for stage in stages]).predict()


def derive_prediction(stages: Sequence[Stage], machine: MachineProfile, plan: Plan) -> list[Term]:
    """Derive every number that ``predict`` gives for a plan; each stage's own come first.

    ``stages`` are as the plan's runner holds them; ``machine`` has the link to the plan's store.
    Raises PlanError for rules that do not fit the model.
    """
    asked = machine, plan.workload, plan.budget, plan.offload
    derived = [derive_stage(stage, *asked) for stage in stages]
    of_stages = (
        replace(term, path=f"stages.{number}.{term.path}")
        for number, each in enumerate(derived)
        for term in each.terms
        if len(derived) > 1
    )
    return [*of_stages, *_join(derived).terms]


def derive_stage(
    stage: Stage, machine: MachineProfile, workload: Workload, budget: Budget, offload: Offload
) -> Derivation:
    """Derive what a GPU of a stage takes, and of host memory all GPUs of the stage."""
    placement, prompt, step, times = price_stage(stage, machine, workload, offload)
    chunk = offload.prefill_chunk
    request_s = to_seconds(times.objective_ps(workload))
    steps = Input("steps after it", workload.num_steps, "count")
    formula = "prefill.step + steps after it x decode.step"
    decode = list_phase(stage, machine, step, times.decode, placement)
    priced = [prompt, step]
    if times.drafted is not None:
        decode = list_drafted(stage, times.drafted)
        priced += [each.compute for each in times.drafted.passes]
    terms = (
        *list_gpu_memory(placement, stage, machine, workload, budget, chunk, offload.draft),
        *list_stores(placement, stage, offload),
        *list_phase(stage, machine, prompt, times.prefill, placement),
        *decode,
        Term("objective", request_s, "s", formula, (steps,)),
    )
    corrections = {Phase.PREFILL: prompt.correction, Phase.DECODE: step.correction}
    return Derivation(terms, all(each.measured for each in priced), corrections)


def _join(stages: Sequence[Derivation]) -> Derivation:
    """Join the stages of a pipeline: one GPU's memory is the most of any, all else adds up."""
    if len(stages) == 1:
        return stages[0]
    totals = [stage.predict().gpu_memory.total_bytes for stage in stages]
    largest = totals.index(max(totals))
    joined: list[Term] = []
    for same in zip(*(stage.terms for stage in stages), strict=True):
        total, formula = sum(term.value for term in same), "the sum of all stages"
        inputs = tuple(Input(f"stage {n}", t.value, t.unit) for n, t in enumerate(same))
        if same[0].path.startswith("gpu_memory."):
            total, inputs = same[largest].value, ()
            formula = f"the term of stage {largest}, whose GPUs hold most"
        joined.append(replace(same[0], value=total, formula=formula, inputs=inputs))
    return Derivation(tuple(joined), all(stage.measured for stage in stages))
