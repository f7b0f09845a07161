"""``offplan measure``: this machine's profile, for plans made anywhere."""

import sys
from typing import Annotated

import typer

from offplan.choices import DeviceName
from offplan.cli import options
from offplan.cli.options import flattens
from offplan.cli.output import (
    STANDARD,
    ProgressBar,
    check_stdout,
    check_writable,
    print_note,
    print_result,
    save_file,
)
from offplan.errors import InputError


@flattens
def measure(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Also time this model's layers, at the workload."),
    ] = None,
    asked: options.WorkloadOptions = options.CHAT,
    revision: options.Revision = None,
    device: Annotated[
        DeviceName,
        typer.Option(
            **options.choice(DeviceName), help="cpu: to try offplan where there is no GPU."
        ),
    ] = "cuda",
    goal: options.TimedOptions = options.ALL_TIMED,
    trust_remote_code: options.TrustRemoteCode = False,
    host_threads: options.HostThreads = None,
    share: Annotated[
        bool,
        typer.Option(
            "--share", help="Print what others can use: no layers, nor this host's memory."
        ),
    ] = False,
    output: options.Output = None,
    force: options.Force = False,
    json: options.Json = False,
) -> None:
    """Measure this machine and print its profile; plans can be made from it elsewhere.

    Everything is measured afresh, on the current GPU and, for what they share, the host's others.
    With --device cpu the CPU plays GPU, and copies within host memory are its link. The host's
    cores multiply the model's weights, if there is a C++ compiler.
    """
    from offplan.checkpoint.open import open_model
    from offplan.cli.planning import read_workload
    from offplan.cli.threads import settle_threads
    from offplan.library.machines import measure_here, require_gpu
    from offplan.machine.profile import dump_profile
    from offplan.report.machine import machine_payload, render_machine, shared_profile

    if output == STANDARD:  # where it goes anyway
        output = None
    check_stdout()
    check_writable(output, force=force)
    if device == "cuda":
        require_gpu()
    if asked.context == options.LONGEST:
        raise InputError("--context max is for plans: give the number of tokens to measure with")
    workload = read_workload(asked)
    timed = None
    if model is not None:
        timed = open_model(
            model,
            revision=revision,
            trust_remote_code=trust_remote_code,
            on_progress=ProgressBar("reading headers"),
        )
    settle_threads(device)
    machine = measure_here(
        timed,
        workload,
        device=device,
        afresh=True,
        with_others=True,
        with_cores=True,
        host_threads=host_threads,
        **vars(goal),
        on_stage=ProgressBar,
    )
    profile = shared_profile(machine.profile) if share else machine.profile
    for each in machine.skipped:
        print_note(f"not measured: {each}")
    if output is not None:
        save_file(output, dump_profile(profile), force=force)
    if json or output is not None:
        print_result({"machine": machine_payload(profile)}, render_machine(profile), json=json)
    else:
        sys.stdout.write(dump_profile(profile))
