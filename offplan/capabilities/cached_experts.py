"""Cached experts: of a layer's routed experts those used last are on the GPU as well.

The host's cores may multiply some of those that a step misses, now; the link then brings these for
later steps.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, ValidationInfo, model_validator

from offplan.capabilities.goal import Asked, GoalBase
from offplan.capabilities.rule import REPLANNED, Count, LayerExperts, RuleBase, WeightCache
from offplan.checkpoint.model import Experts, Layer, Model
from offplan.errors import PlanError
from offplan.forms.form import RAW
from offplan.forms.host_kernels import CHUNK_COLUMNS
from offplan.kernel_sizes import (
    EXPERT_MULTIPLE,
    KERNEL_TYPES,
    MAX_PAIRS,
    TABLE_COUNTERS,
    TABLE_LISTS,
)
from offplan.stores import StoreName

DEFAULT_CACHED_EXPERTS: Literal["off", "auto"] = "auto"
"""Default of ``cached_experts``: plans may cache experts one by one.

Source: an H200 with the reuse that others publish, ``benchmarks/results/kept-experts-h200.json``.
Qwen3-30B-A3B in FP8 and 12 GiB 28.1 -> 9.9 ms a token, gpt-oss-120b in 24 GiB 29.7 -> 9.1. With
uniform routing the search finds the same plans as without.
"""
BOUNDARY_BYTES = 256
"""Every part of the slots, and the table, starts on such a boundary."""


SPLIT_SAVES = 0.02
"""Part of the time of whole experts that splitting one has to save."""
LATER_PARTS = 16
"""Parts of an expert in which ``later_experts`` is counted."""
MOST_LATER = 8
"""Experts of a layer that the link brings for later in one step, at most."""
LATER_STEPS = 64
"""Steps after each of which a layer decides anew whether the link brings experts for later."""
LATER_FADES = 4
"""Of what a layer has counted by then it forgets one of so many parts: chance evens out.

Source: chosen. Simulated layers of 80 slots of 128 experts that choose kept ones 69 % of the time
are found after 9 decisions in 19 of 20 cases, and a change is known after some 6 more.
"""
LATER_DEVIATIONS = 3
"""Standard deviations by which the experts chosen again have to be more than by chance.

