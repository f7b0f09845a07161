"""``offplan machines`` and ``offplan schema``: profiles that come along, and schemas of files."""

from typing import Annotated

import typer

from offplan.choices import FileKind
from offplan.cli import options
from offplan.cli.output import ProgressBar, print_json, print_result
from offplan.errors import InputError
from offplan.units import parse_bytes


@options.flattens
def machines(
    machine: Annotated[
        str | None,
        typer.Argument(
            metavar="[MACHINE]", help="Show this one, named as --machine takes it: rtx4090."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Sort them by tokens a second of this model, as analyze takes it."
        ),
    ] = None,
    ram: Annotated[
        int | None,
        typer.Option(
            parser=parse_bytes,
            metavar="TEXT",
            help="With --model: memory of each machine (64GiB). [default: as much as it takes]",
        ),
    ] = None,
    workload: options.WorkloadOptions = options.CHAT,
    json: options.Json = False,
) -> None:
    """List the machines that can be planned for, or show one with the source of each figure.

    With --model, list what each GPU gives for a model, the fastest first, and the RAM it takes.
    """
    if model is not None:
        if machine is not None:
            raise InputError(
                f"--model is for all machines; of one, offplan analyze {model} --machine {machine}"
            )
        _rank_machines(model, ram, workload, json=json)
        return
    if ram is not None or workload != options.CHAT:
        raise InputError("--ram and a workload are for --model: name a model, or leave them out")
    from offplan.machine.profile import load_profile, shipped_profiles
    from offplan.report.machine import machine_payload, render_machines, render_sources

    if machine is not None:
        shown = load_profile(machine)
        print_result({"machine": machine_payload(shown)}, render_sources(shown), json=json)
        return
    shipped = {name: load_profile(name) for name in shipped_profiles()}
    payload = {name: machine_payload(each) for name, each in shipped.items()} if json else {}
    print_result({"machines": payload}, render_machines(shipped), json=json)


def _rank_machines(
    source: str, ram: int | None, given: options.WorkloadOptions, *, json: bool
) -> None:
    from offplan.checkpoint.open import open_model
    from offplan.cli.planning import read_workload
    from offplan.lean import import_less
    from offplan.library.rankings import rank_machines
    from offplan.report.rankings import rankings_payload, render_ranked_machines

    import_less()
    workload = read_workload(given)
    opened = open_model(source, on_progress=ProgressBar("reading headers"))
    found = rank_machines(opened, workload, ram, ProgressBar("planning"))
    shown = render_ranked_machines(found, opened.source, workload)
    print_result({"machines": rankings_payload(found)}, shown, json=json)


@options.flattens
def models(
    machine: Annotated[
        str | None,
        typer.Option(help="Sort them by tokens a second on this machine: rtx4090,ram=64GiB."),
    ] = None,
    workload: options.WorkloadOptions = options.CHAT,
    json: options.Json = False,
) -> None:
    """List popular checkpoints, or which of them a machine runs, and how fast; asks no network.

    The list comes with offplan, with the facts that planning needs. `analyze` takes any model.
    """
    from offplan.checkpoint.popular import list_checkpoints
    from offplan.lean import import_less
    from offplan.report.rankings import (
        checkpoints_payload,
        rankings_payload,
        render_checkpoints,
        render_ranked_models,
    )

    listed = list_checkpoints()
    if machine is None:
        if workload != options.CHAT:
            raise InputError("a workload is for --machine: name a machine, or leave it out")
        payload = {"models": checkpoints_payload(listed)}
        print_result(payload, render_checkpoints(listed), json=json)
        return
    from offplan.cli.planning import read_workload
    from offplan.library.machines import load_machine
    from offplan.library.rankings import rank_models

    import_less()
    asked, loaded = read_workload(workload), load_machine(machine)
    found = rank_models(listed, loaded, asked, ProgressBar("planning"))
    shown = render_ranked_models(found, loaded.profile.name, asked)
    print_result({"models": rankings_payload(found)}, shown, json=json)


_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema(
    file: Annotated[
        FileKind, typer.Argument(**options.choice(FileKind), help="Which file's.")
    ] = "plan",
) -> None:
    """Print the JSON schema of a plan file, or of a machine profile, for editors."""
    from offplan.machine.profile import profile_schema
    from offplan.plan import Plan

    wanted = Plan.model_json_schema() if file == "plan" else profile_schema()
    print_json({"$schema": _DIALECT, **wanted})
