"""A GPU's stream, simulated."""

import ctypes
import time
from collections.abc import Sequence

import torch

from offplan.hostcores.library import Words
from offplan.runtime.forms.tasks import Bell


class AtOnce:
    """A stream that does everything when it is queued."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def hand_over(
        self, inputs: Sequence[torch.Tensor], memory: Sequence[torch.Tensor], bell: Bell
    ) -> None:
        for source, target in zip(inputs, memory, strict=True):
            target.copy_(source)
        if bell.job:
            self.seen.append("write")
            words = Words.from_address(bell.words.data_ptr())
            words.answer = 0
            words.bell = bell.job

    def wait(self, address: int, least: int) -> None:
        self.seen.append("wait")
        word, ends = ctypes.c_uint32.from_address(address), time.monotonic() + 20
        while word.value < least:
            assert time.monotonic() < ends
            time.sleep(0)

    def call(self, function: int, argument: int) -> None:
        self.seen.append("call")
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)
