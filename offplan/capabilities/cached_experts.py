"""Cached experts: of a layer's routed experts those used last are on the GPU as well.

The host's cores may multiply a share of those that a step misses.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from pydantic import Field

from offplan.capabilities.goal import Asked, GoalBase
from offplan.capabilities.rule import Count, RuleBase
from offplan.checkpoint.model import Layer, Model
from offplan.checkpoint.model_types import EXPERTS_IN_OUT
from offplan.choices import DEFAULT_CACHED_EXPERTS, Store
from offplan.forms.form import RAW
from offplan.kernel_sizes import EXPERT_MULTIPLE, KERNEL_TYPES, MAX_PAIRS


class CachedExpertsRule(RuleBase):
    """A rule that may keep experts on the GPU one by one."""

    cached_experts: Count | None = None
    """Routed experts of each layer that are in GPU memory as well: those used last. Decode steps
    read the others over the link, in place of those unused longest. Null keeps none."""
    cached_experts_more: Count | None = None
    """The first layers that the rule takes, so many of them, keep one expert more."""
    host_share: float | None = Field(default=None, ge=0, le=1)
    """Part of the experts that a layer misses in a step which the host's cores multiply where they
    lie; the link brings the others. Null is all of them, where ``decode: host`` keeps experts."""
    split_expert: bool | None = None
    """True has cores and link each multiply some inner columns of one missed expert, so that
    ``host_share`` is met more closely. Null and false have them divide whole experts."""

    def list_faults(self) -> Iterator[str]:
        """Yield what its cached experts cannot be."""
        is_divided = self.cached_experts is not None and self.decode.is_by_cores
        if self.host_share is not None and not is_divided:
            kept = "no" if self.cached_experts is None else str(self.cached_experts)
            yield (
                f"found host_share: {self.host_share:g} with decode: {self.decode.name} and {kept} "
                "cached_experts: it divides the experts that a step misses between the host's "
                "cores and the link, so write decode: host and cached_experts, or take it out"
            )
        if self.split_expert and not (
            self.host_share and self.host_share < 1 and (self.cached_experts or 0) > 1
        ):
            yield (
                f"found split_expert with host_share: {self.host_share} and cached_experts: "
                f"{self.cached_experts}: cores and link each multiply a part of an expert, and its "
                "part from the link takes the last slot, so write a host_share between 0 and 1 and "
                "cached_experts of 2 or more, or take split_expert out"
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
    def experts_key(self) -> str | None:
        """It is whole experts that are kept."""
        return "cached_experts" if self.cached_experts is not None else super().experts_key

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

    def describe(self) -> str:
        """Say how many experts it keeps, and who multiplies those that are missed."""
        if self.cached_experts is None:
            return super().describe()
        more = self.cached_experts_more
        told = f", and one more of the first {more} of them" if more else ""
        if share := self.share_of_cores:
            told += f"; the host's cores multiply {share:.0%} of those missed, "
            told += "the link brings the rest"
            told += "; one expert is split between them" * bool(self.split_expert)
        kept = f"; the {self.num_kept} experts of a layer used last are on the GPU, too{told}"
        return super().describe() + kept

    def describe_plainly(self) -> str:
        """Say how many experts it keeps to people who do not know the keys."""
        if self.cached_experts is None:
            return super().describe_plainly()
        number = f"{self.num_kept}" + f" or {self.num_kept + 1}" * bool(self.cached_experts_more)
        kept = f"; the {number} of a layer that were used last are on the GPU as well"
        return super().describe_plainly() + kept

    def list_unsaid(self) -> Iterator[str]:
        """Yield that it keeps experts."""
        yield from super().list_unsaid()
        if self.cached_experts is not None:
            yield f"keeps {self.cached_experts} experts of a layer on the GPU (cached_experts)"

    def why_not_store(self, store: Store) -> str | None:
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


def find_unread(model: Model, dtype: str, layers: Iterable[Layer]) -> str | None:
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
    if model.model_type in EXPERTS_IN_OUT:
        return "held by transposed values"
    if any(each.name.endswith("bias") for each in experts):
        return "with biases, held by their values"
    if any(size % EXPERT_MULTIPLE for each in by_value for size in each.shape[-2:]):
        return f"held by their values, of sizes that {EXPERT_MULTIPLE} does not divide"
    return None
