"""Families of candidates: what the search goes through, best bound first."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from offplan.plan import Backend, Offload, Rule
from offplan.planner.contents import Choice
from offplan.planner.patterns import Pattern
from offplan.planner.segments import SegmentClass


class Family(NamedTuple):
    """Candidates with the same memory and the same bound: they differ in their pattern alone.

    Among equally fast plans that of the first family is chosen, in the order of ``rank``.
    """

    prefill_ps: int
    """No member's prompt takes less."""
    decode_ps: int
    """No member's decode step takes less."""
    link_bytes: int
    """That a request moves, at least."""
    prefetch_step: int
    minus_chunk: int
    """The prefill chunk, negated: of equally fast plans the one of fewer passes comes first."""
    embeddings: Literal["device", "host"]
    segments: tuple[str, ...]
    prefill: Backend
    decode: Backend
    max_bytes: int
    """Of a rule without a pattern; 0 otherwise."""
    patterns: tuple[Pattern, ...]
    """In the order to try; empty when everything is resident, or ``max_bytes`` is set."""

    @property
    def rank(self) -> tuple[object, ...]:
        """All but the bounds; of segments, fewer come first."""
        before = self._fields.index("segments")
        return (*self[2:before], len(self.segments), *self[before:])

    @property
    def prefill_chunk(self) -> int:
        """Prompt tokens of each sequence in one pass."""
        return -self.minus_chunk

    def offload(self, rules: tuple[Rule, ...]) -> Offload:
        """The decision that a member stands for."""
        return Offload(
            prefetch_step=self.prefetch_step,
            prefill_chunk=self.prefill_chunk,
            embeddings=self.embeddings,
            rules=rules,
        )

    @property
    def num_members(self) -> int:
        """How many candidates these are."""
        return max(1, len(self.patterns))

    def choices(self, number: int) -> tuple[Choice, ...]:
        """A member's choices; none for a rule of ``max_bytes``."""
        if not self.patterns:
            return ()
        segment_class = SegmentClass(self.segments)
        return (Choice(segment_class, self.prefill, self.decode, self.patterns[number]),)

    def rules(self, number: int) -> tuple[Rule, ...]:
        """A member's rules."""
        if not self.max_bytes:
            return tuple(choice.rule() for choice in self.choices(number))
        return (
            Rule(
                cpu_offload_params=self.segments,
                max_bytes=self.max_bytes,
                prefill=self.prefill,
                decode=self.decode,
            ),
        )


@dataclass
class Shortfall:
    """What the candidates that come closest to fitting lack, in bytes; 0 once one fits."""

    gpu_bytes: int | None = None
    host_bytes: int | None = None
    """Of those that fit the GPU."""

    def note(self, gpu_bytes: int, host_bytes: int) -> bool:
        """Take note of what a candidate lacks (negative: has to spare); returns whether it fits."""
        if self.gpu_bytes is None or gpu_bytes < self.gpu_bytes:
            self.gpu_bytes = max(0, gpu_bytes)
        if gpu_bytes > 0:
            return False
        if self.host_bytes is None or host_bytes < self.host_bytes:
            self.host_bytes = max(0, host_bytes)
        return host_bytes <= 0
