"""Links that measure: what they pass on, and what they note."""

from typing import Any

import torch

from offplan.placement import Span
from offplan.runtime.measuring.timed_link import SerialLink, TimedLink
from offplan.runtime.passes.link import CpuLink
from offplan.schedule import Copy, Wait

CPU = torch.device("cpu")
SPANS = [Span(layer, 0, 4) for layer in (3, 5)]


class Recorder:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[Copy | Wait] = []
        self.bytes_moved = 0

    def copy(self, op: Copy) -> None:
        self.asked.append(op)
        self.bytes_moved += op.span.nbytes

    def wait(self, op: Wait) -> None:
        self.asked.append(op)


def test_a_serial_link_waits_for_every_copy_at_once() -> None:
    recorder = Recorder()
    link = SerialLink(recorder, CPU)
    for span in SPANS:
        link.copy(Copy(0, span))
    assert recorder.asked == [
        Copy(0, SPANS[0]),
        Wait(0, SPANS[0]),
        Copy(0, SPANS[1]),
        Wait(0, SPANS[1]),
    ]
    assert link.bytes_moved == 8


def test_a_timed_link_passes_everything_on() -> None:
    recorder = Recorder()
    link = TimedLink(recorder, CPU)
    operations: list[Any] = [Copy(0, SPANS[0]), Wait(0, SPANS[0])]
    for record in (False, True):
        if record:
            link.start()
        link.copy(operations[0])
        link.wait(operations[1])
    assert recorder.asked == operations * 2
    assert link.bytes_moved == 8


def test_stalls_are_noted_by_layer_between_start_and_stop() -> None:
    slots = [torch.zeros(4, dtype=torch.uint8) for _ in SPANS]
    slabs = {span.layer: torch.full((4,), span.layer, dtype=torch.uint8) for span in SPANS}
    link = TimedLink(CpuLink(slots, slabs), CPU)

    def turn(slot: int) -> None:
        link.copy(Copy(slot, SPANS[slot]))
        link.wait(Wait(slot, SPANS[slot]))

    turn(0)
    link.start()
    turn(1)
    recorded = link.stop()
    stalls = recorded.stalls_s
    turn(0)
    assert list(stalls) == [5]
    assert link.stop().waits == ()
    assert [slot[0].item() for slot in slots] == [3, 5]
