"""A GPU's stream, simulated."""

import ctypes
import time


class AtOnce:
    """A stream that does everything when it is queued."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def write(self, *words: tuple[int, int]) -> None:
        self.seen.append("write")
        for address, value in words:
            ctypes.c_uint32.from_address(address).value = value

    def wait(self, address: int, least: int) -> None:
        self.seen.append("wait")
        word, ends = ctypes.c_uint32.from_address(address), time.monotonic() + 20
        while word.value < least:
            assert time.monotonic() < ends
            time.sleep(0)

    def call(self, function: int, argument: int) -> None:
        self.seen.append("call")
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)
