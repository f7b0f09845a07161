"""Backends: the ways in which a pass gets at the weights that a rule keeps off the GPU.

Each is one record in one table, ``BACKENDS``. Plans name it; placement, schedule, costs, planner
and reports ask the record, and none of them knows a backend by its name. ``runtime.memory.servers``
and the executors of capabilities register what executes it in a session, since nothing here needs
torch. Engines know the backends that their flags can say, and refuse every other one.

Every backend has the whole weight in its layer's slab, off the GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from offplan.forms.form import Form
from offplan.forms.host_kernels import why_no_kernel
from offplan.stores import STORES, StoreName

PhaseName = Literal["prefill", "decode"]


class Use(Protocol):
    """A unit of weights in a pass of so many tokens, as a backend prices it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the unit, as it is stored."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the pass, over all sequences."""

    @property
    def touched(self) -> float:
        """Part of the unit that the tokens are sent to: below 1 for routed experts alone."""

    @property
    def num_reads(self) -> float:
        """How often the GPU's kernels read each byte of that part, where it is not in GPU memory.

        It is measured on the machine for such products, or estimated from what others did.
        """


class Figure(Protocol):
    """A rate of a machine, in bytes per second, and where it comes from."""

    @property
    def value(self) -> float:
        """Bytes per second."""

    @property
    def basis(self) -> Any:
        """How it was obtained: ``measured``."""

    @property
    def source(self) -> str:
        """The source of the figure, in words."""


class Rates(Protocol):
    """The figures that a backend may ask of a machine profile."""

    @property
    def h2d(self) -> Figure:
        """DMA from the store to the GPU."""

    @property
    def uva(self) -> Figure:
        """Kernels that read host memory in place."""

    @property
    def cores_rate(self) -> Figure:
        """The host's cores, which multiply weights that lie in its memory."""


@dataclass(frozen=True)
class Words:
    """The words for what a backend does with weights."""

    verb: str
    """Verb of a pass: ``reads``."""
    how: str
    """Words behind the weights, from their space on: `` in place``."""
    sentence: str
    """The use of weights, ``what``, by a pass, ``who``: ``{who} reads {what} in place``."""
    passive: str
    """Words for the weights' use: ``read there in place``."""
    noun: str
    """The bytes that it moves, as ``explain`` names them: ``read in place``."""


@dataclass(frozen=True, eq=False, repr=False)
class Backend:
    """The way in which a pass of one phase gets at a weight that is off the GPU."""

    name: str
    """Its name in a plan's file."""
    words: Words
    rate_name: str
    """The name of its rate: that of the profile's figure."""
    rate: Callable[[Rates], Figure]
    """Return the rate of its bytes on a machine."""
    link_bytes: Callable[[Use], float]
    """Return the bytes of a unit that cross the link in a pass, those read again included."""
    streams: bool = False
    """True if DMA copies the unit into a slot of the ring ahead of its layer. Otherwise the layer
    reads it in place, and both the link and compute are busy for as long as that takes."""
    is_served: bool = False
    """True if the schedule has a ``Serve`` before the layer: the runtime then fetches the units
    once for all chunks of a prompt. Otherwise the layer's own kernels read them, those of each
    chunk for themselves."""
    gpu_bytes: Callable[[int], int] | None = None
    """Return how many of a unit's bytes stay on the GPU all the same; None if none do."""
    stores: tuple[StoreName, ...] = ("host",)
    """Stores that it can read."""
    phases: tuple[PhaseName, ...] = ("prefill", "decode")
    """Phases that it can serve."""
    why_no_kernel: Callable[[Form, str, int], str | None] | None = None
    """Say why it does not multiply a form in a model of a type, by rows of so many weights; None if
    it does. It is None itself where the GPU's own kernels multiply what they read."""
    capability: str | None = None
    """The capability that executes it, by its executor's name; None if every runtime has it."""
    is_by_cores: bool = False
    """True if the host's cores compute the products, of which activations alone cross the link."""
    is_usual: bool = True
    """True if the planner may choose it without being asked to."""

    PREFETCH: ClassVar["Backend"]
    """Copied by DMA into a slot of the ring before its layer runs."""
    UVA: ClassVar["Backend"]
    """Read in place by the kernels, over the link."""
    HOST: ClassVar["Backend"]
    """Multiplied by the host's cores, in decode alone; what is no matrix is read in place."""

    def __repr__(self) -> str:
        return f"Backend({self.name})"

    def __reduce__(self) -> tuple[Callable[[str], "Backend"], tuple[str]]:
        return find_backend, (self.name,)  # a copy is the record itself: ``is`` compares them

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Read a backend by its name, and write its name."""
        return core_schema.no_info_plain_validator_function(
            _validate,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda b: b.name),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: object) -> dict[str, Any]:
        """List the names that a plan may have."""
        return {"type": "string", "enum": [*BACKENDS], "description": cls.__doc__}


Backend.PREFETCH = Backend(
    "prefetch",
    Words("copies", "", "{who} copies {what}", "copied to the GPU before each layer", "streamed"),
    rate_name="h2d",
    rate=lambda machine: machine.h2d,
    link_bytes=lambda use: use.nbytes,
    streams=True,
    stores=tuple(STORES),
)
Backend.UVA = Backend(
    "uva",
    Words(
        "reads", " in place", "{who} reads {what} in place", "read there in place", "read in place"
    ),
    rate_name="uva",
    rate=lambda machine: machine.uva,
    link_bytes=lambda use: use.nbytes * use.touched * use.num_reads,
)

Backend.HOST = Backend(
    "host",
    Words(
        "has",
        " multiplied by the host's cores",
        "for {who} the host's cores multiply {what}",
        "multiplied by the host's cores where they lie",
        "read by the host's cores",
    ),
    rate_name="cores_rate",
    rate=lambda machine: machine.cores_rate,
    link_bytes=lambda use: use.nbytes * use.touched,
    phases=("decode",),
    why_no_kernel=why_no_kernel,
    capability="host_cores",
    is_by_cores=True,
    is_usual=False,
)

_ALL = (Backend.PREFETCH, Backend.UVA, Backend.HOST)
BACKENDS: dict[str, Backend] = {each.name: each for each in _ALL}
"""All backends, by name."""


def find_backend(name: str) -> Backend:
    """Find a backend by its name; raises ValueError, which names those that there are."""
    if name not in BACKENDS:
        raise ValueError(f"Input should be {' or '.join(map(repr, BACKENDS))}")
    return BACKENDS[name]


def _validate(value: object) -> Backend:
    return value if isinstance(value, Backend) else find_backend(str(value))
