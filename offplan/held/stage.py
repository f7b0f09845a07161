"""The weights that one GPU holds of a model: all of it, or a share of a stage of a pipeline."""

import hashlib
import json
from collections.abc import Hashable, Iterable, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from offplan.capabilities.drafts import Draft, most_drafted
from offplan.capabilities.table import Recoding
from offplan.capabilities.way import OWN, Way
from offplan.checkpoint.architecture import Architecture
from offplan.checkpoint.group import resize
from offplan.checkpoint.kv_cache import addition_bytes
from offplan.checkpoint.model import Experts, Layer, Model
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tables import Table
from offplan.checkpoint.tensors import DTYPE_BITS
from offplan.drafts.acceptance import AcceptanceProfile
from offplan.drafts.mix import Mix, find_mix
from offplan.held.counted import CountedPasses
from offplan.held.layout import AS_STORED, Layout, PassRules
from offplan.held.unit import Unit, group_units
from offplan.plan import Workload
from offplan.routing.profile import BatchReuse, RoutingProfile
from offplan.row_cache import RowCache


@dataclass(frozen=True)
class Stage:
    """The layers that one GPU runs, and what it holds outside them."""

    model: Model
    """The whole model, as it is stored."""
    layers: tuple[Layer, ...]
    """The decoder layers as the GPU holds them, counted from 0 on."""
    outside: tuple[Parameter, ...]
    """The parameters outside the layers that are loaded."""
    architecture: Architecture
    """The model's architecture, with the heads, the experts and the layers of this GPU."""
    experts: Experts | None
    """The routed experts of this GPU."""
    pass_rules: PassRules | None = field(default=None, compare=False)
    """How an engine runs a pass of it; None if offplan's own runtime does."""
    way: Way = field(default=OWN, compare=False)
    """The passes that offplan's own runtime runs it by."""
    layout: Layout = field(default=AS_STORED, compare=False)
    """How what runs it lays out its weights."""
    label: str = ""
    """The options by which an engine divides the model; empty if this GPU has all of it."""
    num_gpus: int = 1
    """GPUs among which the layers are divided: each holds as much, and they copy at once."""
    num_stages: int = 1
    """Stages of the pipeline, each with GPUs of its own."""
    number: int = 0
    """Which of the pipeline's stages it is, from 0 on."""
    first_layer: int = 0
    """The number that its first layer has in the whole model."""
    derived_bytes: int = 0
    """Bytes on the GPU that are made of weights when they are loaded, beside the weights."""
    recoding: Recoding | None = None
    """The weights that are held in another form than the checkpoint's; None if none are."""
    routing: RoutingProfile | None = field(default=None, compare=False)
    """How soon experts are chosen again; None assumes that tokens choose all
    equally often."""
    acceptance: AcceptanceProfile | None = field(default=None, compare=False)
    """How often drafts are taken; None assumes that none is."""
    passes: CountedPasses | None = field(default=None, compare=False)
    """What other passes than offplan's own take, where they run and that was asked for."""

    def pin(self, names: Set[str]) -> "Stage":
        """Return the same where no rule takes the parameters of these stored tensors."""

        def pinned(parameter: Parameter) -> Parameter:
            if parameter.resized is not None or not names & {t.name for t in parameter.tensors}:
                return parameter
            return replace(parameter, resized=DTYPE_BITS[parameter.tensors[0].dtype])

        if not names:
            return self
        layers = (
            replace(layer, parameters=tuple(map(pinned, layer.parameters))) for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    def with_layout(self, layout: Layout) -> "Stage":
        """Return the same, laid out so, with what was found out about it."""
        laid_out = replace(self, layout=layout)
        laid_out.memo.update(self.memo)
        return laid_out

    def reuse(self, batch: int, tokens: int = 1) -> BatchReuse | None:
        """Return how decode steps of a batch choose experts; None where that is not known.

        Passes that check drafts have several ``tokens`` of each sequence.
        """
        return None if self.routing is None else self.routing.find(batch, tokens)

    @property
    def dtype(self) -> str:
        """The type that weights stand for and are computed with, as torch names it."""
        return self.model.dtype

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of hidden states and of the KV cache."""
        return self.model.element_bytes

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Parameters that a text needs: those of layers, and those outside that are no tower's."""
        return (*self._in_layers, *self._read_outside)

    @property
    def _in_layers(self) -> Iterable[Parameter]:
        return (parameter for layer in self.layers for parameter in layer.parameters)

    @cached_property
    def _read_outside(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.outside if p.tensors[0].name not in self.model.towers)

    @cached_property
    def units(self) -> tuple[tuple[Unit, ...], ...]:
        """The units that rules can take of each layer."""
        return tuple(map(group_units, self.layers))

    @cached_property
    def memo(self) -> dict[Hashable, Any]:
        """What was found out about the stage, kept for the next plan of it."""
        return {}

    @cached_property
    def outside_bytes(self) -> int:
        """Bytes outside the layers once loaded, in the types that they are then in."""
        return sum(
            resize(parameter, self.architecture, self.dtype).loaded_bytes
            for parameter in self.outside
        )

    @cached_property
    def loaded_bytes(self) -> int:
        """Bytes of all weights once loaded, and of what is then made of them."""
        in_layers_bytes = sum(parameter.loaded_bytes for parameter in self._in_layers)
        return in_layers_bytes + self.outside_bytes + self.derived_bytes

    def mix(self, draft: Draft | None, workload: Workload) -> Mix:
        """Return the passes of a text whose passes check drafts, by the acceptance profile."""
        return find_mix(draft, self.acceptance, workload.num_steps)

    def cache_bytes(self, workload: Workload, draft: Draft | None = None) -> int:
        """Bytes of the static cache of a batch: a ``RowCache`` for each sequence.

        What caches of other passes keep was counted. An engine is priced as if layers with a
        window kept the whole context.
        """
        if self.passes is not None:
            caches = (layer.kv_cache for layer in self.layers)
            return sum(cache.nbytes(workload.batch, workload.context) for cache in caches)
        if self.is_own:
            return workload.batch * self.row_cache(workload.context, most_drafted(draft)).nbytes
        return workload.batch * sum(
            workload.context * layer.kv_cache.bytes_per_token + layer.kv_cache.state_bytes
            for layer in self.layers
        )

    @property
    def is_own(self) -> bool:
        """True if offplan's own passes run it."""
        return self.pass_rules is None and self.way.is_own

    def row_cache(self, context: int, drafted: int = 0) -> RowCache:
        """Return the cache of one sequence in offplan's own passes, which check so many drafts."""
        caches = [layer.kv_cache for layer in self.layers]
        linear, added = self.architecture.linear, 0
        if linear is not None:
            added = addition_bytes(linear, self.element_bytes)
        return RowCache(caches, context, drafted, added * sum(c.state_bytes > 0 for c in caches))

    @cached_property
    def outside_key(self) -> str:
        """Name what lies outside the layers for its cost, as ``Layer.key`` does for a layer."""
        tensors = (tensor for parameter in self._read_outside for tensor in parameter.stored)
        content = json.dumps(sorted((t.name, t.dtype, t.shape) for t in tensors))
        return f"outside-{hashlib.sha256(content.encode()).hexdigest()[:12]}"

    def time_key(self, key: str) -> str:
        """Return the name of the times of a layer, or of what lies outside, in a profile.

        Other passes than offplan's own take other times, and so have names of their own.
        """
        return key if self.way.is_own else f"{self.way.name}-{key}"

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """What may lie on the host and is read by row, of ``Model.tables`` what the stage holds."""
        held = (table.of(self.outside) for table in self.model.tables)
        return tuple(table for table in held if table is not None)

    @cached_property
    def head(self) -> Parameter | None:
        """The matrix that turns hidden states into logits: the head, or what it is tied to.

        None in a stage of a pipeline that others follow.
        """
        if self.number < self.num_stages - 1:
            return None
        whole = self.model.head
        return next((p for p in self.outside if whole is not None and p.name == whole.name), None)
