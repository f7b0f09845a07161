"""Ways to run one workload, measured alike: by the plan, and what the plan is compared with."""

from collections.abc import Callable
from dataclasses import replace

from offplan.plan import Offload
from offplan.progress import Stages, silent
from offplan.runtime.measuring.accelerated import bench_accelerate
from offplan.runtime.measuring.bench import Bench as Bench
from offplan.runtime.measuring.bench import Measurement as Measurement
from offplan.runtime.measuring.bench import bench_session
from offplan.runtime.measuring.timed_link import SerialLink, TimedLink
from offplan.runtime.memory.gpu_memory import bytes_in_use, return_memory
from offplan.runtime.session import Session


def measure_plan(bench: Bench, on_stage: Stages = silent) -> Measurement:
    """Run the plan as it stands. Raises what Session and ``bench_session`` raise."""
    return _measure(bench, bench.offload, TimedLink, on_stage, bench.record)


def measure_resident(bench: Bench, on_stage: Stages = silent) -> Measurement:
    """Run with every weight on the device: what compute alone takes."""
    everything = bench.offload.model_copy(update={"rules": (), "embeddings": "device"})
    return _measure(bench, everything, TimedLink, on_stage)


def measure_serial(bench: Bench, on_stage: Stages = silent) -> Measurement:
    """Run the plan's rules with one slot and no overlap: compute waits for each copy at once."""
    one_slot = bench.offload.model_copy(update={"prefetch_step": 1})
    return _measure(bench, one_slot, SerialLink, on_stage)


def measure_accelerate(bench: Bench, on_stage: Stages = silent) -> Measurement:
    """Run transformers' model with the plan's parameters on the host, by accelerate."""
    return_memory(bench.device)
    measured = bench_accelerate(bench, on_stage)
    # its allocator has given nothing back yet
    return replace(measured, gpu_bytes=bench.gpu_bytes(bytes_in_use(bench.device)))


WAYS: dict[str, Callable[[Bench, Stages], Measurement]] = {
    "resident": measure_resident,
    "serial": measure_serial,
    "accelerate": measure_accelerate,
}
"""Ways that a plan can be compared with, by its name."""


def _measure(
    bench: Bench,
    offload: Offload,
    link_type: type[TimedLink],
    on_stage: Stages,
    record: Callable[[Session], None] | None = None,
) -> Measurement:
    # of the way before: at its own end a frame, or an error on its way, still holds its session
    return_memory(bench.device)
    with Session(
        bench.model,
        offload,
        context=bench.context,
        device=bench.device,
        folder=bench.folder,
        way=bench.way,
        host_threads=bench.host_threads,
        record_routing=record is not None,
        on_progress=on_stage("loading"),
        wrap_link=lambda link: link_type(link, bench.device),
    ) as session:
        measured = bench_session(session, bench, on_stage("measuring"))
        if record is not None:
            record(session)
        return measured
