"""What a plan of any rules takes of vLLM's own parameters, for a worker that offloads by it."""

import hashlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from offplan import __version__
from offplan.checkpoint.model import Model
from offplan.checkpoint.tensors import TensorInfo
from offplan.engines.engine import Said, Version
from offplan.engines.export import join_flags, require_stored_weights
from offplan.engines.names import EngineParameter, engine_parameters
from offplan.engines.ranks import hold_model, pad_rows
from offplan.engines.vllm import divide_vllm, find_names, require_forms, slot_bytes, stay_vllm
from offplan.errors import ExportError
from offplan.forms.form import Kind
from offplan.placement import Placement, place
from offplan.plan import PRINTED_TO, Backend, Offload, Plan
from offplan.ranks import ONE_RANK, Ranks
from offplan.units import format_budget, format_bytes


@dataclass(frozen=True)
class TakenParameter:
    """A parameter of vLLM's model that stays in host memory."""

    backend: Backend
    """How both phases read it."""
    nbytes: int
    """Its bytes on each rank."""
    is_expert: bool = False
    """Whether it holds routed experts."""


@dataclass(frozen=True)
class Taken:
    """What a plan takes of what one rank of vLLM builds; all else stays in GPU memory."""

    layers: tuple[dict[str, TakenParameter], ...]
    """Layer by layer of the rank's stage, by names relative to the layer; an empty one is
    resident."""
    num_slots: int
    ring_bytes: int
    """GPU memory of vLLM's ring: a buffer a slot for each parameter of another name or shape."""
    embedding: TensorInfo | None
    """The rank's rows of the input embedding, padded, where it lies in host memory and is read by
    row."""

    @property
    def streams(self) -> bool:
        """Whether anything is copied through the ring."""
        return any(self.of(Backend.PREFETCH))

    @property
    def reads_experts(self) -> bool:
        """Whether routed experts are read in place."""
        return any(parameter.is_expert for parameter in self.of(Backend.UVA))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what is taken."""
        return hashlib.sha256(f"{__version__} {self!r}".encode()).hexdigest()

    def describe(self) -> str:
        """Say what lies on the host and how it is read."""
        copied, read = ([p.nbytes for p in self.of(b)] for b in (Backend.PREFETCH, Backend.UVA))
        embedding = ", and the input embedding by row" if self.embedding else ""
        return (
            f"{len(copied)} parameters ({format_bytes(sum(copied))}) are copied through a ring of "
            f"{format_bytes(self.ring_bytes)}, {len(read)} ({format_bytes(sum(read))}) are read in "
            f"place{embedding}"
        )

    def of(self, backend: Backend) -> Iterator[TakenParameter]:
        """Yield what both phases read in one way."""
        for layer in self.layers:
            yield from (taken for taken in layer.values() if taken.backend is backend)


def find_taken(
    plan: Plan, model: Model, version: Version, ranks: Ranks = ONE_RANK, stage: int = 0
) -> Taken:
    """Find what a plan takes of the model as a rank of a stage of some version of vLLM builds it.

    ``model`` is whole, ``ranks`` are those that vLLM divides it among. Raises ExportError, naming
    it, for what such a worker cannot do: other ranks than the plan's, phases that read a parameter
    in different ways, part of what vLLM fuses, other stored forms, packing, another store, and more
    memory than the budget.
    """
    _require_ranks(plan, ranks)
    require_stored_weights(plan.offload, "vLLM")
    _require_one_backend(plan.offload)
    goal = plan.goal.model_copy(update={"engine": "vllm"})
    held = hold_model(model, goal, plan.workload)
    found = [_StageTaken.find(plan.offload, each, version) for each in held.stages]
    more = max(each.more_gpu_bytes for each in found) + held.loaded_bytes
    more -= hold_model(model, plan.goal, plan.workload).loaded_bytes
    _require_budget(plan, more)
    _require_host_memory(plan, ranks.tensor * sum(each.said.pinned_bytes for each in found))
    return found[stage].taken


@dataclass(frozen=True)
class _StageTaken:
    """What a plan takes of what a rank of one stage builds, and what memory that needs."""

    taken: Taken
    said: Said
    """What moves, as vLLM's parameters."""
    more_gpu_bytes: int
    """GPU memory of vLLM's ring, and of experts that stay, beyond that of offplan's own."""

    @classmethod
    def find(cls, offload: Offload, model: Model, version: Version) -> "_StageTaken":
        """Find it for a rank's share of a model."""
        placement = place(model, offload)
        require_forms(placement, version)
        _require_exact_sizes(placement)
        backends = {
            tensor.name: entry.decode
            for slab in placement.slabs
            for entry in slab.entries
            for tensor in entry.unit.tensors
        }
        layers: list[dict[str, TakenParameter]] = [{} for _ in model.layers]
        moved: list[tuple[EngineParameter, Backend]] = []
        for each in engine_parameters(model, find_names(model)):
            backend = _find_backend(each, backends, offload)
            if backend is not None:
                is_expert = each.parameters[0].is_expert
                layers[each.layer][each.name] = TakenParameter(backend, each.nbytes, is_expert)
                moved.append((each, backend))
        streamed = [each for each, backend in moved if backend is Backend.PREFETCH]
        embedding = placement.host_embedding
        if embedding is not None and model.share is None:
            embedding = pad_rows(embedding)  # a share's rows are those of a rank already
        taken = Taken(
            layers=tuple(layers),
            num_slots=placement.num_slots,
            ring_bytes=placement.num_slots * slot_bytes(streamed),
            embedding=embedding,
        )
        said = Said(moved=tuple(each for each, _ in moved))
        more = taken.ring_bytes - placement.ring_bytes
        return cls(taken, said, more + stay_vllm(model, version).more_gpu_bytes)


