"""The machine profile: what plans are made from, here or anywhere else."""

import hashlib
import json
from collections.abc import Mapping
from functools import cache, cached_property
from typing import Annotated, Any, Generic, Protocol, TypeVar, get_args

from pydantic import Field, GetJsonSchemaHandler, PrivateAttr, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from typing_extensions import TypeAliasType

from offplan.errors import ProfileError
from offplan.kernel_sizes import ASSUMED_CORES_BYTES_PER_S, ASSUMED_TRIP_S
from offplan.machine.assumed import change_figures, complete_figures, estimate
from offplan.machine.cards import SHIPPED
from offplan.machine.cards import shipped_profiles as shipped_profiles
from offplan.machine.curve import MAX_FACTOR, Curve, Rereads
from offplan.machine.name import MachineName, parse_name
from offplan.records import (
    Basis,
    Bytes,
    Flops,
    Rate,
    Record,
    Seconds,
    dump_yaml,
    load_yaml,
    read_text,
)
from offplan.stores import STORES, StoreName

PROFILE_VERSION = 1
VECTOR_SHARE = 1 / 16
"""``vector`` of an unknown GPU as a share of ``matmul``. Source: a quarter on GeForce cards, 1/11
on an A100, 1/20 on an H100; estimated between these."""
LAUNCHES = 20
"""Kernels whose captured launches ``layer_overhead`` is the time of."""
MOST_FILE_BYTES = 2**20
"""Beyond any profile's file, layer times included."""

_DISPLAY_BYTES = 2**30
"""Source: chosen; a desktop on one screen takes 0.3 to 0.8 GiB, a browser beside it more."""

LinkRate = TypeAliasType("LinkRate", Annotated[Rate, Field(ge=1e6)])
"""Bytes per second. Bounds lie a thousand times past any machine, so that times stay numbers that
can be added and compared."""
ComputeRate = TypeAliasType("ComputeRate", Annotated[Flops, Field(ge=1e6)])
"""Operations per second. Source: two cores without bfloat16 instructions give 0.9e9 by torch."""
ShortTime = TypeAliasType("ShortTime", Annotated[Seconds, Field(le=60)])
Memory = TypeAliasType("Memory", Annotated[Bytes, Field(ge=1)])
Capacity = TypeAliasType("Capacity", Bytes)

Value = TypeVar("Value")


class Use(Protocol):
    """The use that a plan makes of a machine."""

    @property
    def num_gpus(self) -> int:
        """GPUs that the plan is for."""

    @property
    def num_copying(self) -> int:
        """GPUs that copy at once. A token passes one stage of a pipeline after the other."""

    @property
    def host_threads(self) -> int | None:
        """Threads of the host's cores that compute; None is those of the figures."""


class Figure(Record, Generic[Value]):
    """A number, how it was obtained and where it comes from."""

    value: Value
    """The median, where it was measured several times."""
    basis: Basis
    source: str = Field(min_length=1)
    samples: int | None = Field(None, ge=1)
    """Number of measurements; of a table, each of its entries."""
    spread: float | None = Field(None, ge=0)
    """(largest - smallest) / median of the samples; of a table, each entry has its own."""

    @model_validator(mode="before")
    @classmethod
    def _is_said(cls, data: Any) -> Any:
        """Take a value alone, which must have its unit, for one that somebody has told."""
        if not isinstance(data, (str, int, float)):
            return data
        source = "the profile, which names no source"
        return {"value": str(data), "basis": "reported", "source": source}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Say that a value alone will do, if it is a text with its unit."""
        figure = handler(core_schema)
        value = handler.resolve_ref_schema(figure)["properties"]["value"]
        return {"anyOf": [figure, {"type": "string", **value}]}


class LayerEstimate(Record):
    """The estimate of a layer's time, as it was when the layer was timed, and what it is like."""

    model: int = Field(ge=1)
    """Version of the formulas: ``costs.corrections.ESTIMATES``."""
    seconds: Annotated[Seconds, Field(gt=0, le=1e5)]
    passes: str
    """Name of the passes that ran the layer: ``own``."""
    mixer: str
    """How its tokens see one another: ``attention``, or the name of another mixer."""
    dense: str
    """Form of most dense weights; of plain values their type."""
    experts: str | None = None
    """Form of the routed experts, likewise; absent without them."""


