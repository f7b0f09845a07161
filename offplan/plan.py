"""The plan file: what people review, commit and run.

A plan is a small YAML file with a stable order and nothing volatile in it. It is read with
YAML's safe loader; an unknown key, or one given twice, is an error.
"""

import reprlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    PrivateAttr,
    ValidationInfo,
    model_validator,
)

from offplan.backends import BACKENDS
from offplan.backends import Backend as Backend
from offplan.choices import ObjectiveName, PartsChoice, Store
from offplan.errors import PlanError
from offplan.files import StrPath
from offplan.kinds import describe_kind
from offplan.ranks import Ranks
from offplan.records import (
    Basis,
    Bytes,
    ExactBytes,
    ExactSeconds,
    Rate,
    Record,
    Seconds,
    dump_yaml,
    load_yaml,
    read_text,
)
from offplan.segments import match_segments
from offplan.units import format_budget, format_bytes, format_seconds

PLAN_VERSION: Literal[1] = 1
MOST = 2**24
"""Beyond any workload and any model: sequences, or tokens of one; slots of a ring, or layers."""
MOST_CACHED = 2**32
"""Tokens of all sequences together, beyond any memory."""
Count = Annotated[int, Field(ge=1, le=MOST)]
UnpackedName = Annotated[str, Field(pattern=r"^[\w-]+(\.[\w-]+)*$")]
"""A layer's number, a segment or both with a dot between, or ``output_head``."""
_ALL = "all"


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
MOST_FILE_BYTES = 2**18
"""Beyond any plan's file."""
PRINTED_TO = 1e-3
"""A size of four significant digits is right to less than this part of it."""


_IN_ANY_BUDGET = object()
"""Context in which a plan is read that exceeds its budget, so that it can be made again."""


class ModelRef(Record):
    """Which checkpoint the plan is for."""

    source: str
    """Hub id, or the folder or config.json it was read from."""
    revision: str | None = None
    """Commit on the Hub; null off the Hub."""
    headers_sha256: str
    config_sha256: str | None = None
    """Fingerprint of ``config.json``; null in plans from before it was recorded."""
    generation_config_sha256: str | None = None
    """Fingerprint of ``generation_config.json``; left out where there is none, or none is known."""
    dtype: str
    """The type that most bytes are stored in, as torch names it: ``bfloat16``."""


class Workload(Record):
    """What the plan is optimised for."""

    batch: Count = 1
    prompt_tokens: Count = 512
    output_tokens: Count = 128
    context: Count = 4096
    """Tokens a sequence may reach; the KV cache is sized by it."""

    @property
    def num_steps(self) -> int:
        """Decode steps of a request: the prompt gives the first output token, steps all others."""
        return self.output_tokens - 1

    @property
    def decode_context(self) -> int:
        """Tokens of a sequence that a decode step looks at, on average over the output."""
        return self.prompt_tokens + self.output_tokens // 2

    @model_validator(mode="after")
    def _fits_context(self) -> "Workload":
        if self.batch * self.context > MOST_CACHED:
            raise ValueError(
                f"{self.batch} contexts of {self.context} tokens are more than {MOST_CACHED} "
                "tokens, which no memory holds; lower `batch` or `context`"
            )
        if self.prompt_tokens + self.output_tokens > self.context:
            raise ValueError(
                f"context of {self.context} tokens is less than prompt_tokens + output_tokens "
                f"({self.prompt_tokens} + {self.output_tokens}); raise `context`, or lower "
                "`prompt_tokens` or `output_tokens`"
            )
        return self


class Budget(Record):
    """Memory the plan may take."""

    gpu_memory: ExactBytes
    """All that the process takes on the card, context included."""
    host_memory: ExactBytes | None = None
    """Bytes of the store: pinned host memory, or a second GPU's, where an embedding that stays on
    the host takes none of it; null is unlimited."""


