"""Every rule of a plan: the weights that it takes of some layers, and how passes reach them.

Capabilities add keys of their own in subclasses, and their words and refusals by ``super()``.
"""

import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator
from typing_extensions import Self

from offplan.backends import BACKENDS, Backend
from offplan.checkpoint.model import Experts, Layer, Model
from offplan.records import ExactBytes, Record
from offplan.segments import match_segments
from offplan.stores import STORES, StoreName

MOST = 2**24
"""Beyond any workload and any model: sequences, or tokens of one; slots of a ring, or layers."""
Count = Annotated[int, Field(ge=1, le=MOST)]
_ALL = "all"
REPLANNED = object()
"""Context in which a plan is read to be made again: its rules may have keys of before."""


def _read_segments(value: Any) -> Any:
    if isinstance(value, str) and value != _ALL:
        raise ValueError(f"found {reprlib.repr(value)}: it should be a list of segments, or all")
    return () if value == _ALL else value


Segments = Annotated[
    tuple[str, ...],
    BeforeValidator(_read_segments, json_schema_input_type=Literal["all"] | tuple[str, ...]),
    PlainSerializer(lambda value, info: _ALL if info.context and not value else value),
]
"""Segments: dotted runs of name parts relative to the layer. Empty matches everything, and is
``all`` in a plan's file."""


class WeightCache(Protocol):
    """A part of what a rule takes of a layer that lies on the GPU as well."""

    name: ClassVar[str]
    """Its name among the terms of GPU memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that it takes, with what says what is in it."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the layer's weights that are in it."""

    def describe(self) -> str:
        """Say how many weights lie there, beside the ways of both phases: from a comma on."""


@dataclass(frozen=True)
class LayerExperts:
    """The routed experts of a layer, all of which a rule takes, and nothing else."""

    rule: str
    """The rule in words: ``rule 1``."""
    layer: str
    """The layer in words, with its model."""
    num_experts: int
    unit_bytes: tuple[int, ...]
    """Bytes of each unit of them, in the slab's order."""
    count_inner: Callable[[], int]
    """Counts the inner columns of an expert; 0 if a part of them cannot be multiplied alone."""


