"""What each operation of a pass takes on a machine."""

from offplan.costs.compute import PassCompute
from offplan.costs.link import embedding_bytes, uva_bytes_by_layer, uva_slowdown
from offplan.costs.timeline import PassTimes, to_ps
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import Placement, Span


def pass_times(
    placement: Placement, stage: Stage, machine: MachineProfile, priced: PassCompute
) -> PassTimes:
    """Find what each operation of a pass takes."""

    def copy_ps(span: Span) -> int:
        return to_ps(machine.copy_seconds(span.nbytes))

    num_layers = len(stage.layers)
    read = uva_bytes_by_layer(placement, machine, stage.experts, num_layers, priced.shapes)
    rows = embedding_bytes(placement.host_embedding, priced.shapes)
    first_ps, *rest_ps = (to_ps(num_bytes / machine.uva.value) for num_bytes in read)
    return PassTimes(
        compute_ps=priced.layer_ps,
        outside_ps=priced.outside_ps,
        # embedding rows are read just before the first layer, and count as its reading
        uva_ps=(first_ps + to_ps(rows / machine.uva.value), *rest_ps),
        uva_slowdown=uva_slowdown(machine),
        uva_bytes=sum(read) + rows,
        copy_ps=copy_ps,
    )
