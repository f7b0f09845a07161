"""Opens what ``run``, ``serve`` and ``chat`` are given: a plan's file, or a model to plan."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offplan.cli import options
from offplan.cli.output import (
    ProgressBar,
    check_writable,
    print_note,
    print_result,
    waiting,
)
from offplan.errors import InputError, OffplanError
from offplan.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from offplan.checkpoint.model import Model
    from offplan.library.analysis import Analysis
    from offplan.plan import Plan, Workload


@dataclass(frozen=True)
class ModelOptions:
    """The options of a command that is given a model in place of a plan."""

    machine: Annotated[
        str | None,
        typer.Option(
            help="Of a MODEL: plan by this profile, a name or a file. [default: this GPU, measured]"
        ),
    ] = None
    gpu_memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_bytes,
            metavar="TEXT",
            help="Of a MODEL: GPU memory the process may take. [default: what is free]",
        ),
    ] = None
    context: Annotated[
        int | None,
        options.tokens("--context", "Of a MODEL: tokens a text may reach. [default: 4096]"),
    ] = None
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Download a MODEL of any size without asking.")
    ] = False

    @property
    def of_plans(self) -> dict[str, object]:
        """The options that say what is planned, by their names."""
        return {"machine": self.machine, "gpu-memory": self.gpu_memory, "context": self.context}

    def read_workload(self) -> "Workload":
        """Return the usual workload, shortened to a shorter context."""
        from offplan.plan import Workload

        if self.context is None:
            return Workload()
        usual = Workload(context=max(self.context, Workload().context))
        prompt = min(usual.prompt_tokens, max(1, self.context * 3 // 4))
        output = max(1, min(usual.output_tokens, self.context - prompt))
        return Workload(prompt_tokens=prompt, output_tokens=output, context=self.context)


@dataclass(frozen=True)
class ServedModelOptions(ModelOptions):
    """The options of ``serve``, which may continue several texts at a time."""

    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Of a MODEL: texts that are continued together. [default: 1]"),
    ] = None

    @property
    def of_plans(self) -> dict[str, object]:
        """The options that say what is planned, by their names."""
        return {**super().of_plans, "batch": self.batch}

    def read_workload(self) -> "Workload":
        """Return the usual workload of so many texts; raises InputError if none is so large."""
        from offplan.cli.planning import read_workload

        numbers = {**dict(super().read_workload()), "batch": self.batch}
        return read_workload(options.WorkloadOptions(**numbers))


AS_USUAL = ModelOptions()
SERVED_AS_USUAL = ServedModelOptions()
PlanFile = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="Of a MODEL: write its plan to this file, too."),
]


def open_to_run(
    named: str,
    elsewhere: str | None,
    given: ModelOptions,
    *,
    output: Path | None = None,
    force: bool = False,
    goal: Mapping[str, Any] | None = None,
    device: str | None = None,
    dummy_weights: bool = False,
    trust_remote_code: bool = False,
) -> "tuple[Plan, Model]":
    """Return the plan of a file, or of a model that is planned for this machine, and its model.

    ``elsewhere`` is where a plan's model is to be read. ``output`` is a file for a model's plan.
    ``goal`` are fields of ``Goal`` that take the place of the plan's, where they are true.

    Raises what ``open_plan_to_run`` and ``plan_to_run`` raise, and InputError for options that are
    of no use.
    """
    from offplan.cli.planning import open_plan_to_run, save_plan
    from offplan.library.model_plans import names_model

    granted = {"trust_remote_code": trust_remote_code}
    if not names_model(named):
        for name, value in {**given.of_plans, "output": output}.items():
            if value is not None:
                raise InputError(f"--{name} is for a model: {named} is a plan; leave it out")
        return open_plan_to_run(Path(named), elsewhere, goal, **granted)
    if elsewhere is not None:
        raise InputError(f"--model is for a plan: {named} is a model itself; leave one of them out")
    check_writable(output, force=force)
    plan, model = _plan_model(named, given, goal, device, not dummy_weights, trust_remote_code)
    if output is not None:
        save_plan(output, plan, force=force)
    return plan, model


def _plan_model(
    named: str,
    given: ModelOptions,
    goal: Mapping[str, Any] | None,
    device: str | None,
    needs_weights: bool,
    trust_remote_code: bool,
) -> "tuple[Plan, Model]":
    from offplan.checkpoint.open import open_model
    from offplan.library.model_plans import ModelQuestion, find_id, plan_to_run

    source = find_id(named)
    if source != named:
        print_note(f"{named} is {source} on the Hub")
    model = open_model(
        source,
        trust_remote_code=trust_remote_code,
        on_progress=ProgressBar("reading headers"),
    )
    workload = given.read_workload()
    asked = ModelQuestion(model, workload, given.machine, device, given.gpu_memory, goal or {})

    def confirm(num_bytes: int) -> None:
        if not given.yes:
            _ask_to_download(model.source, num_bytes)

    with waiting("planning"):
        plan = plan_to_run(
            asked,
            show=_show,
            confirm=confirm if needs_weights else None,
            on_stage=ProgressBar,
        )
    return plan, model


def _show(found: "Analysis | Plan") -> None:
    """Print what was found to stderr: stdout is for texts."""
    from offplan.plan import Plan
    from offplan.report.answer import describe_speed, render_answer

    if isinstance(found, Plan):
        print_note(f"planned before: {describe_speed(found)}")
        return
    print_result({}, *render_answer(found), json=False, file=sys.stderr)


def _ask_to_download(source: str, num_bytes: int) -> None:
    """Return if the user agrees to a download; raises InputError where no terminal can be asked."""
    from huggingface_hub import constants

    told = f"{source}: {format_bytes(num_bytes)} are to be downloaded to {constants.HF_HUB_CACHE}"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InputError(f"{told}, and there is no terminal to ask at: add --yes")
    print(f"offplan: {told}. Go on? [Y/n] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("", "y", "yes"):
        raise OffplanError("nothing was downloaded")
