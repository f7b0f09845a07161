"""Least times of one plan of several rules, by arithmetic on the layers that each of them takes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from offplan.costs.predict import PricedPass
from offplan.costs.timeline import to_ps
from offplan.plan import Backend
from offplan.planner.patterns import Pattern
from offplan.planner.problem import KindCosts, Problem
from offplan.planner.space import Totals
from offplan.planner.steady import LayerPass, prefill_ps

Backends = tuple[Backend, Backend]

ROUNDING_PS = 2
"""Sums of rounded times may exceed the rounded time of the sum by less."""


class Taken(NamedTuple):
    """What one rule of a plan takes."""

    segment_class: int
    """By number."""
    costs: tuple[KindCosts, ...]
    """Of its class, by kind of layer."""
    totals: Totals
    pattern: Pattern
    backends: Backends


@dataclass(frozen=True)
class PassBounds:
    """Bounds the passes of plans of one problem."""

    problem: Problem
    _alone: dict[tuple[object, ...], int] = field(default_factory=dict)

    @cached_property
    def slack_ps(self) -> tuple[tuple[float, float], ...]:
        """What rounding may take off where rules read one layer: two bytes a rule and chunk."""
        byte_ps = 1e12 / self.problem.machine.uva.value
        layers = len(self.problem.model.layers)
        return tuple(
            (
                layers * (3 * byte_ps * len(setting.prefill.shapes) + ROUNDING_PS),
                layers * (3 * byte_ps + ROUNDING_PS),
            )
            for setting in self.problem.settings
        )

    @cached_property
    def start_ps(self) -> int:
        """Of a copy, beside its bytes; one of a slab may round to so much more."""
        return to_ps(self.problem.machine.copy_latency.value) + ROUNDING_PS

    @cached_property
    def _before_ps(self) -> tuple[tuple[int, ...], ...]:
        """For each setting, the prompt's compute before each layer, and that of all."""
        return tuple(
            tuple(accumulate(setting.prefill.layer_ps, initial=0))
            for setting in self.problem.settings
        )

    def least_ps(
        self, rules: Sequence[Taken], num_slots: int, setting: int
    ) -> tuple[float, float] | None:
        """Least times of prompt and decode step.

        None where all that streams has a slot of its own, or the host cannot hold it.
        """
        prompt, step = (
            [rule for rule in rules if rule.backends[phase] is Backend.PREFETCH] for phase in (0, 1)
        )
        if num_slots and _users(prompt).bit_count() <= num_slots:
            return None
        chosen, slack_ps = self.problem.settings[setting], self.slack_ps[setting]
        if self.problem.host_lack(sum(rule.totals.slab_bytes for rule in rules), chosen) > 0:
            return None
        prompt_reads = sum(
            rule.totals.prefill_uva_ps[setting] for rule in rules if rule.backends[0] is Backend.UVA
        )
        step_reads = 0
        for rule in rules:
            if rule.backends[1] is Backend.UVA:
                step_reads += rule.totals.decode_uva_ps
                if not step and rule.backends[0] is Backend.PREFETCH:
                    # as many layers as there are slots find their slab where prefill left it
                    step_reads -= num_slots * rule.totals.slowest_uva_ps
        prompt_ps = self._prompt_ps(prompt, step, num_slots, setting)
        step_ps = self._step_ps(step, num_slots)
        return (
            chosen.row_ps[0] + max(0, prompt_reads) + prompt_ps - slack_ps[0],
            chosen.row_ps[1] + max(0, step_reads) + step_ps - slack_ps[1],
        )

    def alone_ps(self, rule: Taken, num_slots: int, setting: int) -> float:
        """Least time of a prompt of plans with this rule: what it takes without the others.

        They delay it: slots that they use look less far ahead, and their copies queue before its
        own. None of its copies is spared but what decode streams as well, where its layers are too
        many for slots of their own.
        """
        if rule.backends[0] is Backend.UVA or rule.totals.num_layers < 2 * num_slots:
            return 0
        chosen = self.problem.settings[setting]
        is_warm = rule.backends[1] is Backend.PREFETCH
        key = (rule.segment_class, rule.pattern.layers, num_slots, chosen.prefill_chunk, is_warm)
        found = self._alone.get(key)
        if found is None:
            found = self._alone[key] = self._run_alone(rule, num_slots, chosen.prefill, is_warm)
        return found + chosen.row_ps[0] - self.slack_ps[setting][0]

    def _run_alone(self, rule: Taken, num_slots: int, priced: PricedPass, is_warm: bool) -> int:
        prompt = [
            LayerPass(layer_ps, 0, rule.costs[kind].slab_bytes, rule.costs[kind].copy_ps)
            if rule.pattern.layers >> layer & 1
            else LayerPass(layer_ps, 0, 0, 0)
            for layer, (layer_ps, kind) in enumerate(
                zip(priced.layer_ps, self.problem.kind_of, strict=True)
            )
        ]
        step = prompt if is_warm else []
        return prefill_ps(prompt, step, num_slots, priced.outside_ps, slowdown=1.0)

    def _prompt_ps(
        self, prompt: Sequence[Taken], step: Sequence[Taken], num_slots: int, setting: int
    ) -> int:
        """Least time of a prompt that reads nothing in place.

        Compute waits for the first copy, unless decode has left that; the layer that streams last
        waits for all copies, and those after it for that layer. With one slot, copies and the
        layers that stream take turns: none overlaps another.
        """
        priced = self.problem.settings[setting].prefill
        users, next_users = _users(prompt), _users(step)
        if not users:
            return priced.resident_ps
        before = self._before_ps[setting]
        first, last = (users & -users).bit_length() - 1, users.bit_length() - 1
        num_users, following = users.bit_count(), min(num_slots, next_users.bit_count())
        # of the slots decode fills the first; what prefill left in others may be there still
        owners = max(0, num_slots - max(following, num_users - num_slots))
        spared = owners * sum(rule.totals.slowest_copy_ps for rule in prompt)
        spared += following * sum(rule.totals.slowest_copy_ps for rule in step)
        copies = self._copies_ps(prompt, num_users) - spared
        behind = before[-1] - before[last] + priced.outside_ps
        if num_slots == 1:
            return max(
                priced.resident_ps,
                copies + self._sum_up(priced.layer_ps, users) + behind - priced.layer_ps[last],
            )
        waits = 0
        in_first = [rule for rule in prompt if rule.pattern.layers >> first & 1]
        if not (following and next_users >> first & 1 and all(rule in step for rule in in_first)):
            kind = self.problem.kind_of[first]
            copied = sum(rule.costs[kind].copy_ps - self.start_ps for rule in in_first)
            waits = max(0, copied + self.start_ps - before[first])
        return max(priced.resident_ps + waits, copies + behind)

    def _step_ps(self, step: Sequence[Taken], num_slots: int) -> int:
        """Least time of a decode step that reads nothing in place."""
        priced, users = self.problem.decode, _users(step)
        num_users = users.bit_count()
        if num_users <= num_slots:
            return priced.resident_ps
        owners = max(0, 2 * num_slots - num_users)
        copies = self._copies_ps(step, num_users)
        copies -= owners * sum(rule.totals.slowest_copy_ps for rule in step)
        if num_slots == 1:
            copies += self._sum_up(priced.layer_ps, users)
        return max(priced.resident_ps, copies)

    def _copies_ps(self, streamed: Sequence[Taken], num_users: int) -> int:
        """All copies; what several rules take of a layer is one."""
        bytes_ps = sum(
            rule.totals.copy_ps - rule.totals.num_layers * self.start_ps for rule in streamed
        )
        return bytes_ps + num_users * self.start_ps

    def _sum_up(self, layer_ps: Sequence[int], users: int) -> int:
        """Compute of these layers."""
        return sum(
            (users & layers).bit_count() * layer_ps[(layers & -layers).bit_length() - 1]
            for layers in self.problem.layers_of_kind
        )


def _users(streamed: Sequence[Taken]) -> int:
    """Layers of which these rules take something, as bits."""
    users = 0
    for rule in streamed:
        users |= rule.pattern.layers
    return users
