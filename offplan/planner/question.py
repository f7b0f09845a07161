"""One question to the planner: everything that decides a plan."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from offplan.checkpoint.model import Model
from offplan.choices import Store
from offplan.engines.export import find_engine
from offplan.engines.ranks import hold_model
from offplan.engines.served import require_served
from offplan.errors import ExportError, InputError
from offplan.machine.profile import MachineProfile
from offplan.packing import check_unpacked
from offplan.plan import Budget, Goal, MachineRef, ModelRef, Offload, Plan, Prediction, Workload
from offplan.unpacked import Unpacked


@dataclass(frozen=True)
class Question:
    """Which plan is the best one for a model, a machine, a workload, a budget and a goal?

    A goal of several ranks makes the model what the largest of them holds. GPU memory is each
    one's, host memory that of all together. The budget takes no more than the machine has.

    Raises InputError for a goal that names an engine offplan does not export to, or one beside a
    second GPU's memory, or ranks that it cannot divide the model among, or a context that it does
    not serve, or weights to leave unpacked that it does not have, and ProfileError where the link
    to that memory is not known.
    """

    model: Model
    machine: MachineProfile
    workload: Workload
    budget: Budget
    goal: Goal = field(default_factory=Goal)
    store: Store = "host"
    """Where what is offloaded lies: in host memory, or in that of a second GPU."""
    profile: str | None = None
    """The name by which the machine's profile is found again; None where it was measured."""

    def __post_init__(self) -> None:
        engine = self.goal.engine
        try:
            if engine is not None:
                require_served(self.model, self.workload.context, find_engine(engine)[0])
            held = hold_model(self.model, self.goal, self.workload)
        except ExportError as error:
            raise InputError(f"--for {engine}: {error}") from None
        # frozen, but not yet seen by anybody
        object.__setattr__(self, "model", held)
        check_unpacked(held, self.unpacked)
        if engine is not None and self.store != "host":
            raise InputError(
                f"--for {engine} and --store {self.store}: no engine's flags reach a second GPU's "
                "memory; leave one of them out"
            )
        machine, host = self.planned_machine, self.budget.host_memory
        if machine.host_memory is not None:
            most = machine.host_memory.value
            host = most if host is None else min(host, most)
        gpu = min(self.budget.gpu_memory, machine.gpu_memory.value)
        object.__setattr__(self, "budget", Budget(gpu_memory=gpu, host_memory=host))

    @cached_property
    def planned_machine(self) -> MachineProfile:
        """The machine's profile with the link to the store as its link, all ranks using theirs."""
        return self.machine.with_link(self.store, self.goal.ranks)

    @property
    def may_pack(self) -> bool:
        """Whether weights may be packed: in GPU memory there are kernels that multiply them."""
        return self.goal.packing and self.goal.engine is None and not self.machine.is_cpu

    @property
    def unpacked(self) -> Unpacked:
        """Weights that stay as they are stored."""
        return Unpacked(self.goal.leave_unpacked)

    def with_gpu_memory(self, num_bytes: int) -> "Question":
        """Ask the same with another budget of GPU memory."""
        return replace(self, budget=self.budget.model_copy(update={"gpu_memory": num_bytes}))

    def with_workload(self, **changes: int) -> "Question":
        """Ask the same for another batch, or another context."""
        return replace(self, workload=self.workload.model_copy(update=changes))

    def answer(self, offload: Offload, prediction: Prediction) -> Plan:
        """Write the plan that answers the question by a decision, with all that was asked."""
        machine = self.planned_machine
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
            offload=offload,
            prediction=prediction,
        )
