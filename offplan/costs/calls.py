"""How often, and in which order, the passes of a stage call its layers."""

from collections import Counter

from offplan.held.stage import Stage
from offplan.placement import Phase
from offplan.schedule import Calls


def list_calls(stage: Stage, num_chunks: int = 1) -> Calls | None:
    """List the layers in the order in which passes call them; None for each once, in their order.

    Chunks of a prompt go through all layers one after another in transformers' own passes.
    """
    if stage.passes is None:
        return None
    counted = {phase: tuple(stage.passes.calls[phase.value]) for phase in Phase}
    called = {**counted, Phase.PREFILL: num_chunks * counted[Phase.PREFILL]}
    once = tuple(range(len(stage.layers)))
    return None if all(order == once for order in called.values()) else called


def count_calls(stage: Stage, phase: Phase, num_chunks: int = 1) -> tuple[int, ...]:
    """Count how often a pass of a phase calls each layer, in all chunks of a prompt."""
    calls = list_calls(stage, num_chunks)
    counted = Counter(range(len(stage.layers)) if calls is None else calls[phase])
    return tuple(counted[layer.index] for layer in stage.layers)
