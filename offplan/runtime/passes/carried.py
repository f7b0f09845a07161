"""State that one pass leaves for the next, and what becomes of it where a pass does not end."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch


class Carried(Protocol):
    """Something that a pass finds as the pass before has left it."""

    def invalidate(self) -> None:
        """Rely on nothing that was left: the next pass makes again what it needs.

        Its work is queued on the current stream, behind whatever an aborted pass has queued.
        """


class CarriedState:
    """All state that one pass of a runner leaves for the next; each pass runs within it.

    ============================  ==========================================================
    ``PassSchedules``             what the slots of the ring hold, and decode finds there
    ``Executor``                  operations that belong between the layers' calls
    ``Passes``                    captured passes, with the tensors that they read and write
    ``Position``, ``Expansion``   where new tokens go; the expanded latents of a prompt
    ``DecoderLayers``             the rows of the cache that layers write to
    ``ExtendedRows``              which rows of a step move, and where idle ones are sent
    ``Frequencies``               the length that rotary embeddings are written for
    ``ExpertKernels``             how routed experts are multiplied
    ``LayerCalls``                the layer that runs, in transformers' own passes
    ``LoadedModel``               the phase whose weights are in place, what the executors of
                                  capabilities keep, what servers have begun
    ============================  ==========================================================

    Texts are not of it. Caches and linear attention's states belong to whoever has texts in them
    (``length`` of a runner, ``Rows``). A pass writes to the rows of its own texts alone. Copies
    that are still on their way are not of it either. A link's copies keep their order, and a slot
    that is believed empty is copied to, and waited for, before it is read.
    """

    def __init__(self, *carried: Carried) -> None:
        """Believe nothing yet: the first pass finds memory that nobody has written."""
        self._carried = carried
        self._is_whole = False

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Context of a pass; once one has not ended, whatever ended it, nothing is believed."""
        self._invalidate()
        self._is_whole = False
        try:
            yield
        except BaseException:
            # at once, for the memory; what fails here, be it by Ctrl-C again, the next pass does
            with suppress(Exception):
                self._invalidate()
                # torch sets a stance before the context that takes it back: between, it would stay
                torch.compiler.set_stance("default")
            raise
        self._is_whole = True

    def _invalidate(self) -> None:
        """Invalidate what the last pass left, unless it ended, or that is done."""
        if not self._is_whole:
            for each in self._carried:
                each.invalidate()
            self._is_whole = True
