"""Packing: bfloat16 weights are held packed, without loss, wherever they lie."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import Field
from typing_extensions import Self

from offplan.capabilities.goal import Asked, GoalBase
from offplan.capabilities.offload import OffloadBase
from offplan.capabilities.rule import Count, Pattern
from offplan.checkpoint.model import Model
from offplan.checkpoint.parameter import Parameter
from offplan.errors import InputError, UnpackableError
from offplan.segments import match_segments

OUTPUT_HEAD = "output_head"
"""The name of the output head among them."""


@dataclass(frozen=True)
class Unpacked:
    """Weights that stay as they are stored, by name.

    ``7`` is all of layer 7, ``7.mlp.down_proj`` what a segment matches there. ``mlp.down_proj`` is
    what it matches in all layers, and ``output_head`` the output head.
    """

    names: tuple[str, ...] = ()

    @cached_property
    def _by_layer(self) -> dict[int | None, list[str]]:
        """Segments by layer, and under None those of all layers; an empty one takes the layer."""
        found: dict[int | None, list[str]] = {}
        for name in self.names:
            first, _, rest = name.partition(".")
            key, segment = (int(first), rest) if first.isdecimal() else (None, name)
            if name != OUTPUT_HEAD:
                found.setdefault(key, []).append(segment)
        return found

    def takes(self, layer: int, name: str) -> bool:
        """Return True if a weight stays as it is stored; ``name`` is relative to its layer."""
        return any(
            not segment or match_segments((segment,), name)
            for key in (layer, None)
            for segment in self._by_layer.get(key, ())
        )

    @property
    def takes_head(self) -> bool:
        """True if the output head stays as it is stored."""
        return OUTPUT_HEAD in self.names

    def list_absent(self, model: Model) -> Iterator[str]:
        """Yield each name that no matrix of a model's layers has, with a remedy."""
        for name in self.names:
            one = Unpacked((name,))
            if not one.takes_head and not any(
                one.takes(layer.index, p.name) and is_matrix(p)
                for layer in model.layers
                for p in layer.parameters
            ):
                yield (
                    f"`leave_unpacked={name}`: no matrix of {model.source} goes by it; name one of "
                    f"the layers 0 to {len(model.layers) - 1} (7), a segment (mlp.down_proj), both "
                    "(7.mlp.down_proj), or output_head"
                )

    def with_names(self, names: Iterable[str]) -> "Unpacked":
        """Return these weights and others, in the order of layers; nothing is named twice."""
        return Unpacked(tuple(sorted({*self.names, *names}, key=_rank)))


def _rank(name: str) -> tuple[int, int, str]:
    first = name.partition(".")[0]
    return (0, int(first), name) if first.isdecimal() else (1, 0, name)


UnpackedName = Annotated[str, Field(pattern=r"^[\w-]+(\.[\w-]+)*$")]
"""A layer's number, a segment or both with a dot between, or ``output_head``."""


class Packing(Pattern):
    """Which weights are held packed, without loss, wherever they lie: 0.76 of their bytes."""

    without: ClassVar = "`packing=False`"
    """The argument, in backquotes, that plans without it."""
    done: ClassVar = "packed"
    """The weights' adjective."""
    word: ClassVar = "packing"
    """The noun of what is done to them."""
    gain: ClassVar = (
        "packed weights take 0.76 of their bytes, on the link and in memory, without loss"
    )
    """The reason that a plan gives."""
    misfit: ClassVar = UnpackableError
    """The error of weights that turn out not to be recoded so."""

    group_size: Count
    num_in_group: Count
    """Of every ``group_size`` layers the last ``num_in_group``."""
    output_head: bool = False
    """True packs the output head, too, and the input embedding if it is tied to that."""
    leave_unpacked: tuple[UnpackedName, ...] = ()
    """Weights that stay as they are stored all the same; experts of a layer stay together."""

    @staticmethod
    def leave(names: Iterable[str]) -> str:
        """Name the argument, in backquotes, that leaves these weights as they are stored."""
        return f"`leave_unpacked={','.join(names)}`"

    def describe(self) -> str:
        """Say what is packed, for a plan's report."""
        head = ", and the output head" if self.output_head else ""
        return f"packed without loss: {self._what} {self.where}{head}"

    def describe_plainly(self, layers: str) -> str:
        """Say the same to people who do not know the keys; ``layers`` are so many of so many."""
        head = " and the output head" if self.output_head else ""
        return f"held packed without loss are {self._what} of {layers} layers{head}"

    @property
    def _what(self) -> str:
        return ", ".join(self.cpu_offload_params) or "weights"


class PackingOffload(OffloadBase):
    """A decision that may hold weights packed."""

    packing: Packing | None = None
    """The weights that are held packed; null if every weight is as it is stored."""

    @property
    def recoding(self) -> Packing | None:
        """The weights that are held packed; None if all are as they are stored."""
        return self.packing

    def recoded_by(self, recoding: Packing | None) -> Self:
        """Return the same decision with other weights packed."""
        return self.model_copy(update={"packing": recoding})

    def list_steps(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield steps to fewer packed weights, and to other layers."""
        yield from super().list_steps()
        if self.packing is None:
            return
        now = dict(self.packing)
        yield "without packing", {"packing": None}
        if self.packing.output_head:
            yield "output_head true -> false", {"packing": {**now, "output_head": False}}
        for step, changes in self.packing.list_pattern_steps():
            yield f"packing: {step}", {"packing": {**now, **changes}}


class PackingGoal(GoalBase):
    """A question whose plans may pack weights."""

    packing: bool = True
    """True lets weights be packed; no engine's flags can say that."""
    leave_unpacked: tuple[UnpackedName, ...] = ()
    """Weights that stay as they are stored, whatever is packed: ``7``, ``7.mlp.down_proj``,
    ``mlp.down_proj``, ``output_head``."""

    def list_refusals(self, asked: Asked) -> Iterator[str]:
        """Yield each weight to leave unpacked that the model does not have."""
        yield from Unpacked(self.leave_unpacked).list_absent(asked.model)
        yield from super().list_refusals(asked)

    def for_other_weights(self) -> Self:
        """Return the same goal without the names of one checkpoint's weights."""
        return self.model_copy(update={"leave_unpacked": ()})

    def exclude(self, names: Sequence[str]) -> Self:
        """Return the same goal with these weights left unpacked, too."""
        noted = Unpacked(self.leave_unpacked).with_names(names).names
        if {*noted} == {*self.leave_unpacked}:
            raise InputError(f"{', '.join(names)} are left unpacked already: a fault of offplan")
        return self.model_copy(update={"leave_unpacked": noted})

    @property
    def excluded(self) -> str:
        """The argument that leaves the weights unpacked."""
        return Packing.leave(self.leave_unpacked)

    def list_outcomes(self) -> Iterator[tuple[str, Any]]:
        """Yield the weights that turned out not to pack."""
        yield "left_unpacked", [*self.leave_unpacked]


def is_matrix(parameter: Parameter) -> bool:
    """Return True if it is one matrix, or one for each expert; a fused expert's bias is none."""
    return len(parameter.shape) == (3 if parameter.is_fused else 2)
