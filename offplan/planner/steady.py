"""The timeline of one request in whole numbers alone: what the search prices candidates with.

It gives exactly what ``costs.timeline`` gives for the schedule of the same candidate, without
building placement or schedule; the plan that is chosen is priced by its schedule again.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from offplan.costs.timeline import largest_cycle_mean

_NEVER = float("-inf")


class LayerPass(NamedTuple):
    """One layer in one phase; times in picoseconds."""

    compute_ps: int
    uva_ps: int
    """Reading weights in place, before it computes."""
    span_bytes: int
    """That it streams through the ring; 0 if it has no slot."""
    copy_ps: int


def prefill_ps(
    prompt: Sequence[LayerPass], step: Sequence[LayerPass], num_slots: int, outside_ps: int
) -> int:
    """Time of a prompt that finds the ring as decode left it after an earlier, equal prompt."""
    users = [layer for layer, each in enumerate(prompt) if each.span_bytes]
    ring = min(num_slots, len(users))
    following = [layer for layer, each in enumerate(step) if each.span_bytes][:num_slots]
    link = compute = 0
    done = [0] * ring
    for slot in range(ring):
        if slot < len(following):  # decode leaves what its next step begins with
            held = following[slot]
            ready = held == users[slot] and step[held].span_bytes == prompt[held].span_bytes
        else:  # or what prefill itself left
            ready = slot + ring >= len(users)
        if not ready:
            link += prompt[users[slot]].copy_ps
            done[slot] = link
    turn = 0
    for each in prompt:
        slot = -1
        if each.span_bytes:
            slot = turn % ring
            compute = max(compute, done[slot])
        if each.uva_ps:
            link = max(link, compute) + each.uva_ps
            done = [max(time, compute) + each.uva_ps for time in done]
        compute += each.uva_ps + each.compute_ps
        if slot >= 0:
            if turn + ring < len(users):
                link = max(link, compute) + prompt[users[turn + ring]].copy_ps
                done[slot] = link
            turn += 1
    return compute + outside_ps


def decode_ps(step: Sequence[LayerPass], num_slots: int, outside_ps: int) -> Fraction:
    """Time of a decode step in steady state: the largest cycle mean of the step's map."""
    users = [layer for layer, each in enumerate(step) if each.span_bytes]
    ring = min(num_slots, len(users))
    if len(users) <= ring:  # every layer owns its slot: nothing is copied
        return Fraction(sum(each.uva_ps + each.compute_ps for each in step) + outside_ps)
    columns = [_step_column(step, users, ring, outside_ps, origin) for origin in range(2 + ring)]
    return largest_cycle_mean(columns)


def _step_column(
    step: Sequence[LayerPass], users: Sequence[int], ring: int, outside_ps: int, origin: int
) -> list[float]:
    """What of compute, link and slots at the end of a step depends on one of them before it."""
    state: list[float] = [_NEVER] * (2 + ring)
    state[origin] = 0
    compute, link, *done = state
    turn = 0
    for each in step:
        slot = -1
        if each.span_bytes:
            slot = turn % ring
            compute = max(compute, done[slot])
        if each.uva_ps:
            link = max(link, compute) + each.uva_ps
            done = [max(time, compute) + each.uva_ps for time in done]
        compute += each.uva_ps + each.compute_ps
        if slot >= 0:
            following = turn + ring if turn + ring < len(users) else slot
            if following != turn:  # else the layer owns its slot
                link = max(link, compute) + step[users[following]].copy_ps
                done[slot] = link
            turn += 1
    return [compute + outside_ps, link, *done]
