"""A model without its weights, and where a plan puts them, on a device that has been asked."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from offplan.capabilities.way import OWN, Way
from offplan.checkpoint.model import Model
from offplan.errors import PlanError
from offplan.held.held import hold
from offplan.held.stage import Stage
from offplan.hostmem.limits import check_host_room
from offplan.placement import place
from offplan.plan import Offload
from offplan.refusals import require_runnable
from offplan.runtime.device import on_device
from offplan.runtime.loading.alike import find_owners
from offplan.runtime.loading.capability import (
    CapabilityExecutor,
    Prepared,
    find_passes,
)
from offplan.runtime.loading.checks import list_shared, map_tensors
from offplan.runtime.loading.fill import hold_codes
from offplan.runtime.loading.offloaded import check_experts_whole, find_offloaded, pin_split
from offplan.runtime.loading.packed import bringing_kernels
from offplan.runtime.loading.skeleton import build_skeleton, decoder_layers
from offplan.runtime.model.probe import check_codes
from offplan.runtime.refusal import refuse


def prepare(
    model: Model,
    offload: Offload,
    device: torch.device,
    executors: Mapping[str, type[CapabilityExecutor]],
    *,
    way: Way = OWN,
    share_layers: bool = False,
    host_threads: int | None = None,
    build: Callable[[Model], PreTrainedModel] = build_skeleton,
) -> Prepared:
    """Build a model without weights, and find out whether ``device`` and host can take a plan's.

    ``executors`` has a class for each capability that the runtime executes, by its name.
    ``way`` are the passes that it is built for. With ``share_layers`` layers that are alike read
    the weights of the first of them; the plan then offloads none but tables. ``host_threads`` are
    what the host computes with. ``build`` builds the model without weights for offplan's own
    passes.

    Raises what ``fit`` raises, and MemoryLimitError where the host's memory or a second GPU is
    lacking. Raises OffplanError where a package is, or what builds the host's kernels.
    """
    stage = hold(model, offload.recoding, way)
    with ExitStack() as ahead:
        if offload.recoding:
            ahead.enter_context(on_device(device))
            ahead.enter_context(bringing_kernels(device))
        prepared = fit(stage, offload, executors, device, build)
    placement = prepared.placement
    for each in prepared.executors.values():
        each.prepare(device, host_threads)
    owners: dict[str, str] = {}
    if share_layers:
        module, resident = prepared.module, prepared.wanted.keys() - prepared.offloaded.keys()
        owners = find_owners(decoder_layers(module), module, stage, resident)
    spared = sum(prepared.wanted.pop(name).nbytes for name in owners)
    elsewhere = prepared.slab_device
    stands_in = device.type == "cpu" and elsewhere is None
    device_bytes = placement.resident_bytes + placement.ring_bytes - spared
    device_bytes += sum(each.device_bytes for each in prepared.executors.values())
    device_bytes *= stands_in
    host_bytes = placement.table_bytes + (placement.slab_bytes if elsewhere is None else 0)
    check_host_room(host_bytes + device_bytes, device_bytes)
    return replace(prepared, owners=owners)


def fit(
    stage: Stage,
    offload: Offload,
    executors: Mapping[str, type[CapabilityExecutor]],
    device: str | torch.device,
    build: Callable[[Model], PreTrainedModel] = build_skeleton,
) -> Prepared:
    """Build a model without weights, and find where a decision places each parameter.

    ``stage`` is held as the decision says. Nothing is asked of this machine, nor of
    ``device``, which is to run it. Raises PlanError for a decision that does not fit the model,
    that ``run`` refuses, or that needs a capability which ``executors`` lacks. Raises
    CheckpointError for a model that cannot run, and for files whose headers do not fit it.
    """
    for name in (*offload.list_capabilities(), *[stage.way.name] * (not stage.way.is_own)):
        if name not in executors:
            raise PlanError(
                f"the plan needs {name}, which this runtime does not execute: it has executors of "
                f"{', '.join(executors) or 'no capability'}; make a plan without {name}"
            )
    passes = find_passes(executors, stage.way)
    model = stage.model
    module = build(model) if passes is None else passes.build(model)
    if passes is None:
        caches = [layer.kv_cache for layer in stage.layers]
        check_codes(stage.model.source, decoder_layers(module), caches)
    targets = map_tensors(module, stage)
    shared = {} if passes is None else list_shared(module, targets)
    hold_codes(module, targets)
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    _check_types(stage, on_gpu)
    state = module.state_dict()
    wanted = {name: state[name] for name in targets}
    if passes is None:
        check_experts_whole(stage, targets, wanted)
    else:
        stage = pin_split(stage, targets, wanted, shared)
    placement = place(stage, offload)
    require_runnable(stage, placement, offload, on_gpu=on_gpu)
    offloaded = find_offloaded(module, placement, targets, wanted)
    made = Prepared(stage, offload, placement, module, targets, wanted, offloaded, device)
    found = {name: executor.find(made) for name, executor in executors.items()}
    return replace(made, executors={name: each for name, each in found.items() if each})


def _check_types(stage: Stage, on_gpu: bool) -> None:
    """Raise CheckpointError for experts that a GPU would have to expand, all of a layer at once."""
    coded = (p for p in stage.parameters if p.is_expert and not p.form.is_raw)
    if on_gpu and stage.dtype == "float32" and any(coded):
        raise refuse(f"{stage.model.source} has experts stored as codes and is computed in float32")
