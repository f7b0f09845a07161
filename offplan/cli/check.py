"""``offplan check``: whether plans still hold, and could run here and now."""

from pathlib import Path
from typing import Annotated

import typer

from offplan.cli import options
from offplan.cli.output import ProgressBar, print_result
from offplan.errors import DriftError, InfeasibleError, InputError


def check(
    plans: Annotated[list[Path], typer.Argument(metavar="PLAN...", help="Plan files.")],
    model: options.LocalModel = None,
    file_only: Annotated[
        bool,
        typer.Option("--file-only", help="Leave this machine out: for hooks, and for CI."),
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine's link, too.")
    ] = False,
    engine: Annotated[
        str | None,
        options.engine(help="Check that this engine does what was exported to it: vllm or sglang."),
    ] = None,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What the engine wrote when it started.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Where the engine serves: it is asked for its flags.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Check plans against their models, their profiles, their own decisions and this machine.

    Exits with 4 where something is not as a plan has it (drift), else with 3 where memory lacks.
    Without a GPU, and with --file-only, all is checked but this machine; with --engine, a running
    engine in its place.
    """
    from offplan.cli.planning import open_plan
    from offplan.library.machines import require_gpu
    from offplan.plan import load_plan
    from offplan.report.check import findings_payload, render_findings, worst_verdict
    from offplan.upkeep.checking import check_plan
    from offplan.upkeep.engine_start import check_start, read_start

    if measure and file_only:
        raise InputError("--file-only leaves this machine out: leave --measure out, too")
    if model is not None and len(plans) > 1:
        raise InputError("--model is where one plan's model is read: name one plan")
    if (engine is None) != (log is None and url is None) or (log is not None and url is not None):
        raise InputError("--engine wants its --log or its --url, and neither goes without it")
    if engine is not None and (len(plans) > 1 or measure):
        raise InputError("--engine checks one plan, and measures nothing: leave the others out")
    loaded = [load_plan(path, in_any_budget=True) for path in plans]
    if measure:
        require_gpu()
    found = {
        str(path): check_plan(
            plan,
            model=model,
            with_machine=not file_only and engine is None,
            measure=measure,
            on_stage=ProgressBar,
        )
        for path, plan in zip(plans, loaded, strict=True)
    }
    if engine is not None:
        [(name, findings)] = found.items()
        startup = read_start(engine, log, url)
        found[name] = (*findings, *check_start(*open_plan(plans[0], model), engine, startup))
    payload = {"plans": [findings_payload(*each) for each in found.items()]}
    print_result(payload, *(render_findings(*each) for each in found.items()), json=json)
    for verdict, error in (("drift", DriftError), ("infeasible", InfeasibleError)):
        if failed := [name for name, each in found.items() if worst_verdict(each) == verdict]:
            raise error(f"{verdict}: {', '.join(failed)}")
