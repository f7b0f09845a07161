"""What a plan takes in the other stages of a pipeline, whose flags are those of the largest one.

A pass goes through one stage after the other, so times add up. The patterns are those that differ
in the largest stage; in each other one they start anew.
"""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offplan.costs.predict import price_request
from offplan.errors import PlanError
from offplan.held.stage import Stage
from offplan.placement import place
from offplan.plan import Offload
from offplan.planner.aims import Floats
from offplan.planner.candidates import NO_RULE, Candidates, Ints
from offplan.planner.classes import list_patterns
from offplan.planner.option import Option
from offplan.planner.prices import Prices
from offplan.planner.space import Setting, Space


class OtherStages(NamedTuple):
    """What candidates take in all other stages; an entry for each candidate."""

    prompt_ps: Floats
    step_ps: Floats
    has_same_flags: NDArray[np.bool_]
    """True if each stage has as many slots, and something that the rule takes."""
    host_bytes: Ints
    """Bytes of slabs of one GPU of each."""


@dataclass(frozen=True, kw_only=True)
class StageSpace(Space):
    """The same plans in another stage: rules take what the options of the largest one name."""

    other: Stage
    largest: Space

    @cached_property
    def stage(self) -> Stage:
        """What a GPU of the stage holds."""
        return self.other

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunks of the largest stage."""
        return self.largest.chunks

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """Settings are those of the largest stage, with this stage's own embeddings, or none."""
        found = []
        for each in self.largest.settings:
            tables = self.stage.tables if each.embeddings == "host" else ()
            found.append(self.setting(each.prefill_chunk, tables))
        return tuple(found)


@dataclass
class StagePrices(Prices):
    """Prices candidates of the largest stage's space in another stage."""

    space: StageSpace

    @cached_property
    def _layers(self) -> Ints:
        """True if each pattern of the largest stage selects each layer of this one."""
        patterns = list_patterns(len(self.space.largest.kind_of))
        sizes, numbers = patterns.group_size[:, None], patterns.num_in_group[:, None]
        remainders = np.arange(len(self.space.kind_of)) % sizes
        layers = (remainders >= sizes - numbers).astype(np.int64)
        return np.vstack([layers, np.zeros_like(layers[:1])])


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline but for the largest one, which is searched."""

    largest: Space
    options: tuple[Option, ...]

    @cached_property
    def _prices(self) -> list[tuple[int, StagePrices]]:
        """How many stages there are of each that differs in what it costs, and its prices."""
        question, number = self.largest.question, self.largest.stage.number
        others = [each for each in self.largest.stages if each.number != number]
        keys = [
            (tuple(layer.key for layer in each.layers), each.outside_key, each.head is None)
            for each in others
        ]
        unlike = dict(zip(keys, others, strict=True))
        return [
            (
                count,
                StagePrices(
                    StageSpace(question, other=unlike[key], largest=self.largest), self.options
                ),
            )
            for key, count in Counter(keys).items()
        ]

    @cached_property
    def fastest_ps(self) -> tuple[int, int]:
        """Picoseconds of prompt and step with all resident: no plan takes less."""
        times = sum(n * prices.space.table.resident_ps.min(axis=0) for n, prices in self._prices)
        prompt_ps, step_ps = np.asarray(times).tolist()
        return prompt_ps, step_ps

    def price(self, candidates: Candidates) -> OtherStages:
        """Price candidates of one rule."""
        prompt_ps, step_ps = np.zeros(len(candidates.setting)), np.zeros(len(candidates.setting))
        same, host_bytes = np.ones(len(prompt_ps), dtype=bool), np.zeros(len(prompt_ps), np.int64)
        for count, prices in self._prices:
            numbers = prices.number_all(candidates)
            _, on_host, num_turns = prices.weigh(numbers, candidates.prefetch_step)
            takes = (on_host > 0) | (candidates.first == NO_RULE)
            same &= takes & (num_turns >= candidates.prefetch_step)
            host_bytes += count * on_host
            times = prices.price(numbers, candidates.setting, candidates.prefetch_step)
            prompt_ps, step_ps = prompt_ps + count * times[0], step_ps + count * times[1]
        return OtherStages(prompt_ps, step_ps, same, host_bytes)

    def price_offload(self, offload: Offload, setting: int) -> tuple[int, Fraction] | None:
        """Price a decision by its schedules; None where it takes nothing of some stage."""
        prompt_ps, step_ps = Fraction(0), Fraction(0)
        for count, prices in self._prices:
            space = prices.space
            try:
                placement = place(space.stage, offload)
            except PlanError:
                return None
            prompt = space.settings[setting].prefill
            times = price_request(placement, space.stage, space.machine, prompt, space.decode)
            prompt_ps += count * times.prefill.step_ps
            step_ps += count * times.decode.step_ps
        return int(prompt_ps), step_ps
