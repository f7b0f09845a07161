"""The part of vLLM's own parameters that a plan of any rules takes, for a worker that offloads by
it."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from offplan import __version__
from offplan.capabilities.table import Recoding
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tables import describe_tables
from offplan.checkpoint.tensors import TensorInfo
from offplan.engines.engine import EngineDemand, Version, pad_rows, page_locked_bytes
from offplan.engines.names import EngineParameter, engine_parameters, fuse, name_part
from offplan.engines.vllm import (
    PLAIN_HEADS,
    VLLM,
    find_breakable,
    find_names,
    require_forms,
    slot_bytes,
)
from offplan.errors import ExportError
from offplan.forms.form import Component, Kind
from offplan.forms.host_kernels import can_pack
from offplan.held.stage import Stage
from offplan.placement import Placement, place
from offplan.plan import Backend, Offload
from offplan.units import format_bytes

WORKER = "offplan.vllm.Worker"
"""The class that vLLM is told to start."""
IN_FORCE = "offplan: the plan is in force: "
"""The beginning of the line of each rank of the worker once it has compared all with the plan."""
QUANTIZATION = "offplan_packed"
"""The name by which vLLM holds packed weights."""
READ_IN_PLACE = "_vllm_is_uva_offloaded"
"""The attribute by which vLLM's offloader marks parameters that it leaves in host memory, to be
read there."""


@dataclass(frozen=True)
class TakenParameter:
    """A parameter of vLLM's model that stays in host memory."""

    backend: Backend
    """How both phases read it."""
    nbytes: int
    """Its bytes on each rank."""
    is_expert: bool = False
    """True if it holds routed experts."""


