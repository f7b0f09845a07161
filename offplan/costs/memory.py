"""GPU memory of a plan, term by term."""

from offplan.checkpoint.model import Model
from offplan.costs.activations import activation_bytes
from offplan.costs.engine_runtime import engine_runtime
from offplan.costs.vllm_cache import cache_bytes
from offplan.machine.profile import MachineProfile
from offplan.placement import Placement
from offplan.plan import Budget, GPUMemoryPrediction, Workload

MARGIN = 0.003
"""Share of the GPU budget left free, for what is allocated in other sizes than asked.

Source: estimated.
"""


def kv_cache_bytes(model: Model, workload: Workload, prefill_chunk: int) -> int:
    """Bytes of the cache: ``context_bytes``, or what the engine that loads the model needs."""
    engine = engine_runtime(model)
    if engine is not None and engine.shares_blocks:
        return cache_bytes(model, workload, prefill_chunk)
    return context_bytes(model, workload)


def context_bytes(model: Model, workload: Workload) -> int:
    """Bytes of the static cache: batch x context tokens of each layer's keys and values or latents.

    Layers with a window keep the whole context as well: the runtime gives all layers one shape.
    """
    return workload.batch * sum(
        workload.context * layer.kv_cache.bytes_per_token + layer.kv_cache.state_bytes
        for layer in model.layers
    )


def overhead_bytes(machine: MachineProfile, budget: Budget) -> int:
    """Bytes of context, libraries and graphs as the profile says, and MARGIN of the budget."""
    return machine.gpu_overhead.value + round(MARGIN * budget.gpu_memory)


def predict_gpu_memory(
    placement: Placement,
    model: Model,
    machine: MachineProfile,
    workload: Workload,
    budget: Budget,
    prefill_chunk: int,
) -> GPUMemoryPrediction:
    """Add up the terms; they are what a plan promises to stay within."""
    terms = {
        "resident": placement.resident_bytes,
        "ring": placement.ring_bytes,
        "kv_cache": kv_cache_bytes(model, workload, prefill_chunk),
        "activations": activation_bytes(model, workload, prefill_chunk),
        "overhead": overhead_bytes(machine, budget),
    }
    return GPUMemoryPrediction(**terms, total=sum(terms.values()))
