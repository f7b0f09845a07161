"""The table of capabilities, by which a plan's rules and its goal have their keys.

The order of the classes is that of the keys in a file, the last one first. The effects of two
capabilities on each other stand here, and nowhere else.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import model_validator
from typing_extensions import Self

from offplan.backends import Backend
from offplan.capabilities.cached_experts import CachedExpertsGoal, CachedExpertsRule
from offplan.capabilities.drafts import Draft, DraftGoal, DraftOffload
from offplan.capabilities.goal import Asked, GoalBase
from offplan.capabilities.host_cores import HostCoresGoal
from offplan.capabilities.kv_cache import KVCacheGoal
from offplan.capabilities.packing import Packing, PackingGoal, PackingOffload
from offplan.capabilities.parts import PartsGoal, PartsRule
from offplan.capabilities.ranks import RanksGoal
from offplan.capabilities.stock import StockGoal

APART = (
    ("parts", "cached_experts", "a prompt in parts leaves no experts on the GPU for steps"),
    ("stock", "cached_experts", "kept experts need offplan's"),
    ("stock", "parts", "layers in parts need offplan's"),
    ("stock", "kv_cache_dtype", "a cache in FP8 needs offplan's"),
)
"""Pairs of keys that may not meet, and why: in a rule, or in what runs it."""
Recoding = Packing
"""Weights that a plan holds in another form than the checkpoint's: one capability does it."""


class Rule(PartsRule, CachedExpertsRule):
    """Which parameters of which layers stay on the host, and how each phase gets them.

    A rule has a group pattern: of every ``group_size`` layers the last ``num_in_group``. Source:
    vLLM ``offload_group_size``. Or it has ``max_bytes``: whole parameters in layer then name order,
    overshooting by at most one. Source: vLLM ``cpu_offload_gb``.
    """

    def list_faults(self) -> Iterator[str]:
        """Yield what two of its capabilities do to each other."""
        for one, other, why in APART:
            values = [getattr(self, key, None) for key in (one, other)]
            if None not in values:
                yield (
                    f"found {one}: {values[0]} with {other}: {values[1]}: {why}, so leave one of "
                    "them out"
                )
        yield from super().list_faults()


class Offload(DraftOffload, PackingOffload):
    """The decision itself."""

    rules: tuple[Rule, ...] = ()
    """First match wins; empty when everything fits."""

    def list_capabilities(self) -> Iterator[str]:
        """Yield the capabilities that execute it and its rules."""
        yield from super().list_capabilities()
        for rule in self.rules:
            yield from rule.list_capabilities()

    @model_validator(mode="after")
    def _reads_its_store(self) -> Self:
        for number, rule in enumerate(self.rules, 1):
            if (why := rule.why_not_store(self.store)) is not None:
                raise ValueError(f"rule {number} {why}")
        return self


def decide_prediction(draft: Draft, prefill_chunk: int) -> Offload:
    """Return the decision on the prediction layer that makes a plan's drafts.

    The layer is a model of one layer. The runtime loads it by this decision, and plans have its
    costs.
    """
    experts = Rule(
        cpu_offload_params=("experts",),
        group_size=1,
        num_in_group=1,
        prefill=Backend.UVA,
        decode=Backend.UVA,
    )
    return Offload(prefill_chunk=prefill_chunk, rules=(experts,) if draft.experts == "host" else ())


class Goal(
    KVCacheGoal,
    RanksGoal,
    DraftGoal,
    HostCoresGoal,
    PartsGoal,
    CachedExpertsGoal,
    PackingGoal,
    StockGoal,
):
    """The aim of a plan, and the limits that it must keep beside the budget."""

    def list_refusals(self, asked: Asked) -> Iterator[str]:
        """Yield why no plan can answer, each with the key in backquotes."""
        for one, other, why in APART:
            value = getattr(self, other)
            if one == self.way.name and value != USUAL[other]:
                yield (
                    f"`{other}={value}`: {self.way.whose} passes are to run {asked.model.source}, "
                    f"and {why}: leave `{other}` out"
                )
        yield from super().list_refusals(asked)

    def describe(self) -> Iterator[str]:
        """Yield what is asked for, each in a line of a plan's report."""
        yield from super().describe()
        if self.parts == "off" and self.cached_experts != "off":  # of a model that has experts
            yield "prompts stream a layer's experts whole"

    def for_engine(self, engine: str, **changes: Any) -> dict[str, Any]:
        """Return its values with those that no engine's flags can say left out, and ``changes``."""
        kept = dict(self)
        for key, _ in self.list_unsaid():
            kept.pop(key)
        return {**kept, "host_threads": None, "engine": engine, **changes}


USUAL: dict[str, Any] = {
    name: field.default
    for name, field in Goal.model_fields.items()
    if name not in GoalBase.model_fields
}
"""Values of a goal that most plans would say alike, which their files leave out."""
