"""Memory that a plan takes here, counted by what is held; no time is priced."""

from offplan.checkpoint.model import Model
from offplan.errors import PlanError
from offplan.held.held import hold
from offplan.placement import place, place_prediction
from offplan.plan import GPUMemoryPrediction, Plan
from offplan.stores import HOST, STORES


def count_held(plan: Plan, model: Model) -> Plan:
    """Return a plan that predicts the bytes which offplan's own runtime holds by its decision.

    Weights, ring, store and KV cache are counted. Activations, overhead and all times are those
    that the plan records, and so is the cache of other passes. ``model`` is the plan's. Raises
    PlanError for a decision that does not fit the model.
    """
    stage = hold(model, plan.offload.recoding, plan.goal.way)
    placement = place(stage, plan.offload)
    recorded, draft = plan.prediction.gpu_memory, plan.offload.draft
    placed, cache_bytes = place_prediction(stage, draft), stage.cache_bytes(plan.workload, draft)
    resident_bytes = placement.resident_bytes + sum(placement.cached_bytes.values())
    drafting_bytes = 0
    if placed is not None:
        layers, of_layers = placed
        resident_bytes += of_layers.resident_bytes
        cache_bytes += layers.cache_bytes(plan.workload)
        drafting_bytes = of_layers.slab_bytes
    terms = {
        "resident": resident_bytes,
        "ring": placement.ring_bytes,
        # what caches of other passes keep takes seconds to count
        "kv_cache": cache_bytes if plan.goal.way.is_own else recorded.kv_cache_bytes,
        "activations": recorded.activation_bytes,
        "overhead": recorded.overhead_bytes,
    }
    stored = dict.fromkeys((each.bytes_key for each in STORES.values()), 0)
    stored[STORES[plan.offload.store].bytes_key] = placement.slab_bytes
    stored[HOST.bytes_key] += placement.table_bytes + drafting_bytes
    counted = {
        "gpu_memory": GPUMemoryPrediction(**terms, total=sum(terms.values())),
        **stored,
    }
    return plan.model_copy(update={"prediction": plan.prediction.model_copy(update=counted)})


def check_held(plan: Plan, model: Model) -> None:
    """Raise PlanError for a plan that does not fit its model, or whose bytes exceed its budget."""
    if (excess := count_held(plan, model).describe_excess()) is not None:
        engine = plan.goal.engine
        why = "was edited, or made by another version"
        if engine is not None:
            why = f"is for {engine}, which may hold less than offplan's own runtime, or {why}"
        raise PlanError(f"the plan {why}: {excess}")
