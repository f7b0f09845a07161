"""A model as the GPUs that run it hold it, a stage for each part of a pipeline."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from offplan.checkpoint.model import KVCache, Layer, Model
from offplan.held.packing import pack_stage
from offplan.held.runner import OWN_RUNTIME, STOCK_RUNTIME, Runner
from offplan.held.stage import Stage
from offplan.held.stock import StockPasses, find_passes
from offplan.plan import Packing, Workload
from offplan.ranks import Ranks
from offplan.routing.profile import RoutingProfile


@dataclass(frozen=True)
class Held:
    """The weights of each stage's ranks; one stage if nothing divides the layers."""

    stages: tuple[Stage, ...]
    """The stages in the order in which a pass goes through them."""
    runner: Runner = field(default=OWN_RUNTIME, compare=False)
    """What loads and runs them."""
    planned: int = 0
    """The stage that is planned for: the one that takes most memory."""

    @property
    def stage(self) -> Stage:
        """The stage that is planned for."""
        return self.stages[self.planned]

    @property
    def model(self) -> Model:
        """The whole model, as it is stored."""
        return self.stage.model

    @property
    def ranks(self) -> Ranks:
        """The processes that the model is divided among."""
        return self.stage.ranks

    def plan_for(self, workload: Workload) -> "Held":
        """Return the same, planned for the stage of most weights and cache."""
        sizes = [stage.loaded_bytes + stage.cache_bytes(workload) for stage in self.stages]
        return replace(self, planned=sizes.index(max(sizes)))

    def route(self, routing: RoutingProfile | None) -> "Held":
        """Return the same with a profile of how experts are chosen."""
        return replace(self, stages=tuple(replace(each, routing=routing) for each in self.stages))

    def pack(self, packing: Packing | None) -> "Held":
        """Return the same with the weights packed that a plan says, of each rank its own shares.

        Each packing is computed once. Raises PlanError as ``pack_stage`` does.
        """
        if packing not in self._packed:
            stages = tuple(pack_stage(stage, packing, self.runner) for stage in self.stages)
            self._packed[packing] = replace(self, stages=stages)
        return self._packed[packing]

    @cached_property
    def _packed(self) -> "dict[Packing | None, Held]":
        return {}


def hold(model: Model, packing: Packing | None = None, *, stock: bool = False) -> Stage:
    """Lower a model to what offplan's own runtime holds of it; raises PlanError for the packing.

    ``stock`` is for transformers' own passes.
    """
    runner = STOCK_RUNTIME if stock else OWN_RUNTIME
    return pack_stage(hold_whole(model, runner), packing, runner)


def hold_stock(model: Model, passes: StockPasses | None = None) -> Stage:
    """Lower a model to what offplan's runtime holds of it for transformers' own passes.

    ``passes`` are what these take where that is known. Raises CheckpointError if it cannot be
    counted.
    """
    stage, passes = hold_whole(model, STOCK_RUNTIME), passes or find_passes(model)
    caches = [KVCache(of_token, window, state) for of_token, window, state in passes.caches]
    layers = [
        replace(layer, kv_cache=cache) for layer, cache in zip(stage.layers, caches, strict=True)
    ]
    return replace(stage, layers=tuple(layers), passes=passes).pin({*passes.pinned})


def hold_whole(model: Model, runner: Runner) -> Stage:
    """Lower a model to what one GPU holds where a runner loads it.

    Engines load its towers, and of latent attention's ``kv_b_proj`` they keep a copy beside it, as
    the two matrices that decode steps multiply latents by.
    Source: vLLM 0.33, ``mla_attention`` (``W_UK_T``, ``W_UV``); SGLang 0.5.23 (``w_kc``).
    """
    is_own = runner.pass_rules is None
    left_out = model.not_loaded if is_own else model.not_loaded - model.towers
    stage = Stage(
        model=model,
        layers=model.layers,
        outside=tuple(p for p in model.outside_parameters if p.tensors[0].name not in left_out),
        architecture=model.architecture,
        experts=model.experts,
        pass_rules=runner.pass_rules,
        is_stock=runner is STOCK_RUNTIME,
        derived_bytes=0 if is_own else absorbed_bytes(model, model.layers),
    )
    return replace(stage, layout=runner.lay_out(stage))


def absorbed_bytes(model: Model, layers: tuple[Layer, ...]) -> int:
    """Bytes of the copies of ``kv_b_proj`` that engines keep of these layers."""
    absorbed = (
        parameter.num_weights
        for layer in layers
        for parameter in layer.parameters
        if parameter.name.endswith("kv_b_proj.weight")
    )
    return sum(absorbed) * model.element_bytes
