"""``offplan bench``: measure a plan against its prediction, its bound and other ways to run it."""

from typing import TYPE_CHECKING, Annotated

import typer

from offplan.cli.options import (
    DeviceOption,
    DummyWeightsOption,
    JsonOption,
    LocalModelOption,
    PlanArgument,
)
from offplan.cli.output import Progress, print_json, print_report
from offplan.errors import InputError, OffplanError

if TYPE_CHECKING:
    from offplan.report.bench import BenchResult
    from offplan.runtime.measuring.versus import Bench

DEFAULT_STEPS = 20


def bench(
    plan: PlanArgument,
    vs: Annotated[
        str | None,
        typer.Option(help="Also measure resident, serial, accelerate: names with commas between."),
    ] = None,
    model: LocalModelOption = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Decode steps timed in each request. [default: 20 if they fit]"),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Requests timed.")] = 5,
    dummy_weights: DummyWeightsOption = False,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Measure a plan's workload: time, bytes moved, stalls and memory, beside the prediction."""
    from offplan.cli.models import find_weights, open_planned_model
    from offplan.plan import load_plan

    loaded = load_plan(plan)
    found = open_planned_model(loaded, model)

    from offplan.cli.workload import find_device, random_prompt
    from offplan.report.bench import render_bench
    from offplan.report.payload import bench_payload
    from offplan.runtime.measuring.bench import check_room
    from offplan.runtime.measuring.versus import Bench
    from offplan.runtime.memory.gpu_memory import bytes_in_use
    from offplan.runtime.session import NUM_WARMUP_STEPS

    workload = loaded.workload
    room = workload.context - workload.prompt_tokens - NUM_WARMUP_STEPS
    num_steps = steps or max(1, min(DEFAULT_STEPS, room))
    check_room(workload.context, workload.prompt_tokens, num_steps)
    names = _read_ways(vs)
    chosen = find_device(device)
    setup = Bench(
        model=found,
        offload=loaded.offload,
        context=workload.context,
        device=chosen,
        folder=None if dummy_weights else find_weights(found),
        prompt=random_prompt(loaded, found),
        num_steps=num_steps,
        num_repeats=repeats,
        used_before=bytes_in_use(chosen),
    )
    result = _measure(setup, names)
    if json:
        print_json(bench_payload(loaded, result))
    else:
        print_report(*render_bench(loaded, result))


def _read_ways(vs: str | None) -> list[str]:
    """Check what the plan is to be compared with, before anything is loaded."""
    from offplan.runtime.measuring.accelerated import require_accelerate
    from offplan.runtime.measuring.versus import WAYS

    names = [] if vs is None else list(dict.fromkeys(name.strip() for name in vs.split(",")))
    unknown = [name for name in names if name not in WAYS]
    if unknown:
        raise InputError(f"--vs {unknown[0]!r} is not a way to run a plan: name {', '.join(WAYS)}")
    if "accelerate" in names:
        require_accelerate()
    return names


def _measure(setup: "Bench", names: list[str]) -> "BenchResult":
    """Measure the plan, then the other ways; one that fails does not take the others with it."""
    from offplan.cli.workload import device_name
    from offplan.hostmem.limits import peak_host_bytes
    from offplan.report.bench import BenchResult
    from offplan.runtime.measuring.versus import WAYS, Measurement, measure_plan

    # first, so that the peaks that only grow are the plan's own
    plan = measure_plan(setup, Progress("loading"))
    host_bytes = peak_host_bytes()
    others: dict[str, Measurement | str] = {}
    for name in names:
        try:
            others[name] = WAYS[name](setup, Progress(f"loading, {name}"))
        except OffplanError as error:
            others[name] = " ".join(str(error).split())
    return BenchResult(
        device=device_name(setup.device),
        batch=setup.prompt.shape[0],
        prompt_tokens=setup.prompt.shape[1],
        num_steps=setup.num_steps,
        num_repeats=setup.num_repeats,
        plan=plan,
        host_bytes=host_bytes,
        others=others,
    )
