"""A model without its weights, and where a plan puts them, on a device that has been asked."""

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from offplan.checkpoint.model import Model
from offplan.held.held import hold
from offplan.held.stage import Stage
from offplan.hostmem.limits import check_host_room
from offplan.placement import Placement, place
from offplan.plan import Offload
from offplan.refusals import require_runnable
from offplan.runtime.forms import cores
from offplan.runtime.loading.alike import find_owners
from offplan.runtime.loading.by_cores import check_cores
from offplan.runtime.loading.cached import find_parts
from offplan.runtime.loading.checks import list_shared
from offplan.runtime.loading.codes import hold_codes
from offplan.runtime.loading.mapping import map_tensors
from offplan.runtime.loading.offloaded import check_experts_whole, find_offloaded, pin_split
from offplan.runtime.loading.parted import check_package, check_parted
from offplan.runtime.loading.skeleton import build_skeleton, decoder_layers
from offplan.runtime.loading.stock import build_stock
from offplan.runtime.loading.target import Target
from offplan.runtime.memory.peer import find_peer
from offplan.runtime.memory.store import Offloaded
from offplan.runtime.refusal import refuse


@dataclass(frozen=True)
class Prepared:
    """All that is settled before any weight is there."""

    stage: Stage
    """What the GPU holds of the model, packed as the plan says."""
    placement: Placement
    module: PreTrainedModel
    """The model's class, every tensor on the meta device."""
    targets: dict[str, Target]
    wanted: dict[str, torch.Tensor]
    """What is loaded, by parameter name, on the meta device."""
    offloaded: Offloaded
    peer: torch.device | None
    """The GPU that holds the slabs; None for host memory."""
    cached: dict[int, list[str]]
    """Names of the parameters of experts that are kept one by one, by layer."""
    owners: dict[str, str]
    """Whose weight a parameter that is not loaded reads, by name."""


def prepare(
    model: Model,
    offload: Offload,
    device: torch.device,
    *,
    stock: bool = False,
    share_layers: bool = False,
) -> Prepared:
    """Build a model without weights, and find out whether ``device`` and host can take a plan's.

    ``stock`` builds it for transformers' own passes. With ``share_layers`` layers that are alike
    read the weights of the first of them; the plan then offloads none but tables.

    Raises what ``fit`` raises, and MemoryLimitError where the host's memory or a second GPU is
    lacking. Raises OffplanError where a package is, or what builds the host's kernels.
    """
    stage = hold(model, offload.packing, stock=stock)
    prepared = fit(stage, offload, on_gpu=device.type == "cuda")
    placement = prepared.placement
    check_package(placement)
    if any(entry.decode.is_by_cores for entry in placement.entries):
        cores.load()
    peer = _find_store(placement, offload, device)
    owners: dict[str, str] = {}
    if share_layers:
        module, resident = prepared.module, prepared.wanted.keys() - prepared.offloaded.keys()
        owners = find_owners(decoder_layers(module), module, stage, resident)
    spared = sum(prepared.wanted.pop(name).nbytes for name in owners)
    stands_in = device.type == "cpu" and peer is None
    device_bytes = _device_bytes(placement) - spared if stands_in else 0
    check_host_room(_host_bytes(placement, peer) + device_bytes, device_bytes)
    return replace(prepared, peer=peer, owners=owners)


def fit(stage: Stage, offload: Offload, *, on_gpu: bool) -> Prepared:
    """Build a model without weights, and find where a decision places each parameter.

    ``stage`` is held by the decision's packing. Nothing is asked of this machine, and ``on_gpu``
    says whether a GPU is to run it. Raises PlanError for a decision that does not fit the model or
    that ``run`` refuses. Raises CheckpointError for a model that cannot run, and for files whose
    headers do not fit it.
    """
    model, stock = stage.model, stage.is_stock
    module = build_stock(model) if stock else build_skeleton(model)
    targets = map_tensors(module, stage)
    shared = list_shared(module, targets) if stock else {}
    hold_codes(module, targets)
    _check_types(stage, on_gpu)
    state = module.state_dict()
    wanted = {name: state[name] for name in targets}
    if stock:
        stage = pin_split(stage, targets, wanted, shared)
    else:
        check_experts_whole(stage, targets, wanted)
    placement = place(stage, offload)
    require_runnable(stage, placement, offload, on_gpu=on_gpu)
    offloaded = find_offloaded(module, placement, targets, wanted)
    check_parted(module, placement, offloaded)
    check_cores(module, placement, offloaded, wanted, getattr(torch, model.dtype))
    cached = find_parts(model, module, placement, offloaded, on_gpu=on_gpu)
    return Prepared(stage, placement, module, targets, wanted, offloaded, None, cached, {})


def _check_types(stage: Stage, on_gpu: bool) -> None:
    """Raise CheckpointError for experts that a GPU would have to expand, all of a layer at once."""
    coded = (p for p in stage.parameters if p.is_expert and not p.form.is_raw)
    if on_gpu and stage.dtype == "float32" and any(coded):
        raise refuse(f"{stage.model.source} has experts stored as codes and is computed in float32")


def _find_store(
    placement: Placement, offload: Offload, device: torch.device
) -> torch.device | None:
    """Find the GPU that holds the slabs; None for host memory, which stands in on the CPU."""
    if offload.store == "host" or not placement.slabs or device.type == "cpu":
        return None
    return find_peer(device, placement.slab_bytes)


def _host_bytes(placement: Placement, peer: torch.device | None) -> int:
    """Count the bytes of the weights that a plan has on the host."""
    return placement.offloaded_bytes - (0 if peer is None else placement.slab_bytes)


def _device_bytes(placement: Placement) -> int:
    """Count the bytes that the weights take on the GPU, or in host memory if the CPU plays it."""
    return placement.resident_bytes + placement.ring_bytes + placement.expert_slots_bytes
