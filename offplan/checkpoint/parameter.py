"""A parameter of a model: a weight with whatever is stored for it, and what it is there for."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import prod

from offplan.checkpoint.tensors import Tensors, split_expert, sum_bytes
from offplan.forms.form import RAW, Component, Form


@dataclass(frozen=True)
class Parameter:
    """A weight, of one module or of all routed experts, and the tensors that it is stored in.

    It is the smallest thing a rule's segments can choose.
    """

    name: str
    """Its name relative to the layer, without expert index: ``mlp.experts.down_proj.weight``.

    It is the weight's own, also where what is stored is named ``qweight`` or ``weight_packed``.
    """
    tensors: Tensors
    """Values or codes: one tensor, or one for each routed expert in the order of their indices."""
    is_expert: bool = False
    """True if it belongs to the routed experts (fused or one by one)."""
    resized: int | None = None
    """Bits that an element takes once loaded, where they are not those that it is stored in."""
    form: Form = RAW
    """How the values are stored."""
    is_shuffled: bool = False
    """True if columns of one group lie apart, by the config: each column's scales are looked up."""
    beside: tuple[tuple[Component, Tensors], ...] = ()
    """Scales and what else the values are made with, each as many tensors as ``tensors``."""
    logical_shape: tuple[int, ...] | None = None
    """The shape that each of ``tensors`` stands for; None for that stored.

    A logical shape other than the stored one is [..., out, in].
    """
    made_of: Tensors = ()
    """The checkpoint's tensors that the parts are made of when they are loaded, as many as
    ``tensors``; () where it stores the parts themselves."""

    def of(self, part: Component) -> Tensors:
        """Return the tensors of one part, in the order of the experts; () where there are none."""
        return self.tensors if part is Component.WEIGHT else dict(self.beside).get(part, ())

    @property
    def is_recoded(self) -> bool:
        """True if the plan, and not the checkpoint, chose the form."""
        return bool(self.made_of)

    @cached_property
    def as_stored(self) -> "Parameter":
        """The same as the checkpoint stores it, by its values."""
        return Parameter(self.name, self.made_of, self.is_expert) if self.made_of else self

    @property
    def components(self) -> tuple[Component, ...]:
        """The parts that it is stored in, the values or codes first."""
        return (Component.WEIGHT, *(part for part, _ in self.beside))

    @cached_property
    def stored(self) -> Tensors:
        """All its tensors."""
        return self.tensors + tuple(tensor for _, tensors in self.beside for tensor in tensors)

    @cached_property
    def kinds_read(self) -> list[tuple[str, tuple[int, ...]]]:
        """Types and shapes of the tensors that values are made of, in order.

        bitsandbytes' states are not among them, since they differ in length alone.
        """
        read = (self.of(part) for part in self.components if part is not Component.STATE)
        return sorted({(tensor.dtype, tensor.shape) for tensors in read for tensor in tensors})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what one of ``tensors`` stands for."""
        return self.tensors[0].shape if self.logical_shape is None else self.logical_shape

    @cached_property
    def part_bytes(self) -> Mapping[Component, int]:
        """Bytes as stored, by part."""
        return {part: sum_bytes(self.of(part)) for part in self.components}

    @cached_property
    def nbytes(self) -> int:
        """Bytes as stored, over all its tensors."""
        return sum(self.part_bytes.values())

    @property
    def loaded_bytes(self) -> int:
        """Bytes once loaded, over all its tensors."""
        if self.resized is None:
            return self.nbytes
        return sum(tensor.num_elements for tensor in self.tensors) * self.resized // 8

    @cached_property
    def num_weights(self) -> int:
        """Weights that it stands for: scales and the like are none."""
        if self.logical_shape is None:
            return sum(tensor.num_elements for tensor in self.tensors)
        return len(self.tensors) * prod(self.logical_shape)

    @property
    def is_fused(self) -> bool:
        """True if one tensor holds all routed experts."""
        return self.is_expert and split_expert(self.tensors[0].name) is None

    @property
    def segment(self) -> str:
        """Its name without the final part: ``mlp.experts.down_proj``."""
        return self.name.rpartition(".")[0] or self.name


ATTENTION_OUTPUTS = frozenset({"o_proj", "out_proj", "wo", "dense", "c_proj"})
"""Modules of attention that give hidden states."""
MLP_OUTPUTS = frozenset({"down_proj", "w2", "fc2", "c_proj", "dense_4h_to_h", "fc_out"})
"""Modules of an MLP that give hidden states."""
_MLP_INPUTS = frozenset(
    {"gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "fc1", "c_fc", "dense_h_to_4h", "fc_in"}
)


class Role(str, Enum):
    """Parameters of one role are fused, or used together, by every engine.

    Source: vLLM's ``qkv_proj``, ``gate_up_proj``, ``w13_weight`` and ``w2_weight``.
    """

    QKV = "attention inputs"
    ATTENTION_OUTPUT = "attention output"
    GATE_UP = "MLP inputs"
    DOWN = "MLP output"
    EXPERTS_GATE_UP = "expert inputs"
    EXPERTS_DOWN = "expert outputs"
    SHARED_EXPERTS = "shared experts"
    OTHER = "norms, router and the like"


def role_of(parameter: Parameter) -> Role:
    """Tell a parameter's role by its name; what is not recognised is OTHER."""
    parts = parameter.name.split(".")
    if parameter.is_expert:
        # fused experts join what it is to the projection's name: down_proj_bias, w2_weight
        is_output = any(part.startswith(tuple(MLP_OUTPUTS)) for part in parts)
        return Role.EXPERTS_DOWN if is_output else Role.EXPERTS_GATE_UP
    # not all parts: DBRX has its attention in ``norm_attn_norm``
    if "norm" in parameter.segment.rpartition(".")[2]:
        return Role.OTHER
    if any(part.startswith("shared_expert") for part in parts):
        return Role.SHARED_EXPERTS
    if "attn" in parts[0] or "attention" in parts[0]:
        is_output = not ATTENTION_OUTPUTS.isdisjoint(parts)
        return Role.ATTENTION_OUTPUT if is_output else Role.QKV
    if not MLP_OUTPUTS.isdisjoint(parts):
        return Role.DOWN
    if not _MLP_INPUTS.isdisjoint(parts):
        return Role.GATE_UP
    return Role.OTHER