@dataclass(frozen=True)
class Taken:
    """The parameters that a plan takes of those that one rank of vLLM builds; all others stay in
    GPU memory."""

    layers: tuple[dict[str, TakenParameter], ...]
    """Layer by layer of the rank's stage, by names relative to the layer; an empty one is
    resident."""
    num_slots: int
    ring_bytes: int
    """GPU memory of vLLM's ring: a buffer a slot for each parameter of another name or shape."""
    embedding: TensorInfo | None
    """The rank's rows of the input embedding, padded, where it lies in host memory and is read by
    row."""
    packed: tuple[Mapping[str, int], ...] = ()
    """Layer by layer the bytes of each part of packed weights, wherever it lies; () where the plan
    packs nothing."""
    packs_head: bool = False
    """True if the output head is packed."""
    first_layer: int = 0
    """The number that vLLM gives the stage's first layer."""

    @property
    def streams(self) -> bool:
        """True if anything is copied through the ring."""
        return any(self.of(Backend.PREFETCH))

    @property
    def reads_experts(self) -> bool:
        """True if routed experts are read in place."""
        return any(parameter.is_expert for parameter in self.of(Backend.UVA))

    @property
    def packs_any(self) -> bool:
        """True if anything is packed."""
        return bool(self.packed) or self.packs_head

    def packs(self, module: str) -> bool:
        """Return True if a module of a layer, by its whole name in vLLM, holds packed weights."""
        names = module.split(".")
        at = next((number for number, name in enumerate(names) if name.isdecimal()), None)
        if at is None or not self.packed:
            return False
        own, has_experts = ".".join(names[at + 1 :]), names[-1] == "experts"
        index = int(names[at]) - self.first_layer
        held = self.packed[index] if 0 <= index < len(self.packed) else {}
        owners = (name.rpartition(".")[0] for name in held)
        # some models name the parent of their experts otherwise than its attribute
        return any(o == own or (has_experts and o.endswith(".routed_experts")) for o in owners)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what is taken."""
        return hashlib.sha256(f"{__version__} {self!r}".encode()).hexdigest()

    def describe(self) -> str:
        """Say what lies on the host and how it is read."""
        copied, read = ([p.nbytes for p in self.of(b)] for b in (Backend.PREFETCH, Backend.UVA))
        embedding = ", and the input embedding by row" if self.embedding else ""
        packed = sum(sum(layer.values()) for layer in self.packed)
        head = ", and the output head," if self.packs_head else ""
        held = f"; {format_bytes(packed)} of the layers{head} are packed" if packed else ""
        return (
            f"{len(copied)} parameters ({format_bytes(sum(copied))}) are copied through a ring of "
            f"{format_bytes(self.ring_bytes)}, {len(read)} ({format_bytes(sum(read))}) are read in "
            f"place{embedding}{held}"
        )

    def of(self, backend: Backend) -> Iterator[TakenParameter]:
        """Yield what both phases read in one way."""
        for layer in self.layers:
            yield from (taken for taken in layer.values() if taken.backend is backend)


@dataclass(frozen=True)
class StageTaken:
    """The part of a decision that a rank of one stage of vLLM carries out by offplan's worker."""

    taken: Taken
    demand: EngineDemand
    """Flags but for the plan's file, and memory beyond what offplan's own runtime takes."""

    @classmethod
    def find(cls, offload: Offload, stage: Stage, version: Version) -> "StageTaken":
        """Find it for what a rank holds.

        Raises ExportError, naming it, for what the worker cannot do. That is phases that read a
        parameter in different ways, part of what vLLM fuses, and other stored forms.
        """
        _require_one_backend(offload)
        placement = place(stage, offload)
        require_forms(placement, version)
        _require_exact_sizes(placement)
        backends = {
            tensor.name: entry.decode
            for entry in placement.entries
            for tensor in entry.unit.tensors
        }
        if offload.recoding is not None:
            _require_packable(stage, offload.recoding)
        layers: list[dict[str, TakenParameter]] = [{} for _ in stage.layers]
        packed: list[dict[str, int]] = [{} for _ in stage.layers]
        moved: list[tuple[EngineParameter, Backend]] = []
        for each in engine_parameters(stage, find_names(stage)):
            backend = _find_backend(each, backends, offload)
            if each.packs is not None:
                packed[each.layer][each.name] = each.nbytes
            if backend is not None:
                # of experts that are packed no kernel of vLLM's is chosen
                is_expert = each.parameters[0].is_expert and each.packs is None
                layers[each.layer][each.name] = TakenParameter(backend, each.nbytes, is_expert)
                moved.append((each, backend))
        streamed = [each for each, backend in moved if backend is Backend.PREFETCH]
        embedding = _find_embedding(placement)
        if embedding is not None and stage.num_gpus == 1:
            embedding = pad_rows(embedding)  # a share's rows are padded already
        taken = Taken(
            layers=tuple(layers),
            num_slots=placement.num_slots,
            ring_bytes=placement.num_slots * slot_bytes(streamed),
            embedding=embedding,
            packed=tuple(packed) if any(packed) else (),
            packs_head=any(p.is_recoded for p in stage.outside),
            first_layer=stage.first_layer,
        )
        flags: dict[str, tuple[str, ...]] = {"worker-cls": (WORKER,)}
        if offload.recoding is not None:
            flags["quantization"] = (QUANTIZATION,)
        environment: dict[str, str] = {}
        if taken.streams:
            flags["compilation-config"] = (json.dumps({"cudagraph_mode": "FULL_DECODE_ONLY"}),)
            if find_breakable(stage) is not None:
                environment = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}
        if taken.reads_experts:
            flags["moe-backend"] = ("triton",)
        more_ring = taken.ring_bytes - placement.ring_bytes
        demand = EngineDemand(
            flags=flags,
            environment=environment,
            notes=("vLLM needs offplan beside it: in a clone of offplan, pip install '.[vllm]'",),
            moved=tuple(each for each, _ in moved),
            more_gpu_bytes=more_ring + VLLM.demand_resident(stage, version).more_gpu_bytes,
            pinned_elsewhere=0 if embedding is None else page_locked_bytes(embedding.nbytes),
        )
        return cls(taken, demand)


def _find_embedding(placement: Placement) -> TensorInfo | None:
    """Find the input embedding on the host, if it is there; raises ExportError for other tables."""
    others = [table for table in placement.host_tables if not table.is_input]
    if others:
        raise ExportError(
            f"offplan's worker moves the input embedding alone, and the plan has "
            f"{describe_tables(others)} on the host; plan again with `engine=vllm-worker`"
        )
    return next((tensor for table in placement.host_tables for tensor in table.tensors), None)


