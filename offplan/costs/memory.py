"""Memory of a plan, term by term."""

from collections.abc import Iterator

from offplan.capabilities.drafts import Draft, most_drafted
from offplan.costs.activations import activation_parts
from offplan.costs.capabilities import GPU_BYTES
from offplan.costs.engine_times import cache_bytes
from offplan.costs.term import Input, Term, list_figures, sum_up
from offplan.held.held import hold_prediction
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import Placement, place_prediction
from offplan.plan import Budget, Offload, Workload
from offplan.stores import HOST, STORES

MARGIN = 0.003
"""Share of the GPU budget left free, for what is allocated in other sizes than asked.

Source: estimated.
"""


def kv_cache_bytes(
    stage: Stage, workload: Workload, prefill_chunk: int, draft: Draft | None = None
) -> int:
    """Bytes of the cache: ``Stage.cache_bytes``, or what the engine that loads the model needs.

    Prediction layers have a cache of their own.
    """
    engine = stage.pass_rules
    if engine is not None and engine.shares_blocks:
        return cache_bytes(stage, workload, prefill_chunk)
    layers = hold_prediction(stage, draft)
    own = 0 if layers is None else layers.cache_bytes(workload)
    return stage.cache_bytes(workload, draft) + own


def resident_draft_bytes(stage: Stage, draft: Draft | None) -> int:
    """Bytes on the GPU of the prediction layers that make drafts, which no plan's rule takes."""
    placed = place_prediction(stage, draft)
    return 0 if placed is None else placed[1].resident_bytes


def stored_draft_bytes(stage: Stage, draft: Draft | None) -> int:
    """Bytes of host memory that experts of these layers take."""
    placed = place_prediction(stage, draft)
    return 0 if placed is None else placed[1].slab_bytes


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
    draft: Draft | None = None,
) -> Iterator[Term]:
    """List the terms of GPU memory, which a plan promises to stay within, and then their sum."""
    saved = sum(each.as_stored.nbytes - each.nbytes for each in stage.parameters)
    margin = f"{MARGIN:.1%} of the budget"
    weights = {
        "weights": stage.loaded_bytes + saved,
        **({} if stage.recoding is None else {f"what {stage.recoding.word} saves": -saved}),
        **placement.cached_bytes,
        "what rules take": placement.resident_bytes + placement.table_bytes - stage.loaded_bytes,
        "embeddings on the host": -placement.table_bytes,
    }
    if drafting := resident_draft_bytes(stage, draft):
        weights["prediction layers"] = drafting
    slots = Input("slots", placement.num_slots, "count")
    ring: tuple[Input, ...] = (slots, Input("largest span", placement.slot_bytes, "bytes"))
    of_ring = "slots x largest span"
    are_whole = (n not in placement.pieces for n, of in enumerate(stage.layers) if of.expert_bytes)
    in_pieces = bool(placement.pieces) and not any(are_whole)
    activations = activation_parts(stage, workload, prefill_chunk, draft, in_pieces=in_pieces)
    for name_bytes in GPU_BYTES:
        activations |= name_bytes(placement, stage, workload, prefill_chunk)
    if placement.pieces:
        of_ring += " + slots for parts x largest part"
        ring += (
            Input("slots for parts", placement.num_piece_slots, "count"),
            Input("largest part", placement.piece_bytes, "bytes"),
        )
    cache = _cache_parts(stage, workload, draft)
    cached = kv_cache_bytes(stage, workload, prefill_chunk, draft)
    beside = "the engine's blocks" if not stage.is_own else "of prediction layers"
    cache[beside] = cached - stage.cache_bytes(workload, draft)
    figure = list_figures(machine, "gpu_overhead")
    kept = (*figure, Input(margin, _margin_bytes(budget), "bytes"))
    taken = overhead_bytes(machine, budget)
    terms = (
        sum_up("gpu_memory.resident", weights),
        Term("gpu_memory.ring", placement.ring_bytes, "bytes", of_ring, ring),
        sum_up("gpu_memory.kv_cache", cache),
        sum_up("gpu_memory.activations", activations),
        Term("gpu_memory.overhead", taken, "bytes", f"gpu_overhead + {margin}", kept),
    )
    yield from terms
    total = sum(term.value for term in terms)
    yield Term("gpu_memory.total", total, "bytes", "the sum of these")


def _cache_parts(stage: Stage, workload: Workload, draft: Draft | None) -> dict[str, int]:
    """Name the parts of ``Stage.cache_bytes``."""
    batch, row = workload.batch, stage.row_cache(workload.context, most_drafted(draft))
    if stage.is_own:
        tokens, rings, checkpoints = row.whole_bytes, row.window_bytes, row.checkpoint_bytes
        added = row.addition_bytes
    else:
        tokens = workload.context * sum(layer.kv_cache.bytes_per_token for layer in stage.layers)
        rings = checkpoints = added = 0
    beside = " and drafts" if draft is not None else ""
    found = {
        "batch x context x bytes a token": batch * tokens,
        f"batch x window{beside} x bytes a token": batch * rings,
        "batch x what a pass adds to states": batch * added,
        "batch x row checkpoint of windows and states": batch * checkpoints,
    }
    of_states = stage.cache_bytes(workload, draft) - sum(found.values())
    return found | {"batch x state of linear attention": of_states}


def list_stores(placement: Placement, stage: Stage, offload: Offload) -> Iterator[Term]:
    """List the memory that all GPUs of a stage take of the host, and of another store if any."""
    num_gpus = stage.num_gpus
    each = " x GPUs" if num_gpus > 1 else ""
    slabs = {f"slabs, each tensor on a boundary{each}": num_gpus * placement.slab_bytes}
    taken: dict[str, dict[str, int]] = {HOST.memory: {}, STORES[offload.store].memory: slabs}
    taken[HOST.memory] |= {f"embeddings on the host{each}": num_gpus * placement.table_bytes}
    if drafting := stored_draft_bytes(stage, offload.draft):
        taken[HOST.memory]["experts of prediction layers"] = drafting
    yield from (sum_up(memory, parts) for memory, parts in taken.items())
