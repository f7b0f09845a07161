"""A model without its weights, and where a plan puts them, on a device that has been asked.

Of layers that are alike one stands for all: it is run, built or loaded.
"""

import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from offplan.capabilities.way import OWN, Way
from offplan.checkpoint.model import Layer, Model
from offplan.checkpoint.tables import Table
from offplan.checkpoint.tensors import TensorInfo
from offplan.checkpoint.transformers_config import build_config
from offplan.errors import PlanError
from offplan.held.held import hold
from offplan.held.stage import Stage
from offplan.held.unit import Unit
from offplan.hostmem.limits import check_host_room
from offplan.placement import Placement, place
from offplan.plan import Offload
from offplan.refusals import require_runnable
from offplan.runtime.device import on_device
from offplan.runtime.loading.capability import (
    CapabilityExecutor,
    Prepared,
    find_passes,
)
from offplan.runtime.loading.checks import list_shared, map_tensors
from offplan.runtime.loading.fill import Target, hold_codes
from offplan.runtime.loading.packed import bringing_kernels
from offplan.runtime.loading.skeleton import build_skeleton, decoder_layers
from offplan.runtime.memory.store import Offloaded, table_layer
from offplan.runtime.model.probe import check_codes
from offplan.runtime.refusal import refuse
from offplan.units import format_bytes


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
    beside: Prepared | None = None,
) -> Prepared:
    """Build a model without weights, and find out whether ``device`` and host can take a plan's.

    ``executors`` has a class for each capability that the runtime executes, by its name.
    ``way`` are the passes that it is built for. With ``share_layers`` layers that are alike read
    the weights of the first of them; the plan then offloads none but tables. ``host_threads`` are
    what the host computes with. ``build`` builds the model without weights for offplan's own
    passes. ``beside`` is another prepared model, which host memory has to hold as well.

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
    of_others = (0, 0) if beside is None else (beside.host_bytes, beside.stand_in_bytes)
    in_all = host_bytes + of_others[0], device_bytes + of_others[1]
    check_host_room(sum(in_all), in_all[1])
    return replace(prepared, owners=owners, host_bytes=host_bytes, stand_in_bytes=device_bytes)


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


def find_offloaded(
    module: nn.Module,
    placement: Placement,
    targets: Mapping[str, Target],
    wanted: Mapping[str, torch.Tensor],
) -> Offloaded:
    """Find where a plan places parameters off the device.

    ``wanted`` are the model's tensors by parameter name, on the meta device. Raises PlanError where
    a plan places part of what is loaded as one, or a table that is not only read by row.
    """
    owners = _list_owners(targets)
    found: dict[str, tuple[int, int]] = {}
    for slab in placement.slabs:
        for entry in slab.entries:
            name = _parameter_of(entry.unit, owners, targets)
            _check_size(entry.unit, wanted[name].nbytes)
            found[name] = slab.layer, entry.offset
    for number, table in enumerate(placement.host_tables):
        found[_find_gathered(table, owners, module, wanted)] = table_layer(number), 0
    return found


def _find_gathered(
    table: Table,
    owners: Mapping[TensorInfo, str],
    module: nn.Module,
    wanted: Mapping[str, torch.Tensor],
) -> str:
    """Find the parameter that a table is loaded as, which embeddings alone may read.

    Raises PlanError where another module reads it, too, or where it is loaded in other bytes.
    """
    names, remedy = {owners[tensor] for tensor in table.tensors}, "plan with `embeddings: device`"
    name = next(iter(names))
    if len(names) > 1 or wanted[name].nbytes != table.nbytes:
        raise PlanError(
            f"{table.name} is stored in {format_bytes(table.nbytes)} and loaded as "
            f"{', '.join(sorted(names))} in {format_bytes(wanted[name].nbytes)}: {remedy}"
        )
    weight = module.get_parameter(name)
    for path, each in module.named_modules():
        reads = any(parameter is weight for parameter in each.parameters(recurse=False))
        if reads and not isinstance(each, nn.Embedding):
            raise PlanError(
                f"{path} ({type(each).__name__}) reads all of {table.name}, expected embeddings "
                f"alone, which read rows: {remedy}"
            )
    return name


def check_experts_whole(
    stage: Stage, targets: Mapping[str, Target], wanted: Mapping[str, torch.Tensor]
) -> None:
    """Raise CheckpointError for experts that no plan could move, since loading splits them."""
    owners = _list_owners(targets)
    for unit in (unit for units in stage.units for unit in units if unit.is_expert):
        if wanted[owners[unit.tensors[0]]].nbytes < unit.nbytes:
            raise refuse(
                f"{stage.model.source} stores experts of text and of images as one ({unit.name}), "
                "which loading splits"
            )


def pin_split(
    stage: Stage,
    targets: Mapping[str, Target],
    wanted: Mapping[str, torch.Tensor],
    shared: Iterable[str],
) -> Stage:
    """Return a stage of whose layers no rule takes what is split or joined when it is loaded.

    Nor does any take ``shared`` parameters, which several layers read: they stay on the GPU.
    """
    owners = _list_owners(targets)
    pinned = {piece.tensor.name for name in shared for piece in targets[name].pieces}
    for units in stage.units:
        for unit in units:
            try:
                _check_size(unit, wanted[_parameter_of(unit, owners, targets)].nbytes)
            except PlanError:
                pinned.update(tensor.name for tensor in unit.tensors)
    return stage.pin(pinned)


def _list_owners(targets: Mapping[str, Target]) -> dict[TensorInfo, str]:
    """List the parameter that each stored tensor is loaded into."""
    return {piece.tensor: name for name, target in targets.items() for piece in target.pieces}


def _parameter_of(
    unit: Unit, owners: Mapping[TensorInfo, str], targets: Mapping[str, Target]
) -> str:
    """Find the parameter that a unit is loaded as; raises PlanError for part of one."""
    names = sorted({owners[tensor] for tensor in unit.tensors})
    if len(names) > 1 or len(targets[names[0]].pieces) != len(unit.tensors):
        raise PlanError(
            f"layer {unit.layer}: {unit.name} is loaded together with other parameters "
            f"({', '.join(names)}); name all of them in cpu_offload_params or none"
        )
    return names[0]


def _check_size(unit: Unit, used_bytes: int) -> None:
    """Raise PlanError for a unit that takes other bytes in use than in its slab."""
    if used_bytes != unit.nbytes:
        raise PlanError(
            f"layer {unit.layer}: {unit.name} is stored in {format_bytes(unit.nbytes)} and used in "
            f"{format_bytes(used_bytes)}; a parameter that is split or changes type when it is "
            "loaded cannot be offloaded"
        )


def list_kinds(layers: Sequence[Layer], config: PreTrainedConfig) -> list[object]:
    """Name what makes two layers run alike: their parameters, and what the config lists of each.

    ``layers`` are all that a model has, and ``config`` is that of its text.
    """
    if len({len(layer.prefix.rpartition(".")[0]) for layer in layers}) > 1:
        return [*range(len(layers))]
    values = config.to_dict().values()
    lists = [v for v in values if isinstance(v, (list, tuple)) and len(v) == len(layers)]
    return [
        (layer.key, *(json.dumps(each[layer.index], default=str) for each in lists))
        for layer in layers
    ]


def shorten(stage: Stage) -> Stage:
    """Leave out a stage's last layers as far as each is like an earlier one.

    offplan's own runtime can run the rest where it can run the whole: it builds, maps and probes
    layers of one kind alike.
    """
    model = stage.model
    config = build_config(model.config, model.source).get_text_config()
    kinds = list_kinds(stage.layers, config)
    count = 1 + max(kinds.index(kind) for kind in {*kinds})
    short = replace(model, layers=model.layers[:count])
    return replace(stage, model=short, layers=stage.layers[:count])


def find_owners(
    layers: nn.ModuleList, module: nn.Module, stage: Stage, names: Container[str]
) -> dict[str, str]:
    """Find whose weights a layer can read in place of its own: those of the first one like it.

    Returns the first layer's parameter for each one of a later layer, of those in ``names``.
    """
    paths = {id(part): path for path, part in module.named_modules()}
    first: dict[str, nn.Module] = {}
    owners: dict[str, str] = {}
    for layer, block in zip(stage.layers, layers, strict=True):
        owner = first.setdefault(layer.key, block)
        if owner is block:
            continue
        for name in block.state_dict():
            here, there = (f"{paths[id(each)]}.{name}" for each in (block, owner))
            if here in names and there in names:
                owners[here] = there
    return owners
