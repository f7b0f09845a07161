"""The plan file: what people review, commit and run.

A plan is a small YAML file with a stable order and nothing volatile in it. It is read with
YAML's safe loader; an unknown key, or one given twice, is an error.
"""

import os
import reprlib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, ValidationInfo, model_validator

from offplan.backends import Backend as Backend
from offplan.capabilities.rule import REPLANNED, Count
from offplan.capabilities.table import USUAL
from offplan.capabilities.table import Goal as Goal
from offplan.capabilities.table import Offload as Offload
from offplan.capabilities.table import Rule as Rule
from offplan.checkpoint.model import Model
from offplan.choices import WorkloadName
from offplan.errors import InputError, PlanError
from offplan.files import StrPath
from offplan.kinds import describe_kind
from offplan.records import (
    Basis,
    Bytes,
    ExactBytes,
    Rate,
    Record,
    Seconds,
    dump_yaml,
    load_yaml,
    read_text,
)
from offplan.stores import HOST, STORES, Store
from offplan.units import format_budget, format_bytes

PLAN_VERSION: Literal[1] = 1
MOST_CACHED = 2**32
"""Tokens of all sequences together, beyond any memory."""
MOST_FILE_BYTES = 2**18
"""Beyond any plan's file."""
PRINTED_TO = 1e-3
"""A size of four significant digits is right to less than this part of it."""


_IN_ANY_BUDGET = object()
"""Context in which a plan is read that exceeds its budget, so that it can be made again."""


def is_none(value: object) -> bool:
    """Return True for what a file leaves out, so that other files stay as they are."""
    return value is None


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

    def require(self, model: Model, name: str, remedy: str) -> None:
        """Raise InputError, which says ``name``, if what was recorded is of another model."""
        if self.headers_sha256 != model.headers_sha256:
            raise InputError(
                f"{name} was recorded with {self.source} (headers {self.headers_sha256[:12]}); "
                f"{model.source} has headers {model.headers_sha256[:12]}: {remedy}"
            )


class Workload(Record):
    """The requests that the plan is optimised for."""

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


WORKLOADS: dict[WorkloadName, Workload] = {
    "chat": Workload(),
    "agent": Workload(prompt_tokens=32 * 1024, output_tokens=1024, context=128 * 1024),
    "batch": Workload(batch=32, prompt_tokens=512, output_tokens=256, context=1024),
}
"""The numbers of usual workloads."""


class Budget(Record):
    """Memory the plan may take."""

    gpu_memory: ExactBytes
    """All that the process takes on the card, context included."""
    host_memory: ExactBytes | None = None
    """Bytes of the store: pinned host memory, or a second GPU's; null is unlimited. An embedding
    that stays on the host takes none of a second GPU's."""


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
        """True if the CPU stands in for a GPU, as in the profile ``cpu``."""
        return self.name == "CPU"


class RoutingRef(Record):
    """The routing profile that the plan was made from."""

    file: str
    """The profile's file, as ``--routing`` takes it."""
    fingerprint: str
    """SHA-256 of the profile."""


class AcceptanceRef(Record):
    """The acceptance profile that the plan was made from."""

    file: str
    """The profile's file, as ``--acceptance`` takes it."""
    fingerprint: str
    """SHA-256 of the profile."""


class Correction(Record):
    """The correction of estimated layers by measured layers of other models."""

    ratio: float = Field(gt=0)
    """Measured times as a multiple of estimates, the median; estimates were multiplied by it."""
    times: Count
    """Number of measured times."""
    least: float = Field(gt=0)
    """Compute as a multiple of what was predicted, at least."""
    most: float = Field(gt=0)
    """The same at most."""


class PhasePrediction(Record):
    """The predicted cost of one phase: of the whole prompt, or in decode of one token.

    A token is a step, or where passes check drafts its share of the passes' means.
    """

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
    # left out where there is none: what is printed of other plans stays as it is
    correction: Correction | None = Field(default=None, exclude_if=lambda each: each is None)
    """Left out where compute was measured, or no layers were by which to correct all."""


class GPUMemoryPrediction(Record):
    """The terms of GPU memory; they add up to the total."""

    resident_bytes: Bytes = Field(alias="resident")
    ring_bytes: Bytes = Field(alias="ring")
    kv_cache_bytes: Bytes = Field(alias="kv_cache")
    activation_bytes: Bytes = Field(alias="activations")
    overhead_bytes: Bytes = Field(alias="overhead")
    """Context, libraries, graphs and the margin."""
    total_bytes: Bytes = Field(alias="total")


class DraftPrediction(Record):
    """The passes that check drafts, beside ``decode``, which has the means of a token."""

    tokens: float
    """Tokens of text that a pass gives on average, steps without drafts included."""
    step_s: Seconds = Field(alias="step")
    """A step without drafts."""
    pass_2_s: Seconds | None = Field(default=None, alias="pass_2", exclude_if=is_none)
    """A pass of two tokens; null, and left out, where no pass has so many."""
    pass_4_s: Seconds | None = Field(default=None, alias="pass_4", exclude_if=is_none)
    pass_8_s: Seconds | None = Field(default=None, alias="pass_8", exclude_if=is_none)


