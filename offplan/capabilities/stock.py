"""Transformers' own passes: they run models that offplan's own cannot, or any where asked for."""

from collections.abc import Iterator

from offplan.capabilities.goal import GoalBase


class StockGoal(GoalBase):
    """A question whose plans transformers' own passes may be asked to run."""

    stock: bool = False
    """True has transformers' own passes run the model, not offplan's."""

    def list_unsaid(self) -> Iterator[tuple[str, str]]:
        """Yield these passes, where they are asked for."""
        yield from super().list_unsaid()
        if self.stock:
            yield "stock", "no engine runs passes of transformers"
