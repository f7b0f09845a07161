"""Weights and memory of a GPU of each stage, by a plan of several GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass

from offplan.costs.predict import derive_stage
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.plan import GPUMemoryPrediction, Plan


@dataclass(frozen=True)
class StageShare:
    """One GPU of a stage; those of a stage hold as much each."""

    stage: int
    """The stage, from 0 on."""
    num_ranks: int
    """GPUs of the stage."""
    num_layers: int
    """Layers of the stage, which rules count anew from 0 on."""
    loaded_bytes: int
    """Bytes of weights, those on the host included."""
    expert_bytes: int
    """Bytes of routed experts among them."""
    kv_cache_bytes_per_token: int
    gpu_memory: GPUMemoryPrediction | None
    """GPU memory that it takes by a plan; None without one."""
    host_memory_bytes: int | None
    """Bytes of host memory that it takes."""


def list_shares(
    stages: Sequence[Stage], machine: MachineProfile, plan: Plan | None
) -> list[StageShare]:
    """List what a GPU of each stage holds, and takes by a plan; none for one GPU.

    ``stages`` are as a question has them.
    """
    return [_describe(stage, machine, plan) for stage in stages if stage.label]


def _describe(stage: Stage, machine: MachineProfile, plan: Plan | None) -> StageShare:
    gpu_memory, host_bytes = None, None
    if plan is not None:
        asked = machine, plan.workload, plan.budget, plan.offload
        taken = derive_stage(stage, *asked).predict()
        gpu_memory, host_bytes = taken.gpu_memory, taken.host_memory_bytes // stage.num_gpus
    return StageShare(
        stage=stage.number,
        num_ranks=stage.num_gpus,
        num_layers=len(stage.layers),
        loaded_bytes=stage.loaded_bytes,
        expert_bytes=sum(layer.expert_bytes for layer in stage.layers),
        kv_cache_bytes_per_token=sum(layer.kv_cache.bytes_per_token for layer in stage.layers),
        gpu_memory=gpu_memory,
        host_memory_bytes=host_bytes,
    )