def _require_one_backend(offload: Offload) -> None:
    for number, rule in enumerate(offload.rules, 1):
        if rule.is_mixed:
            raise ExportError(
                f"rule {number} is {rule.prefill.name} in prefill and {rule.decode.name} in "
                "decode: vLLM computes both phases with the same tensors, so expected one backend "
                "in both; plan again with `engine=vllm-worker`"
            )


def choose_packed(stage: Stage, weights: Sequence[Parameter]) -> set[int]:
    """Return the identities of those of a stage's weights that vLLM can hold packed.

    vLLM packs what it fuses as one matrix, and some heads not at all. It packs none that it ties to
    the input embedding, whose rows it gathers.
    """
    found = set(map(id, weights))
    for each in engine_parameters(stage, {}):
        fused = each.parameters
        is_matrix = all(len(parameter.shape) == 2 for parameter in fused)
        if len(fused) == 1 or not is_matrix or fused[0].is_expert:
            continue
        if not found.issuperset(map(id, fused)) or not can_pack(fuse(fused)):
            found.difference_update(map(id, fused))
    model, head = stage.model, stage.model.head
    if head is not None and (not model.stores_head or head.name in model.tied):
        found -= {id(each) for each in weights if each.name == head.name}
    if stage.head is not None and not PLAIN_HEADS.isdisjoint(stage.architecture.class_names):
        found.discard(id(stage.head))
    return found


def _require_packable(stage: Stage, recoding: Recoding) -> None:
    """Raise ExportError where vLLM would not pack exactly what the plan does."""
    if stage.model.towers:
        raise ExportError(
            f"{stage.model.source} has towers beside its text, and packed weights in vLLM were not "
            f"tried with such a model: plan again with {recoding.without}"
        )
    found = engine_parameters(stage, find_names(stage))
    names = {(each.layer, each.name) for each in found}
    for each in found:
        if each.packs is None or not each.name.endswith(name_part("", Component.WEIGHT)):
            continue
        whole = each.name.removesuffix(name_part("", Component.WEIGHT))
        if (each.layer, whole) in names or not can_pack(fuse(each.parameters)):
            raise ExportError(
                f"vLLM holds {whole} of layer {each.layer} as one matrix, and the plan packs part "
                "of it alone, or more than one packed matrix has: plan again with "
                f"{recoding.without}, or with {recoding.leave([each.parameters[0].segment])}"
            )


def _require_exact_sizes(placement: Placement) -> None:
    for entry in placement.entries:
        if entry.unit.parameters[0].form.kind is Kind.MXFP4:
            raise ExportError(
                f"{entry.unit.name} of layer {entry.unit.layer} is stored as MXFP4, whose sizes "
                "vLLM rounds up in ways that are not known well enough to verify them: use vLLM's "
                "own flags (offplan export --engine vllm)"
            )


def _find_backend(
    each: EngineParameter, backends: dict[str, Backend], offload: Offload
) -> Backend | None:
    """Find how vLLM's parameter is read, None where it is resident; it moves whole or not at all.

    That within which the bytes of a rule run out is taken: such a rule overshoots by at most one.
    Raises ExportError where else the plan has its parts in different places.
    """
    found = {tensor.name: backends.get(tensor.name) for tensor in each.tensors}
    places = set(found.values())
    if len(places) == 1:
        return places.pop()
    limited = [rule for rule in offload.rules if rule.max_bytes is not None]
    names = [parameter.name for parameter in each.parameters]
    if places == {Backend.UVA, None} and any(all(map(r.matches, names)) for r in limited):
        return Backend.UVA
    said = ", ".join(f"{n} {'resident' if b is None else b.name}" for n, b in found.items())
    raise ExportError(
        f"vLLM holds in one parameter, {each.name} of layer {each.layer}, what the plan has in "
        f"different places ({said}): expected one place for all; plan again with "
        "`engine=vllm-worker`"
    )
