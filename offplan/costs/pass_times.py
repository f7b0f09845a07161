"""What each operation of a pass takes on a machine."""

from collections import Counter

from offplan.backends import Backend
from offplan.costs.calls import count_calls
from offplan.costs.compute import PassCompute
from offplan.costs.cores import CoresUse, add_uses, cores_by_layer
from offplan.costs.kept_experts import keeping_by_layer
from offplan.costs.link import embedding_bytes, read_bytes_by_layer, uva_slowdown
from offplan.costs.missed import missed_by_layer
from offplan.costs.parts import part_times, span_seconds
from offplan.costs.timeline import PassTimes, to_ps
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase, Placement, Span


def pass_times(
    placement: Placement, stage: Stage, machine: MachineProfile, priced: PassCompute
) -> PassTimes:
    """Find what each operation of a pass takes."""

    def copy_ps(span: Span) -> int:
        return to_ps(span_seconds(machine, span))

    shapes, num_layers = priced.shapes, len(stage.layers)
    calls = count_calls(stage, shapes[0].phase)
    reuse = stage.reuse(shapes[0].batch)
    once = read_bytes_by_layer(placement, machine, stage.experts, num_layers, shapes, reuse)
    read = [
        {backend: count * num_bytes for backend, num_bytes in layer.items()}
        for count, layer in zip(calls, once, strict=True)
    ]
    cores_ps: tuple[int, ...] = ()
    uses: list[CoresUse] = []
    if shapes[0].phase is Phase.DECODE:
        cores_ps, uses = cores_by_layer(
            placement, machine, stage.experts, num_layers, shapes[0].num_tokens, reuse
        )
    missed_ps, divided = missed_by_layer(placement, stage, machine, priced)
    cores_bytes, cores_products = add_uses([*uses, *divided])
    rows = embedding_bytes(placement.host_embedding, shapes)
    first_ps, *rest_ps = (
        sum(read_ps(backend, machine, num_bytes) for backend, num_bytes in layer.items())
        for layer in read
    )
    read_bytes = Counter({Backend.UVA: rows})
    for layer in read:
        read_bytes.update(layer)
    return PassTimes(
        compute_ps=priced.layer_ps,
        outside_ps=priced.outside_ps,
        # embedding rows are read just before the first layer, and count as its reading
        uva_ps=(first_ps + read_ps(Backend.UVA, machine, rows), *rest_ps),
        uva_slowdown=uva_slowdown(machine),
        uva_bytes=read_bytes.total(),
        copy_ps=copy_ps,
        read_by=read_bytes,
        cores_ps=cores_ps,
        cores_bytes=cores_bytes,
        cores_products=cores_products,
        missed_ps=missed_ps,
        num_calls=count_calls(stage, shapes[0].phase, len(shapes)),
        parts=part_times(placement, priced),
        keeping_ps=keeping_by_layer(placement, stage.experts, machine, num_layers, shapes),
    )


def read_ps(backend: Backend, machine: MachineProfile, num_bytes: int) -> int:
    """Picoseconds in which a backend has so many bytes cross."""
    return to_ps(num_bytes / backend.rate(machine).value)
