"""Transformers' own passes: they run models that offplan's own cannot, or any where asked for."""

from collections.abc import Iterator

from offplan.capabilities.goal import GoalBase
from offplan.capabilities.way import Way

STOCK = Way("stock", "transformers' own", num_scratch=2)
"""Transformers' own passes. Its code that reads a weight in another way than nn.Linear is given
the weight's values in memory of their own."""


class StockGoal(GoalBase):
    """A question whose plans transformers' own passes may be asked to run."""

    stock: bool = False
    """True has transformers' own passes run the model, not offplan's."""

    @property
    def way(self) -> Way:
        """These passes, where they are asked for."""
        return STOCK if self.stock else super().way

    def list_unsaid(self) -> Iterator[tuple[str, str]]:
        """Yield these passes, where they are asked for."""
        yield from super().list_unsaid()
        if self.stock:
            yield "stock", "no engine runs passes of transformers"