class LayerTime(Record):
    """Measured compute of one layer, or of what lies outside the layers, with all resident."""

    layer: str
    """``Stage.time_key`` of ``Layer.key``, or of ``Stage.outside_key`` for embedding, norm and
    head."""
    phase: str = Field(pattern="^(prefill|decode)$")
    batch: int = Field(ge=1)
    tokens: int = Field(ge=1, le=2**40)
    """New tokens of each sequence in the pass: the chunk in prefill, 1 in decode."""
    context: int = Field(ge=1)
    """Tokens that each sequence's attention reaches: those cached at the chunk's end, or in decode
    the prompt and half of the output."""
    is_part: bool = False
    """True if the chunk is one of several of a prompt."""
    seconds: Annotated[Seconds, Field(le=1e5)]
    samples: Annotated[int, Field(ge=1)] | None = None
    """Samples that the time is the median or the mean of."""
    spread: Annotated[float, Field(ge=0)] | None = None
    """(largest - smallest) / seconds of the samples."""
    estimate: LayerEstimate | None = None
    """Absent of what lies outside the layers, of recoded layers, and in older profiles."""


class InPlaceRead(Record):
    """The reads by one product of its weight, which lies in host memory."""

    shape: tuple[int, ...] = Field(min_length=2, max_length=3)
    """The weight's, [out, in], or that of all routed experts' weights, [experts, out, in]."""
    tokens: int = Field(ge=1, le=2**40)
    """Over all sequences; of routed experts those before routing."""
    factor: float = Field(ge=1, le=MAX_FACTOR)


class DeviceRate(Record):
    """The rate of one GPU among several."""

    device: int = Field(ge=0)
    """CUDA's index of it."""
    rate: LinkRate
    spread: float | None = Field(None, ge=0)
    """(largest - smallest) / median of the samples."""
    num_gpus: int | None = Field(None, ge=2)
    """GPUs that copied at once, the first ones of the host; absent where as many as are listed."""


