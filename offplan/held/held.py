"""A model lowered to what one GPU holds of it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from offplan.capabilities.drafts import Draft
from offplan.capabilities.packing import Unpacked
from offplan.capabilities.table import Recoding
from offplan.capabilities.way import OWN, Way
from offplan.checkpoint.model import KVCache, Layer, Model
from offplan.checkpoint.prediction import PredictionLayers, find_prediction_layers
from offplan.held.counted import CountedPasses
from offplan.held.packing import exclude_from_packing, pack_everything, pack_stage, packable
from offplan.held.runner import Runner
from offplan.held.runtimes import RUNTIMES
from offplan.held.stage import Stage
from offplan.plan import Goal, Workload
from offplan.row_cache import SCALE_BYTES

exclude_weights = exclude_from_packing
"""Returns a recoding that leaves some more weights as they are stored; None if all are, then."""


def find_largest(stages: Sequence[Stage], workload: Workload) -> Stage:
    """Return the stage of most weights and cache, which is the one that is planned for."""
    return max(stages, key=lambda each: each.loaded_bytes + each.cache_bytes(workload))


def recode_stages(
    stages: Iterable[Stage], recoding: Recoding | None, runner: Runner
) -> tuple[Stage, ...]:
    """Recode the weights of each stage of a pipeline; raises what ``pack_stage`` raises."""
    return tuple(pack_stage(stage, recoding, runner) for stage in stages)


def find_recoding(
    stage: Stage, goal: Goal, runner: Runner, *, last: Stage | None = None, batch: int = 1
) -> Recoding | None:
    """Find the recoding of all that a goal lets be recoded; None if nothing can be.

    ``stage`` is the one that is planned for, and ``last`` the last of the pipeline, if that is
    another. ``batch`` are the sequences of a step.
    """
    unpacked = Unpacked(goal.leave_unpacked)
    if not (goal.packing and runner.holds_packed and packable(stage, unpacked, runner)):
        return None
    return pack_everything(last or stage, unpacked, runner, batch)


def hold(model: Model, recoding: Recoding | None = None, way: Way = OWN) -> Stage:
    """Lower a model to what offplan's own runtime holds of it; raises PlanError for the recoding.

    ``way`` are the passes that run it. What others than offplan's own take is not counted.
    """
    runner = RUNTIMES[way]
    return pack_stage(hold_whole(model, runner, way), recoding, runner)


def hold_counted(model: Model, way: Way, passes: CountedPasses | None = None) -> Stage:
    """Lower a model to what offplan's runtime holds of it, with what other passes take.

    ``passes`` are what they take where that is known. Raises CheckpointError if it cannot be
    counted.
    """
    stage, passes = hold_whole(model, RUNTIMES[way], way), passes or RUNTIMES[way].count(model)
    if passes is None:
        return stage
    caches = [KVCache(of_token, window, state) for of_token, window, state in passes.caches]
    layers = [
        replace(layer, kv_cache=cache) for layer, cache in zip(stage.layers, caches, strict=True)
    ]
    return replace(stage, layers=tuple(layers), passes=passes).pin({*passes.pinned})


def hold_prediction(stage: Stage, draft: Draft | None) -> Stage | None:
    """Lower the prediction layers that drafts are made by, as they are stored.

    Returns None for other drafts, and for a model without such layers.
    """
    if draft is None or not draft.uses_layers or not stage.is_own:
        return None
    if PredictionLayers not in stage.memo:
        found = find_prediction_layers(stage.model)
        stage.memo[PredictionLayers] = (
            hold(found.model) if isinstance(found, PredictionLayers) else None
        )
    layers: Stage | None = stage.memo[PredictionLayers]
    return layers


def hold_whole(model: Model, runner: Runner, way: Way = OWN) -> Stage:
    """Lower a model to what one GPU holds where a runner loads it.

    Engines load its towers, and of latent attention's ``kv_b_proj`` they keep a copy beside it, as
    the two matrices that decode steps multiply latents by.
    Source: vLLM 0.33, ``mla_attention`` (``W_UK_T``, ``W_UV``); SGLang 0.5.23 (``w_kc``).
    """
    is_own = runner.pass_rules is None
    left_out = model.not_loaded if is_own else model.not_loaded - model.towers
    stage = Stage(
        model=model,
        layers=tuple(keep_cache(layer, model, way, runner) for layer in model.layers),
        outside=tuple(p for p in model.outside_parameters if p.tensors[0].name not in left_out),
        architecture=model.architecture,
        experts=model.experts,
        pass_rules=runner.pass_rules,
        way=way,
        derived_bytes=0 if is_own else absorbed_bytes(model, model.layers),
    )
    return stage.with_layout(runner.lay_out(stage))


def keep_cache(layer: Layer, model: Model, way: Way, runner: Runner) -> Layer:
    """Return a layer with the cache that a runner keeps of it, in the type that passes ask for.

    Engines have one scale for all tokens.
    """
    cache = layer.kv_cache
    if way.kv_cache_dtype == "auto" or not cache.bytes_per_token:
        return layer
    scale_bytes = SCALE_BYTES if runner.pass_rules is None else 0
    return replace(layer, kv_cache=cache.as_codes(model.element_bytes, scale_bytes))


def absorbed_bytes(model: Model, layers: tuple[Layer, ...]) -> int:
    """Bytes of the copies of ``kv_b_proj`` that engines keep of these layers."""
    absorbed = (
        parameter.num_weights
        for layer in layers
        for parameter in layer.parameters
        if parameter.name.endswith("kv_b_proj.weight")
    )
    return sum(absorbed) * model.element_bytes
