"""Machines to plan for: one that a profile describes, or the one at hand, measured."""

import ctypes
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from offplan.capabilities.goal import Asked
from offplan.checkpoint.model import Model
from offplan.choices import DeviceName
from offplan.costs.corrections import note_estimates
from offplan.engines.runner import find_runner
from offplan.errors import CheckpointError, OffplanError, Topic
from offplan.files import StrPath
from offplan.held.held import find_recoding, hold, hold_counted
from offplan.held.stage import Stage
from offplan.hostcores.build import check_platform, describe_refusal, load_code
from offplan.hostcores.coordinator import choose_cores
from offplan.hostcores.library import find_instruction_sets
from offplan.hostmem.limits import core_quota
from offplan.library.runnable import find_way
from offplan.machine.name import MachineName, parse_name
from offplan.machine.profile import LayerTime, MachineProfile, load_profile
from offplan.plan import Goal, Workload
from offplan.progress import Stages, silent
from offplan.stores import STORES, StoreName

MOST_TIMED = 8192
"""Tokens of the largest chunk whose layers are timed; a larger one's times are scaled from it."""


@dataclass(frozen=True)
class Machine:
    """A machine to plan for."""

    profile: MachineProfile
    free_gpu_bytes: int
    """Bytes of GPU memory that a process can have: all of it, or what nobody else has taken."""
    profile_name: str | None = None
    """The name or file that the profile was read from; None if it was measured."""
    skipped: tuple[str, ...] = ()
    """Figures that were to be measured and were not, and why."""
    no_cores: str | None = None
    """Why the host's cores are to multiply nothing; None if they may."""


_OF_CORES = ("cores", "cores_beside_copies", "host_reads", "cores_round_trip")
"""Figures of a profile that are of the host's cores."""
_SKIPPED = "the host's cores: "


def check_threads(host_threads: int) -> None:
    """Raise OffplanError if the host's cores cannot compute with so many threads."""
    check_platform()
    choose_cores(os.sched_getaffinity(0), num_threads=host_threads, quota=core_quota())


def check_cores(host_threads: int | None) -> None:
    """Raise OffplanError if the host's cores cannot multiply here, with so many threads if said.

    Their library is compiled if it is not there yet, as ``run`` would.
    """
    find_instruction_sets(load_code())
    if host_threads is not None:
        check_threads(host_threads)


def load_machine(name: StrPath) -> Machine:
    """Take the machine that a profile describes, its GPU memory free but for the display's.

    ``name`` is that of a profile that comes with offplan, such as ``h200-pcie5`` or ``rtx4090``, or
    a file that ``offplan measure`` wrote. Figures may be changed behind it, as in
    ``rtx4090,pcie=4x8,ram=64GiB``. Raises ProfileError if there is none, or it is not valid.
    """
    named = parse_name(os.fspath(name))
    profile = load_profile(named)
    free = max(1, profile.gpu_memory.value - profile.display_bytes)
    return Machine(profile, free, str(named), no_cores=find_obstacle(profile, named))


def find_obstacle(profile: MachineProfile, named: MachineName) -> str | None:
    """Find why the host's cores of a named machine are to multiply nothing; None if they may."""
    return profile.why_no_cores or named.why_no_cores


