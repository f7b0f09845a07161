"""Refusals of a decision by ``run``, found from the plan, the headers and the config.

One list: a decision that is priced, checked, offered as a neighbour or run has passed it.
``library.runnable`` has the refusals that only transformers' class of the model tells,
``runtime.loading.prepared`` those that only the machine tells. No torch.
"""

from collections.abc import Iterable, Iterator

from offplan.backends import Backend
from offplan.capabilities.cached_experts import find_unread
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.roles import Role, role_of
from offplan.errors import PlanError
from offplan.expert_slots import is_in_out, require_few_pairs
from offplan.forms.form import RAW, Part
from offplan.forms.host_kernels import why_no_kernel
from offplan.held.stage import Stage
from offplan.held.unit import Unit
from offplan.placement import Placement
from offplan.plan import Offload


def require_runnable(
    stage: Stage, placement: Placement, offload: Offload, *, batch: int = 1, on_gpu: bool
) -> None:
    """Raise PlanError for a decision that offplan's own runtime refuses.

    ``placement`` is where the decision places the stage's weights, ``batch`` the sequences of a
    step. An engine has a list of its own, its runner's ``demand``.
    """
    if stage.pass_rules is not None:
        return
    for why in _list_refusals(stage, placement, offload, on_gpu):
        raise PlanError(why)
    require_few_pairs(stage, offload, batch)


def _list_refusals(
    stage: Stage, placement: Placement, offload: Offload, on_gpu: bool
) -> Iterator[str]:
    if stage.is_stock and placement.expert_slots:
        yield (
            "a rule has cached_experts, and transformers' own passes are to run the model: kept "
            "experts need offplan's own passes, so make a plan with `stock=True`"
        )
    if stage.is_stock and placement.parts:
        yield (
            "a rule has parts, and transformers' own passes are to run the model, whose layers "
            "take one chunk after the other: make a plan with `stock=True`"
        )
    keeping = [layer for layer in stage.layers if layer.index in placement.expert_slots]
    if on_gpu and (what := find_unread(stage.model, stage.dtype, keeping)) is not None:
        yield (
            f"a rule has cached_experts, and {stage.model.source} has experts {what}, which no "
            "kernel on a GPU keeps: leave cached_experts out"
        )
    for slab in placement.slabs:
        given = [entry.unit for entry in slab.entries if entry.decode is Backend.HOST]
        if given and (why := why_not_by_cores(stage, stage.units[slab.layer], given)):
            yield f"layer {slab.layer}: `decode: host` {why}"


def why_not_by_cores(stage: Stage, units: Iterable[Unit], given: Iterable[Unit]) -> str | None:
    """Say why the host's cores cannot multiply what they are ``given`` of a layer's ``units``.

    Returns None if they can. The products of routed experts are computed together or not at all.
    """
    given = [unit for unit in given if _is_multiplied(unit)]
    taken = {parameter.name for unit in given for parameter in unit.parameters if unit.is_expert}
    left = [
        parameter.name
        for unit in units
        if unit.is_expert and _is_multiplied(unit)
        for parameter in unit.parameters
        if parameter.name not in taken
    ]
    if taken and left:
        return (
            f"takes {', '.join(sorted(taken))} without {', '.join(left)}, which the cores multiply "
            "in the same task: name all of them in cpu_offload_params, or none"
        )
    for unit in given:
        for parameter in unit.parameters:
            if _is_wide(parameter):
                continue
            why = why_no_kernel(parameter.form, stage.dtype, parameter.shape[-1])
            if is_in_out(stage, unit):
                why = "has no kernel for experts whose rows are inputs"
            if why is not None:
                return f"{why} ({parameter.name}): write decode: uva or prefetch"
    return None


def _is_multiplied(unit: Unit) -> bool:
    """Return True if a unit is a linear layer's weights, or experts: no norm, bias or router."""
    of = unit.parameters[0]
    if unit.part is not Part.WEIGHT or of.name.endswith("bias"):
        return False
    return len(unit.shape) > 1 and (not of.form.is_raw or role_of(of) is not Role.OTHER)


def _is_wide(parameter: Parameter) -> bool:
    """Return True if values are float32, which steps read in place whatever the decision says."""
    return parameter.form is RAW and all(tensor.dtype == "F32" for tensor in parameter.tensors)
