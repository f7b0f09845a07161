"""Costs of prediction layers: drafts by a layer that lies whole on the GPU, used once for each.

What passes leave behind the model's last norm waits until the token behind it is known, and the
layer reads all that waits at once. Each further draft is a use by one token. The model's own head
chooses each. The link's copies go on meanwhile. A prompt is read chunk by chunk, behind its pass.

Source: ``runtime.prediction.predictor``.
"""

from dataclasses import replace

from offplan.capabilities.drafts import PASS_TOKENS, Draft
from offplan.costs.compute import ModelCompute, outside_time
from offplan.costs.kernels import LAUNCH_S, LAUNCH_SLOWDOWN, head_seconds
from offplan.costs.pass_compute import PassCompute
from offplan.costs.timeline import to_ps
from offplan.costs.work import PassShape
from offplan.held.held import hold_prediction
from offplan.held.stage import Stage
from offplan.machine.profile import LAUNCHES, MachineProfile
from offplan.placement import Phase

JOINING_KERNELS = 6
"""Small captured kernels around a layer's block: rows of the embedding, three norms, a
concatenation. Source: ``runtime.prediction.skeleton.JoinedInput``, read."""
DRAFT_OPERATORS = 4
"""Uncaptured operators of each draft: the head, its greatest logit, and copies of tokens. Source:
``runtime.prediction.predictor.Predictor.propose``, read."""
MOST_WAITING = PASS_TOKENS[-1]
"""Tokens that wait for the layer at most, where steps check no drafts. Source: as above."""


def add_drafting(
    stage: Stage, machine: MachineProfile, priced: PassCompute, draft: Draft | None
) -> PassCompute:
    """Return a prompt or a pass of decode with what prediction layers take behind it."""
    layers = hold_prediction(stage, draft)
    if layers is None or draft is None:
        return priced
    first, use = priced.shapes[0], _LayerUse(layers, machine)
    if first.phase is Phase.PREFILL:
        seconds = sum(map(use.seconds, priced.shapes))
    elif first.tokens == 1:
        waiting = replace(first, tokens=MOST_WAITING)
        seconds = use.seconds(waiting) / MOST_WAITING
    else:
        one, num_drafts = replace(first, tokens=1), min(draft.tokens, first.tokens - 1)
        choosing = outside_time(machine, stage, one).seconds + DRAFT_OPERATORS * LAUNCH_S
        seconds = use.seconds(first) + (num_drafts - 1) * use.seconds(one) + num_drafts * choosing
    return replace(priced, drafting_ps=to_ps(seconds), measured=False)


class _LayerUse:
    """Prices uses of a prediction layer."""

    def __init__(self, layers: Stage, machine: MachineProfile) -> None:
        self._machine = machine
        known, compute = layers.memo.get(ModelCompute, (None, None))
        if known is not machine:  # summing up hundreds of experts takes a while
            compute = ModelCompute(layers, machine)
            layers.memo[ModelCompute] = machine, compute
        self._compute: ModelCompute = compute
        self._projections = [p for p in layers.outside if len(p.shape) > 1]

    def seconds(self, shape: PassShape) -> float:
        """Seconds of the layer for a pass of these tokens, projection included."""
        machine, num_rows = self._machine, shape.num_tokens
        seconds = sum(self._compute.price(shape).layer_ps) / to_ps(1.0)
        size = self._compute.stage.element_bytes
        for each in self._projections:
            num_bytes = each.nbytes + num_rows * sum(each.shape) * size
            seconds += head_seconds(machine, num_bytes, each.num_weights, num_rows)
        small = machine.layer_overhead.value / LAUNCHES
        return seconds + JOINING_KERNELS * LAUNCH_SLOWDOWN * small
