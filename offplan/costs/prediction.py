"""Costs of prediction layers: drafts by a layer that is used once for each.

What passes leave behind the model's last norm waits until the token behind it is known, and the
layer reads all that waits at once. Each further draft is a use by one token. The model's own head
chooses each. The link's copies go on meanwhile. A prompt is read chunk by chunk, behind its pass.
Each use reads experts in place where the plan has them in host memory: those that its tokens touch.

Source: ``runtime.prediction.predictor``.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

from offplan.backends import Backend
from offplan.capabilities.drafts import PASS_TOKENS, Draft
from offplan.costs.compute import ModelCompute, outside_time
from offplan.costs.in_place_costs import AtUse
from offplan.costs.kernels import LAUNCH_S, LAUNCH_SLOWDOWN, head_seconds
from offplan.costs.pass_compute import PassCompute
from offplan.costs.timeline import to_ps
from offplan.costs.work import PassShape
from offplan.held.stage import Stage
from offplan.machine.profile import LAUNCHES, MachineProfile
from offplan.placement import Phase, Placement, place_prediction

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
    placed = place_prediction(stage, draft)
    if placed is None or draft is None:
        return priced
    layers, placement = placed
    first, layer, choosing_s = priced.shapes[0], _find_layer(layers, machine), 0.0
    uses: list[tuple[float, PassShape]] = [(1, shape) for shape in priced.shapes]
    if first.phase is Phase.DECODE and first.tokens == 1:
        uses = [(1 / MOST_WAITING, replace(first, tokens=MOST_WAITING))]
    elif first.phase is Phase.DECODE:
        one, num_drafts = replace(first, tokens=1), min(draft.tokens, first.tokens - 1)
        uses.append((num_drafts - 1, one))
        choosing = outside_time(machine, stage, one).seconds + DRAFT_OPERATORS * LAUNCH_S
        choosing_s = num_drafts * choosing
    seconds = sum(number * layer.seconds(shape) for number, shape in uses) + choosing_s
    read = sum(number * layer.read_bytes(placement, shape) for number, shape in uses)
    return replace(priced, drafting_ps=to_ps(seconds), drafting_bytes=round(read), measured=False)


def _find_layer(layers: Stage, machine: MachineProfile) -> "_Layer":
    """Return the pricer of a prediction layer; the last one is kept, which knows many uses."""
    known: _Layer | None = layers.memo.get(_Layer)
    if known is None or known.machine is not machine:
        known = layers.memo[_Layer] = _Layer(layers, machine)
    return known


@dataclass(frozen=True)
class _Layer:
    """Prices uses of a prediction layer, and remembers them."""

    stage: Stage
    machine: MachineProfile
    _seconds: dict[PassShape, float] = field(default_factory=dict)
    _read: dict[tuple[int, PassShape], int] = field(default_factory=dict)

    @cached_property
    def _compute(self) -> ModelCompute:
        return ModelCompute(self.stage, self.machine)

    def seconds(self, shape: PassShape) -> float:
        """Seconds of a use by these tokens with everything resident, projection included."""
        if shape not in self._seconds:
            self._seconds[shape] = self._find_seconds(shape)
        return self._seconds[shape]

    def _find_seconds(self, shape: PassShape) -> float:
        machine, num_rows = self.machine, shape.num_tokens
        seconds = sum(self._compute.price(shape).layer_ps) / to_ps(1.0)
        for each in self.stage.outside:
            if len(each.shape) > 1:
                num_bytes = each.nbytes + num_rows * sum(each.shape) * self.stage.element_bytes
                seconds += head_seconds(machine, num_bytes, each.num_weights, num_rows)
        small = machine.layer_overhead.value / LAUNCHES
        return seconds + JOINING_KERNELS * LAUNCH_SLOWDOWN * small

    def read_bytes(self, placement: Placement, shape: PassShape) -> int:
        """Bytes that a use by these tokens reads in place, re-reads included."""
        key = id(placement), shape  # placements live as long as the stage
        if key not in self._read:
            served = [(entry.unit, entry.backend(shape.phase)) for entry in placement.entries]
            use = PassCompute((shape,), (), 0, measured=False, routed_ps=())
            at_use = AtUse(self.stage, self.machine, shape.batch, shape.tokens)
            self._read[key] = at_use.read_bytes(served, use)[Backend.UVA]
        return self._read[key]
