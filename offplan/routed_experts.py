"""The routed experts of a layer, which some rules take whole and alone, or not at all."""

from collections.abc import Sequence
from functools import partial

from offplan.capabilities.rule import LayerExperts
from offplan.checkpoint.assemble import SECOND_PROJECTIONS, count_experts
from offplan.checkpoint.layers import is_in_out
from offplan.checkpoint.model import Layer
from offplan.errors import PlanError
from offplan.forms.form import Component, Kind
from offplan.forms.host_kernels import CHUNK_COLUMNS
from offplan.held.stage import Stage
from offplan.held.unit import Unit
from offplan.plan import Rule


def require_experts(
    stage: Stage, layer: Layer, position: int, taker: Rule, units: Sequence[Unit]
) -> LayerExperts:
    """Describe the experts of a layer of which a rule, at a position from 1 on, takes ``units``.

    Raises PlanError if these are not all of the layer's routed experts, and nothing else, or if
    the rule's pieces do not divide them.
    """
    rule = f"rule {position}"
    has = f"{rule} has {taker.experts_key}"
    other = next((unit.name for unit in units if not unit.is_expert), None)
    if other is not None:
        raise PlanError(
            f"{has} and takes {other} of layer {layer.index}, which is "
            "no routed expert: name the routed experts alone, cpu_offload_params: [experts]"
        )
    taken = {parameter.name for unit in units for parameter in unit.parameters}
    left = next((p.name for p in layer.parameters if p.is_expert and p.name not in taken), None)
    if left is not None:
        raise PlanError(
            f"{has} and leaves {left} of layer {layer.index} out: the "
            "parts of an expert are kept together, so name all of them, cpu_offload_params: "
            "[experts]"
        )
    num_experts = count_experts(layer, stage.experts.num_experts if stage.experts else None)
    for unit in units:
        if unit.nbytes % num_experts:
            raise PlanError(
                f"{has}, and {unit.name} of layer {layer.index} has {unit.nbytes} bytes, which "
                f"{num_experts} experts do not divide: leave {taker.experts_key} out"
            )
    whose = f"layer {layer.index} of {stage.model.source}"
    if (why := taker.why_not_divide(num_experts, whose)) is not None:
        raise PlanError(f"{rule} has {why}")
    sizes = tuple(unit.nbytes for unit in units)
    return LayerExperts(rule, whose, num_experts, sizes, partial(count_inner, stage, units))


def count_inner(stage: Stage, units: Sequence[Unit]) -> int:
    """Count the inner columns of experts; 0 if a part of them cannot be multiplied alone.

    Packed weights lie in halves of a row, and their patches by place.
    """
    weights = [u for u in units if u.part is Component.WEIGHT and not u.name.endswith("bias")]
    if any(p.form.kind is Kind.PACKED for unit in weights for p in unit.parameters):
        return 0
    second = (u for u in weights if SECOND_PROJECTIONS.intersection(u.name.split(".")))
    if (down := next(second, None)) is None:
        return 0
    inner = down.shape[-2 if has_inputs_as_rows(stage, down) else -1]
    return inner if inner > CHUNK_COLUMNS else 0


def has_inputs_as_rows(stage: Stage, unit: Unit) -> bool:
    """Return True if a unit holds a matrix of all experts as [experts, in, out]."""
    of = unit.parameters[0]
    return len(of.shape) == 3 and of.form.is_raw and is_in_out(of, stage.architecture)