class Goal(Record):
    """What a plan is asked to be best at, and what it must keep beside the budget."""

    objective: ObjectiveName = "latency"
    """``latency``: the time of one request at the workload's batch; ``throughput``: tokens a
    second, the plan's batch being chosen for it."""
    max_ttft_s: ExactSeconds | None = Field(default=None, alias="max_ttft")
    """Seconds to the first token, at most; null where any time will do."""
    max_tpot_s: ExactSeconds | None = Field(default=None, alias="max_tpot")
    """Seconds of a decode step, at most; null where any time will do."""
    engine: str | None = None
    """The engine whose flags must be able to say the plan; null for offplan's own runtime."""
    stock: bool = False
    """Whether transformers' own passes run the model, not offplan's."""
    packing: bool = True
    """Whether weights may be packed; no engine's flags can say that."""
    leave_unpacked: tuple[UnpackedName, ...] = ()
    """Weights that stay as they are stored, whatever is packed: ``7``, ``7.mlp.down_proj``,
    ``mlp.down_proj``, ``output_head``."""
    cached_experts: Literal["off", "auto"] | Count = "off"
    """Whether rules may keep experts on the GPU one by one: ``auto`` chooses how many; a number is
    how many of each layer."""
    parts: PartsChoice = "off"
    """Whether rules may have prompts stream a layer's routed experts in parts; ``auto`` chooses."""
    host_cores: bool = False
    """Whether rules may have the host's cores multiply what they take (``decode: host``)."""
    host_threads: Count | None = None
    """Threads that the host's cores compute with; null for those of the profile's figures."""
    tensor_parallel: Count = 1
    """GPUs that each layer is divided among."""
    pipeline_parallel: Count = 1
    """Stages of layers, one after the other, on GPUs of their own."""
    expert_parallel: Count = 1
    """Groups of ``tensor_parallel`` GPUs that routed experts are divided among, as whole ones."""

    @model_validator(mode="after")
    def _can_be_divided(self) -> "Goal":
        if self.ranks.num_gpus > 1 and self.engine is None:
            raise ValueError(
                f"{self.ranks.label} without an engine: offplan's own runtime runs on one GPU; "
                "name the engine that runs the plan, `engine=vllm` or `engine=sglang`"
            )
        if self.stock and self.engine is not None:
            raise ValueError(
                f"stock beside the engine {self.engine}, which runs no passes of transformers: "
                "leave one of them out"
            )
        if self.pipeline_parallel > 1 and self.objective != "latency":
            raise ValueError(
                f"`pipeline_parallel={self.pipeline_parallel}` with the objective throughput: how "
                "many batches are under way in several stages is the engine's affair, and not "
                "predicted; choose one with `batch`"
            )
        if self.tensor_parallel % self.expert_parallel:
            raise ValueError(
                f"`expert_parallel={self.expert_parallel}` does not divide "
                f"`tensor_parallel={self.tensor_parallel}`: groups "
                "of experts are groups of the ranks that divide a layer"
            )
        if self.host_cores and self.engine is not None:
            raise ValueError(
                f"`host_cores` with `engine={self.engine}`: no engine's flags have the host's "
                "cores multiply weights; leave one of them out"
            )
        if self.host_threads is not None and not self.host_cores:
            raise ValueError(
                f"`host_threads={self.host_threads}` without `host_cores`, which lets the host's "
                "cores multiply: add `host_cores`, or leave `host_threads` out"
            )
        if self.cached_experts != "off" and self.engine is not None:
            raise ValueError(
                f"`cached_experts={self.cached_experts}` with `engine={self.engine}`: no engine "
                "keeps experts one by one; leave one of them out"
            )
        if self.parts != "off" and self.engine is not None:
            raise ValueError(
                f"`parts={self.parts}` with `engine={self.engine}`: no engine streams a layer's "
                "experts in parts; leave one of them out"
            )
        return self

    @property
    def ranks(self) -> Ranks:
        """The GPUs that the plan is for, one of which holds what it says."""
        return Ranks(self.tensor_parallel, self.pipeline_parallel, self.expert_parallel)

    @property
    def targets(self) -> str:
        """The targets as the command line says them; empty where there are none."""
        named = (("--max-ttft", self.max_ttft_s), ("--max-tpot", self.max_tpot_s))
        return " and ".join(f"{name} {format_seconds(s)}" for name, s in named if s is not None)


