"""GPU memory of a plan, term by term."""

from offplan.costs.activations import activation_bytes
from offplan.costs.vllm_cache import cache_bytes
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import Placement
from offplan.plan import Budget, GPUMemoryPrediction, Workload

MARGIN = 0.003
"""Share of the GPU budget left free, for what is allocated in other sizes than asked.

Source: estimated.
"""


def kv_cache_bytes(stage: Stage, workload: Workload, prefill_chunk: int) -> int:
    """Bytes of the cache: ``Stage.cache_bytes``, or what the engine that loads the model needs."""
    engine = stage.runner.pass_rules
    if engine is not None and engine.shares_blocks:
        return cache_bytes(stage, workload, prefill_chunk)
    return stage.cache_bytes(workload)


def overhead_bytes(machine: MachineProfile, budget: Budget) -> int:
    """Bytes of context, libraries and graphs as the profile says, and MARGIN of the budget."""
    return machine.gpu_overhead.value + round(MARGIN * budget.gpu_memory)


def predict_gpu_memory(
    placement: Placement,
    stage: Stage,
    machine: MachineProfile,
    workload: Workload,
    budget: Budget,
    prefill_chunk: int,
) -> GPUMemoryPrediction:
    """Add up the terms; they are what a plan promises to stay within."""
    terms = {
        "resident": placement.resident_bytes,
        "ring": placement.ring_bytes,
        "kv_cache": kv_cache_bytes(stage, workload, prefill_chunk),
        "activations": activation_bytes(stage, workload, prefill_chunk),
        "overhead": overhead_bytes(machine, budget),
    }
    return GPUMemoryPrediction(**terms, total=sum(terms.values()))
