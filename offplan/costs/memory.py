"""Memory of a plan, term by term."""

from collections.abc import Iterator

from offplan.costs.activations import activation_parts
from offplan.costs.term import Input, Term, list_figures, list_sizes, sum_up
from offplan.costs.vllm_cache import cache_bytes
from offplan.held.packing import is_packed
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import Placement
from offplan.plan import Budget, Offload, Workload

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
    return machine.gpu_overhead.value + _margin_bytes(budget)


def _margin_bytes(budget: Budget) -> int:
    return round(MARGIN * budget.gpu_memory)


def list_gpu_memory(
    placement: Placement,
    stage: Stage,
    machine: MachineProfile,
    workload: Workload,
    budget: Budget,
    prefill_chunk: int,
) -> Iterator[Term]:
    """List the terms of GPU memory, which a plan promises to stay within, and then their sum."""
    packed = filter(is_packed, stage.parameters)
    saved = sum(sum(t.nbytes for t in each.unpacked) - each.nbytes for each in packed)
    embedding = placement.offloaded_bytes - placement.slab_bytes
    cached, context = stage.cache_bytes(workload), workload.batch * workload.context
    tokens = context * sum(layer.kv_cache.bytes_per_token for layer in stage.layers)
    margin = f"{MARGIN:.1%} of the budget"
    terms = (
        sum_up(
            "gpu_memory.resident",
            {
                "weights": stage.loaded_bytes + saved,
                "what packing saves": -saved,
                "what rules take": placement.resident_bytes + embedding - stage.loaded_bytes,
                "embedding on the host": -embedding,
            },
        ),
        Term(
            "gpu_memory.ring",
            placement.ring_bytes,
            "bytes",
            "slots x largest span",
            (
                Input("slots", placement.num_slots, "count"),
                *list_sizes({"largest span": placement.slot_bytes}),
            ),
        ),
        sum_up(
            "gpu_memory.kv_cache",
            {
                "batch x context x bytes a token": tokens,
                "batch x state of linear attention": cached - tokens,
                "the engine's blocks": kv_cache_bytes(stage, workload, prefill_chunk) - cached,
            },
        ),
        sum_up("gpu_memory.activations", activation_parts(stage, workload, prefill_chunk)),
        Term(
            "gpu_memory.overhead",
            overhead_bytes(machine, budget),
            "bytes",
            f"gpu_overhead + {margin}",
            (*list_figures(machine, "gpu_overhead"), *list_sizes({margin: _margin_bytes(budget)})),
        ),
    )
    yield from terms
    total = sum(term.value for term in terms)
    yield Term("gpu_memory.total", total, "bytes", "the sum of these")


def list_stores(placement: Placement, offload: Offload, num_ranks: int) -> Iterator[Term]:
    """List the memory that all ranks of a stage take of the host, and of a second GPU if any."""
    slabs = {"slabs, each tensor on a boundary": placement.slab_bytes}
    on_host = {} if offload.store == "peer" else slabs
    embedding = placement.offloaded_bytes - placement.slab_bytes
    of_rank = sum_up("host_memory", {**on_host, "embedding on the host": embedding})
    if num_ranks == 1:
        yield of_rank
    else:
        ranks = Input("ranks", num_ranks, "count")
        yield Term(
            of_rank.path,
            num_ranks * of_rank.value,
            "bytes",
            f"({of_rank.formula}) x ranks",
            (*of_rank.inputs, ranks),
        )
    if offload.store == "peer":
        yield sum_up("peer_memory", slabs)
