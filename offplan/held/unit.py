"""Units of placement: a weight, or the weights that the runtime fuses into one."""

from dataclasses import dataclass
from functools import cached_property

from offplan.checkpoint.model import Layer
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tensors import TensorInfo
from offplan.forms.form import Component

FUSED_EXPERT_PARTS = (("gate_proj", "up_proj"), ("w1", "w3"))
"""Projections of the routed experts that are one parameter once loaded.

Source: transformers' conversion mapping (``gate_up_proj``), vLLM (``w13_weight``).
"""
FUSED_PARTS = (("q_conv1d", "k_conv1d", "v_conv1d"),)
"""Parts of a layer beside its experts that are one parameter once loaded.

Source: transformers' conversion mapping (``linear_attn.conv1d``).
"""
_GATE_AND_UP = ("gate_proj", "up_proj")


@dataclass(frozen=True)
class Unit:
    """A unit of placement: a part of a parameter, or of parameters that the runtime fuses.

    All parts of a parameter have its name, so that every rule takes them together.
    """

    layer: int
    parameters: tuple[Parameter, ...]
    part: Component = Component.WEIGHT

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(parameter.part_bytes[self.part] for parameter in self.parameters)

    @property
    def tensors(self) -> list[TensorInfo]:
        """The stored tensors of this part of all its parameters."""
        return [tensor for parameter in self.parameters for tensor in parameter.of(self.part)]

    @property
    def name(self) -> str:
        """The first parameter's name, relative to the layer."""
        return self.parameters[0].name

    @property
    def is_expert(self) -> bool:
        """True if it holds routed experts."""
        return self.parameters[0].is_expert

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first parameter's weight; of routed experts with their number."""
        shape, tensors = self.parameters[0].shape, self.parameters[0].tensors
        return (len(tensors), *shape) if self.is_expert and len(shape) == 2 else shape


def group_units(layer: Layer) -> tuple[Unit, ...]:
    """Split a layer into units, in the order of their names.

    What takes another type's size when it is loaded is in none, nor is what it is fused with: its
    bytes are not those that a slab would hold.
    """
    of_dense = (*FUSED_PARTS, _GATE_AND_UP) if layer.fuses_gates else FUSED_PARTS
    fused = {False: of_dense, True: FUSED_EXPERT_PARTS}
    partners = {
        is_expert: {part: group for group in groups for part in group}
        for is_expert, groups in fused.items()
    }
    groups: dict[tuple[object, ...], list[Parameter]] = {}
    for parameter in layer.parameters:
        parts = parameter.name.split(".")
        key = tuple(partners[parameter.is_expert].get(part, part) for part in parts)
        groups.setdefault(key, []).append(parameter)
    return tuple(
        Unit(layer.index, tuple(parameters), part)
        for parameters in groups.values()
        if all(parameter.resized is None for parameter in parameters)
        for part in parameters[0].components
    )
