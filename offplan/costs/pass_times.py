"""The times of each operation of a pass on a machine."""

from collections import Counter
from dataclasses import replace
from functools import partial

from offplan.backends import Backend
from offplan.costs.calls import count_calls
from offplan.costs.capabilities import CACHED_TIMES, PIECE_TIMES
from offplan.costs.in_place_costs import AtUse, read_ps
from offplan.costs.link import copy_ps, rows_bytes, uva_slowdown
from offplan.costs.pass_compute import PassCompute
from offplan.costs.timeline import PassTimes, to_ps
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase, Placement
from offplan.schedule import read_at_use


def pass_times(
    placement: Placement, stage: Stage, machine: MachineProfile, priced: PassCompute
) -> PassTimes:
    """Find what each operation of a pass takes."""
    shapes, phase = priced.shapes, priced.shapes[0].phase
    is_step, copies = phase is Phase.DECODE, bool(placement.spans(Phase.DECODE))
    calls, tokens = count_calls(stage, phase), shapes[0].tokens if is_step else 1
    at_use = AtUse(stage, machine, shapes[0].batch, tokens)
    read: list[Counter[Backend]] = [Counter() for _ in calls]
    keeping, waiting, missing, working = ([0] * len(calls) for _ in range(4))
    later_bytes = 0
    uses, at_uses = [], read_at_use(placement, phase)
    for layer, entries in at_uses.items():
        served = [(e.unit, e.backend(phase)) for e in entries if not (is_step and e.is_cached)]
        read[layer] = at_use.read_bytes(served, priced)
        if is_step:
            uses.append(at_use.cores(served))
            waiting[layer] = to_ps(uses[-1].seconds(machine, beside=copies))
            working[layer] = to_ps(uses[-1].busy_s(machine, beside=copies))
    for list_cached in CACHED_TIMES:
        for layer, cached in list_cached(placement, at_uses, at_use, priced):
            keeping[layer], missing[layer] = cached.keeping_ps, cached.missed_ps
            read[layer] += cached.read
            if cached.cores:
                uses.append(cached.cores)
                working[layer] += to_ps(cached.cores.busy_s(machine, beside=copies))
            later_bytes += cached.later_bytes
    # rows of tables are read just before the first layer or in it, and count as its reading
    rows = rows_bytes(placement.host_tables, shapes)
    uva_ps, read_by = [0] * len(calls), Counter({Backend.UVA: rows})
    uva_ps[0] = read_ps(Backend.UVA, machine, rows)
    for layer, count in enumerate(calls):
        for backend, num_bytes in read[layer].items():
            uva_ps[layer] += read_ps(backend, machine, count * num_bytes)
            read_by[backend] += count * num_bytes
    times = PassTimes(
        compute_ps=priced.layer_ps,
        outside_ps=priced.outside_ps,
        uva_ps=tuple(uva_ps),
        uva_slowdown=uva_slowdown(machine),
        uva_bytes=read_by.total(),
        copy_ps=partial(copy_ps, machine),
        read_by=read_by,
        cores_ps=tuple(waiting),
        cores_busy_ps=tuple(working) if any(working) else (),
        cores_bytes=sum(use.num_bytes for use in uses),
        cores_products=sum(use.num_products for use in uses),
        missed_ps=tuple(missing) if any(missing) else (),
        num_calls=count_calls(stage, phase, len(shapes)),
        pieces={n: of for find in PIECE_TIMES for n, of in find(placement, priced).items()},
        keeping_ps=tuple(keeping),
        later_bytes=later_bytes,
        later_ps=to_ps(later_bytes / machine.h2d.value),
    )
    return add_drafting_times(times, machine, priced)


def add_drafting_times(times: PassTimes, machine: MachineProfile, priced: PassCompute) -> PassTimes:
    """Return the times of a pass with those of the prediction layers behind it.

    What they read in place counts as the first layer's reading, which follows them.
    """
    num_bytes = priced.drafting_bytes
    times = replace(times, outside_ps=priced.behind_ps) if priced.drafting_ps else times
    if not num_bytes:
        return times
    first, *others = times.uva_ps
    return replace(
        times,
        uva_ps=(first + read_ps(Backend.UVA, machine, num_bytes), *others),
        uva_bytes=times.uva_bytes + num_bytes,
        read_by=Counter(times.read_by) + Counter({Backend.UVA: num_bytes}),
    )
