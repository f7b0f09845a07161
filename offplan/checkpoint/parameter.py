"""A parameter of a model: a weight, with whatever is stored for it."""

from collections.abc import Mapping
from dataclasses import dataclass
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