class MachineProfile(Record):
    """One GPU, its link to host memory, and what a pass costs besides the weights."""

    _store: StoreName = PrivateAttr(default="host")

    profile: int = Field(PROFILE_VERSION, ge=PROFILE_VERSION, le=PROFILE_VERSION)
    name: str
    link: str
    h2d: Figure[LinkRate]
    """Host to device, one large pinned DMA."""
    copy_latency: Figure[ShortTime]
    """Fixed cost of one DMA; a copy of n bytes takes latency + n / rate. If ``h2d_curve`` was
    measured, the latency that fits it best."""
    uva: Figure[LinkRate]
    """Kernels reading pinned host memory in place, each byte once."""
    uva_beside_copies: Figure[LinkRate] | None = None
    """``uva`` while copies to the device are queued, which the kernels nearly starve; absent is as
    on an H200."""
    h2d_curve: Figure[Curve] | None = None
    """Host to device by size, pinned memory."""
    h2d_pageable_curve: Figure[Curve] | None = None
    """Host to device by size, ordinary memory, which the driver copies through a buffer."""
    d2h_curve: Figure[Curve] | None = None
    """Device to host by size, pinned memory."""
    h2d_concurrent: Figure[tuple[DeviceRate, ...]] | None = None
    """Host to device of each GPU while 2, 4, ... and all GPUs of the host copy at once."""
    peer_curve: Figure[Curve] | None = None
    """Another GPU's memory to this one's by size; the fastest of the others."""
    uva_rereads: Figure[Rereads] | None = None
    """Times that weights read in place cross, by the rows of the product; absent is as on an
    H200."""
    hbm: Figure[LinkRate]
    """Device memory, as a memory-bound kernel reads it. A file's figure of basis ``datasheet`` is a
    peak, of which reading makes what kernels achieve."""
    matmul: Figure[ComputeRate]
    """bf16 matrix products with float32 sums, large and back to back; a datasheet's as ``hbm``."""
    vector: Figure[ComputeRate] | None = None
    """Instructions of threads that multiprocessors issue: 128 a cycle each. Absent is that of the
    shipped profile of the same GPU, or VECTOR_SHARE of ``matmul``."""
    layer_overhead: Figure[ShortTime]
    """Time of LAUNCHES kernels in a captured graph that do next to nothing; on a CPU, that of the
    small operators of one layer."""
    gpu_memory: Figure[Memory]
    """GPU memory that the card offers to a process, context included."""
    host_memory: Figure[Capacity] | None = None
    """Host memory that can be pinned: the least of physical memory and the limits of the container
    and the process; absent is unlimited."""
    pinning: Figure[LinkRate] | None = None
    """Registering ordinary memory with the driver, the page faults of fresh pages included."""
    numa_node: Figure[int] | None = None
    """The host's memory that is nearest to the GPU; absent where the kernel names none."""
    numa_nodes: Figure[int] | None = None
    """NUMA nodes of the host that have cores; absent where the kernel lists none."""
    gpu_overhead: Figure[Capacity]
    """Context, libraries and captured graphs of a process that has run a model."""
    ranks_overhead: Figure[Capacity] | None = None
    """Memory of each of several GPUs beside that, to exchange what they compute; absent is 1,152
    MiB."""
    cores: Figure[LinkRate] | None = None
    """The host's memory as its cores read weights that they multiply by one row; absent is as a
    desktop's two channels of DDR5 have it."""
    cores_beside_copies: Figure[LinkRate] | None = None
    """``cores`` while copies to the device run; absent is what ``host_reads`` leaves."""
    host_reads: Figure[LinkRate] | None = None
    """Rate of the host's memory in all, to cores and copies together; absent is unlimited."""
    cores_round_trip: Figure[ShortTime] | None = None
    """Seconds from the device's last write before a product to its first read behind it, beside
    those of the product; absent is 15 us."""
    host_threads: Figure[int] | None = None
    """Threads that the cores' figures are of; absent is one a physical core, a quarter left out."""
    peer: Figure[LinkRate] | None = None
    """Device memory of a second GPU to this one, one large DMA."""
    peer_latency: Figure[ShortTime] | None = None
    """Seconds of one DMA from that GPU beside those of its bytes."""
    in_place_reads: tuple[InPlaceRead, ...] | None = None
    """Reads by a model's own products, where it was measured too; else ``uva_rereads`` tells."""
    layer_times: tuple[LayerTime, ...] = ()
    """Measured on this machine; a roofline estimates what is not here."""

    @property
    def store(self) -> StoreName:
        """The store that ``h2d`` and ``copy_latency`` are the link to, and ``host_memory`` the size
        of."""
        return self._store

    @property
    def basis(self) -> Basis:
        """The weakest basis among the figures of the link."""
        return max(self.h2d.basis, self.uva.basis, key=get_args(Basis).index)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the profile's content, layer times included."""
        # figures that are absent leave no trace, so that profiles from before they existed keep
        # the fingerprints that plans name; host memory is older, and always counted
        content = {"host_memory": None, **self.model_dump(mode="json", exclude_none=True)}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @cached_property
    def vector_rate(self) -> float:
        """``vector``, or what is assumed in its place."""
        known = self.vector or _vector_of(self.name, self.gpu_memory.value)
        return VECTOR_SHARE * self.matmul.value if known is None else known.value

    @property
    def cores_rate(self) -> Figure[float]:
        """``cores``, or what is assumed in its place."""
        return self.cores if self.cores is not None else ASSUMED_CORES

    @property
    def cores_rate_beside(self) -> Figure[float]:
        """``cores_beside_copies``, or what is left of the host's memory beside copies."""
        if self.cores_beside_copies is not None:
            return self.cores_beside_copies
        alone = self.cores_rate
        if self.host_reads is None:
            return alone
        left = max(0.1 * alone.value, self.host_reads.value - self.h2d.value)
        said = estimate(min(alone.value, left), "host_reads less h2d, cores at most")
        return alone.model_copy(update=said)

    @property
    def cores_trip(self) -> Figure[float]:
        """``cores_round_trip``, or what is assumed in its place."""
        return self.cores_round_trip or ASSUMED_TRIP

    @cached_property
    def timed_layers(self) -> frozenset[str]:
        """Keys of the layers whose compute was measured."""
        return frozenset(time.layer for time in self.layer_times)

    @cached_property
    def estimated_times(self) -> dict[tuple[object, ...], tuple[float, ...]]:
        """Measured times as multiples of their estimates, by phase and all that is beside both."""
        found: dict[tuple[object, ...], list[float]] = {}
        for time in self.layer_times:
            if (said := time.estimate) is not None:
                alike = said.model, time.phase, said.passes, said.mixer, said.dense, said.experts
                found.setdefault(alike, []).append(time.seconds / said.seconds)
        return {alike: tuple(sorted(ratios)) for alike, ratios in found.items()}

    @property
    def display_bytes(self) -> int:
        """Bytes of GPU memory that display and driver take of a card for desktops and laptops."""
        return _DISPLAY_BYTES if "GeForce" in self.name else 0

    @property
    def why_no_cores(self) -> str | None:
        """Why the host's cores are to multiply nothing; None if they may."""
        if self.is_cpu:
            return "the CPU plays GPU"
        if "C2C" in self.link:
            return "their kernels are for Linux on x86-64, and this machine's processor is an Arm"
        return None

    @property
    def is_cpu(self) -> bool:
        """True if the CPU stands in for a GPU, as in the profile ``cpu``."""
        return self.name == "CPU"

    def with_store(self, store: StoreName) -> "MachineProfile":
        """Return the profile with the link to this store as its link; a GPU is such a one as this.

        Kernels cannot read another GPU's memory in place. ``host_memory`` is what it has room for.
        Raises ProfileError if that link is not known.
        """
        if (link := STORES[store].link) is None:
            return self
        if (rate := getattr(self, link.rate)) is None:
            raise ProfileError(
                f"the profile of {self.name} has no `{link.rate}`, {link.meaning} (offplan measure "
                "-o machine.yaml, then `machine=machine.yaml`), or plan with `store=host`"
            )
        # a context is made there too; libraries and graphs are not, which leaves some room
        room = max(0, self.gpu_memory.value - self.gpu_overhead.value)
        changes = {
            "link": link.name,
            "h2d": rate,
            "copy_latency": getattr(self, link.latency) or self.copy_latency,
            "host_memory": self.gpu_memory.model_copy(update={"value": room}),
        }
        linked = self._change(changes)
        linked._store = store
        return linked

    def with_link(self, store: StoreName, use: Use) -> "MachineProfile":
        """Return the profile with the link that each GPU has to a plan's store, and its overhead.

        Raises ProfileError if the link to the store is not known.
        """
        return self.with_store(store).with_gpus(use).with_threads(use.host_threads)

    def with_threads(self, num_threads: int | None) -> "MachineProfile":
        """Return the profile with what so many threads of the host's cores read.

        Fewer threads than the figures are of read in proportion less, which is an estimate. More
        threads, and those of figures that do not tell theirs, read as much as the figures tell.
        """
        known = self.host_threads
        if num_threads is None or (known is not None and known.value == num_threads):
            return self
        source = "asked for; the rate is of threads that the profile does not count"
        if known is not None:
            source = f"asked for; the rate was found with {known.value} threads"
        changes: dict[str, Any] = {"host_threads": estimate(num_threads, source)}
        if known is not None and num_threads < known.value:
            for name in ("cores", "cores_beside_copies"):
                if (figure := getattr(self, name)) is not None:
                    source = f"{num_threads} of {known.value} threads of: {figure.source}"
                    changes[name] = estimate(figure.value * num_threads / known.value, source)
        return self._change(changes)

    def with_gpus(self, use: Use) -> "MachineProfile":
        """Return the profile as each of several GPUs has it: its overhead and its link.

        The link is that of a GPU while as many copy at once. Its rate is that of the slowest GPU of
        as many. If so many were not measured, the next larger measured number decides. If none was
        measured, offplan assumes that each GPU has the whole link.
        """
        if use.num_gpus == 1:
            return self
        alone, more = self.gpu_overhead, self.ranks_overhead or ASSUMED_RANKS_OVERHEAD
        # fingerprints of plans have this text
        source = f"{alone.source}; of several ranks: {more.source}"
        overhead = {"value": alone.value + more.value, "source": source}
        changes = {"gpu_overhead": alone.model_copy(update=overhead)}
        together = [number for number in self.concurrent_rates if number >= use.num_copying]
        if use.num_copying > 1 and together:
            share = min(1.0, min(self.concurrent_rates[min(together)]) / self.h2d.value)
            for name in ("h2d", "uva"):
                figure = getattr(self, name)
                changes[name] = figure.model_copy(update={"value": share * figure.value})
        return self._change(changes)

    @property
    def concurrent_rates(self) -> dict[int, list[float]]:
        """Bytes a second of each GPU, by how many copied at once."""
        found: dict[int, list[float]] = {}
        rates = () if self.h2d_concurrent is None else self.h2d_concurrent.value
        for each in rates:
            found.setdefault(each.num_gpus or len(rates), []).append(each.rate)
        return found

    def _change(self, changes: Mapping[str, Any]) -> "MachineProfile":
        """Return it with other figures, without what is kept of them once it was asked for."""
        figures = {name: getattr(self, name) for name in MachineProfile.model_fields}
        changed = MachineProfile.model_validate({**figures, **changes})
        changed._store = self._store
        return changed

    def copy_seconds(self, num_bytes: int) -> float:
        """Time of one DMA of ``num_bytes`` to the device."""
        return self.copy_latency.value + num_bytes / self.h2d.value

    def find_in_place_read(self, shape: tuple[int, ...], tokens: int) -> float | None:
        """How often a product of exactly these reads its weight, if that was measured."""
        reads = self.in_place_reads or ()
        found = (each.factor for each in reads if (each.shape, each.tokens) == (shape, tokens))
        return next(found, None)


