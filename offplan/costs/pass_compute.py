"""Compute of a pass, priced layer by layer."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from offplan.costs.work import PassShape
from offplan.plan import Correction


@dataclass(frozen=True)
class PassCompute:
    """Compute of one pass over the layers with everything resident: a decode step, or a prompt."""

    shapes: tuple[PassShape, ...]
    """Shapes of its chunks, which go through each layer one after another; a decode step is one."""
    layer_ps: tuple[int, ...]
    """Picoseconds of each layer, all chunks and calls, in the order of execution."""
    outside_ps: int
    """Picoseconds of embedding, norm and head, which only the prompt's last token reaches.

    Those of states that go on behind a pass that checks drafts are among them.
    """
    measured: bool
    """True if it was measured, as ``ModelCompute.price`` has it."""
    routed_ps: tuple[int, ...]
    """Part of each layer's picoseconds that is its routed experts' products."""
    correction: Correction | None = None
    """What measured layers of other models changed about all layers, if about all."""
    drafting_ps: int = 0
    """Picoseconds behind it in which prediction layers make drafts, with everything resident."""
    drafting_bytes: int = 0
    """Bytes that these read in place meanwhile, re-reads included."""

    @property
    def behind_ps(self) -> int:
        """Picoseconds of all that is no layer of the model."""
        return self.outside_ps + self.drafting_ps

    @cached_property
    def chunks(self) -> Mapping[int, int]:
        """How many of its chunks have how many tokens, over all sequences."""
        return Counter(shape.num_tokens for shape in self.shapes)

    @cached_property
    def resident_ps(self) -> int:
        """Picoseconds of the whole pass."""
        return sum(self.layer_ps) + self.behind_ps
