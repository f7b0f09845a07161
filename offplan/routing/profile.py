"""A routing profile: the reuse of experts that a run recorded, as a file."""

import hashlib
import json
import reprlib
from collections.abc import Iterator, Sequence
from functools import cached_property, reduce
from itertools import accumulate
from operator import add
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from offplan.capabilities.drafts import PASS_TOKENS
from offplan.capabilities.way import OWN, Way
from offplan.checkpoint.model import Model
from offplan.errors import InputError
from offplan.files import StrPath
from offplan.plan import ModelRef
from offplan.records import Record, read_text
from offplan.routing.use_order import AGES, Reuse, Steps, join_steps, measure_reuse, num_bands

ROUTING_VERSION: Literal[2] = 2
"""Version of the format that is written; the one before, which is read too, has no passes."""
MOST_FILE_BYTES = 64 * 2**20
MOST_COUNTED = 2**53
"""No count is larger: JSON's readers keep whole numbers exact up to here."""

Count = Annotated[int, Field(ge=0, le=MOST_COUNTED)]


class LayerReuse(Record):
    """The reuse of one layer's experts: how soon they were chosen again."""

    layer: Annotated[int, Field(ge=0)]
    """Index of the layer."""
    distances: tuple[Count, ...]
    """Choices of an expert that lay behind so many others in the order of use, nearest first."""
    first_uses: Count
    """Choices of an expert that had not been used before."""

    @property
    def choices(self) -> int:
        """Distinct experts that all steps chose, summed up."""
        return sum(self.distances) + self.first_uses

    def why_impossible(self, steps: int, most: int) -> str | None:
        """Say why no ``steps``, each of ``most`` distinct experts at most, count so; else None.

        A step chooses what lies at one place of the order of use once at most. So many experts as
        lie before a place, and the one at it, were used for the first time before.
        """
        if not steps <= self.choices <= steps * most:
            return (
                f"chose {self.choices} experts in {steps} steps, expected {steps} to "
                f"{steps * most}: a step chooses {most} distinct ones at most"
            )
        if (largest := max(self.distances)) > steps:
            return (
                f"chose one place of the order of use {largest} times in {steps} steps, expected "
                "once a step at most"
            )
        reached = max((place for place, count in enumerate(self.distances) if count), default=-1)
        if self.first_uses <= reached:
            return (
                f"chose an expert behind {reached} others, and {self.first_uses} first uses were "
                f"counted: expected {reached + 1} or more"
            )
        return None


