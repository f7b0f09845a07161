"""Parts that exporters share: an engine, its versions, and the demand of a plan."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from offplan.backends import Backend
from offplan.checkpoint.model import Model
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tensors import TensorInfo
from offplan.choices import KVCacheDtype
from offplan.engines.names import NOTE, EngineParameter, Kernels, engine_parameters, lay_out_experts
from offplan.errors import ExportError
from offplan.held.layout import PassRules
from offplan.held.stage import Stage
from offplan.placement import Placement
from offplan.plan import Offload, Plan, Rule
from offplan.stores import STORES
from offplan.units import format_bytes

BACKENDS = (Backend.PREFETCH, Backend.UVA)
"""Backends that engines have, by their flags or by offplan's worker."""
VOCABULARY_MULTIPLE = 64
"""Rows that embedding and head are padded to a multiple of, over all ranks.

Source: ``DEFAULT_VOCAB_PADDING_SIZE``.
"""

Version = tuple[int, int, int]
Flags = Mapping[str, tuple[str, ...]]
"""Options by their name without dashes, each with its values; none is a switch."""


@dataclass(frozen=True)
class EngineDemand:
    """The flags by which an engine moves what a rule takes, and the memory of that."""

    flags: Flags = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables without which the flags do something else."""
    notes: tuple[str, ...] = ()
    """Limits of what the flags promise, a sentence each."""
    moved: tuple[EngineParameter, ...] = ()
    """All that it, or one of its ranks, may move to the host."""
    more_gpu_bytes: int = 0
    """Bytes on the GPU beyond those that offplan's own runtime takes for the rule."""
    pinned_elsewhere: int = 0
    """Page-locked memory of the other ranks, where there are any, and of the input embedding."""

    @property
    def pinned_bytes(self) -> int:
        """Page-locked memory, of each parameter by itself."""
        return sum(page_locked_bytes(each.nbytes) for each in self.moved) + self.pinned_elsewhere