def _require_ranks(plan: Plan, ranks: Ranks) -> None:
    """Refuse ranks that the plan was not made for: what each holds is then another model."""
    goal = plan.goal
    engine = (goal.engine or "vllm").partition("==")[0]
    if goal.ranks == ranks and (ranks == ONE_RANK or engine == "vllm"):
        return
    planned = f"{goal.ranks.label} of {engine}" if goal.ranks != ONE_RANK else "one GPU"
    options = "--for vllm " + ranks.label if ranks != ONE_RANK else "--no-packing"
    size = format_budget(plan.budget.gpu_memory).replace(" ", "")
    command = f"offplan plan {shlex.quote(plan.model.source)} {options} --gpu-memory {size}"
    as_planned = ""
    if engine == "vllm" and goal.ranks != ONE_RANK:
        as_planned = f", or start vLLM with {' '.join(join_flags(divide_vllm(goal.ranks)))}"
    raise ExportError(
        f"the plan is for {planned}, and vLLM was started on {ranks.label or 'one GPU'}: what each "
        f"GPU holds is another model then; plan for it ({command}){as_planned}"
    )


def _require_one_backend(offload: Offload) -> None:
    for number, rule in enumerate(offload.rules, 1):
        if rule.is_mixed:
            raise ExportError(
                f"rule {number} is {rule.prefill.value} in prefill and {rule.decode.value} in "
                "decode: vLLM computes both phases with the same tensors, so expected one backend "
                "in both; plan again with --for vllm"
            )


def _require_exact_sizes(placement: Placement) -> None:
    for slab in placement.slabs:
        for entry in slab.entries:
            if entry.unit.parameters[0].form.kind is Kind.MXFP4:
                raise ExportError(
                    f"{entry.unit.name} of layer {slab.layer} is stored as MXFP4, whose sizes vLLM "
                    "rounds up in ways that are not known well enough to verify them: use vLLM's "
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
    said = ", ".join(f"{n} {'resident' if b is None else b.value}" for n, b in found.items())
    raise ExportError(
        f"vLLM holds in one parameter, {each.name} of layer {each.layer}, what the plan has in "
        f"different places ({said}): expected one place for all; plan again with --for vllm"
    )


def _require_budget(plan: Plan, more: int) -> None:
    """Refuse what vLLM's ring, and what it makes of weights, take beyond."""
    total = plan.prediction.gpu_memory.total_bytes + more
    if total > plan.budget.gpu_memory * (1 + PRINTED_TO):
        raise ExportError(
            f"vLLM takes {format_bytes(more)} more of GPU memory for it than offplan's own "
            f"runtime: {format_bytes(total)} of a budget of {format_budget(plan.budget.gpu_memory)}"
            "; plan again with --for vllm, or for less memory"
        )


def _require_host_memory(plan: Plan, pinned_bytes: int) -> None:
    most = plan.budget.host_memory
    # as elsewhere, an embedding that is read by row takes none of the budget
    if most is not None and pinned_bytes > most:
        raise ExportError(
            f"vLLM page-locks {format_bytes(pinned_bytes)}, each parameter rounded up to a "
            f"power of two, of a budget of {format_budget(most)}; plan again with more host memory"
        )