Source: gpt-oss-120b in 24 GiB on H200s, with uniform routing and two slots a layer
(``benchmarks/results/llama-cpp-h200.json``). By an eighth alone the link brought 8.7 and 12 experts
a step for later, which hit as by chance.
"""


class Division(NamedTuple):
    """The part of a layer's missed experts that the host's cores multiply in a step."""

    experts: int
    """Whole experts."""
    chunks: int
    """Chunks of one expert more: the first CHUNK_COLUMNS of its inner columns, so many times."""


class MissRates(NamedTuple):
    """Seconds that the host's cores and the link take for experts that a step misses.

    A prediction has them from a machine's profile, a session from what it measures when it opens.
    """

    trip_s: float
    """A hand-over to the cores, beside what they compute."""
    cores_s: float
    """One expert, by the cores."""
    link_s: float
    """One expert, over the link."""

    def seconds(self, num_missed: float, by_cores: float) -> float:
        """Return how long cores and link take together: the longer of both."""
        of_cores = self.trip_s + by_cores * self.cores_s if by_cores else 0.0
        return max(of_cores, (num_missed - by_cores) * self.link_s)


@dataclass(frozen=True)
class ExpertSlots:
    """The slots of one layer: room in GPU memory for some of its experts, all parts of each."""

    name: ClassVar[str] = "experts kept one by one"
    num_slots: int
    """Experts that there is room for."""
    num_experts: int
    """Experts of the layer."""
    unit_bytes: tuple[int, ...]
    """Bytes of each unit of the layer's experts, in the slab's order."""
    by_cores: bool = False
    """True if the host's cores multiply some of the experts that a step misses where they lie."""
    inner: int = 0
    """Inner columns of an expert that cores and link may split; 0 if they split none."""
    later: int = 0
    """LATER_PARTS of an expert that the link may bring for later, a step: of what the cores
    multiplied. What a step leaves of it the next ones may use, up to MOST_LATER experts."""

    @property
    def splits(self) -> bool:
        """True if cores and link may each multiply a part of one missed expert.

        The link brings its part into the last slot, where no expert is kept.
        """
        return self.by_cores and self.num_slots > 1 and self.inner > 0

    @property
    def num_kept(self) -> int:
        """Experts that are kept from step to step."""
        return self.num_slots - self.splits

    def divide(self, num_missed: int, rates: MissRates) -> Division:
        """Divide so many experts that a layer misses in a step: cores and link end together.

        An expert is split, by whole chunks, only if that saves SPLIT_SAVES of the time.
        """
        if not self.by_cores or not num_missed:
            return Division(0, 0)
        whole = min(range(num_missed + 1), key=lambda number: rates.seconds(num_missed, number))
        if not self.splits:
            return Division(whole, 0)
        both = rates.cores_s + rates.link_s
        wanted = min(max(0.0, (num_missed * rates.link_s - rates.trip_s) / both), num_missed)
        experts = math.floor(wanted)
        chunks = round((wanted - experts) * self.inner / CHUNK_COLUMNS)
        if chunks * CHUNK_COLUMNS >= self.inner:
            experts, chunks = experts + 1, 0
        split_s = rates.seconds(num_missed, self.count_by_cores(experts, chunks))
        is_split = split_s < (1 - SPLIT_SAVES) * rates.seconds(num_missed, whole)
        return Division(experts, chunks) if is_split else Division(whole, 0)

    def count_by_cores(self, experts: int, chunks: int) -> float:
        """Count the experts that a ``Division`` gives the cores, a part of one as that part."""
        return experts + (chunks * CHUNK_COLUMNS / self.inner if chunks else 0.0)

    def brings_later(self, used: float, recent: float) -> bool:
        """Return True if the link is to bring experts for later, by what the last steps chose.

        Of ``used`` experts ``recent`` were among the ``num_kept`` used last.
        """
        return brings_later(self.num_kept, self.num_experts, used, recent)

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of one expert: what each miss has cross the link."""
        return sum(self.unit_bytes) // self.num_experts

    @cached_property
    def slots_bytes(self) -> int:
        """Bytes of the slots, each part on a boundary."""
        of_each = (size // self.num_experts * self.num_slots for size in self.unit_bytes)
        return sum(map(_align, of_each))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the experts that there is room for."""
        return self.num_slots * self.expert_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the table that says which expert is in which slot, in the order of use."""
        return table_bytes(self.num_experts)

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that the layer's slots and table take."""
        return self.slots_bytes + self.table_bytes

    def describe(self) -> str:
        """Say how many experts are kept, and what the cores do of those that are missed."""
        told = f", {self.num_kept} experts kept"
        if self.by_cores:
            told += ", those missed by cores and link"
        return told


def brings_later(num_kept: int, num_experts: int, used: float, recent: float) -> bool:
    """Return True if experts are to be brought for later, ``recent`` of ``used`` having been kept.

    By chance ``num_kept`` of ``num_experts`` would: that share has to be beaten by an eighth, of
    hits or of misses, and by LATER_DEVIATIONS of what chance alone makes. What is not chosen again
    is not worth the link. Whole numbers stay exact.
    """
    others = num_experts - num_kept
    beyond = recent * num_experts - num_kept * used
    is_beyond_chance = beyond**2 > LATER_DEVIATIONS**2 * used * num_kept * others
    return 8 * beyond > used * min(num_kept, others) and is_beyond_chance


