"""``offplan bench``: measure a plan against its prediction, its bound and other ways to run it."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offplan.cli import options
from offplan.cli.options import flattens
from offplan.cli.output import ProgressBar, check_stdout, print_note, print_result, waiting

if TYPE_CHECKING:  # it imports torch
    from offplan.runtime.session import Session


@flattens
def bench(
    plan: options.Plan,
    vs: Annotated[
        str | None,
        typer.Option(
            help="Also measure resident, serial, accelerate, llama.cpp: names with commas between."
        ),
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option("--gguf", help="A GGUF file of the model, for llama.cpp.")
    ] = None,
    llama_bench: Annotated[
        Path | None,
        typer.Option("--llama-bench", help="llama.cpp's program. [default: that of PATH]"),
    ] = None,
    model: options.LocalModel = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Decode steps timed in each request. [default: 20 if they fit]"),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Requests timed.")] = 5,
    record_routing: options.RecordRouting = None,
    force: options.Force = False,
    goal: options.RunGoal = options.AS_PLANNED,
    trust_remote_code: options.TrustRemoteCode = False,
    dummy_weights: options.DummyWeights = False,
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Measure a plan's workload: time, bytes moved, stalls and memory, beside the prediction."""
    from offplan.cli.planning import open_plan_to_run
    from offplan.cli.routing import check_file, save_routing

    # before torch is imported, which takes seconds: the mistakes that need none
    check_stdout()
    check_file(record_routing, force=force)
    asked = plan, model, asdict(goal)
    loaded, found = open_plan_to_run(*asked, trust_remote_code=trust_remote_code)

    with waiting("starting torch"):
        from offplan.cli.threads import settle_threads
        from offplan.library.benchmark import bench_plan
        from offplan.report.bench import render_bench
        from offplan.report.payload import bench_payload
        from offplan.runtime.device import find_device

    settle_threads(find_device(device))
    names = [] if vs is None else [name.strip().lower() for name in vs.split(",")]

    def record(session: "Session") -> None:
        assert record_routing is not None
        print_note("the routing recorded is that of random tokens: `offplan run` records texts")
        save_routing(session, loaded, record_routing, force=force)

    result = bench_plan(
        loaded,
        others=list(dict.fromkeys(names)),  # each once
        model=found,
        num_steps=steps,
        num_repeats=repeats,
        device=device,
        dummy_weights=dummy_weights,
        on_stage=ProgressBar,
        tell=print_note,
        record=None if record_routing is None else record,
        gguf=gguf,
        llama_bench=llama_bench,
    )
    ran = result.ran
    print_result(bench_payload(ran, result), *render_bench(ran, result), json=json)
