"""Finds the layer of a pass that gives the first NaN."""

import torch


class NanFoundError(Exception):
    """Ends a watched pass behind the layer that gave a NaN; its text names the layer."""


class NanWatch:
    """Looks at what each layer of a pass takes and gives; the host waits for every layer."""

    def __init__(self) -> None:
        self._infinite: int | None = None
        """The first layer that gave infinite values."""

    def see(self, index: int, before: torch.Tensor, after: torch.Tensor) -> None:
        """Raise NanFoundError if a layer gives a NaN; ``before`` and ``after`` are its hidden
        states, of any shape."""
        if index == 0 and _has_nan(before):
            raise NanFoundError("the input embedding gives the first NaN")
        if _has_nan(after):
            since = f", after layer {self._infinite} gave infinite values"
            raise NanFoundError(
                f"layer {index} gives the first NaN{since * (self._infinite is not None)}"
            )
        if self._infinite is None and bool(after.abs().amax().isinf()):
            self._infinite = index

    def describe_rest(self, logits: torch.Tensor) -> str:
        """Say where the first NaN is of a pass whose layers all gave numbers."""
        if not _has_nan(logits):
            return (
                "the same pass gave numbers when offplan ran it once more, so the weights alone "
                "are not the reason: run again, and suspect the device if NaN comes back"
            )
        since = f", after layer {self._infinite} gave infinite values"
        return (
            "the final norm or the output head gives the first NaN"
            f"{since * (self._infinite is not None)}"
        )


def _has_nan(values: torch.Tensor) -> bool:
    return bool(values.amax().isnan())  # a maximum is NaN if any value is, and takes no memory
