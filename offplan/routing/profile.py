"""A routing profile: the reuse of experts that a run recorded, as a file."""

import hashlib
import json
from collections.abc import Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from offplan.checkpoint.model import Model
from offplan.errors import InputError
from offplan.plan import ModelRef
from offplan.records import Record, read_text
from offplan.routing.use_order import Reuse, Steps, measure_reuse

MOST_FILE_BYTES = 64 * 2**20
MOST_COUNTED = 2**53
"""No count is larger: JSON's readers keep whole numbers exact up to here."""

Count = Annotated[int, Field(ge=0, le=MOST_COUNTED)]


class LayerReuse(Record):
    """How soon one layer's experts were chosen again."""

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


class BatchReuse(Record):
    """The reuse in batches of one size."""

    batch: Annotated[int, Field(gt=0)]
    """Sequences of a batch."""
    steps: Annotated[int, Field(gt=0)]
    """Steps that were recorded, over all groups of so many sequences."""
    layers: tuple[LayerReuse, ...]

    @property
    def touched(self) -> float:
        """Distinct experts of a layer that a step chooses, on average."""
        return self._choices / self.steps / len(self.layers)

    def hit_rate(self, num_kept: int) -> float:
        """Share of the choices that a cache of ``num_kept`` experts a layer would have served."""
        hits = sum(sum(layer.distances[:num_kept]) for layer in self.layers)
        return hits / self._choices

    @property
    def _choices(self) -> int:
        return sum(layer.choices for layer in self.layers)


class RoutingProfile(Record):
    """Which experts a model's tokens chose, summed up; it holds nothing of the texts."""

    offplan_routing: Literal[1] = 1
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

    @model_validator(mode="after")
    def _is_whole(self) -> "RoutingProfile":
        sizes = [each.batch for each in self.batches]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"batches {sizes} are not in ascending order")
        layers = [layer.layer for layer in self.batches[0].layers]
        if not layers or layers != sorted(set(layers)):
            raise ValueError(f"layers {layers} are not in ascending order")
        for each in self.batches:
            if [layer.layer for layer in each.layers] != layers:
                raise ValueError(f"batch {each.batch} has other layers than batch {sizes[0]}")
            for layer in each.layers:
                if len(layer.distances) != self.num_experts:
                    raise ValueError(
                        f"layer {layer.layer} has {len(layer.distances)} distances; expected "
                        f"{self.num_experts}, one for each expert"
                    )
                if not layer.choices:
                    raise ValueError(f"layer {layer.layer} of batch {each.batch} chose no expert")
        return self

    @property
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
            f"or record a run of at least {batch} sequences with --record-routing"
        )


def require_routing(model: Model, *, stock: bool = False) -> None:
    """Raise InputError for a model without routed experts, and where transformers' passes run."""
    if stock:
        raise InputError(
            "--record-routing watches offplan's own passes, and transformers' own run this model: "
            "leave that option out"
        )
    if model.experts is None:
        raise InputError(
            f"{model.source} has no routed experts, whose choices --record-routing records: leave "
            "that option out"
        )


def make_routing(
    model: ModelRef, layers: Sequence[int], runs: Sequence[Steps], num_experts: int
) -> RoutingProfile:
    """Sum up recorded choices for batches of 1, 2, 4 ... sequences, up to the largest recorded.

    ``layers`` are the indices of the layers, ``runs`` steps of equal batches each. Raises
    InputError where no step was recorded.
    """
    if not runs:
        raise InputError(
            "no decode step was run, so no routing was recorded: raise --max-new-tokens"
        )
    most = max(run.shape[2] for run in runs)
    sizes = sorted({most, *(2**power for power in range(most.bit_length()))})
    batches = []
    for batch in sizes:
        each = [measure_reuse(run, num_experts, batch) for run in runs if run.shape[2] >= batch]
        batches.append(_of_batch(batch, layers, reduce(add, each)))
    return RoutingProfile(
        model=model,
        num_experts=num_experts,
        num_experts_per_token=runs[0].shape[3],
        tokens=sum(run.shape[0] * run.shape[2] for run in runs),
        batches=tuple(batches),
    )


def _of_batch(batch: int, layers: Sequence[int], reuse: Reuse) -> BatchReuse:
    return BatchReuse(
        batch=batch,
        steps=reuse.num_steps,
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
    batches = data.pop("batches")
    lines = [json.dumps(data)[:-1] + ', "batches": [']
    for number, batch in enumerate(batches):
        layers = ",\n".join(json.dumps(layer, separators=(",", ":")) for layer in batch["layers"])
        head = f'{{"batch": {batch["batch"]}, "steps": {batch["steps"]}, "layers": ['
        lines += [head, layers, "]}" + "," * (number + 1 < len(batches))]
    return "\n".join([*lines, "]}"]) + "\n"


def load_routing(path: Path) -> RoutingProfile:
    """Read a profile; raises InputError with each key that is wrong."""
    text = read_text(path, "routing profile", MOST_FILE_BYTES, InputError)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no routing profile, which is JSON: {error}") from None
    return RoutingProfile.check(data, str(path), "the routing profile", InputError)
