"""The parameters of a model that a plan places off the device."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from offplan.checkpoint.tables import Table
from offplan.checkpoint.tensors import TensorInfo
from offplan.errors import PlanError
from offplan.held.stage import Stage
from offplan.held.unit import Unit
from offplan.placement import Placement
from offplan.runtime.loading.fill import Target
from offplan.runtime.memory.store import Offloaded, table_layer
from offplan.runtime.refusal import refuse
from offplan.units import format_bytes


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