def measure_here(
    model: Model | None = None,
    workload: Workload | None = None,
    *,
    device: DeviceName = "cuda",
    afresh: bool = False,
    with_others: bool = False,
    with_cores: bool = False,
    host_threads: int | None = None,
    on_stage: Stages = silent,
    **goal: Any,
) -> Machine:
    """Measure this machine on its current CUDA device, and a model's layers at a workload.

    Without a ``model`` only the machine is measured: link, memory, matrix products. With one, each
    kind of its layers is timed too, on random weights at the shapes of ``workload`` (the default
    one if left out). ``goal`` are fields of ``Goal``: layers are also timed recoded, if it lets
    plans hold them so. Layers are timed in the passes that the goal names, or in those that run the
    model. How often products read weights in place is measured, too.
    Times of layers are kept on disk, and found there where nothing that they depend on has changed,
    unless all is to be measured ``afresh``.
    ``with_others`` also uses the host's other GPUs: the link while several copy at once, and a
    second one's memory as a store. ``with_cores`` has the host's cores multiply the model's weights
    by ``host_threads`` threads, one for each of most physical cores if left out. If the cores
    cannot, their figures stay out. The ``device`` ``cpu`` is measured as one that plays GPU, to try
    offplan without any. ``on_stage`` hears what begins.

    Takes a minute or so, nearly all of the GPU's memory in turns, and synchronises the device.
    Raises OffplanError if there is no CUDA device, CheckpointError for a model that cannot run
    on such texts, and MemoryLimitError.
    """
    if device == "cuda":
        require_gpu()
    if host_threads is not None:
        check_threads(host_threads)
    workload, asked = workload or Workload(), Goal.from_arguments(**goal)
    held = [] if model is None else _hold_timed(model, workload, asked)
    import torch

    from offplan.machine.measure import measure_machine
    from offplan.machine.measure_cpu import measure_cpu
    from offplan.runtime.memory.gpu_memory import bytes_in_use, has_context

    # asked before this process has a context on the card, which the budget is to include
    used, progress = bytes_in_use(torch.device(device)), on_stage("measuring the machine")
    if device == "cpu":
        profile = measure_cpu(progress)
    else:
        # not in the overhead, too: whoever asked without nvidia-smi has a context now
        others = 0 if has_context(torch.device(device)) else used
        profile = measure_machine(progress, with_others=with_others, bytes_of_others=others)
    if held:
        profile = _add_model(profile, held, workload, device, on_stage, afresh=afresh)
    skipped: tuple[str, ...] = ()
    if with_cores:
        # their figures are taken of layers that are built for offplan's own passes
        own = held[0] if held and held[0].way.is_own else None
        profile, skipped = _add_cores(profile, own, device, host_threads, on_stage)
    return Machine(profile, profile.gpu_memory.value - used, skipped=skipped)


def _hold_timed(model: Model, workload: Workload, goal: Goal) -> list[Stage]:
    """Hold a model in the ways that are timed: as it is stored, and as plans may hold it besides.

    Raises CheckpointError for a model that cannot run on texts of the workload's context.
    """
    way = find_way(model, goal, workload.context)
    if not way.is_own:
        return [hold_counted(model, way)]
    stored = hold(model)
    recoding = find_recoding(stored, goal.for_other_weights(), find_runner(goal.engine))
    return [stored] if recoding is None else [stored, hold(model, recoding)]


def _add_model(
    profile: MachineProfile,
    held: Sequence[Stage],
    workload: Workload,
    device: DeviceName,
    on_stage: Stages,
    *,
    afresh: bool,
) -> MachineProfile:
    """Add to a profile what a model's layers take on its machine, the one at hand."""
    from offplan.planner.space import prefill_chunks
    from offplan.runtime.measuring.layer_cache import LAYER_TIMES, layer_times_key
    from offplan.runtime.measuring.layer_times import measure_layer_times, measure_model_reads
    from offplan.runtime.measuring.pass_times import measure_pass_times

    chunks = prefill_chunks(min(workload.prompt_tokens, MOST_TIMED), workload.batch)
    is_own = held[0].way.is_own
    chunks = chunks if is_own else chunks[:1]  # plans have other passes read prompts whole
    measure = measure_layer_times if is_own else measure_pass_times
    progress = on_stage("measuring the layers")
    if device == "cpu":  # which has other work, too: its times are not kept
        times = measure(held[0], workload, chunks, progress, device=device)
        times = note_estimates(profile, held, times)
        return profile.model_copy(update={"layer_times": times})
    known: dict[str, list[LayerTime]] = {}
    for each in held:
        key = layer_times_key(each, workload, chunks)
        found = None if afresh else LAYER_TIMES.find(key)
        if found is None:
            found = measure(each, workload, chunks, progress)
            LAYER_TIMES.keep(key, tuple(found))
        # what is the same either way was measured first as it is stored
        for time in [time for time in found if time.layer not in known]:
            known.setdefault(time.layer, []).append(time)
    times = note_estimates(profile, held, tuple(chain(*known.values())))
    if not is_own:
        return profile.model_copy(update={"layer_times": times})
    rate, progress = profile.uva.value, on_stage("measuring reads in place")
    reads = measure_model_reads(held[0], workload, chunks, rate, progress)
    return profile.model_copy(update={"layer_times": times, "in_place_reads": reads})


