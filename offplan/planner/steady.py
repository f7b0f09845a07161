"""The timeline of one request in whole numbers alone: what the search prices candidates with.

It gives exactly what ``costs.timeline`` gives for the schedule of the same candidate, without
building placement or schedule; the plan that is chosen is priced by its schedule again.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from offplan.costs.timeline import largest_cycle_mean, slow_down

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
    prompt: Sequence[LayerPass],
    step: Sequence[LayerPass],
    num_slots: int,
    outside_ps: int,
    slowdown: float,
) -> int:
    """Time of a prompt that finds the ring as decode left it after an earlier, equal prompt.

    ``slowdown`` is ``PassTimes.uva_slowdown``, here and below.
    """
    users = [layer for layer, each in enumerate(prompt) if each[2]]
    ring = min(num_slots, len(users))
    following = [layer for layer, each in enumerate(step) if each[2]][:num_slots]

    def stays(user: int, slot: int) -> bool:
        """Whether this layer's span in the prompt is what a step begins with in the slot."""
        held = following[slot]
        return held == user and step[held].span_bytes == prompt[held].span_bytes

    link = 0
    done: list[float] = [0] * ring
    for slot in range(ring):
        # decode leaves what its next step begins with, elsewhere lies what prefill itself left
        ready = stays(users[slot], slot) if slot < len(following) else slot + ring >= len(users)
        if not ready:
            link += prompt[users[slot]].copy_ps
            done[slot] = link
    refills: list[int | None] = [prompt[layer].copy_ps for layer in users[ring:]]
    for turn in range(len(users) - ring, len(users)):  # for the step after it
        slot = turn % ring
        copied = slot < len(following) and not stays(users[turn], slot)
        refills.append(step[following[slot]].copy_ps if copied else None)
    compute, *_ = _run_pass(prompt, refills, slowdown, [0, link, *done], drains=True)
    return int(compute) + outside_ps


def decode_ps(
    step: Sequence[LayerPass], num_slots: int, outside_ps: int, slowdown: float
) -> Fraction:
    """Time of a decode step in steady state: the largest cycle mean of the step's map.

    Steps are run until one delays every moment by the same time, which then is that mean (Collatz
    and Wielandt: it lies between the least and the largest delay); if none does, Karp's formula
    gives it.
    """
    users = [layer for layer, each in enumerate(step) if each[2]]
    ring = min(num_slots, len(users))
    if len(users) <= ring:  # every layer owns its slot: nothing is copied
        return Fraction(sum(each.uva_ps + each.compute_ps for each in step) + outside_ps)
    refills: list[int | None] = []
    for turn in range(len(users)):
        following = turn + ring if turn + ring < len(users) else turn % ring
        # else the layer owns its slot
        refills.append(step[users[following]].copy_ps if following != turn else None)

    def run(state: Sequence[float]) -> list[float]:
        compute, *others = _run_pass(step, refills, slowdown, state)
        return [compute + outside_ps, *others]

    size = 2 + ring
    before: list[float] = [0] * size
    for _ in range(size):
        after = run(before)
        delays = {late - early for early, late in zip(before, after, strict=True)}
        if len(delays) == 1:
            return Fraction(int(delays.pop()))
        before = after
    origins = ([0 if i == origin else _NEVER for i in range(size)] for origin in range(size))
    return largest_cycle_mean([run(state) for state in origins])


def _run_pass(
    layers: Sequence[LayerPass],
    refills: Sequence[int | None],
    slowdown: float,
    state: Sequence[float],
    *,
    drains: bool = False,
) -> list[float]:
    """Advance ``state``: when compute, the link and the fill of each slot are done.

    With ``drains``, kernels that read are slower only until nothing is left to be copied.
    ``refills`` are the copies that follow each layer that streams, into its slot; None for none.
    """
    compute, link, *done = state
    turn = slot = 0
    for compute_ps, uva_ps, span_bytes, _ in layers:
        if span_bytes:
            slot = turn % len(done)
            if done[slot] > compute:
                compute = done[slot]
        if uva_ps:
            link = (link if link > compute else compute) + uva_ps
            done = [(time if time > compute else compute) + uva_ps for time in done]
            slowly = compute + slow_down(uva_ps, slowdown)
            compute = link if drains and link < slowly else slowly
        compute += compute_ps
        if span_bytes:
            copy_ps = refills[turn]
            if copy_ps is not None:
                link = done[slot] = (link if link > compute else compute) + copy_ps
            turn += 1
    return [compute, link, *done]
