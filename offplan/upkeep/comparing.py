"""The differences of two plans: what was asked, what was decided, what moves, what that costs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any

from offplan.checkpoint.model import Model
from offplan.errors import PlanError
from offplan.files import StrPath
from offplan.held.held import hold
from offplan.held.unit import Unit
from offplan.library.repricing import list_changes, price_decision
from offplan.placement import Placement, place
from offplan.plan import Offload, Plan, take_plan

_PROFILES = ("routing", "acceptance")
_ASKED = ("model", "workload", "budget", "goal", "machine", *_PROFILES)
"""Sections of a plan that say what was asked."""


@dataclass(frozen=True)
class Change:
    """A value that two plans write differently."""

    key: str
    """Its place in the file: ``budget.gpu_memory``."""
    before: str
    after: str


@dataclass(frozen=True)
class Move:
    """A parameter that lies elsewhere, or reaches the GPU in another way, in these layers."""

    parameter: str
    """Its name relative to the layer, or the names of those that the runtime fuses into one. Of an
    embedding it is the module's."""
    layers: tuple[int, ...]
    """Empty for an embedding."""
    num_bytes: int
    """Bytes in all of the layers."""
    before: str
    after: str
    """``GPU``, or the store with the backends of prefill and decode: ``host (prefetch, uva)``."""


@dataclass(frozen=True)
class Difference:
    """The changes from one plan to another."""

    before: Plan
    after: Plan
    asked: tuple[Change, ...]
    """Of the question: model, workload, budget, goal, machine."""
    decided: tuple[Change, ...]
    """Of the decision, a line for each rule."""
    moves: tuple[Move, ...] | None
    """It is None if nobody looked at that: the plans are of different models."""
    repriced: Mapping[str, Plan] = field(default_factory=dict)
    """By ``before`` and ``after``, the plans whose prediction is stale, as they are priced now."""
    stale: tuple[str, ...] = ()
    """A sentence about each plan whose prediction is not that of its decision and workload."""

    @property
    def is_empty(self) -> bool:
        """True if question, decision and prediction of both files are the same."""
        same = self.before.prediction == self.after.prediction
        return same and not (self.asked or self.decided)


def compare_plans(
    before: Plan | StrPath, after: Plan | StrPath, model: Model | None = None
) -> Difference:
    """Compare two plans by what their files say.

    Each is a plan or its file. ``model`` is the one that both are of, where moves and stale
    predictions are to be found. Raises PlanError for rules that do not fit it.
    """
    before, after = take_plan(before), take_plan(after)
    repriced: dict[str, Plan] = {}
    stale: list[str] = []
    for name, plan in (("before", before), ("after", after)):
        if model is None:
            break
        try:
            priced = price_decision(plan, model)
        except PlanError as error:
            stale.append(f'The prediction of "{name}" is stale: {error}.')
            continue
        if priced is not plan:
            repriced[name] = priced
            stale.append(
                f'The prediction of "{name}" is stale: the file was edited, or made by another '
                f"version. offplan priced it again: {'; '.join(list_changes(plan, priced))}."
            )
            if (excess := priced.describe_excess()) is not None:
                stale.append(f'"{name}" exceeds its budget: {excess}.')
    old, new = before.dump_with_units(), after.dump_with_units()
    for each in (old, new):  # what may be left out
        for key in _PROFILES:
            each[key] = each.get(key) or {"file": None, "fingerprint": None}
        each["goal"].setdefault("draft", "auto")
        each["offload"].setdefault("draft")
    asked = (_changes(old[key], new[key], f"{key}.") for key in _ASKED)
    return Difference(
        before,
        after,
        asked=tuple(chain.from_iterable(asked)),
        decided=tuple(_changes(old["offload"], new["offload"])),
        moves=None if model is None else tuple(_moves(model, before.offload, after.offload)),
        repriced=repriced,
        stale=tuple(stale),
    )


def _changes(
    before: Mapping[str, Any], after: Mapping[str, Any], path: str = ""
) -> Iterator[Change]:
    """Yield the values of two sections of the same keys that differ."""
    for key, old in before.items():
        new = after[key]
        if isinstance(old, list):
            pairs = enumerate(zip_longest(old, new), 1)
            rules = {f"{key} {number}": pair for number, pair in pairs if pair[0] != pair[1]}
            yield from (Change(name, *map(_write, pair)) for name, pair in rules.items())
        elif old != new:
            yield Change(path + key, _write(old), _write(new))


def _write(value: Any) -> str:
    """Write a value in a line: a rule as its keys and values, a digest by its beginning."""
    if isinstance(value, dict):
        return ", ".join(f"{k} {_write(v)}" for k, v in value.items() if v is not None)
    if isinstance(value, list):
        return "[" + ", ".join(map(_write, value)) + "]"
    text = "none" if value is None else str(value)
    return text[:12] if len(text) in (40, 64) and text.isalnum() else text


def _moves(model: Model, before: Offload, after: Offload) -> Iterator[Move]:
    """Yield what moves, in the order of the model's layers, equal moves of layers together."""
    old, new = (
        _places(place(hold(model, each.recoding), each), each.store) for each in (before, after)
    )
    groups: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
    for (layer, name), (num_bytes, _) in sorted((old | new).items()):
        pair = [places.get((layer, name), (0, "GPU"))[1] for places in (old, new)]
        if pair[0] != pair[1]:
            groups.setdefault((name, pair[0], pair[1]), []).append((layer, num_bytes))
    for (name, was, now), found in groups.items():
        layers = tuple(layer for layer, _ in found if layer >= 0)
        yield Move(name, layers, sum(size for _, size in found), was, now)


def _name(unit: Unit) -> str:
    return ", ".join(parameter.name.removesuffix(".weight") for parameter in unit.parameters)


def _places(placement: Placement, store: str) -> dict[tuple[int, str], tuple[int, str]]:
    """Return bytes and place of all that is not in GPU memory, by layer and name."""
    places: dict[tuple[int, str], tuple[int, str]] = {}
    for entry in placement.entries:
        key = entry.unit.layer, _name(entry.unit)
        # all parts of a parameter, its codes and its scales, have one name and one place
        num_bytes = places.get(key, (0,))[0] + entry.unit.nbytes
        ways = f"{entry.prefill.name}, {entry.decode.name}"
        if entry.is_cached:
            ways += placement.weight_caches[entry.unit.layer].describe()
        if entry.num_pieces > 1:
            ways += f", in {entry.num_pieces} parts"
            if (at_once := placement.chunks_at_once.get(entry.unit.layer)) is not None:
                ways += f" again for every {'chunk' if at_once == 1 else f'{at_once} chunks'}"
        places[key] = num_bytes, f"{store} ({ways})"
    for table in placement.host_tables:
        places[-1, table.name] = (table.nbytes, "host (by row)")
    return places