def _add_cores(
    profile: MachineProfile,
    stage: Stage | None,
    device: DeviceName,
    host_threads: int | None,
    on_stage: Stages,
) -> tuple[MachineProfile, tuple[str, ...]]:
    """Add to a profile what the host's cores read of a model's weights that they multiply.

    Also returns what could not be measured, and why.
    """
    import torch

    from offplan.runtime.measuring.cores import measure_cores

    progress = on_stage("measuring the host's cores")
    skipped: tuple[str, ...] = ()
    try:
        figures = measure_cores(stage, torch.device(device), host_threads)
    except OffplanError as error:
        if host_threads is not None:
            raise
        figures = {}  # plans without them need none
        skipped = (f"{_SKIPPED}{describe_refusal(error)}",)
    else:
        missing = [name for name in _OF_CORES if name not in figures]
        if missing:
            why = "that takes a GPU" if device == "cpu" else "copies ended before the cores did"
            skipped = (f"{', '.join(missing)}: {why}",)
    if progress is not None:
        progress(1, 1)
    return MachineProfile.model_validate(profile.model_dump() | figures), skipped


def add_kept_cores(machine: Machine, model: Model, on_stage: Stages = silent) -> Machine:
    """Add what the host's cores read of a model's weights, measured on this hardware now or before.

    The weights are bf16 experts of a large model, and of one that the cores cannot multiply.
    Figures that other processes disturb are not kept: the next answer measures them again. If the
    cores cannot multiply, ``Machine.no_cores`` tells why.
    """
    import torch

    from offplan.runtime.measuring.cores import is_small
    from offplan.runtime.measuring.cores_cache import HOST_CORES, cores_key

    try:
        check_platform()  # first: other systems do not say which cores they have
    except OffplanError as error:
        return replace(machine, no_cores=describe_refusal(error))
    skipped: tuple[str, ...] = ()
    missing = []
    for stage in (*filter(is_small, [hold(model)]), None):
        key = cores_key(torch.device("cuda"), stage)
        if (figures := HOST_CORES.find(key)) is not None:
            found = machine.profile.model_dump() | dict(figures)
            profile = MachineProfile.model_validate(found)
        else:
            missing.append(key)
            profile, skipped = _add_cores(machine.profile, stage, "cuda", None, on_stage)
        if profile.cores is None:
            continue
        if profile.cores.basis == "measured":  # not beside busy processes
            for each in missing:  # that of a model which was refused has what stands in
                HOST_CORES.keep(each, profile.model_dump(include={*_OF_CORES, "host_threads"}))
        return replace(machine, profile=profile)
    return replace(machine, no_cores=skipped[0].removeprefix(_SKIPPED))


def find_machine(
    name: str | None,
    model: Model,
    workload: Workload,
    *,
    store: StoreName = "host",
    goal: Goal | None = None,
    on_stage: Stages = silent,
) -> Machine | None:
    """Take the machine of this profile, else the one at hand; None if that has no GPU.

    The host's other GPUs are measured only where the ``store`` is one of them, or the plan is for
    several. Layers are timed as the ``goal`` has them. The host's cores are measured where plans
    may have them multiply, once for this hardware and such layers. Raises what ``load_machine``
    and ``measure_here`` raise.
    """
    if name is not None:
        return load_machine(name)
    if not has_gpu():
        return None
    goal = goal or Goal()
    others = STORES[store].num_gpus > 1 or goal.ranks.tensor > 1
    measure = partial(measure_here, with_others=others, on_stage=on_stage)
    chosen = goal.choose(Asked(model, workload.batch, store), by_others=not goal.is_own)
    try:
        machine = measure(model, workload, **{**dict(goal), "host_threads": None})
    except CheckpointError:  # what cannot run cannot be timed: its compute is estimated
        machine = measure()
    has_cores = chosen.get("host_cores", goal.host_cores)
    return add_kept_cores(machine, model, on_stage) if has_cores else machine


def has_gpu() -> bool:
    """Return True if a CUDA device can be measured; imports torch only where there is a driver."""
    driver = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        ctypes.CDLL(driver)
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


def require_gpu() -> None:
    """Raise OffplanError if there is no CUDA device to measure."""
    if not has_gpu():
        raise OffplanError(
            "no CUDA device to measure here: measure where there is one, and name the profile "
            "as `machine` here; or try offplan with `device=cpu`, which plays GPU",
            topic=Topic.NO_GPU,
        )


def why_unmeasured() -> str:
    """Say what is missing for a plan where there is neither a GPU nor a profile."""
    return (
        "no GPU here and no `machine`: link bandwidth and compute were not measured, so nothing "
        "is planned; name a machine, as in `machine=rtx4090` (`offplan machines` lists them), or a "
        "profile's file"
    )
