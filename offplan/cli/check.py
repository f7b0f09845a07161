"""``offplan check``: whether plans still hold, and could run here and now."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from offplan.cli import options
from offplan.cli.output import ProgressBar, print_result
from offplan.errors import DriftError, InfeasibleError, InputError, OffplanError


def check(
    plans: Annotated[
        list[Path], typer.Argument(metavar="PLAN...", help="Plan files, or folders of them.")
    ],
    model: options.LocalModel = None,
    file_only: Annotated[
        bool,
        typer.Option("--file-only", help="Leave this machine and the network out: for hooks."),
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine's link, too.")
    ] = False,
    weights: Annotated[
        bool,
        typer.Option(
            "--weights", help="Read all weights once, and compare their SHA-256 with those known."
        ),
    ] = False,
    record_weights: Annotated[
        bool,
        typer.Option(
            "--record-weights",
            help="Do so, and write the SHA-256 beside the plan, as PLAN.weights.sha256.",
        ),
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail where something could not be compared.")
    ] = False,
    engine: Annotated[
        str | None,
        options.take_engine(
            help="Check that this engine does what was exported to it: vllm, vllm-worker, sglang."
        ),
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

    Exits with 4 if something is not as a plan has it (drift), else with 3 if memory lacks. Else it
    exits with 2 if `run` or the engine refuses the plan, or a file cannot be read. Without a GPU,
    and with --file-only, all is checked but this machine; with --engine, a running engine in its
    place. With --strict it exits with 1 if all else holds and something could not be compared.
    --file-only does not ask the Hub: of a model that is not on this disk it checks the plan's own
    figures and its profile.
    """
    from offplan.cli.planning import open_plan
    from offplan.library.machines import require_gpu
    from offplan.plan import load_plan
    from offplan.report.diff import MARKS, findings_payload, render_findings, worst_verdict
    from offplan.upkeep.checking import check_plan
    from offplan.upkeep.engine_start import check_start, read_start
    from offplan.upkeep.figures import Finding

    plans = [path for given in plans for path in _expand(given)]
    if measure and file_only:
        raise InputError("--file-only leaves this machine out: leave --measure out, too")
    if model is not None and len(plans) > 1:
        raise InputError("--model is where one plan's model is read: name one plan")
    if (engine is None) != (log is None and url is None) or (log is not None and url is not None):
        raise InputError("--engine wants its --log or its --url, and neither goes without it")
    if engine is not None and (len(plans) > 1 or measure):
        raise InputError("--engine checks one plan, and measures nothing: leave the others out")
    if measure:
        require_gpu()
    errors: dict[str, OffplanError] = {}

    def check_file(path: Path) -> tuple[Finding, ...]:
        """Check a plan; what cannot be read is one result of several."""
        try:
            return check_plan(
                load_plan(path, in_any_budget=True),
                model=model,
                with_machine=not file_only and engine is None,
                with_network=not file_only,
                measure=measure,
                weights=weights or record_weights,
                record_weights=record_weights,
                on_stage=ProgressBar,
            )
        except OffplanError as error:
            if len(plans) == 1:
                raise
            errors[str(path)] = error
            return (Finding("plan", "error", str(error)),)

    found = {str(path): check_file(path) for path in plans}
    if engine is not None:
        [(name, findings)] = found.items()
        startup = read_start(engine, log, url)
        found[name] = (*findings, *check_start(*open_plan(plans[0], model), engine, startup))
    payload = {"plans": [findings_payload(*each, strict=strict) for each in found.items()]}
    print_result(payload, *(render_findings(*each) for each in found.items()), json=json)
    named = max((error.exit_code for error in errors.values()), default=0)
    kinds = {
        "drift": DriftError,
        "infeasible": InfeasibleError,
        "refused": InputError,
        "error": InputError if named == InputError.exit_code else OffplanError,
        "unknown": OffplanError,
    }
    worst = {name: worst_verdict(each, strict=strict) for name, each in found.items()}
    failed = {kind: [name for name in worst if worst[name] == kind] for kind in kinds}
    told = {
        kind: f"{MARKS[kind] if kind == 'unknown' else kind}: {', '.join(of)}"
        for kind, of in failed.items()
        if of
    }
    if told:
        raise kinds[next(iter(told))]("; ".join(told.values()))


def _expand(given: Path) -> list[Path]:
    """Return the plans of a folder; the path itself where it is none, or has a model.

    Raises InputError for a folder that has no plan.
    """
    from offplan.kinds import find_plans

    try:
        plans = find_plans(given) if given.is_dir() else [given]
        if plans or (given / "config.json").exists():
            return plans or [given]
        below = [each for each in sorted(given.iterdir()) if each.is_dir() and find_plans(each)]
        help_ = f"name {shlex.quote(str(below[0]))}" if below else "name a plan's file"
        raise InputError(
            f"{given}: found a folder without a plan (*.yaml that `offplan plan -o` wrote), "
            f"expected plans; {help_}"
        )
    except OSError as error:
        raise InputError(
            f"the folder {given} cannot be read ({error.strerror}): name its plans"
        ) from None
