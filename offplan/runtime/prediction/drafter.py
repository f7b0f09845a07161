"""Drafts of one text by a prediction layer."""

from collections.abc import Callable, Sequence


class PredictionDrafter:
    """Asks the prediction layer that reads beside the text's passes."""

    def __init__(self, predict: Callable[[int, int], list[int]]) -> None:
        """Draft by ``predict``, told the text's last token, and how many to draft at most."""
        self._predict = predict
        self._last: int | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens of the text, as the protocol says: the layer reads what passes read."""
        if tokens:
            self._last = tokens[-1]

    def propose(self, most: int) -> list[int]:
        """Return up to ``most`` tokens that may follow; waits for the device."""
        return [] if self._last is None else self._predict(self._last, most)