class BatchReuse(Record):
    """The reuse in batches of one size, or in passes of several tokens of one text."""

    batch: Annotated[int, Field(gt=0)]
    """Sequences of a batch."""
    tokens: Annotated[int, Field(gt=0)] = 1
    """Consecutive tokens of each sequence that a step passes."""
    steps: Annotated[int, Field(gt=0)]
    """Steps that were recorded, over all groups of so many sequences."""
    layers: tuple[LayerReuse, ...]
    again: tuple[tuple[tuple[Count, Count], ...], ...] | None = None
    """Experts by the band of their place in the order of use, and of their age: how many were
    chosen, and how many lay there, over all steps and layers. An age is low where an expert was
    often chosen soon again. Null in profiles that do not tell: all ages are then chosen alike."""

    @model_validator(mode="after")
    def _has_bands(self) -> "BatchReuse":
        if self.again is None:
            return self
        if any(len(each) != AGES for each in self.again):
            raise ValueError(f"again: expected {AGES} pairs in each row")
        if any(chosen > there for row in self.again for chosen, there in row):
            raise ValueError("again: more experts were chosen than lay there")
        return self

    @property
    def name(self) -> str:
        """Its steps, in words."""
        return f"passes of {self.tokens} tokens" if self.tokens > 1 else f"batch {self.batch}"

    @property
    def touched(self) -> float:
        """Distinct experts of a layer that a step chooses, on average."""
        return self._choices / self.steps / len(self.layers)

    def hit_rate(self, num_kept: float) -> float:
        """Share of the choices that a cache of ``num_kept`` experts a layer would have served.

        Between whole numbers it is interpolated; more than all experts serve no more than all.
        """
        whole = int(min(num_kept, len(self._hits) - 1))
        hits: float = self._hits[whole]
        if whole < min(num_kept, len(self._hits) - 1):
            hits += (num_kept - whole) * (self._hits[whole + 1] - hits)
        return hits / self._choices

    def least_missed(self, num_kept: float) -> float:
        """Experts that a step misses over all layers, at least, if so many are kept in all.

        The best sizes take the places of the order of use that served most, of whichever layer. A
        cache of all experts of a layer misses none of them at its first use.
        """
        served = sorted(
            (
                count + layer.first_uses / len(layer.distances)
                for layer in self.layers
                for count in layer.distances
            ),
            reverse=True,
        )
        whole = int(min(num_kept, len(served)))
        hits = sum(served[:whole])
        if whole < len(served):
            hits += (num_kept - whole) * served[whole]
        return max(0.0, self._choices - hits) / self.steps

    @cached_property
    def _hits(self) -> tuple[int, ...]:
        """Choices that a cache of none, of one, of two ... experts a layer would have served."""
        in_all = (sum(each) for each in zip(*(one.distances for one in self.layers), strict=True))
        return tuple(accumulate(in_all, initial=0))

    @cached_property
    def _choices(self) -> int:
        return sum(layer.choices for layer in self.layers)