ASSUMED_CORES = Figure[LinkRate].model_validate(
    estimate(
        ASSUMED_CORES_BYTES_PER_S,
        "two channels of DDR5-5600 have 90 GB/s, of which cores read two thirds",
    )
)
"""Rate that offplan assumes of the host's cores where a profile has none."""
ASSUMED_RANKS_OVERHEAD = Figure[Capacity].model_validate(
    estimate(1152 << 20, "0.83 to 1.1 GiB of NCCL and vLLM 0.33.0 on two H200s, and on two H100s")
)
"""Bytes that offplan assumes of ``ranks_overhead`` where a profile has none."""
ASSUMED_TRIP = Figure[ShortTime].model_validate(
    estimate(
        ASSUMED_TRIP_S, "two copies of some KB, a bell that is heard, and a stream that goes on"
    )
)
"""Seconds that offplan assumes of a hand-over to the cores where a profile has none."""


def load_profile(name: str | MachineName) -> MachineProfile:
    """Read a profile by the name of a shipped one, loosely typed, or from a file.

    Figures may be changed behind the name: ``rtx4090,pcie=4x8,ram=64GiB``. Raises ProfileError,
    with the nearest names, or with each key that is wrong.
    """
    named = parse_name(name) if isinstance(name, str) else name
    text = read_text(named.find_file(), "machine profile", MOST_FILE_BYTES, ProfileError)
    data = _read_figures(text, named.base)
    if named.changes and isinstance(data, dict):
        data = change_figures(data, named.read_changes())
    return _check_figures(data, str(named))


