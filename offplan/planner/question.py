"""One question to the planner: everything that decides a plan."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

from offplan.backends import Backend
from offplan.capabilities.drafts import PASS_TOKENS, Draft, pass_tokens
from offplan.capabilities.goal import Asked
from offplan.capabilities.table import Recoding
from offplan.checkpoint.model import Model
from offplan.costs.predict import predict
from offplan.errors import InputError
from offplan.held.held import find_largest, find_recoding, recode_stages
from offplan.held.runner import Demand, Runner
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.plan import (
    AcceptanceRef,
    Budget,
    Goal,
    MachineRef,
    ModelRef,
    Offload,
    Plan,
    Prediction,
    RoutingRef,
    Workload,
)
from offplan.stores import STORES, StoreName


@dataclass(frozen=True)
class Question:
    """Which plan is the best one for a model, a machine, a workload, a budget and a goal?

    GPU memory is that of each GPU, host memory that of all together.

    Raises InputError for an engine beside a second GPU's memory, and for what the
    goal's capabilities refuse. Raises InputError for experts that cannot be cached, and for a
    batch that the routing profile does not have. Raises ProfileError if the link to that memory is
    not known.
    """

    stages: tuple[Stage, ...]
    """Weights of a GPU of each stage of a pipeline, in their order, all as they are stored."""
    runner: Runner
    """The runtime or engine that loads and runs them."""
    machine: MachineProfile
    workload: Workload
    budget: Budget
    """Memory that a plan may take: no more than the machine has."""
    goal: Goal = field(default_factory=Goal)
    store: StoreName = "host"
    """Store of what is offloaded: host memory, or that of a second GPU."""
    profile: str | None = None
    """The name by which the machine's profile is found again; None if it was measured."""
    routing_file: str | None = None
    """The file of the routing profile; None if tokens choose all experts alike."""
    no_cores: str | None = None
    """Why the machine's own cores cannot multiply; None if they can."""
    acceptance_file: str | None = None
    """The file of the acceptance profile; None if nothing is known of drafts."""

    def __post_init__(self) -> None:
        engine = self.goal.engine
        store = STORES[self.store]
        if engine is not None and not store.is_host:
            raise InputError(
                f"`engine={engine}` and `store={self.store}`: no engine's flags reach a "
                f"{store.title}'s memory; leave one of them out"
            )
        routing = self.stage.routing
        if routing is not None and self.goal.objective == "latency":
            routing.of_batch(self.workload.batch)
        # a plan for throughput chooses its batch
        batch = self.workload.batch if self.goal.objective == "latency" else 1
        asked = self.asked._replace(batch=batch)
        for why in chain(self.goal.list_refusals(asked), self._list_unusable(asked)):
            raise InputError(why)
        _ = self.planned_machine  # which refuses a link that is not known

    def _list_unusable(self, asked: Asked) -> Iterator[str]:
        """Yield why the profiles that are given cannot serve plans that check drafts."""
        profile, draft, routing = self.stage.acceptance, self.goal.asked_draft, self.stage.routing
        if profile is not None and draft is None and self.goal.draft != "off":
            drafts = (Draft(kind=each.kind, tokens=1) for each in profile.profiles)
            refusals = [[*self.goal.list_draft_refusals(each, asked)] for each in drafts]
            # plans may have the kinds that are not refused
            for why in refusals[0] if all(refusals) else ():
                yield f"`acceptance={self.acceptance_file}`: {why}"
            if self.goal.objective != "latency":
                yield (
                    f"`acceptance={self.acceptance_file}` with `objective={self.goal.objective}`, "
                    "which chooses the batch: a pass checks the drafts of one sequence: leave one "
                    "of them out"
                )
        if routing is None or (profile is None and draft is None) or self.goal.draft == "off":
            return
        tokens = PASS_TOKENS[0] if draft is None else pass_tokens(draft.tokens)
        if self.stage.reuse(1, tokens) is None:
            yield (
                f"`routing={self.routing_file}` has no experts of passes of {tokens} tokens, which "
                "check drafts: record it again with `record_routing`, or leave one of them out"
            )

    @property
    def key(self) -> dict[str, Any]:
        """Name everything that an answer depends on, as plain JSON: each field by its content.

        The names of files are left out, whose content is there.
        """
        stages = [[each.number, each.outside_key] for each in self.stages]
        routing, profile = self.stage.routing, self.stage.acceptance
        return {
            "model": self.model.key,
            "runner": [self.runner.name, self.stage.way.name],
            "stages": [*stages, self.stage.number],
            "routing": None if routing is None else routing.fingerprint,
            "machine": self.machine.fingerprint,
            "workload": self.workload.model_dump(mode="json"),
            "budget": self.budget.model_dump(mode="json"),
            "goal": self.goal.model_dump(mode="json"),
            "store": self.store,
            **({} if profile is None else {"acceptance": profile.fingerprint}),
            **({} if self.no_cores is None else {"no_cores": self.no_cores}),
        }

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The backends that plans may have: the runner's, and the host's cores where asked for."""
        return (*self.runner.backends, *self.goal.more_backends)

    @property
    def asked(self) -> Asked:
        """The question's subject."""
        return Asked(self.model, self.workload.batch, self.store, self.no_cores)

    @cached_property
    def stage(self) -> Stage:
        """The stage that is planned for."""
        return find_largest(self.stages, self.workload)

    def hold(self, offload: Offload) -> tuple[Stage, ...]:
        """Return the stages as they are held by a decision."""
        return recode_stages(self.stages, offload.recoding, self.runner)

    def demand(self, offload: Offload) -> Demand:
        """Return what the runner takes for a decision; raises ExportError if it cannot run it."""
        return self.runner.demand(offload, self.hold(offload))

    def predict(self, offload: Offload, budget: Budget | None = None) -> Prediction:
        """Predict what a decision costs, in the question's budget or another, kept or not.

        Raises PlanError for rules that do not fit the model.
        """
        asked = self.planned_machine, self.workload, budget or self.budget, offload
        return predict(self.hold(offload), *asked)

    @property
    def model(self) -> Model:
        """The model, as it is stored."""
        return self.stages[0].model

    @cached_property
    def planned_machine(self) -> MachineProfile:
        """The machine's profile with the link to the store as its link, all GPUs using theirs."""
        return self.machine.with_link(self.store, self.goal)

    @cached_property
    def recoding(self) -> Recoding | None:
        """The recoding of all that may be recoded: GPUs have kernels that multiply it."""
        if self.machine.is_cpu:
            return None
        batch, last = self.workload.batch, self.stages[-1]
        return find_recoding(self.stage, self.goal, self.runner, last=last, batch=batch)

    def with_gpu_memory(self, num_bytes: int) -> "Question":
        """Ask the same with another budget of GPU memory, no more than the machine has."""
        most = min(num_bytes, self.planned_machine.gpu_memory.value)
        return replace(self, budget=self.budget.model_copy(update={"gpu_memory": most}))

    def with_workload(self, **changes: int) -> "Question":
        """Ask the same for another batch, or another context."""
        workload = self.workload.model_copy(update=changes)
        return replace(self, workload=workload)

    def for_one_sequence(self) -> "Question":
        """Ask for the latency of one sequence, where a plan would choose its batch."""
        goal = self.goal.model_copy(update={"objective": "latency"})
        return replace(self.with_workload(batch=1), goal=goal)

    def answer(self, offload: Offload) -> Plan:
        """Write the plan that answers the question by a decision, with all that was asked."""
        machine, routing = self.planned_machine, self.stage.routing
        profile = self.stage.acceptance
        return Plan(
            model=ModelRef.model_validate(self.model, from_attributes=True),
            workload=self.workload,
            budget=self.budget,
            goal=self.goal,
            machine=MachineRef(
                name=machine.name,
                profile=self.profile,
                link=machine.link,
                h2d=machine.h2d.value,
                uva=machine.uva.value,
                basis=machine.basis,
                fingerprint=machine.fingerprint,
            ),
            routing=None
            if routing is None or self.routing_file is None
            else RoutingRef(file=self.routing_file, fingerprint=routing.fingerprint),
            acceptance=None
            if profile is None or self.acceptance_file is None
            else AcceptanceRef(file=self.acceptance_file, fingerprint=profile.fingerprint),
            offload=offload,
            prediction=self.predict(offload),
        )
