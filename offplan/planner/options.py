"""The options of the search: plain ones, and those that capabilities add to a table.

The search is about options and knows no number of any.
"""

from collections.abc import Callable, Iterable
from itertools import chain

from offplan.backends import Backend
from offplan.plan import Offload, Rule
from offplan.planner import cached_experts, parts
from offplan.planner.classes import segment_classes
from offplan.planner.option import Option, Steps, Ways
from offplan.planner.question import Question
from offplan.planner.space import Space
from offplan.stores import StoreName

OPTIONS: tuple[Callable[..., Iterable[Option]], ...] = (
    cached_experts.list_options,
    parts.list_options,
)
"""Given a space and the backends that a rule may have: a capability's options."""
STEPS: tuple[Callable[[Rule], Steps], ...] = (cached_experts.list_steps, parts.list_steps)
"""Given a rule: the steps of its own numbers, and the keys that each changes."""
SETTLED: tuple[Callable[[Question, Offload], Offload], ...] = (cached_experts.settle_later,)
"""Given a question and its decision: the decision with the numbers that follow from it."""


def backend_pairs(backends: Iterable[Backend], store: StoreName) -> Ways:
    """List the backends that a rule may have in prefill and in decode.

    Decode by the ring with a prompt that reads in place is not tried. A prompt never has fewer rows
    than a step. So reading never suits the prompt better if it is no faster than copying, as on
    every link measured so far.
    """
    known = [each for each in backends if store in each.stores]
    return [
        (prefill, decode)
        for prefill in known
        for decode in known
        if "prefill" in prefill.phases and "decode" in decode.phases
        if prefill.streams or not decode.streams
    ]


def list_options(space: Space) -> tuple[Option, ...]:
    """List what a rule may take and how, in their order, as store and engine allow.

    Classes whose parameters are all empty are left out: a rule of one frees nothing.
    """
    takes_one = space.question.runner.takes_one_rule
    ways = backend_pairs(space.question.backends, space.machine.store)
    ways = [way for way in ways if not takes_one or way[0] is way[1]]
    claimed = space.question.goal.claims_experts
    found: list[Option] = []
    for each in segment_classes(space.stage):
        units = [*chain(*space.taken(each))]
        if any(u.nbytes for u in units) and not (claimed and any(u.is_expert for u in units)):
            found += [Option(each, *way) for way in ways if space.suits(each, way[1])]
    for list_more in OPTIONS:
        found += list_more(space, ways)
    if space.near is not None:
        found = [option for option in found if option.segment_class in space.near.classes]
    return tuple(sorted(found, key=lambda option: option.order))
