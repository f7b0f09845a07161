"""From command-line options to the planner's arguments."""

import ctypes
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from offplan.cli.options import Store
from offplan.cli.output import Progress, print_note
from offplan.errors import InputError
from offplan.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from offplan.checkpoint.model import Model
    from offplan.machine.profile import MachineProfile
    from offplan.plan import Budget, Workload


MOST_TIMED = 8192
"""Tokens of the largest chunk whose layers are timed; a larger one's times are scaled from it."""


@dataclass(frozen=True)
class Wishes:
    """What the user asked for, checked before anything is read or measured."""

    workload: "Workload"
    gpu_memory_bytes: int | None
    host_memory_bytes: int | None

    def budget(self, machine: "Found") -> "Budget":
        """Fill in what the machine has where the user set no limit."""
        from offplan.plan import Budget

        gpu, host = self.gpu_memory_bytes, self.host_memory_bytes
        most = machine.profile.gpu_memory.value
        if gpu is None:
            gpu = machine.gpu_memory_bytes
        elif gpu > most:
            print_note(
                f"{machine.profile.name} has {format_bytes(most)}: planning for that instead of "
                f"{format_bytes(gpu)}"
            )
        if host is None and machine.profile.host_memory is not None:
            host = machine.profile.host_memory.value
        return Budget(gpu_memory=gpu, host_memory=host)


def read_wishes(
    workload: "Workload", gpu_memory: str | None = None, host_memory: str | None = None
) -> Wishes:
    """Parse the sizes; raises InputError."""
    return Wishes(
        workload,
        None if gpu_memory is None else parse_bytes(gpu_memory),
        None if host_memory is None else parse_bytes(host_memory),
    )


def read_workload(batch: int, prompt_tokens: int, output_tokens: int, context: int) -> "Workload":
    """Check the workload; raises InputError where it contradicts itself."""
    from pydantic import ValidationError

    from offplan.plan import Workload
    from offplan.records import explain

    try:
        return Workload(
            batch=batch, prompt_tokens=prompt_tokens, output_tokens=output_tokens, context=context
        )
    except ValidationError as error:
        where, why = explain(error)
        raise InputError(f"--{where.replace('_', '-')}: {why}" if where else why) from None


def has_gpu() -> bool:
    """Whether a CUDA device can be measured; imports torch only where there is a driver."""
    driver = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        ctypes.CDLL(driver)
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


def unmeasured() -> str:
    """Say what is missing for a plan where there is neither a GPU nor a profile."""
    from offplan.machine.profile import shipped_profiles

    return (
        "no GPU here and no --machine: link bandwidth and compute were not measured, so nothing "
        f"is planned; --machine takes a profile's file or one of {', '.join(shipped_profiles())}"
    )


@dataclass(frozen=True)
class Found:
    """A machine to plan for, and how much of it is free."""

    profile: "MachineProfile"
    gpu_memory_bytes: int

    def with_store(self, store: Store) -> "Found":
        """Plan with this store; raises ProfileError where its link is not known."""
        if store is Store.HOST:
            return self
        return replace(self, profile=self.profile.with_peer_store())


def find_machine(
    name: str | None, model: "Model", workload: "Workload", store: Store
) -> "Found | None":
    """Read the named profile, or measure this machine; None where there is no GPU to measure.

    The host's other GPUs are measured only where the ``store`` is one of them. Raises ProfileError.
    """
    if name is not None:
        from offplan.machine.profile import load_profile

        profile = load_profile(name)
        return Found(profile, profile.gpu_memory.value)
    if not has_gpu():
        return None
    return measure_here(model, workload, with_others=store is Store.PEER)


def measure_here(
    model: "Model", workload: "Workload", *, afresh: bool = False, with_others: bool = False
) -> "Found":
    """Measure the link, and at the workload's shapes each kind of layer's compute and reads.

    Times of layers come from the cache where nothing they depend on has changed, unless all is to
    be measured ``afresh``. ``with_others`` also uses the host's other GPUs.
    """
    import torch
    from huggingface_hub import constants

    from offplan.machine.layer_cache import LayerTimeCache
    from offplan.machine.measure import measure_machine
    from offplan.planner.space import prefill_chunks
    from offplan.runtime.measuring.layer_key import layer_times_key
    from offplan.runtime.measuring.layer_times import measure_layer_times, measure_model_reads
    from offplan.runtime.memory.gpu_memory import bytes_in_use

    # asked before this process has a context on the card, which the budget is to include
    used = bytes_in_use(torch.device("cuda"))
    profile = measure_machine(Progress("measuring the machine"), with_others=with_others)
    chunks = prefill_chunks(min(workload.prompt_tokens, MOST_TIMED))
    key = layer_times_key(model, workload, chunks)
    kept = LayerTimeCache(Path(constants.HF_HOME), key)
    times = None if afresh else kept.load()
    if times is None:
        times = measure_layer_times(model, workload, chunks, Progress("measuring the layers"))
        kept.store(times)
    rate, progress = profile.uva.value, Progress("measuring reads in place")
    reads = measure_model_reads(model, workload, chunks, rate, progress)
    profile = profile.model_copy(update={"layer_times": times, "in_place_reads": reads})
    return Found(profile, profile.gpu_memory.value - used)