@cache
def _vector_of(gpu: str, gpu_bytes: int) -> Figure[float] | None:
    """Find what a shipped profile tells of the CUDA cores of a GPU of this name and memory."""
    same = [
        load_profile(name)
        for name in shipped_profiles()
        if f"\nname: {gpu}\n" in (SHIPPED / f"{name}.yaml").read_text("utf-8")
    ]
    # cards of one name and two memories have other cores
    same.sort(key=lambda each: abs(each.gpu_memory.value - gpu_bytes))
    return same[0].vector if same else None


def parse_profile(text: str, name: str) -> MachineProfile:
    """Check a profile's YAML; ``name`` is used in errors."""
    return _check_figures(_read_figures(text, name), name)


def _read_figures(text: str, name: str) -> Any:
    """Read a profile's YAML, and what it takes from the shipped profile that it names as base."""
    try:
        data = load_yaml(text)
    except ValueError as error:
        raise ProfileError(f"{name} is not YAML: {error}") from None
    if not isinstance(data, dict) or "base" not in data:
        return data
    base = parse_name(str(data.pop("base")))
    if not base.is_shipped:
        raise ProfileError(f"machine profile {name}: base: {base} does not come with offplan")
    figures = load_yaml(base.find_file().read_text("utf-8"))
    return change_figures(change_figures(figures, base.read_changes()), data)


def _check_figures(data: Any, name: str) -> MachineProfile:
    complete = complete_figures(data) if isinstance(data, dict) else data
    return MachineProfile.check(complete, f"machine profile {name}", "profile", ProfileError)


def profile_schema() -> dict[str, Any]:
    """Return the JSON schema of a profile's file, which may leave out what can be assumed."""
    schema = MachineProfile.model_json_schema()
    base = {"type": "string", "description": "A shipped profile, for what the file leaves out"}
    needed = [{"required": ["base"]}, {"required": ["name", "hbm", "matmul", "gpu_memory"]}]
    properties = {"base": base, **schema["properties"]}
    return {**schema, "properties": properties, "required": [], "anyOf": needed}


def dump_profile(profile: MachineProfile) -> str:
    """Print a profile as YAML, with plain numbers: it reads back to an equal profile."""
    data = profile.model_dump(mode="json", exclude_none=True)
    return dump_yaml(data, width=100)