@dataclass(frozen=True)
class ExpertsFound:
    """The chosen experts that a decode step hits and misses, over all layers that keep some.

    An expert counts once a step and layer, however many tokens chose it.
    """

    hits: float
    """Experts that were in GPU memory, or are predicted to be."""
    misses: float
    """Experts that were not."""
    by_cores: float = 0.0
    """Experts of these that the host's cores multiplied where they lie."""
    later: float = 0.0
    """Experts of these that the link then brought for later steps."""

    @property
    def brought(self) -> float:
        """Experts of these that were read over the link."""
        return self.misses - self.by_cores

    def list_names(self) -> Iterator[tuple[str, str]]:
        """Yield what is shown of it: a figure's name and its attribute.

        Experts brought and multiplied are shown if the host's cores multiplied some.
        """
        yield from (("experts hit", "hits"), ("experts missed", "misses"))
        if self.by_cores:
            yield "experts brought", "brought"
            yield "experts multiplied by the cores", "by_cores"
            yield "experts brought for later", "later"


@dataclass(frozen=True)
class FoundAnywhere:
    """What is predicted of ``ExpertsFound`` where nobody knows the rates of cores and link."""

    hits: float
    misses: float
    by_cores: None = None
    later: None = None


def table_bytes(num_experts: int) -> int:
    """Bytes of a layer's table: numbers of 4 bytes."""
    return _align(4 * (TABLE_LISTS * num_experts + TABLE_COUNTERS))


