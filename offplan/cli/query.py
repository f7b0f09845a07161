"""The options of ``analyze`` and ``plan``, declared once."""

from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offplan import choices
from offplan.cli import options
from offplan.cli.output import (
    STANDARD,
    ProgressBar,
    check_writable,
    print_result,
    printable,
    save_file,
    waiting,
)
from offplan.errors import InputError
from offplan.lean import import_less
from offplan.stores import StoreName
from offplan.units import parse_bytes

if TYPE_CHECKING:
    from offplan.checkpoint.model import Model
    from offplan.plan import Plan
    from offplan.planner.question import Question


_size = partial(typer.Option, parser=parse_bytes, metavar="TEXT")


@dataclass(frozen=True)
class Query:
    """The options of a command that plans."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hub id, a folder of safetensors, a config.json, or (analyze) a GGUF file.",
        ),
    ]
    machine: Annotated[
        str | None,
        typer.Option(
            help="Plan for this machine, a profile's name or file (rtx4090 or "
            "rtx4090,pcie=4x8,ram=64GiB); else this GPU is measured."
        ),
    ] = None
    gpu_memory: Annotated[
        int | None, _size(help="GPU memory the process may take (16GiB). [default: what is free]")
    ] = None
    host_memory: Annotated[
        int | None, _size(help="Memory of the store the weights may take. [default: what it has]")
    ] = None
    store: Annotated[
        StoreName,
        typer.Option(
            **options.choice(StoreName),
            help="Offload to host memory, or to a second GPU's memory.",
        ),
    ] = "host"
    workload: options.WorkloadOptions = field(default_factory=options.WorkloadOptions)
    goal: options.GoalOptions = field(default_factory=options.GoalOptions)
    trust_remote_code: options.TrustRemoteCode = False
    routing: options.Routing = None
    acceptance: options.Acceptance = None
    no_draft: options.NoDraft = False
    frontier: Annotated[
        bool,
        typer.Option(
            "--frontier", help="Show GPU memory, and RAM, against speed instead of one plan."
        ),
    ] = False
    revision: options.Revision = None
    dtype: Annotated[
        choices.WeightType | None,
        typer.Option(
            **options.choice(choices.WeightType),
            help="Type that the weights of a config.json alone are stored in. [default: it says]",
        ),
    ] = None
    source: Annotated[
        str | None, typer.Option(help="Name of the model in the plan, when MODEL is a local copy.")
    ] = None
    output: options.Output = None
    svg: Annotated[Path | None, typer.Option(help="Save pictures of the plan, too.")] = None
    force: options.Force = False
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="Show all that the answer rests on: layers, figures, reasons, terms.",
        ),
    ] = False
    json: options.Json = False

    def check(self) -> None:
        """Raise InputError for what contradicts itself, and for files that cannot be written."""
        goal = self.goal
        if self.frontier:
            for used, why in (
                (self.output or self.svg, "many plans and writes none: leave --output and --svg"),
                (goal.max_ttft_s or goal.max_tpot_s, "all times: leave --max-ttft and --max-tpot"),
                (goal.objective != "latency", "the plans of one batch: leave --objective"),
                (self.acceptance, "plans without drafts, or with --draft: leave --acceptance"),
            ):
                if used:
                    raise InputError(f"--frontier shows {why} out")
        check_writable(self.output, self.svg, force=self.force)

    def read(self, *, writes: bool) -> "tuple[Model, Question | None]":
        """Read the model, and ask what is asked; None where there is no machine to ask about.

        Raises InputError for a GGUF file of which the command ``writes`` a plan.
        """
        from offplan.checkpoint.open import open_model
        from offplan.checkpoint.weights import require_checkpoint
        from offplan.cli.planning import (
            note_budget,
            note_machine,
            read_workload,
            settle_context,
        )
        from offplan.drafts.acceptance import check_acceptance
        from offplan.library.asking import ask, read_acceptance, read_routing
        from offplan.library.machines import check_threads, find_machine
        from offplan.plan import Goal

        if self.machine is not None:  # else it is measured
            import_less()
        goal = options.settle_draft(asdict(self.goal), no_draft=self.no_draft)
        if self.workload.batch is not None:  # a named batch leaves none to be chosen
            goal["objective"] = "latency"
        workload = read_workload(self.workload)
        if goal["objective"] == "throughput":  # which chooses the batch
            workload = workload.model_copy(update={"batch": 1})
        asked = Goal.from_arguments(**goal)
        accepted = None
        if self.acceptance is not None:  # before anything is read or fetched
            accepted = read_acceptance(str(self.acceptance), asked.asked_draft)
        model = open_model(
            self.model,
            revision=self.revision,
            name=self.source,
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
            on_progress=ProgressBar("reading headers"),
        )
        if writes:
            require_checkpoint(model)
        if self.routing is not None:  # before anything is measured
            read_routing(str(self.routing), model, goal["engine"])
        if accepted is not None:
            check_acceptance(accepted, model, str(self.acceptance))
        if goal["host_threads"] is not None and self.machine is None:
            check_threads(goal["host_threads"])
        machine = find_machine(
            self.machine,
            model,
            workload,
            store=self.store,
            goal=asked,
            on_stage=ProgressBar,
        )
        if machine is None:
            return model, None
        ask_this = partial(
            ask,
            model,
            machine,
            gpu_memory=self.gpu_memory,
            host_memory=self.host_memory,
            store=self.store,
            routing=None if self.routing is None else str(self.routing),
            acceptance=None if self.acceptance is None else str(self.acceptance),
            **goal,
        )
        note_machine(self.machine, asked, self.store, model, machine.profile)
        note_budget(machine.profile, self.gpu_memory)
        with waiting("planning"):
            return model, settle_context(ask_this, workload, self.workload.context)

    def print_frontier(self, question: "Question | None") -> None:
        """Answer ``--frontier``; raises InputError where there is no machine to ask about."""
        from offplan.library.machines import why_unmeasured
        from offplan.planner.frontier import find_frontier, find_ram_frontier
        from offplan.report.frontier import (
            frontier_payload,
            ram_frontier_payload,
            render_frontier,
            render_ram_frontier,
        )

        if question is None:
            raise InputError(why_unmeasured())
        points = find_frontier(question, ProgressBar("planning"))
        by_ram = find_ram_frontier(question)
        payload = {"frontier": frontier_payload(points), "ram": ram_frontier_payload(by_ram)}
        shown = [render_frontier(points), *([render_ram_frontier(by_ram)] if by_ram else [])]
        print_result(payload, *shown, json=self.json)

    def save_picture(self, question: "Question", plan: "Plan") -> None:
        """Answer ``--svg``."""
        from offplan.report.portrait import draw_poster, portray

        if self.svg is not None:
            picture = draw_poster(portray(plan, question.hold(plan.offload), question.machine))
            save_file(self.svg, printable(picture), force=self.force)

    @property
    def plan_file(self) -> Path | None:
        """The plan's file, if one is written."""
        return None if self.output == STANDARD else self.output
