"""Segment classes: the groups of parameters that one rule may name."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offplan.checkpoint.parameter import Role, role_of
from offplan.held.stage import Stage
from offplan.held.unit import Unit
from offplan.segments import cover_names, list_runs, match_segments

_DENSE_ATOMS = tuple(
    frozenset({role}) for role in (Role.QKV, Role.ATTENTION_OUTPUT, Role.GATE_UP, Role.DOWN)
)
_MOE_ATOMS = (
    frozenset({Role.QKV, Role.ATTENTION_OUTPUT}),
    frozenset({Role.SHARED_EXPERTS, Role.GATE_UP, Role.DOWN}),
    frozenset({Role.EXPERTS_GATE_UP}),
    frozenset({Role.EXPERTS_DOWN}),
)
"""Beside routed experts the rest is small: attention and dense MLP are taken whole in unions."""

_LEAF_PARTS = frozenset(("weight", "bias"))
"""Last parts of names that say which tensor of a module it is: rules name the module."""


@dataclass(frozen=True)
class SegmentClass:
    """The weights that one rule's ``cpu_offload_params`` take."""

    segments: tuple[str, ...]
    """Empty takes everything."""

    def takes(self, unit: Unit) -> bool:
        """Return True if a rule of this class takes the unit in a layer that it selects."""
        return all(match_segments(self.segments, parameter.name) for parameter in unit.parameters)


def segment_classes(stage: Stage) -> tuple[SegmentClass, ...]:
    """List the classes that the search goes over, each with the shortest names that mean it.

    They are everything, each role that engines fuse, and all unions of attention inputs, attention
    output, MLP inputs and MLP output. With routed experts the unions are of attention, the MLPs
    that are not routed, and the experts' inputs and outputs. A class may take norms and routers
    along where that makes its names shorter; classes that would take the same are listed once.
    """
    roles = {p.name: role_of(p) for layer in stage.layers for p in layer.parameters}
    return _list_classes(tuple(roles.items()), has_experts=stage.experts is not None)


def expert_class(stage: Stage) -> SegmentClass:
    """Return the class of the routed experts alone, by the shortest names that mean it."""
    names = {p.name: p.is_expert for layer in stage.layers for p in layer.parameters}
    wanted = {name for name, is_expert in names.items() if is_expert}
    runs = {run for name in wanted for run in _runs(name)}
    return SegmentClass(tuple(cover_names(wanted, names.keys() - wanted, runs) or ()))


@cache
def _list_classes(
    named: tuple[tuple[str, Role], ...], *, has_experts: bool
) -> tuple[SegmentClass, ...]:
    roles = dict(named)
    optional = {name for name, role in named if role is Role.OTHER}
    classes: dict[frozenset[str], SegmentClass] = {frozenset(roles): SegmentClass(())}
    for union in _role_unions(has_experts):
        wanted = {name for name, role in named if role in union}
        runs = {run for name in wanted for run in _runs(name)}
        segments = tuple(cover_names(wanted, roles.keys() - wanted - optional, runs) or ())
        if segments:
            taken = frozenset(name for name in roles if match_segments(segments, name))
            classes.setdefault(taken, SegmentClass(segments))
    return tuple(classes.values())


def _role_unions(has_experts: bool) -> list[frozenset[Role]]:
    atoms = _MOE_ATOMS if has_experts else _DENSE_ATOMS
    unions = [
        frozenset().union(*chosen)
        for size in range(1, len(atoms) + 1)
        for chosen in combinations(atoms, size)
    ]
    return unions + [frozenset({role}) for role in Role if role is not Role.OTHER]


def _runs(name: str) -> Iterable[str]:
    """List dotted runs of a name's parts, the tensor's own last part left out."""
    owner, _, last = name.rpartition(".")
    return list_runs(owner if owner and last in _LEAF_PARTS else name)


class Patterns(NamedTuple):
    """Patterns over the layers of a model; a row each, the smallest groups first."""

    group_size: NDArray[np.int64]
    num_in_group: NDArray[np.int64]
    layers: NDArray[np.bool_]
    """True if the pattern selects a layer, [patterns, layers]."""


class PatternGroup(NamedTuple):
    """Patterns that take as many layers of each kind: they cost the same memory."""

    counts: tuple[int, ...]
    """Layers of each kind."""
    patterns: tuple[int, ...]
    """The patterns by number; the first has the smallest groups, so it spreads most evenly."""


@cache
def list_patterns(num_layers: int) -> Patterns:
    """List the patterns: of every ``group_size`` layers the last ``num_in_group``.

    A group larger than the model selects a tail that a group of the model's size selects as well.
    """
    pairs = [(size, n) for size in range(1, num_layers + 1) for n in range(1, size + 1)]
    sizes, numbers = np.array(pairs, dtype=np.int64).T
    remainders = np.arange(num_layers) % sizes[:, None]
    return Patterns(sizes, numbers, remainders >= (sizes - numbers)[:, None])


@cache
def group_patterns(kind_of: tuple[int, ...], kinds: frozenset[int]) -> tuple[PatternGroup, ...]:
    """Group the patterns that differ in the layers they select among those of some ``kinds``.

    ``kind_of`` is the kind of each layer, by number. Of patterns that select the same such layers
    only the first counts; those that select none are left out.
    """
    of_kind = np.array(kind_of)[:, None] == np.arange(max(kind_of) + 1)
    of_kind[:, [kind for kind in range(of_kind.shape[1]) if kind not in kinds]] = False
    selected = list_patterns(len(kind_of)).layers & of_kind.any(axis=1)
    counts = (selected.astype(np.int64) @ of_kind).tolist()
    firsts = np.unique(np.packbits(selected, axis=1), axis=0, return_index=True)[1]
    groups: dict[tuple[int, ...], list[int]] = {}
    for number in sorted(firsts.tolist()):
        if any(counts[number]):
            groups.setdefault(tuple(counts[number]), []).append(number)
    return tuple(PatternGroup(counts, tuple(numbers)) for counts, numbers in groups.items())
