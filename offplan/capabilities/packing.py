"""Packing: bfloat16 weights are held packed, without loss, wherever they lie."""

from typing import Annotated

from pydantic import Field

from offplan.capabilities.goal import GoalBase
from offplan.capabilities.rule import Count, Pattern

UnpackedName = Annotated[str, Field(pattern=r"^[\w-]+(\.[\w-]+)*$")]
"""A layer's number, a segment or both with a dot between, or ``output_head``."""


class Packing(Pattern):
    """Which weights are held packed, without loss, wherever they lie: 0.76 of their bytes."""

    group_size: Count
    num_in_group: Count
    """Of every ``group_size`` layers the last ``num_in_group``."""
    output_head: bool = False
    """True packs the output head, too, and the input embedding if it is tied to that."""
    leave_unpacked: tuple[UnpackedName, ...] = ()
    """Weights that stay as they are stored all the same; experts of a layer stay together."""

    def describe(self) -> str:
        """Say what is packed, for a plan's report."""
        what = ", ".join(self.cpu_offload_params) or "weights"
        head = ", and the output head" if self.output_head else ""
        return f"packed without loss: {what} {self.where}{head}"


class PackingGoal(GoalBase):
    """A question whose plans may pack weights."""

    packing: bool = True
    """True lets weights be packed; no engine's flags can say that."""
    leave_unpacked: tuple[UnpackedName, ...] = ()
    """Weights that stay as they are stored, whatever is packed: ``7``, ``7.mlp.down_proj``,
    ``mlp.down_proj``, ``output_head``."""