@dataclass(frozen=True)
class Engine:
    """An engine that plans are exported to."""

    name: str
    title: str
    oldest: Version
    newest: Version
    """The version whose real package the export is held against."""
    pass_rules: PassRules
    """Rules by which it runs a pass."""
    demand_rule: Callable[[Rule, Placement, Stage, Version], EngineDemand] | None
    """Returns flags for a rule with one backend; raises ExportError for what no flags can say.

    A worker in the engine has none: it reads the plan itself.
    """
    kernels: Callable[[Stage, Version], tuple[Kernels, Kernels]]
    """Returns the least that kernels make of experts of MXFP4, and the most where none moves."""
    serve: Callable[[Plan, Sequence[Stage], int | None], Flags]
    """Says the rest of a plan, given what a rank of each stage holds, and the bytes of the GPU
    where they are known."""
    rank_flags: tuple[str, str, str]
    """Options for tensor and pipeline ranks and groups of experts; ``enable-`` begins a switch."""
    command: tuple[str, ...]
    """Words that start it, before the model and the flags."""
    image: str
    """The container image, without its tag."""
    port: int
    bind: Flags
    """Binds each rank to the NUMA node of its GPU; empty if the engine does so by itself."""
    cache_types: Mapping[KVCacheDtype, str] = field(default_factory=dict)
    """Words of its ``kv-cache-dtype`` for the types that a plan may ask for."""
    no_float16: Collection[str] = ()
    """Model types that it does not compute in float16."""
    max_bytes_unit: int = 1
    """A rule's ``max_bytes`` is a whole number of these."""

    @property
    def is_worker(self) -> bool:
        """True if it is offplan's worker in the engine, which runs plans that no flags can say."""
        return self.demand_rule is None

    @property
    def family(self) -> str:
        """The engine itself, by name, also of a worker in it."""
        return family_of(self.name)

    def demand_resident(self, stage: Stage, version: Version) -> EngineDemand:
        """Return what the weights of a plan without rules take, whichever kernels have them."""
        _, most = self.kernels(stage, version)
        laid_out = lay_out_experts(engine_parameters(stage, {}), most)
        more = sum(after.nbytes - before.nbytes for before, after in laid_out.items())
        return EngineDemand(notes=(NOTE,) if more else (), more_gpu_bytes=more)

    def divide(self, sizes: Iterable[int]) -> Flags:
        """Divide a model among so many GPUs, stages and groups of experts."""
        return {
            name: () if name.startswith("enable-") else (str(size),)
            for name, size in zip(self.rank_flags, sizes, strict=True)
            if size > 1
        }

    def choose_cache(self, dtype: KVCacheDtype) -> Flags:
        """Choose the type of the KV cache; no flag keeps it as the model computes it."""
        return {} if dtype == "auto" else {"kv-cache-dtype": (self.cache_types[dtype],)}

    def require_cache(self, model: Model, dtype: KVCacheDtype) -> None:
        """Raise ExportError for a type of the KV cache in which it does not keep a model's."""
        if dtype == "auto":
            return
        if dtype not in self.cache_types:
            raise ExportError(
                f"{self.title} keeps no KV cache in {dtype} that is known: leave kv_cache_dtype out"
            )
        if model.architecture.latents is not None:
            raise ExportError(
                f"{model.source} caches latents, and which of {self.title}'s kernels read them in "
                f"{dtype} is not known: leave kv_cache_dtype out"
            )

    def require_served(self, model: Model, context: int) -> None:
        """Raise ExportError for a context or a type with which the engine does not start."""
        longest = model.architecture.engine_context
        if longest is not None and context > longest:
            raise ExportError(
                f"{self.title} does not start with a context of {context} tokens: the config of "
                f"{model.source} states {longest} positions; lower `context`"
            )
        types = {str(model.config.get("model_type")), model.architecture.model_type}
        if model.dtype == "float16" and not types.isdisjoint(self.no_float16):
            raise ExportError(
                f"{self.title} does not compute {model.architecture.model_type} in float16, in "
                f"which {model.source} is stored; take a checkpoint in bfloat16"
            )

    def round_up(self, offload: Offload) -> Offload:
        """Return a decision with as many bytes in each ``max_bytes`` as the engine is told."""
        unit = self.max_bytes_unit
        rules = (
            rule.model_copy(update={"max_bytes": -(-rule.max_bytes // unit) * unit})
            if rule.max_bytes
            else rule
            for rule in offload.rules
        )
        return offload.model_copy(update={"rules": tuple(rules)})

    def parse_version(self, text: str) -> Version:
        """Read ``0.31`` or ``0.31.2``; raises ExportError for a version that is not known."""
        parts = text.split(".")
        if not (1 < len(parts) < 4 and all(part.isdecimal() for part in parts)):
            raise ExportError(f"{self.name}=={text}: write a version as {self.name}==0.31")
        major, minor, patch = (int(part) for part in (*parts, "0")[:3])
        version = major, minor, patch
        if not (self.oldest <= version and version[:2] <= self.newest[:2]):
            raise ExportError(
                f"what {self.title} {text} does with its flags is not known: offplan knows "
                f"{format_version(self.oldest)} to {format_version(self.newest)}"
            )
        return version


def pad_rows(tensor: TensorInfo, multiple: int = VOCABULARY_MULTIPLE) -> TensorInfo:
    """Return the rows of a vocabulary as an engine pads them."""
    rows = -(-tensor.shape[0] // multiple) * multiple
    return tensor._replace(shape=(rows, *tensor.shape[1:]))


def page_locked_bytes(num_bytes: int) -> int:
    """Bytes that torch page-locks for so many: it rounds up to a power of two.

    Source: torch 2.11, ``CachingHostAllocator``.
    """
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def family_of(name: str) -> str:
    """Return the name of the engine itself: ``vllm`` of ``vllm-worker==0.33``."""
    return name.partition("==")[0].removesuffix("-worker")


def join_flags(flags: Flags) -> list[str]:
    """Write options as words of a command line."""
    return [word for name, values in flags.items() for word in (f"--{name}", *values)]


def require_stored_weights(offload: Offload, engine: Engine) -> None:
    """Raise ExportError for packed weights that the engine cannot hold, and for another store.

    It is also raised for a backend that no engine has, for experts kept one by one, for parts, and
    for drafts.
    """
    title = engine.title
    if offload.draft is not None:
        raise ExportError(
            f"the plan has `draft: {offload.draft.kind}`, and offplan's own runtime alone checks "
            "drafts: plan again with `engine`, or without `draft`"
        )
    if not (store := STORES[offload.store]).is_host and offload.rules:
        raise ExportError(
            f"{title} offloads to host memory; the plan has a {store.title}'s memory as "
            "its store, whose faster link would be lost: plan again with `store: host`"
        )
    for number, rule in enumerate(offload.rules, 1):
        for what in rule.list_unsaid():
            raise ExportError(
                f"rule {number} {what}, which {title} does not do: plan again with `engine`"
            )
        for backend in (rule.prefill, rule.decode):
            if backend not in BACKENDS:
                known = " or ".join(each.name for each in BACKENDS)
                raise ExportError(
                    f"rule {number} has the backend {backend.name}, which {title} does not have: "
                    f"expected {known}; plan again with `engine`"
                )
    if (recoding := offload.recoding) is not None and not engine.is_worker:
        raise ExportError(
            f"{title} holds every weight as it is stored; the plan holds some {recoding.done}: "
            f"plan again with `engine` or {recoding.without}"
        )


def note_overshoot(title: str, moved: Sequence[EngineParameter], num_bytes: int) -> tuple[str, ...]:
    """Say how far an engine's own order within the last layer may go beyond a plan's bytes."""
    more = sum(each.nbytes for each in moved) - num_bytes
    if more <= 0:
        return ()
    return (
        f"within layer {moved[-1].layer}, where the bytes run out, {title} has its own parameter "
        f"order: up to {format_bytes(more)} more than the plan says may lie on the host",
    )


def relaid(title: str, parameter: Parameter, layer: int) -> ExportError:
    """Return the refusal of a parameter that an engine lays out anew when it loads."""
    return ExportError(
        f"{title} lays {parameter.name} of layer {layer}, stored as {parameter.form.kind.value}, "
        "out anew when it loads: that it stays in host memory then is not known"
    )


def note_more_memory(engine: Engine, more: int) -> list[str]:
    """Say how many bytes of GPU memory more an engine takes than a plan predicts, if any."""
    if more <= 0:
        return []
    return [f"of GPU memory {engine.title} takes {format_bytes(more)} more than the plan predicts"]


def note_page_locked(engine: Engine, demand: EngineDemand) -> str:
    """Say how much host memory an engine page-locks for a demand."""
    return (
        f"of host memory {engine.title} page-locks up to {format_bytes(demand.pinned_bytes)}: each "
        "parameter is rounded up to a power of two"
    )


def format_version(version: Version) -> str:
    """Write a version as packages have it."""
    return ".".join(map(str, version))


def first_layers(parameters: Iterable[EngineParameter], num_bytes: int) -> list[EngineParameter]:
    """Return those of whole layers, from the first on, that hold so many bytes together.

    An engine that takes parameters until it has ``num_bytes`` takes no other, in whatever order it
    has those of a layer.
    """
    taken: list[EngineParameter] = []
    for each in parameters:
        if num_bytes <= 0 and each.layer != taken[-1].layer:
            break
        taken.append(each)
        num_bytes -= each.nbytes
    return taken