class RoutingProfile(Record):
    """The experts that a model's tokens chose, summed up; it holds nothing of the texts."""

    offplan_routing: Literal[1, 2] = ROUTING_VERSION
    """Version of the format."""
    model: ModelRef
    """The model that chose."""
    num_experts: Annotated[int, Field(gt=0)]
    """Routed experts of a layer."""
    num_experts_per_token: Annotated[int, Field(gt=0)]
    tokens: Annotated[int, Field(gt=0)]
    """Tokens whose choices were recorded."""
    batches: Annotated[tuple[BatchReuse, ...], Field(min_length=1)]
    """The reuse by size of batch, the smallest first."""
    passes: tuple[BatchReuse, ...] = ()
    """The reuse of one text in passes of several tokens, the fewest first; in format 1 none. Each
    pass begins behind the one before, as where all drafts are taken: where some are rejected,
    passes overlap, and find more of their experts."""

    @model_validator(mode="after")
    def _is_whole(self) -> "RoutingProfile":
        sizes = [each.batch for each in self.batches]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"batches {sizes} are not in ascending order")
        passes = [(each.batch, each.tokens) for each in self.passes]
        if passes != sorted(set(passes)) or any(of[0] != 1 or of[1] < 2 for of in passes):
            raise ValueError("passes: expected batch 1 and 2 tokens or more, in ascending order")
        if any(each.tokens != 1 for each in self.batches):
            raise ValueError("batches: found tokens, which passes alone have")
        if passes and self.offplan_routing == 1:
            raise ValueError("passes: a profile of version 1 has none")
        layers = [layer.layer for layer in self.batches[0].layers]
        if not layers or layers != sorted(set(layers)):
            raise ValueError(f"layers {layers} are not in ascending order")
        for each in self.every:
            if [layer.layer for layer in each.layers] != layers:
                raise ValueError(f"{each.name} has other layers than batch {sizes[0]}")
            if each.again is not None and len(each.again) != num_bands(self.num_experts):
                raise ValueError(
                    f"{each.name} has {len(each.again)} bands of places; expected "
                    f"{num_bands(self.num_experts)}, one for each doubling of {self.num_experts}"
                )
            for layer in each.layers:
                if len(layer.distances) != self.num_experts:
                    raise ValueError(
                        f"layer {layer.layer} has {len(layer.distances)} distances; expected "
                        f"{self.num_experts}, one for each expert"
                    )
        return self

    @model_validator(mode="after")
    def _is_possible(self) -> "RoutingProfile":
        """Refuse counts that no run gives: such a profile would promise what nothing keeps."""
        chosen = self.num_experts_per_token
        if chosen > self.num_experts:
            raise ValueError(f"a token chooses {chosen} of {self.num_experts} experts")
        for each in self.every:
            of_step = each.batch * each.tokens
            if of_step * each.steps > self.tokens:
                raise ValueError(
                    f"{each.name} has {each.steps} steps of {of_step} tokens, and {self.tokens} "
                    "tokens were recorded in all"
                )
            most = min(self.num_experts, of_step * chosen)
            for layer in each.layers:
                if (why := layer.why_impossible(each.steps, most)) is not None:
                    raise ValueError(f"layer {layer.layer} of {each.name} {why}: record it again")
        return self

    @property
    def every(self) -> tuple[BatchReuse, ...]:
        """The reuse of all batches and passes."""
        return (*self.batches, *self.passes)

    def find(self, batch: int, tokens: int) -> BatchReuse | None:
        """Return the reuse in steps of so many sequences and tokens of each; None for others."""
        wanted = batch, tokens
        return next((each for each in self.every if (each.batch, each.tokens) == wanted), None)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that the profile says."""
        return hashlib.sha256(dump_routing(self).encode()).hexdigest()

    def of_batch(self, batch: int) -> BatchReuse:
        """Return the reuse of one size; raises InputError, with those recorded, for another."""
        for each in self.batches:
            if each.batch == batch:
                return each
        sizes = ", ".join(str(each.batch) for each in self.batches)
        raise InputError(
            f"the routing profile has batches of {sizes} and none of {batch}: choose one of them, "
            f"or record a run of at least {batch} sequences with `record_routing`"
        )


def require_routing(model: Model, argument: str = "record_routing", way: Way = OWN) -> None:
    """Raise InputError, which names an argument, for a model without routed experts.

    Raise it too where other passes than offplan's own run the model.
    """
    if not way.is_own:
        raise InputError(
            f"`{argument}` is about offplan's own passes, and {way.whose} run this model: "
            "leave it out"
        )
    if model.experts is None:
        raise InputError(
            f"{model.source} has no routed experts, which `{argument}` is about: leave it out"
        )


def check_routing(profile: RoutingProfile, model: Model, name: str) -> None:
    """Raise InputError, which says ``name``, for a profile that is not of a model."""
    require_routing(model, "routing")
    experts = model.experts
    assert experts is not None
    again = "record a run of this model with `record_routing`, or leave `routing` out"
    profile.model.require(model, name, again)
    found = {each.layer for each in profile.batches[0].layers}
    known = {layer.index for layer in model.layers if layer.expert_bytes}
    if found != known:
        wrong, told = sorted(found - known), "has"
        if not wrong:
            wrong, told = sorted(known - found), "lacks"
        raise InputError(
            f"{name} {told} layer {wrong[0]}: it is of {len(found)} layers, and {model.source} "
            f"has routed experts in {len(known)}: {again}"
        )
    sizes = profile.num_experts, profile.num_experts_per_token
    if sizes != (experts.num_experts, experts.num_experts_per_token):
        raise InputError(
            f"{name} is of {sizes[0]} experts a layer and {sizes[1]} a token; {model.source} has "
            f"{experts.num_experts} and {experts.num_experts_per_token}: {again}"
        )
    if model.architecture.routing.has_idle:
        return  # tokens may choose experts that there are not
    for each in profile.every:
        for layer in each.layers:
            if layer.choices < each.steps * sizes[1]:
                raise InputError(
                    f"{name} has {layer.choices} choices of layer {layer.layer} in {each.steps} "
                    f"steps of {each.name}; a token chooses {sizes[1]} experts, so at least "
                    f"{each.steps * sizes[1]} are expected: {again}"
                )


def make_routing(
    model: ModelRef, layers: Sequence[int], runs: Sequence[Steps], num_experts: int
) -> RoutingProfile:
    """Sum up recorded choices for batches of 1, 2, 4 ... sequences, up to the largest recorded.

    Passes of PASS_TOKENS tokens of one text are summed up, too, where a run has as many steps.
    ``layers`` are the indices of the layers, ``runs`` steps of equal batches each. Raises
    InputError where no step was recorded.
    """
    if not runs:
        raise InputError("no decode step was run, so no routing was recorded: raise `num_tokens`")
    most = max(run.shape[2] for run in runs)
    sizes = sorted({most, *(2**power for power in range(most.bit_length()))})
    batches = []
    for batch in sizes:
        each = [measure_reuse(run, num_experts, batch) for run in runs if run.shape[2] >= batch]
        batches.append(_of_batch(batch, 1, layers, reduce(add, each)))
    passes = []
    for tokens in PASS_TOKENS:
        in_passes = [join_steps(run, tokens) for run in runs if len(run) >= tokens]
        if in_passes:
            reuse = reduce(add, (measure_reuse(run, num_experts, 1) for run in in_passes))
            passes.append(_of_batch(1, tokens, layers, reuse))
    return RoutingProfile(
        model=model,
        num_experts=num_experts,
        num_experts_per_token=runs[0].shape[3],
        tokens=sum(run.shape[0] * run.shape[2] for run in runs),
        batches=tuple(batches),
        passes=tuple(passes),
    )


def _of_batch(batch: int, tokens: int, layers: Sequence[int], reuse: Reuse) -> BatchReuse:
    num_places = num_bands(reuse.distances.shape[1])
    return BatchReuse(
        batch=batch,
        tokens=tokens,
        steps=reuse.num_steps,
        again=tuple(tuple(map(tuple, row)) for row in reuse.again[:num_places].tolist()),
        layers=tuple(
            LayerReuse(layer=layer, distances=tuple(distances), first_uses=first)
            for layer, distances, first in zip(
                layers, reuse.distances.tolist(), reuse.first_uses.tolist(), strict=True
            )
        ),
    )


def dump_routing(profile: RoutingProfile) -> str:
    """Write a profile as JSON, a layer a line: ``load_routing`` reads it back."""
    data = profile.model_dump(mode="json")
    batches, passes = data.pop("batches"), data.pop("passes")
    lines = [json.dumps(data)[:-1] + ', "batches": [', *_dump_steps(batches)]
    if passes:
        lines += ['], "passes": [', *_dump_steps(passes)]
    return "\n".join([*lines, "]}"]) + "\n"


def _dump_steps(batches: Sequence[dict[str, Any]]) -> Iterator[str]:
    for number, batch in enumerate(batches):
        tokens = f' "tokens": {batch["tokens"]},' if batch["tokens"] > 1 else ""
        yield f'{{"batch": {batch["batch"]},{tokens} "steps": {batch["steps"]}, "layers": ['
        yield ",\n".join(json.dumps(layer, separators=(",", ":")) for layer in batch["layers"])
        again = "" if batch["again"] is None else f', "again": {json.dumps(batch["again"])}'
        yield f"]{again}}}" + "," * (number + 1 < len(batches))


def load_routing(path: StrPath) -> RoutingProfile:
    """Read a profile; raises InputError with each key that is wrong."""
    text = read_text(path, "routing profile", MOST_FILE_BYTES, InputError)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no routing profile, which is JSON: {error}") from None
    version = data.get("offplan_routing") if isinstance(data, dict) else None
    if version is not None and version not in (1, ROUTING_VERSION):
        raise InputError(
            f"{path} is a routing profile of version {reprlib.repr(version)}: offplan_routing is 1 "
            f"or {ROUTING_VERSION} in those that this offplan reads; record it again"
        )
    return RoutingProfile.check(data, str(path), "the routing profile", InputError)