class Pattern(Record):
    """Weights of some layers, by segments and a group pattern.

    Source: vLLM ``offload_group_size``: of every ``group_size`` layers the last ``num_in_group``.
    """

    cpu_offload_params: Segments = ()
    """Segments: dotted runs of name parts relative to the layer. ``all`` takes every parameter."""
    group_size: Count | None = None
    num_in_group: Count | None = None

    def selects_layer(self, index: int) -> bool:
        """Return True if the group pattern takes this layer, or there is none."""
        if self.group_size is None or self.num_in_group is None:
            return True
        return index % self.group_size >= self.group_size - self.num_in_group

    def matches(self, name: str) -> bool:
        """Return True if its segments match a name, relative to the layer."""
        return match_segments(self.cpu_offload_params, name)

    @model_validator(mode="after")
    def _has_group(self) -> Self:
        if self.group_size and self.num_in_group and self.num_in_group > self.group_size:
            raise ValueError(
                f"num_in_group {self.num_in_group} is more than group_size {self.group_size}"
            )
        return self

    def list_pattern_steps(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the steps of its group pattern, and the key that each changes."""
        for knob in ("num_in_group", "group_size"):
            old = getattr(self, knob)
            for new in (old - 1, old + 1):
                yield f"{knob} {old} -> {new}", {knob: new}

    @property
    def where(self) -> str:
        """The layers in words: ``of every 2nd layer``."""
        if self.num_in_group == self.group_size:
            return "of every layer"
        if self.num_in_group != 1 or self.group_size is None:
            return f"of the last {self.num_in_group} in each {self.group_size} layers"
        tens, ones = divmod(self.group_size % 100, 10)
        end = {1: "st", 2: "nd", 3: "rd"}.get(ones, "th") if tens != 1 else "th"
        return f"of every {self.group_size}{end} layer"


class RuleBase(Pattern):
    """Which parameters of which layers stay on the host, and how each phase gets them.

    Either a group pattern or ``max_bytes`` (whole parameters in layer then name order, overshooting
    by at most one; Source: vLLM ``cpu_offload_gb``).
    """

    max_bytes: ExactBytes | None = Field(default=None, gt=0)
    prefill: Backend
    decode: Backend

    @model_validator(mode="after")
    def _is_sound(self) -> Self:
        for why in self.list_faults():
            raise ValueError(why)
        return self

    def list_faults(self) -> Iterator[str]:
        """Yield what contradicts itself: what was found, what was expected, what to do."""
        if self.max_bytes is not None:
            if self.group_size is not None or self.num_in_group is not None:
                yield "a rule has either max_bytes or group_size and num_in_group"
            if self.prefill is not self.decode or self.decode.streams:
                both = (b for b in BACKENDS.values() if not b.streams and len(b.phases) == 2)
                names = " or ".join(b.name for b in both)
                yield f"a max_bytes rule is read in place: prefill and decode are {names}"
        elif self.group_size is None or self.num_in_group is None:
            yield "a rule needs group_size and num_in_group, or max_bytes"
        for phase, backend in (("prefill", self.prefill), ("decode", self.decode)):
            if phase not in backend.phases:
                yield (
                    f"{phase}: {backend.name} serves {' and '.join(backend.phases)} alone; choose "
                    f"{' or '.join(b.name for b in BACKENDS.values() if phase in b.phases)}"
                )

    @property
    def is_mixed(self) -> bool:
        """True if it reaches the GPU in one way for a prompt and in another for a decode step."""
        return self.prefill is not self.decode

    @property
    def streams(self) -> tuple[bool, bool]:
        """True for each phase, prefill and decode, in which it goes through the ring."""
        return self.prefill.streams, self.decode.streams

    @property
    def num_pieces(self) -> int:
        """Pieces, of as many bytes each, in which prompts stream what it takes of a layer."""
        return 1

    def chunks_at_once(self, prefill_chunk: int) -> int | None:
        """Count the chunks of so many tokens that meet a piece at once; None for all."""
        return None

    @property
    def experts_key(self) -> str | None:
        """Key for which it takes layers' routed experts alone, all of them; None if it need not.

        It is the name of the capability whose executor reads them.
        """
        return None

    def why_not_divide(self, num_experts: int, whose: str) -> str | None:
        """Say why so many experts of a layer cannot stream in its pieces; None if they can."""
        return None

    @property
    def caches(self) -> bool:
        """True if a part of what it takes of each layer lies on the GPU as well."""
        return False

    def make_cache(self, experts: LayerExperts, num_before: int) -> WeightCache | None:
        """Make the cache of a layer, which comes after ``num_before`` others of the rule.

        Returns None if it ``caches`` nothing. Raises PlanError for experts that it cannot cache.
        """
        return None

    def why_not_on_gpu(self, model: Model, dtype: str, layers: Sequence[Layer]) -> str | None:
        """Say why no kernel on a GPU reads what it caches of these layers; None if one does.

        ``dtype`` is the type that they are computed in.
        """
        return None

    def why_not_batch(self, experts: Experts | None, batch: int) -> str | None:
        """Say why it does not serve steps of so many sequences; None if it does."""
        return None

    def list_capabilities(self) -> Iterator[str]:
        """Yield the capabilities that execute it, by the names of their executors."""
        named = self.prefill.capability, self.decode.capability, self.experts_key
        yield from (name for name in named if name is not None)

    @property
    def trades_request(self) -> bool:
        """True if it brings the first token earlier, and may make the whole request longer."""
        return self.num_pieces > 1

    def describe(self) -> str:
        """Say what capabilities add to the rule, for a plan's report: words from ``; `` on."""
        return ""

    def describe_plainly(self) -> str:
        """Say the same to people who do not know the keys, for an answer."""
        return ""

    def list_unsaid(self) -> Iterator[str]:
        """Yield what no engine's flags can say of it: verb, object and key."""
        yield from ()

    def why_not_store(self, store: StoreName) -> str | None:
        """Say why the rule cannot take from a store; None if it can."""
        for backend in (self.prefill, self.decode):
            if store not in backend.stores:
                known = " or ".join(b.name for b in BACKENDS.values() if store in b.stores)
                return (
                    f"is {backend.words.noun} ({backend.name}), which reads no "
                    f"{STORES[store].title}'s memory: "
                    f"with `store: {store}`, prefill and decode are {known}"
                )
        return None