class Prediction(Record):
    """The plan's promises; the runtime compares itself with them."""

    objective_s: Seconds = Field(alias="objective")
    """One request of the workload: prefill and all its decode steps."""
    basis: Basis
    """``measured`` when layer times were measured on the machine, ``estimated`` by roofline."""
    prefill: PhasePrediction
    decode: PhasePrediction
    draft: DraftPrediction | None = Field(default=None, exclude_if=is_none)
    """The passes that check drafts; null where none do, and in plans from before it was told."""
    gpu_memory: GPUMemoryPrediction
    host_memory_bytes: Bytes = Field(alias="host_memory")
    """Weights there: embeddings read by row, and the slabs where the host is the store."""
    peer_memory_bytes: Bytes = Field(default=0, alias="peer_memory")
    """Bytes of the slabs on the second GPU, where it is the store."""

    def bytes_in(self, store: Store) -> int:
        """Bytes of weights in a store."""
        return int(getattr(self, store.bytes_key))


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
    acceptance: AcceptanceRef | None = Field(default=None, exclude_if=is_none)
    """Left out where the plan knows of no acceptance of drafts."""
    offload: Offload
    prediction: Prediction

    _file: Path | None = PrivateAttr(default=None)
    """The file that the plan was read from, with no link in its path; None where it was in none."""

    @model_validator(mode="after")
    def _keeps_its_budget(self, info: ValidationInfo) -> "Plan":
        in_any_budget = info.context in (_IN_ANY_BUDGET, REPLANNED)
        if not in_any_budget and (excess := self.describe_excess()) is not None:
            raise ValueError(excess)
        return self

    @property
    def stored_bytes(self) -> int:
        """Bytes of weights in the store, which the budget's ``host_memory`` limits."""
        return self.prediction.bytes_in(STORES[self.offload.store])

    @property
    def stores(self) -> tuple[Store, ...]:
        """The stores that weights may lie in: the host's memory, which takes embeddings, first."""
        return tuple(dict.fromkeys((HOST, STORES[self.offload.store])))

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
        """Raise PlanError for a plan of several GPUs: only engines run those."""
        if self.goal.num_gpus > 1:
            raise PlanError(
                f"the plan is for {self.goal.gpus} of {self.goal.engine}: offplan's own runtime "
                "runs on one; offplan export prints the engine's command"
            )

    @property
    def has_cores(self) -> bool:
        """True if a rule has the host's cores multiply."""
        return any(rule.decode.is_by_cores for rule in self.offload.rules)

    def locate(self, path: str) -> str:
        """Return a path that the plan names as it is from here: it starts at the plan's file.

        Errors and records show it, so it has no ``..`` where the same file has a path without.
        """
        joined = str((Path() if self._file is None else self._file.parent) / path)
        plain = os.path.normpath(joined)
        is_other = os.path.realpath(joined) != os.path.realpath(plain)  # by a link before the ..
        return joined if is_other else plain

    @property
    def weights_file(self) -> Path | None:
        """The file with the SHA-256 of the weights beside the plan; None for a plan of no file."""
        return None if self._file is None else self._file.with_suffix(".weights.sha256")


def load_plan(path: StrPath, *, in_any_budget: bool = False, to_replan: bool = False) -> Plan:
    """Read and check a plan file; ``in_any_budget`` also one that exceeds the budget it names.

    ``to_replan`` reads such a plan, too, and one whose rules have keys of before: without these.
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
    plan = parse_plan(data, str(path), in_any_budget=in_any_budget, to_replan=to_replan)
    plan._file = Path(path).resolve()  # the file itself, also by way of a link
    return plan


def take_plan(plan: Plan | StrPath, *, to_replan: bool = False) -> Plan:
    """Return a plan as it is, or read its file as ``load_plan`` does, which raises PlanError."""
    return plan if isinstance(plan, Plan) else load_plan(plan, to_replan=to_replan)


def parse_plan(
    data: Any, name: str, *, in_any_budget: bool = False, to_replan: bool = False
) -> Plan:
    """Check a plan's data, as YAML or JSON gives it; ``name`` is used in errors.

    Plans that are read ``in_any_budget``, or ``to_replan``, are as ``load_plan`` says.
    """
    if not isinstance(data, dict) or "offplan" not in data:
        raise PlanError(f"{name} is not a plan: it must be a mapping with the key `offplan: 1`")
    if data["offplan"] != PLAN_VERSION:
        raise PlanError(
            f"{name} is a plan of version {reprlib.repr(data['offplan'])}; this offplan reads "
            f"{PLAN_VERSION}"
        )
    context = REPLANNED if to_replan else _IN_ANY_BUDGET if in_any_budget else None
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
    for key, value in data["offload"].items():
        if isinstance(value, dict):
            data["offload"][key] = leave_out_usual(value)
    data["offload"]["rules"] = list(map(leave_out_usual, data["offload"]["rules"]))
    lines = [f"offplan: {data.pop('offplan')}"]
    for key, section in data.items():
        lines += _dump_section(key, section)
    return "\n".join(lines) + "\n"


def leave_out_usual(section: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is null, and what most plans would say alike."""
    return {
        key: value
        for key, value in section.items()
        if value is not None and (key not in _USUAL or value != _USUAL[key])
    }


_USUAL: dict[str, Any] = {"embeddings": "device", "store": "host", "peer_memory": "0 B"} | {
    name: [] if value == () else value for name, value in USUAL.items()
}
"""The values that most plans would say alike, by key: lists as a file has them."""


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
