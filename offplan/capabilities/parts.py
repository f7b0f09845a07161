"""Prompts in parts: a prompt streams a layer's routed experts some at a time."""

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from offplan.capabilities.goal import Asked, GoalBase
from offplan.capabilities.rule import MOST, Count, RuleBase
from offplan.choices import DEFAULT_PARTS, PartsChoice


class PartsRule(RuleBase):
    """A rule whose experts prompts may stream in parts."""

    parts: int | None = Field(default=None, ge=2, le=MOST)
    """Parts in which prompts stream a layer's routed experts. Some experts at a time meet the
    tokens of all chunks while the next ones come. Null streams what the rule takes whole."""
    tokens_at_once: Count | None = None
    """Tokens of each sequence that meet a part while it is in its slot, rounded up to whole chunks.
    The parts cross again for the tokens behind them. Null has a part meet the whole prompt, however
    long, and memory is counted for a prompt as long as the context."""

    def list_faults(self) -> Iterator[str]:
        """Yield what its parts cannot be."""
        if self.parts is None:
            if self.tokens_at_once is not None:
                yield (
                    "tokens_at_once says how much of a prompt meets a part of a layer's experts, "
                    "and parts is missing: add it, or take tokens_at_once out"
                )
        else:
            if self.tokens_at_once is not None and self.parts % 2:
                yield (
                    f"found parts: {self.parts} with tokens_at_once, expected an even number: two "
                    "slots take parts in turn, also from one group of chunks to the next"
                )
            if self.max_bytes is not None:
                yield (
                    "a max_bytes rule takes whole parameters, and parts divides a layer's experts: "
                    "give the rule group_size and num_in_group"
                )
            if not self.prefill.streams or self.decode.streams or self.decode.is_served:
                yield (
                    f"found parts: {self.parts} with prefill: {self.prefill.name} and decode: "
                    f"{self.decode.name}, expected prefill: prefetch and decode: uva or host: "
                    "prompts stream parts, and steps read the experts where they lie"
                )
        yield from super().list_faults()

    @property
    def num_pieces(self) -> int:
        """Each part is a piece."""
        return self.parts or 1

    def chunks_at_once(self, prefill_chunk: int) -> int | None:
        """Count the chunks that ``tokens_at_once`` are in."""
        at_once = self.tokens_at_once
        return None if at_once is None else -(-at_once // prefill_chunk)

    @property
    def experts_key(self) -> str | None:
        """Parts are of routed experts."""
        return "parts" if self.parts is not None else super().experts_key

    def why_not_divide(self, num_experts: int, whose: str) -> str | None:
        """Say that its parts do not divide the experts, and what would."""
        if num_experts % self.num_pieces == 0:
            return None
        divisors = [str(n) for n in range(2, num_experts + 1) if num_experts % n == 0]
        return (
            f"parts: {self.parts}, which does not divide the {num_experts} experts of {whose}: "
            f"write one of {', '.join(divisors)}"
        )

    def describe(self) -> str:
        """Say in how many parts experts stream."""
        return super().describe() + self._describe("prompts stream")

    def describe_plainly(self) -> str:
        """Say the same to people who do not know the keys."""
        return super().describe_plainly() + self._describe("A prompt brings", ".")

    def _describe(self, doing: str, before: str = ";") -> str:
        if self.parts is None:
            return ""
        told = f"{before} {doing} the experts of a layer in {self.parts} parts"
        if self.tokens_at_once is not None:
            told += f", again for every {self.tokens_at_once:,} tokens of a sequence"
        return told

    def list_unsaid(self) -> Iterator[str]:
        """Yield that the experts stream in parts."""
        yield from super().list_unsaid()
        if self.parts is not None:
            yield f"streams a layer's experts in {self.parts} parts (parts)"


class PartsGoal(GoalBase):
    """A question whose plans may have prompts in parts."""

    parts: PartsChoice = "off"
    """Choice of prompts that stream a layer's routed experts in parts; ``auto`` has the planner
    choose."""

    def list_unsaid(self) -> Iterator[tuple[str, str]]:
        """Yield parts, where they are asked for."""
        yield from super().list_unsaid()
        if self.parts != "off":
            yield "parts", "no engine streams a layer's experts in parts"

    def list_refusals(self, asked: Asked) -> Iterator[str]:
        """Yield why no plan can stream experts in parts, though that is asked for."""
        yield from super().list_refusals(asked)
        if self.parts != "off" and (why := _why_not(asked)) is not None:
            yield f"`parts={self.parts}`: {why}: leave `parts` out"

    def choose(self, asked: Asked, *, by_others: bool) -> dict[str, Any]:
        """Choose DEFAULT_PARTS where prompts can stream in parts."""
        chosen = super().choose(asked, by_others=by_others)
        if "parts" not in self.model_fields_set:
            chosen["parts"] = "off" if by_others or _why_not(asked) else DEFAULT_PARTS
        return chosen


def _why_not(asked: Asked) -> str | None:
    """Say why no plan can stream a model's experts in parts; None if plans can."""
    if asked.model.experts is None:
        return f"{asked.model.source} has no routed experts"
    if asked.store != "host":
        return f"steps read the experts in host memory, and the store is {asked.store}"
    return None
