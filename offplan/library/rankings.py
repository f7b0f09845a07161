"""One model on many machines, and many models on one: what runs, how fast, with which memory."""

from collections.abc import Iterable
from dataclasses import dataclass

from offplan.checkpoint.model import Model
from offplan.checkpoint.popular import Checkpoint
from offplan.errors import CheckpointError, InfeasibleError, OffplanError
from offplan.hostmem.limits import find_ram
from offplan.library.alternatives import tokens_per_s
from offplan.library.asking import ask
from offplan.library.machines import Machine, load_machine
from offplan.machine.name import why_no_run
from offplan.machine.profile import shipped_profiles
from offplan.plan import Plan, Workload
from offplan.planner.make import try_plan
from offplan.planner.question import Question
from offplan.progress import Progress, silent

_SYSTEM = "linux"


@dataclass(frozen=True)
class Ranked:
    """A machine for a model, or a model for a machine."""

    name: str
    """The machine's, or the model's."""
    gpu_bytes: int
    """GPU memory of the machine."""
    model_bytes: int
    """Bytes of the checkpoint as stored."""
    plan: Plan | None = None
    """The plan that is the best; None if none fits."""
    why_not: str | None = None
    """Why no plan fits, or why ``run`` cannot execute it there; None if it runs."""
    ram_bytes: int | None = None
    """Memory of a machine with Linux that has enough of it; None if no machine has."""
    form: str | None = None
    """The form that most of a model's weights are stored in; None of a machine."""

    @property
    def rate(self) -> float:
        """Tokens a second, 0 if no plan fits."""
        return 0.0 if self.plan is None else tokens_per_s(self.plan)


def rank_machines(
    model: Model,
    workload: Workload,
    ram_bytes: int | None = None,
    on_progress: Progress | None = None,
) -> tuple[Ranked, ...]:
    """Plan a model for each shipped GPU, by tokens a second, the fastest first.

    Each machine has ``ram_bytes`` of memory, or as much as is wanted. ``on_progress`` hears
    (machines done, machines in all).
    """
    names = [name for name in shipped_profiles() if name != "cpu"]
    report, found = on_progress or silent(""), []
    change = "" if ram_bytes is None else f",ram={ram_bytes}B"
    for number, name in enumerate(names, 1):
        machine = load_machine(f"{name}{change}")
        question = ask(model, machine, workload)
        found.append(_rank(name, machine, question, why_no_run(machine.profile.name)))
        report(number, len(names))
    return _sort(found)


def rank_models(
    checkpoints: Iterable[Checkpoint],
    machine: Machine,
    workload: Workload,
    on_progress: Progress | None = None,
) -> tuple[Ranked, ...]:
    """Plan checkpoints for a machine, by tokens a second, the fastest first.

    ``on_progress`` hears (checkpoints done, checkpoints in all).
    """
    listed = [*checkpoints]
    report, found = on_progress or silent(""), []
    why_no = why_no_run(machine.profile.name)
    for number, each in enumerate(listed, 1):
        try:
            question = ask(each.open(), machine, workload)
        except CheckpointError as error:  # as where the installed transformers is too old for it
            gpu_bytes = machine.profile.gpu_memory.value
            row = Ranked(each.name, gpu_bytes, each.num_bytes, why_not=str(error), form=each.form)
        else:
            row = _rank(each.name, machine, question, why_no, each.form)
        found.append(row)
        report(number, len(listed))
    return _sort(found)


def _rank(
    name: str, machine: Machine, question: Question, why_no: str | None, form: str | None = None
) -> Ranked:
    sizes = machine.profile.gpu_memory.value, question.model.total_bytes
    try:
        plan = try_plan(question).plan
    except InfeasibleError as error:
        return Ranked(name, *sizes, None, error.facts, error.ram_bytes, form)
    except OffplanError as error:
        return Ranked(name, *sizes, None, str(error), None, form)
    ram = find_ram(plan.prediction.host_memory_bytes, _SYSTEM)
    return Ranked(name, *sizes, plan, why_no, ram, form)


def _sort(found: list[Ranked]) -> tuple[Ranked, ...]:
    return tuple(sorted(found, key=lambda each: (-each.rate, each.gpu_bytes, each.name)))
