"""Least times of one plan of several rules, by arithmetic on the layers that each of them takes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from offplan.costs.link import uva_slowdown
from offplan.costs.predict import PricedPass
from offplan.costs.timeline import PS_PER_S, to_ps
from offplan.plan import Backend
from offplan.planner.options import Taken, users_of
from offplan.planner.problem import Problem
from offplan.planner.slots import kept_ps
from offplan.planner.steady import LayerPass, prefill_ps
from offplan.planner.targets import Goal, Time

ROUNDING_PS = 4
"""Sums of rounded times may exceed the rounded time of the sum by less, slowed down or not."""


@dataclass(frozen=True)
class PassBounds:
    """Bounds the passes of plans of one problem."""

    problem: Problem
    _alone: dict[tuple[object, ...], int] = field(default_factory=dict)

    @cached_property
    def slack_ps(self) -> tuple[tuple[float, float], ...]:
        """What rounding may take off where rules read one layer: two bytes a rule and chunk."""
        byte_ps = self.slowdown * PS_PER_S / self.problem.machine.uva.value
        layers = len(self.problem.model.layers)
        return tuple(
            (
                layers * (3 * byte_ps * len(setting.prefill.shapes) + ROUNDING_PS),
                layers * (3 * byte_ps + ROUNDING_PS),
            )
            for setting in self.problem.settings
        )

    @cached_property
    def slowdown(self) -> float:
        """Of reading in place in a step that copies, as a multiple."""
        return uva_slowdown(self.problem.machine)

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
        self, rules: Sequence[Taken], num_slots: int, setting: int, goal: Goal, limit: Time
    ) -> tuple[float, float] | None:
        """Least times of prompt and decode step.

        None unless they are better than ``limit``, where all that streams has a slot of its own,
        and where the host cannot hold it.
        """
        prompt, step = [], []
        host_bytes = prompt_reads = step_reads = 0
        for rule in rules:
            in_prompt, in_step = rule.backends
            host_bytes += rule.totals.slab_bytes
            if in_prompt is Backend.PREFETCH:
                prompt.append(rule)
            else:
                prompt_reads += rule.totals.prefill_uva_ps[setting]
            if in_step is Backend.PREFETCH:
                step.append(rule)
            else:
                step_reads += rule.totals.decode_uva_ps
        chosen, slack_ps = self.problem.settings[setting], self.slack_ps[setting]
        if num_slots and users_of(prompt).bit_count() <= num_slots:
            return None
        if self.problem.host_lack(host_bytes, chosen) > 0:
            return None
        if not step:
            streamed = [(rule.pattern.layers, rule.costs) for rule in prompt]
            step_reads -= kept_ps(streamed, self.problem.kind_of, num_slots)
        # compute takes longer to read in a step that copies, the link does not
        streamed_ps, turns = self._step_ps(step, num_slots)
        slow_ps = (self.slowdown - 1) * step_reads if turns else 0.0
        step_ps = max(streamed_ps, self.problem.decode.resident_ps + slow_ps)
        decode_ps = chosen.row_ps[1] + step_reads + step_ps - slack_ps[1]
        fixed_ps = chosen.row_ps[0] + prompt_reads - slack_ps[0]
        if goal.value(fixed_ps + chosen.prefill.resident_ps, decode_ps) >= limit:
            return None
        prefill_ps = fixed_ps + self._prompt_ps(prompt, step, num_slots, setting)
        return None if goal.value(prefill_ps, decode_ps) >= limit else (prefill_ps, decode_ps)

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
        where = num_slots, chosen.prefill_chunk, is_warm
        key = (rule.segment_class.segments, rule.pattern.layers, *where)
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
        users, next_users = users_of(prompt), users_of(step)
        if not users:
            return priced.resident_ps
        before = self._before_ps[setting]
        first, last = (users & -users).bit_length() - 1, users.bit_length() - 1
        num_users = users.bit_count()
        copies = self._copies_ps(prompt, num_users)
        copies -= self._found_ps(prompt, step, users, next_users, num_slots)
        behind = before[-1] - before[last] + priced.outside_ps
        if num_slots == 1:
            return max(
                priced.resident_ps,
                copies + self._sum_up(priced.layer_ps, users) + behind - priced.layer_ps[last],
            )
        waits = 0
        if not self._is_found(prompt, step, first, next_users):
            kind = self.problem.kind_of[first]
            copied = sum(
                rule.costs[kind].copy_ps - self.start_ps
                for rule in prompt
                if rule.pattern.layers >> first & 1
            )
            waits = max(0, copied + self.start_ps - before[first])
        return max(priced.resident_ps + waits, copies + behind)

    def _found_ps(
        self,
        prompt: Sequence[Taken],
        step: Sequence[Taken],
        users: int,
        next_users: int,
        num_slots: int,
    ) -> int:
        """Copies of a prompt that it finds done: the first, where decode filled the ring with them.

        Where decode fills fewer slots, what prefill left in the others may be there still.
        """
        num_users, following = users.bit_count(), next_users.bit_count()
        if following < num_slots:
            owners = max(0, num_slots - max(following, num_users - num_slots))
            found_ps = owners * sum(rule.totals.slowest_copy_ps for rule in prompt)
            return found_ps + following * sum(rule.totals.slowest_copy_ps for rule in step)
        found_ps = 0
        for _ in range(num_slots):
            first = users & -users
            if first != next_users & -next_users:
                break
            kind = self.problem.kind_of[first.bit_length() - 1]
            for rule in step:
                if rule.pattern.layers & first:
                    found_ps += rule.costs[kind].copy_ps
            users ^= first
            next_users ^= first
        return found_ps

    @staticmethod
    def _is_found(prompt: Sequence[Taken], step: Sequence[Taken], layer: int, users: int) -> bool:
        """Whether decode may have left what a prompt streams of its first layer."""
        if not users >> layer & 1:
            return False
        return all(
            rule.backends[1] is Backend.PREFETCH
            for rule in prompt
            if rule.pattern.layers >> layer & 1
        )

    def _step_ps(self, step: Sequence[Taken], num_slots: int) -> tuple[int, bool]:
        """Least time of a decode step that reads nothing in place, and whether it copies."""
        priced, users = self.problem.decode, users_of(step)
        num_users = users.bit_count()
        if num_users <= num_slots:
            return priced.resident_ps, False
        copies = self._copies_ps(step, num_users)
        if num_users < 2 * num_slots:
            owners = 2 * num_slots - num_users
            copies -= owners * sum(rule.totals.slowest_copy_ps for rule in step)
        if num_slots == 1:
            copies += self._sum_up(priced.layer_ps, users)
        return max(priced.resident_ps, copies), True

    def _copies_ps(self, streamed: Sequence[Taken], num_users: int) -> int:
        """All copies; what several rules take of a layer is one."""
        copies, num_starts = 0, num_users
        for rule in streamed:
            copies += rule.totals.copy_ps
            num_starts -= rule.totals.num_layers
        return copies + num_starts * self.start_ps

    def _sum_up(self, layer_ps: Sequence[int], users: int) -> int:
        """Compute of these layers."""
        return sum(
            (users & layers).bit_count() * layer_ps[(layers & -layers).bit_length() - 1]
            for layers in self.problem.layers_of_kind
        )
