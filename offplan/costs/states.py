"""Costs of states of linear attention in passes that check drafts.

Such a pass reads each state once, and writes none. Behind it the tokens that are taken are added to
the states of all layers together. Source: ``runtime.model.delta_rule``.
"""

from offplan.costs.kernels import LAUNCH_S
from offplan.costs.work import PassShape
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase

STATE_MOVES = 4
"""Times that the states cross GPU memory where tokens are added: read and written by their decay,
and by a product."""
OPERATORS = 10
"""Operators that add tokens to the states of all layers, four of them to convolutions' inputs."""


def adding_seconds(machine: MachineProfile, stage: Stage, shape: PassShape) -> float:
    """Seconds that a pass takes behind its layers for states to go on; 0 for other passes."""
    state_bytes = sum(layer.kv_cache.state_bytes for layer in stage.layers)
    if shape.phase is not Phase.DECODE or shape.tokens == 1 or not state_bytes:
        return 0.0
    moving = STATE_MOVES * shape.batch * state_bytes / machine.hbm.value
    return moving if machine.is_cpu else max(OPERATORS * LAUNCH_S, moving)