def _align(num_bytes: int) -> int:
    return -(-num_bytes // BOUNDARY_BYTES) * BOUNDARY_BYTES


_OLD_KEYS = ("host_share", "split_expert")
"""Keys of rules of before."""


class CachedExpertsRule(RuleBase):
    """A rule that may keep experts on the GPU one by one."""

    cached_experts: Count | None = None
    """Routed experts of each layer that are in GPU memory as well: those used last. Decode steps
    read the others over the link, in place of those unused longest. Null keeps none."""
    cached_experts_more: Count | None = None
    """The first layers that the rule takes, so many of them, keep one expert more."""
    later_experts: float | None = Field(default=None, ge=0, le=MOST_LATER)
    """Experts of a layer that the link may bring for later, a step: of those that the host's cores
    multiplied. It is counted in sixteenths. Null brings none, where ``decode: host``."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_share(cls, data: Any, info: ValidationInfo) -> Any:
        """Refuse the keys of before cores and link divided by their rates, unless it is replanned.

        Replanning asks the file's question again, which none of these keys belong to.
        """
        if not isinstance(data, dict) or not (old := [key for key in _OLD_KEYS if key in data]):
            return data
        if info.context is REPLANNED:
            return {key: value for key, value in data.items() if key not in old}
        raise ValueError(
            f"found {' and '.join(old)}: cores and link divide missed experts by their rates now; "
            "offplan replan makes the plan again"
        )

    def list_faults(self) -> Iterator[str]:
        """Yield what its cached experts cannot be."""
        if self.later_experts is not None and not self.divides_missed:
            kept = "no" if self.cached_experts is None else str(self.cached_experts)
            yield (
                f"found later_experts: {self.later_experts:g} with decode: {self.decode.name} and "
                f"{kept} cached_experts: the link brings for later what the host's cores multiply "
                "of the experts that a step misses, so write decode: host and cached_experts, or "
                "take it out"
            )
        if self.cached_experts is None:
            if self.cached_experts_more is not None:
                yield (
                    "cached_experts_more has layers keep one expert more than cached_experts, "
                    "which is missing: add it, or take cached_experts_more out"
                )
        else:
            if self.max_bytes is not None:
                yield (
                    "a max_bytes rule takes whole parameters, and cached_experts keeps single "
                    "experts of layers: give the rule group_size and num_in_group"
                )
            if self.decode.streams or self.decode.is_served:
                yield (
                    f"found decode: {self.decode.name} with cached_experts, expected decode: uva "
                    "or host: steps read the experts that are not in GPU memory over the link, one "
                    "by one, or have the host's cores multiply them"
                )
        yield from super().list_faults()

    @property
    def divides_missed(self) -> bool:
        """True if the host's cores and the link divide the experts that steps miss."""
        return self.cached_experts is not None and self.decode.is_by_cores

    @property
    def experts_key(self) -> str | None:
        """It is whole experts that are kept."""
        return "cached_experts" if self.cached_experts is not None else super().experts_key

    @property
    def caches(self) -> bool:
        """It keeps experts of each layer."""
        return self.cached_experts is not None or super().caches

    def make_cache(self, experts: LayerExperts, num_before: int) -> WeightCache | None:
        """Make the slots of a layer, one more in the first layers where the rule says so."""
        if self.cached_experts is None:
            return super().make_cache(experts, num_before)
        more = num_before < (self.cached_experts_more or 0)
        num_slots, num_experts = self.cached_experts + more, experts.num_experts
        if num_slots > num_experts:
            asked = f"{self.cached_experts} and one more" if more else str(self.cached_experts)
            raise PlanError(
                f"{experts.rule} has cached_experts: {asked}, and {experts.layer} has "
                f"{num_experts} experts: keep {num_experts} at most, or leave them resident"
            )
        by_cores = self.decode.is_by_cores
        return ExpertSlots(
            num_slots,
            num_experts,
            experts.unit_bytes,
            by_cores,
            experts.count_inner() if by_cores else 0,
            round((self.later_experts or 0) * LATER_PARTS),
        )

    def why_not_on_gpu(self, model: Model, dtype: str, layers: Sequence[Layer]) -> str | None:
        """Say what no kernel reads from slots."""
        what = None if self.cached_experts is None else find_unread(model, dtype, layers)
        if what is None:
            return super().why_not_on_gpu(model, dtype, layers)
        return (
            f"cached_experts, and {model.source} has experts {what}, which no kernel on a GPU "
            "keeps: leave cached_experts out"
        )

    def why_not_batch(self, experts: Experts | None, batch: int) -> str | None:
        """Say that a step sends tokens to more experts than kernels sort."""
        num_chosen = 0 if experts is None else experts.num_experts_per_token
        if self.cached_experts is None or batch * num_chosen <= MAX_PAIRS:
            return super().why_not_batch(experts, batch)
        return (
            f"cached_experts serves steps of {MAX_PAIRS} pairs of a token and an expert at most; "
            f"{batch} sequences x {num_chosen} experts a token are {batch * num_chosen}: lower "
            f"`batch` to {MAX_PAIRS // num_chosen}, or leave cached_experts out"
        )

    def describe(self) -> str:
        """Say how many experts it keeps, and who multiplies those that are missed."""
        if self.cached_experts is None:
            return super().describe()
        more = self.cached_experts_more
        told = f", and one more of the first {more} of them" if more else ""
        if self.decode.is_by_cores:
            told += "; the host's cores and the link divide those missed by their rates"
            if self.later_experts:
                told += (
                    ", and of those that the cores multiply the link brings up to "
                    f"{self.later_experts:g} a step for later"
                )
        kept = f"; the {self.cached_experts} experts of a layer used last are on the GPU, too{told}"
        return super().describe() + kept

    def describe_plainly(self) -> str:
        """Say how many experts it keeps to people who do not know the keys."""
        if self.cached_experts is None:
            return super().describe_plainly()
        few, more = self.cached_experts, bool(self.cached_experts_more)
        number = f"{few}" + f" or {few + 1}" * more
        kept = f". The {number} experts of a layer that were used last are on the GPU as well"
        return super().describe_plainly() + kept

    def list_unsaid(self) -> Iterator[str]:
        """Yield that it keeps experts."""
        yield from super().list_unsaid()
        if self.cached_experts is not None:
            yield f"keeps {self.cached_experts} experts of a layer on the GPU (cached_experts)"

    def why_not_store(self, store: StoreName) -> str | None:
        """Say that experts which are missed are read out of host memory."""
        if self.cached_experts is not None and store != "host":
            return (
                "has cached_experts, whose misses are read out of host memory: found "
                f"`store: {store}`, expected `store: host`"
            )
        return super().why_not_store(store)


class CachedExpertsGoal(GoalBase):
    """A question whose plans may keep experts on the GPU one by one."""

    cached_experts: Literal["off", "auto"] | Count = "off"
    """Experts that rules may keep on the GPU one by one: ``auto`` chooses how many; a number is how
    many of each layer."""

    @property
    def claims_experts(self) -> bool:
        """Where so many experts are asked for, all that go are kept so."""
        return isinstance(self.cached_experts, int) or super().claims_experts

    def list_unsaid(self) -> Iterator[tuple[str, str]]:
        """Yield cached experts, where they are asked for."""
        yield from super().list_unsaid()
        if self.cached_experts != "off":
            yield "cached_experts", "no engine keeps experts one by one"

    def list_refusals(self, asked: Asked) -> Iterator[str]:
        """Yield why no plan can keep experts, or not as many as are asked for."""
        yield from super().list_refusals(asked)
        kept, model = self.cached_experts, asked.model
        if kept == "off":
            return
        if (why := _why_not(asked)) is not None:
            yield f"`cached_experts={kept}`: {why}, or leave `cached_experts` out"
        elif isinstance(kept, int) and model.experts and kept > model.experts.num_experts:
            yield (
                f"`cached_experts={kept}`: a layer of {model.source} has "
                f"{model.experts.num_experts} experts; name that many at most, or auto"
            )

    def choose(self, asked: Asked, *, by_others: bool) -> dict[str, Any]:
        """Choose DEFAULT_CACHED_EXPERTS where experts can be kept."""
        chosen = super().choose(asked, by_others=by_others)
        if "cached_experts" not in self.model_fields_set:
            keeps = not by_others and _why_not(asked) is None
            chosen["cached_experts"] = DEFAULT_CACHED_EXPERTS if keeps else "off"
        return chosen

    def describe(self) -> Iterator[str]:
        """Yield how many experts are to be kept, if a number is asked for."""
        yield from super().describe()
        if isinstance(self.cached_experts, int):
            yield f"experts are kept on the GPU one by one, {self.cached_experts} of each layer"


def _why_not(asked: Asked) -> str | None:
    """Say why plans of a batch cannot keep experts, and what would help; None if they can."""
    model = asked.model
    if model.experts is None:
        return f"{model.source} has no routed experts: take a model that has"
    if asked.store != "host":
        return (
            f"experts that are missed are read out of host memory, and the store is {asked.store}: "
            "take `store=host`"
        )
    most = MAX_PAIRS // model.experts.num_experts_per_token
    if asked.batch > most:
        return (
            f"steps of {MAX_PAIRS} pairs of a token and an expert are served at most, which is a "
            f"batch of {most}, and not of {asked.batch}: lower `batch`"
        )
    if (what := find_unread(model, model.dtype, model.layers)) is not None:
        return f"{model.source} has experts {what}, which no kernel keeps: take another model"
    return None


def find_unread(model: Model, dtype: str, layers: Sequence[Layer]) -> str | None:
    """Name what of these layers' experts no kernel reads from slots on a GPU; None for nothing.

    ``dtype`` is the type that they are computed in.
    """
    experts = [each for layer in layers for each in layer.parameters if each.is_expert]
    if not experts:
        return None
    if dtype not in KERNEL_TYPES:
        return f"computed in {dtype}"
    if any(each.is_shuffled for each in experts):
        return "with inputs in an order of each expert's own (g_idx)"
    by_value = [e for e in experts if e.form is RAW and not e.name.endswith("bias")]
    if not by_value:
        return None
    if model.architecture.routing.held_in_out:
        return "held by transposed values"
    if any(each.name.endswith("bias") for each in experts):
        return "with biases, held by their values"
    if any(size % EXPERT_MULTIPLE for each in by_value for size in each.shape[-2:]):
        return f"held by their values, of sizes that {EXPERT_MULTIPLE} does not divide"
    return None