class MachineRef(Record):
    """The machine whose figures the plan was made from."""

    name: str
    profile: str | None = None
    """The profile's name or file, as ``--machine`` takes it; null where it was measured."""
    link: str
    h2d: Rate
    """Bytes a second from the store to the device, by DMA of a large block."""
    uva: Rate
    """Kernels reading pinned host memory in place."""
    basis: Basis
    fingerprint: str
    """SHA-256 of the machine profile."""

    @property
    def is_cpu(self) -> bool:
        """Whether the CPU stands in for a GPU, as in the profile ``cpu``."""
        return self.name == "CPU"


class RoutingRef(Record):
    """The routing profile that the plan was made from."""

    file: str
    """The profile's file, as ``--routing`` takes it."""
    fingerprint: str
    """SHA-256 of the profile."""


def _check_group(group_size: int, num_in_group: int) -> None:
    if num_in_group > group_size:
        raise ValueError(f"num_in_group {num_in_group} is more than group_size {group_size}")


def _selects(group_size: int, num_in_group: int, index: int) -> bool:
    return index % group_size >= group_size - num_in_group


class Rule(Record):
    """Which parameters of which layers stay on the host, and how each phase gets them.

    Either a group pattern (``group_size``, ``num_in_group``: of every ``group_size`` layers the
    last ``num_in_group``; Source: vLLM ``offload_group_size``) or ``max_bytes`` (whole parameters
    in layer then name order, overshooting by at most one; Source: vLLM ``cpu_offload_gb``).
    """

    cpu_offload_params: Segments = ()
    """Segments: dotted runs of name parts relative to the layer. ``all`` takes every parameter."""
    group_size: Count | None = None
    num_in_group: Count | None = None
    max_bytes: ExactBytes | None = Field(default=None, gt=0)
    prefill: Backend
    decode: Backend
    cached_experts: Count | None = None
    """Routed experts of each layer that are in GPU memory as well: those used last. Decode steps
    read the others over the link, in place of those unused longest. Null keeps none."""
    cached_experts_more: Count | None = None
    """The first layers that the rule takes, so many of them, keep one expert more."""
    host_share: float | None = Field(default=None, ge=0, le=1)
    """Part of the experts that a layer misses in a step which the host's cores multiply where they
    lie; the link brings the others. Null is all of them, where ``decode: host`` keeps experts."""
    split_expert: bool | None = None
    """Whether cores and link each multiply some inner columns of one missed expert, so that
    ``host_share`` is met more closely. Null and false have them divide whole experts."""
    parts: int | None = Field(default=None, ge=2, le=MOST)
    """Parts in which prompts stream a layer's routed experts: some experts at a time, which meet
    the tokens of all chunks while the next ones come. Null streams what the rule takes whole."""
    tokens_at_once: Count | None = None
    """Tokens of each sequence that meet a part while it is in its slot, rounded up to whole chunks.
    The parts cross again for the tokens behind them. Null has a part meet the whole prompt, however
    long, and memory is counted for a prompt as long as the context."""

    @model_validator(mode="after")
    def _streams_in_parts(self) -> "Rule":
        if self.parts is None:
            if self.tokens_at_once is not None:
                raise ValueError(
                    "tokens_at_once says how much of a prompt meets a part of a layer's experts, "
                    "and parts is missing: add it, or take tokens_at_once out"
                )
            return self
        if self.tokens_at_once is not None and self.parts % 2:
            raise ValueError(
                f"found parts: {self.parts} with tokens_at_once, expected an even number: two "
                "slots take parts in turn, also from one group of chunks to the next"
            )
        if self.max_bytes is not None:
            raise ValueError(
                "a max_bytes rule takes whole parameters, and parts divides a layer's experts: "
                "give the rule group_size and num_in_group"
            )
        if not self.prefill.streams or self.decode.streams or self.decode.is_served:
            raise ValueError(
                f"found parts: {self.parts} with prefill: {self.prefill.name} and decode: "
                f"{self.decode.name}, expected prefill: prefetch and decode: uva or host: prompts "
                "stream parts, and steps read the experts where they lie"
            )
        if self.cached_experts is not None:
            raise ValueError(
                f"found parts: {self.parts} with cached_experts: {self.cached_experts}: a prompt "
                "in parts leaves no experts on the GPU for steps, so leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _keeps_experts(self) -> "Rule":
        is_divided = self.cached_experts is not None and self.decode.is_by_cores
        if self.host_share is not None and not is_divided:
            kept = "no" if self.cached_experts is None else str(self.cached_experts)
            raise ValueError(
                f"found host_share: {self.host_share:g} with decode: {self.decode.name} and {kept} "
                "cached_experts: it divides the experts that a step misses between the host's "
                "cores and the link, so write decode: host and cached_experts, or take it out"
            )
        if self.split_expert and not (
            self.host_share and self.host_share < 1 and (self.cached_experts or 0) > 1
        ):
            raise ValueError(
                f"found split_expert with host_share: {self.host_share} and cached_experts: "
                f"{self.cached_experts}: cores and link each multiply a part of an expert, and its "
                "part from the link takes the last slot, so write a host_share between 0 and 1 and "
                "cached_experts of 2 or more, or take split_expert out"
            )
        if self.cached_experts is None:
            if self.cached_experts_more is not None:
                raise ValueError(
                    "cached_experts_more has layers keep one expert more than cached_experts, "
                    "which is missing: add it, or take cached_experts_more out"
                )
            return self
        if self.max_bytes is not None:
            raise ValueError(
                "a max_bytes rule takes whole parameters, and cached_experts keeps single experts "
                "of layers: give the rule group_size and num_in_group"
            )
        if self.decode.streams or self.decode.is_served:
            raise ValueError(
                f"found decode: {self.decode.name} with cached_experts, expected decode: uva or "
                "host: steps read the experts that are not in GPU memory over the link, one by "
                "one, or have the host's cores multiply them"
            )
        return self

    @model_validator(mode="after")
    def _one_form(self) -> "Rule":
        if self.max_bytes is not None:
            if self.group_size is not None or self.num_in_group is not None:
                raise ValueError("a rule has either max_bytes or group_size and num_in_group")
            if self.prefill is not self.decode or self.decode.streams:
                both = (b for b in BACKENDS.values() if not b.streams and len(b.phases) == 2)
                names = " or ".join(b.name for b in both)
                raise ValueError(
                    f"a max_bytes rule is read in place: prefill and decode are {names}"
                )
        elif self.group_size is None or self.num_in_group is None:
            raise ValueError("a rule needs group_size and num_in_group, or max_bytes")
        else:
            _check_group(self.group_size, self.num_in_group)
        for phase, backend in (("prefill", self.prefill), ("decode", self.decode)):
            if phase not in backend.phases:
                raise ValueError(
                    f"{phase}: {backend.name} serves {' and '.join(backend.phases)} alone; choose "
                    f"{' or '.join(b.name for b in BACKENDS.values() if phase in b.phases)}"
                )
        return self

    @property
    def num_kept(self) -> int:
        """Experts of a layer that are on the GPU from step to step; the last slot may keep none."""
        return (self.cached_experts or 0) - bool(self.split_expert)

    @property
    def share_of_cores(self) -> float:
        """Part of the kept experts that a step misses which the host's cores multiply."""
        if self.cached_experts is None or not self.decode.is_by_cores:
            return 0.0
        return 1.0 if self.host_share is None else self.host_share

    @property
    def is_mixed(self) -> bool:
        """Whether it reaches the GPU in one way for a prompt and in another for a decode step."""
        return self.prefill is not self.decode

    @property
    def streams(self) -> tuple[bool, bool]:
        """Whether it goes through the ring in prefill, and in decode."""
        return self.prefill.streams, self.decode.streams

    def chunks_at_once(self, prefill_chunk: int) -> int | None:
        """Count the chunks of so many tokens that meet a part at once; None for all."""
        at_once = self.tokens_at_once
        return None if at_once is None else -(-at_once // prefill_chunk)

    def selects_layer(self, index: int) -> bool:
        """Whether the group pattern takes this layer (always true for ``max_bytes``)."""
        if self.group_size is None or self.num_in_group is None:
            return True
        return _selects(self.group_size, self.num_in_group, index)

    def matches(self, name: str) -> bool:
        """Whether its segments match a name, relative to the layer."""
        return match_segments(self.cpu_offload_params, name)


class Packing(Record):
    """Which weights are held packed, without loss, wherever they lie: 0.76 of their bytes."""

    cpu_offload_params: Segments = ()
    """Segments, as a rule's; ``all`` takes every weight that can be packed."""
    group_size: Count
    num_in_group: Count
    """Of every ``group_size`` layers the last ``num_in_group``."""
    output_head: bool = False
    """Whether the output head is packed, too."""
    leave_unpacked: tuple[UnpackedName, ...] = ()
    """Weights that stay as they are stored all the same; experts of a layer stay together."""

    @model_validator(mode="after")
    def _is_within(self) -> "Packing":
        _check_group(self.group_size, self.num_in_group)
        return self

    def selects_layer(self, index: int) -> bool:
        """Whether the group pattern takes this layer."""
        return _selects(self.group_size, self.num_in_group, index)

    def matches(self, name: str) -> bool:
        """Whether its segments match a name, relative to the layer."""
        return match_segments(self.cpu_offload_params, name)


class Offload(Record):
    """The decision itself."""

    prefetch_step: Count = 1
    """Slots in the ring."""
    prefill_chunk: Count
    """Prompt tokens of each sequence in one forward pass, at most."""
    embeddings: Literal["device", "host"] = "device"
    """``host``: what passes read by row stays in pinned host memory, and is read in place: an input
    embedding that no head is tied to, Gemma's embedding for each layer, and the like."""
    store: Store = "host"
    """Where what the rules take lies: in pinned host memory, or in that of a second GPU."""
    packing: Packing | None = None
    """What is held packed; null where every weight is as it is stored."""
    rules: tuple[Rule, ...] = ()
    """First match wins; empty when everything fits."""

    @model_validator(mode="after")
    def _reads_its_store(self) -> "Offload":
        known = " or ".join(b.name for b in BACKENDS.values() if self.store in b.stores)
        for number, rule in enumerate(self.rules, 1):
            if rule.cached_experts is not None and self.store != "host":
                raise ValueError(
                    f"rule {number} has cached_experts, whose misses are read out of host memory: "
                    f"found `store: {self.store}`, expected `store: host`"
                )
            for backend in (rule.prefill, rule.decode):
                if self.store not in backend.stores:
                    raise ValueError(
                        f"rule {number} is {backend.words.noun} ({backend.name}), which reads no "
                        f"second GPU's memory: with `store: {self.store}`, prefill and decode are "
                        f"{known}"
                    )
        return self


class PhasePrediction(Record):
    """What one phase is predicted to cost (decode: one step; prefill: the whole prompt)."""

    step_s: Seconds = Field(alias="step")
    compute_s: Seconds = Field(alias="compute")
    """The same pass with everything resident."""
    link_s: Seconds = Field(alias="link")
    """Time the link is busy."""
    stall_s: Seconds = Field(alias="stall")
    """Time compute waits for the link."""
    bound_s: Seconds = Field(alias="bound")
    """max(compute, this plan's bytes over the link)."""
    link_bytes: Bytes


class GPUMemoryPrediction(Record):
    """The terms of GPU memory; they add up to the total."""

    resident_bytes: Bytes = Field(alias="resident")
    ring_bytes: Bytes = Field(alias="ring")
    kv_cache_bytes: Bytes = Field(alias="kv_cache")
    activation_bytes: Bytes = Field(alias="activations")
    overhead_bytes: Bytes = Field(alias="overhead")
    """Context, libraries, graphs and the margin."""
    total_bytes: Bytes = Field(alias="total")


class Prediction(Record):
    """What the plan promises; the runtime compares itself with it."""

    objective_s: Seconds = Field(alias="objective")
    """One request of the workload: prefill and all its decode steps."""
    basis: Basis
    """``measured`` when layer times were measured on the machine, ``estimated`` by roofline."""
    prefill: PhasePrediction
    decode: PhasePrediction
    gpu_memory: GPUMemoryPrediction
    host_memory_bytes: Bytes = Field(alias="host_memory")
    """Weights there: embeddings read by row, and the slabs where the host is the store."""
    peer_memory_bytes: Bytes = Field(default=0, alias="peer_memory")
    """Bytes of the slabs on the second GPU, where it is the store."""


class Plan(Record):
    """A plan file."""

    offplan: Literal[1] = PLAN_VERSION
    model: ModelRef
    workload: Workload
    budget: Budget
    goal: Goal = Goal()
    machine: MachineRef
    routing: RoutingRef | None = None
    """Left out where the plan assumes that tokens choose all experts equally often."""
    offload: Offload
    prediction: Prediction

    _file: Path | None = PrivateAttr(default=None)
    """The file that the plan was read from, with no link in its path; None where it was in none."""

    @model_validator(mode="after")
    def _keeps_its_budget(self, info: ValidationInfo) -> "Plan":
        if info.context is not _IN_ANY_BUDGET and (excess := self.describe_excess()) is not None:
            raise ValueError(excess)
        return self

    @property
    def stored_bytes(self) -> int:
        """Bytes of weights in the store, which the budget's ``host_memory`` limits."""
        predicted = self.prediction
        if self.offload.store == "peer":
            return predicted.peer_memory_bytes
        return predicted.host_memory_bytes

    def describe_excess(self) -> str | None:
        """Say by which term the prediction exceeds the budget; None where it keeps it."""
        budget = self.budget
        taken = (
            ("GPU memory", self.prediction.gpu_memory.total_bytes, budget.gpu_memory),
            ("memory of the store", self.stored_bytes, budget.host_memory),
        )
        for what, num_bytes, most in taken:
            if most is not None and num_bytes > most * (1 + PRINTED_TO):
                return (
                    f"it takes {format_bytes(num_bytes)} of {what} by its prediction, more than "
                    f"its budget of {format_budget(most)}: plan it again for that budget "
                    "(offplan replan)"
                )
        return None

    def require_one_gpu(self) -> None:
        """Raise PlanError for what one rank of several holds: only engines run those."""
        if self.goal.ranks.num_gpus > 1:
            raise PlanError(
                f"the plan is for {self.goal.ranks.num_gpus} GPUs ({self.goal.ranks.label}) of "
                f"{self.goal.engine}: offplan's own runtime runs on one; offplan export prints the "
                "engine's command"
            )

    @property
    def has_cores(self) -> bool:
        """Whether a rule has the host's cores multiply."""
        return any(rule.decode.is_by_cores for rule in self.offload.rules)

    def locate(self, path: str) -> str:
        """Return a path that the plan names as it is from here: it starts at the plan's file."""
        return str((Path() if self._file is None else self._file.parent) / path)

    @property
    def weights_file(self) -> Path | None:
        """Where the SHA-256 of the weights stand beside the plan; None for a plan of no file."""
        return None if self._file is None else self._file.with_suffix(".weights.sha256")


def load_plan(path: StrPath, *, in_any_budget: bool = False) -> Plan:
    """Read and check a plan file; ``in_any_budget`` also one that exceeds the budget it names.

    Raises PlanError, naming the file, the key, what was found and what was expected.
    """
    if Path(path).is_dir():
        raise PlanError(f"{path}: {describe_kind(path, 'a plan')}")
    try:
        text = read_text(path, "plan", MOST_FILE_BYTES, PlanError)
    except PlanError as error:
        if (kind := describe_kind(path, "a plan")) is not None:
            raise PlanError(f"{path} is not a plan: {kind}") from None
        if Path(path).exists() or Path(path).suffix in (".yaml", ".yml"):
            raise
        raise PlanError(f"{error}; to plan a model run offplan plan {path} -o plan.yaml") from None
    try:
        data = load_yaml(text)
    except ValueError as error:
        raise PlanError(f"{path} is not YAML: {error}") from None
    is_plan = isinstance(data, dict) and "offplan" in data
    if not is_plan and (kind := describe_kind(path, "a plan")) is not None:
        raise PlanError(f"{path} is not a plan: {kind}")
    plan = parse_plan(data, str(path), in_any_budget=in_any_budget)
    plan._file = Path(path).resolve()  # the file itself, also by way of a link
    return plan


def take_plan(plan: Plan | StrPath) -> Plan:
    """Return a plan as it is, or read its file; raises PlanError as ``load_plan`` does."""
    return plan if isinstance(plan, Plan) else load_plan(plan)


def parse_plan(data: Any, name: str, *, in_any_budget: bool = False) -> Plan:
    """Check a plan's data, as YAML or JSON gives it; ``name`` is used in errors."""
    if not isinstance(data, dict) or "offplan" not in data:
        raise PlanError(f"{name} is not a plan: it must be a mapping with the key `offplan: 1`")
    if data["offplan"] != PLAN_VERSION:
        raise PlanError(
            f"{name} is a plan of version {reprlib.repr(data['offplan'])}; this offplan reads "
            f"{PLAN_VERSION}"
        )
    context = _IN_ANY_BUDGET if in_any_budget else None
    return Plan.check(data, name, "plan", PlanError, context)


def dump_plan(plan: Plan) -> str:
    """Print the plan as YAML: the same plan always gives the same bytes.

    Quantities are rounded to four digits, sizes that must be exact are printed exactly.
    """
    data = plan.dump_with_units()
    if plan.model.generation_config_sha256 is None:
        del data["model"]["generation_config_sha256"]
    if plan.routing is None:
        del data["routing"]
    for key in ("goal", "offload", "prediction"):
        data[key] = leave_out_usual(data[key])
    if (packing := data["offload"].get("packing")) is not None:
        data["offload"]["packing"] = leave_out_usual(packing)
    data["offload"]["rules"] = list(map(leave_out_usual, data["offload"]["rules"]))
    lines = [f"offplan: {data.pop('offplan')}"]
    for key, section in data.items():
        lines += _dump_section(key, section)
    return "\n".join(lines) + "\n"


def leave_out_usual(section: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is null, and what most plans would say alike."""
    usual: tuple[tuple[str, object], ...] = (
        ("embeddings", "device"),
        ("store", "host"),
        ("peer_memory", "0 B"),
        ("stock", False),
        ("packing", True),
        ("leave_unpacked", []),
        ("cached_experts", "off"),
        ("parts", "off"),
        ("host_cores", False),
        ("tensor_parallel", 1),
        ("pipeline_parallel", 1),
        ("expert_parallel", 1),
    )
    return {k: v for k, v in section.items() if v is not None and (k, v) not in usual}


def _dump_section(key: str, section: dict[str, Any]) -> list[str]:
    """Print a section on one line if it is flat and fits, otherwise a line for each entry."""
    line = f"{key}: {flow(section)}"
    nested = any(isinstance(value, (dict, list)) for value in section.values())
    if len(line) <= 100 and not nested:
        return [line]
    lines = [f"{key}:"]
    for name, value in section.items():
        if isinstance(value, list) and value:
            lines += [f"  {name}:", *(f"    - {flow(item)}" for item in value)]
        else:
            lines.append(f"  {name}: {flow(value)}")
    return lines


def flow(value: Any) -> str:
    """Write a value on one line of a plan's file."""
    text = dump_yaml(value, width=10**6, on_one_line=True)
    return text.removesuffix("\n").removesuffix("\n...")
