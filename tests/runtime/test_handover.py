"""Products handed over within a stream, which is simulated: it does at once what it is given."""

import os
from collections.abc import Iterator
from ctypes import CFUNCTYPE, c_int, c_size_t, c_uint64, c_void_p, cast, memmove
from typing import Any

import pytest
import torch
from torch import nn

from offplan.errors import OffplanError
from offplan.forms.form import RAW, Component
from offplan.hostcores.library import Driver
from offplan.runtime.forms import tasks
from offplan.runtime.host_cores import cores, executor
from offplan.runtime.host_cores.executor import LinearTask
from offplan.runtime.host_cores.handover import CurrentStream, Handover
from offplan.runtime.host_cores.server import ByCores
from tests.hostcores.cores import make_weight, require_cores, values_of
from tests.runtime.stream import AtOnce

require_cores()

CPU = torch.device("cpu")


@pytest.fixture
def stream() -> AtOnce:
    return AtOnce()


@pytest.fixture(params=[True, False], ids=["waits", "calls the host"])
def handover(stream: AtOnce, request: pytest.FixtureRequest) -> Iterator[Handover]:
    made = Handover(CPU, stream)
    made.exchange.waits = request.param
    yield made
    made.close()
    made.close()


def test_products_come_back(handover: Handover, stream: AtOnce) -> None:
    form, parts = make_weight("mxfp4", 192, 256)
    weight = cores.describe(form, parts)
    for num_rows in (1, 4, 1, 4, 40):
        x = torch.randn(num_rows, 256).to(torch.bfloat16)
        made = handover.multiply(weight, x)
        expected = x.double() @ values_of(form, parts).mT
        assert (made.double() - expected).abs().max() < 5e-3 * expected.abs().max()
    each = ["write", "wait"] if handover.exchange.waits else ["call"]
    assert stream.seen == each * 5
    assert len(handover._jobs) == 3  # one for each number of rows
    handover.check()


def test_what_an_aborted_pass_has_begun_is_waited_for(stream: AtOnce) -> None:
    handover = Handover(CPU, stream)
    handover.exchange.invalidate()
    handover.exchange.end()  # of no job: the answer is there
    handover.exchange.begin(handover._coordinator.add(None))
    handover.exchange._is_begun = False  # a captured pass notes nothing
    stream.seen.clear()
    handover.exchange.invalidate()
    handover.exchange.enqueue(handover._coordinator.add(None))
    assert stream.seen == ["wait", "write", "wait"]
    handover.close()


def test_the_host_is_called_where_the_stream_refuses_to_wait(
    stream: AtOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OffplanError("refused")

    handover = Handover(CPU, stream)
    monkeypatch.setattr(stream, "wait", refuse)
    with pytest.raises(OffplanError, match="refused"):
        handover.exchange.enqueue(handover._coordinator.add(None))
    handover.exchange.waits = False
    form, parts = make_weight("bf16", 64, 64)
    x = torch.randn(1, 64).to(torch.bfloat16)
    made = handover.multiply(cores.describe(form, parts), x)
    assert torch.allclose(
        made.double(), x.double() @ values_of(form, parts).mT, atol=0.1, rtol=0.02
    )
    handover.close()


def test_experts_come_back(handover: Handover) -> None:
    up, down = make_weight("bf16", 128, 96, 4), make_weight("bf16", 96, 64, 4)
    experts = cores.Experts(up=cores.describe(*up), down=cores.describe(*down), num_experts=4)
    experts.is_gated, experts.alpha, experts.limit = 1, 1.0, float("inf")
    library = cores.load()
    team = library.team(1)
    for num_tokens in (1, 3):
        x = torch.randn(num_tokens, 96).to(torch.bfloat16)
        arguments = x, torch.randint(0, 4, (num_tokens, 2)), torch.rand(num_tokens, 2)
        expected = cores.send(team, library.kernels(), experts, *arguments)
        assert torch.equal(handover.send(experts, *arguments), expected)
    team.close()


class StandIn(CurrentStream, AtOnce):
    """A stream of the host's whose driver copies memory of the host."""

    def __init__(self) -> None:
        AtOnce.__init__(self)
        self.num_copies, self.num_streams = 0, 0
        types = c_int, c_uint64, c_void_p, c_size_t, c_void_p
        self._functions = (
            CFUNCTYPE(c_int, c_void_p)(lambda context: 0),
            CFUNCTYPE(*types)(self._copy),
            CFUNCTYPE(c_int, c_void_p)(lambda stream: 0),
        )

    hand_over, wait, call = AtOnce.hand_over, AtOnce.wait, AtOnce.call

    def make_copier(self) -> Driver:
        self.num_streams += 1
        return Driver(*(cast(each, c_void_p).value for each in self._functions), 1, 2)

    def destroy(self, copier: Driver) -> None:
        self.num_streams -= 1

    def _copy(self, target: int, source: int, num_bytes: int, stream: int) -> int:
        memmove(target, source, num_bytes)
        self.num_copies += 1
        return 0


def make_experts(num_experts: int = 4) -> tuple[cores.Experts, Any]:
    up, down = (make_weight("bf16", *size, num_experts) for size in ((128, 96), (96, 64)))
    experts = cores.Experts(up=cores.describe(*up), down=cores.describe(*down))
    experts.num_experts, experts.is_gated = num_experts, 1
    experts.alpha, experts.limit = 1.0, float("inf")
    return experts, (up, down)


def test_what_a_kernel_lists_is_copied_into_slots() -> None:
    stream = StandIn()
    handover = Handover(CPU, stream)
    source = torch.randn(4, 3000)
    layers: list[Any] = []
    for _ in range(300):  # more than a block of lists has
        experts, keeps = make_experts() if len(layers) < 2 else layers[0][:2]
        slots, done = torch.zeros(2, 3000), torch.zeros(1, dtype=torch.int32)
        parts = [(source.data_ptr(), slots.data_ptr(), source[0].nbytes)]
        later = handover.bring_later(experts, parts, done.data_ptr())
        layers.append((experts, keeps, slots, done, later))
    assert len({layer[-1].data_ptr() for layer in layers}) == 300
    assert stream.num_streams == 1
    experts, _, slots, done, later = layers[1]
    arguments = torch.randn(1, 96).bfloat16(), torch.tensor([[1, 3]]), torch.ones(1, 2)
    for sequence, pairs in ((1, [3, 0, 1, 1]), (2, [0, 0])):
        later[:2] = torch.tensor([len(pairs) // 2, sequence])
        later[4 : 4 + len(pairs)] = torch.tensor(pairs)
        handover.send(experts, *arguments)
        handover.drain()
        assert int(done) == sequence
        for expert, slot in zip(pairs[::2], pairs[1::2], strict=True):
            assert torch.equal(slots[slot], source[expert])
    spent = handover.count()
    assert spent.queued_bytes == 3 * source[0].nbytes
    handover.check()
    later[2] = 1  # as a kernel writes that has waited for too long
    with pytest.raises(OffplanError, match="brings for later did not come in time"):
        handover.check()
    handover.close()
    assert stream.num_streams == 0


def test_experts_are_timed_by_the_host(stream: AtOnce) -> None:
    handover = Handover(CPU, stream)
    experts, keeps = make_experts()
    experts.later = 8  # which timing leaves alone
    assert handover.time_experts(experts, [2], 3) > 0
    assert handover.time_experts(experts, [0, 1, 3], 3) > 0
    assert len(handover._jobs) == 1
    assert stream.seen == []
    experts.later = None
    arguments = torch.randn(2, 96).bfloat16(), torch.randint(0, 4, (2, 2)), torch.rand(2, 2)
    team = cores.load().team(1)
    expected = cores.send(team, cores.load().kernels(), experts, *arguments)
    assert torch.equal(handover.send(experts, *arguments), expected)
    team.close()
    handover.close()
    assert keeps


def test_a_caller_that_times_experts_is_on_no_core_of_theirs(
    stream: AtOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits busily, which would take half of a core's time from the thread that computes."""
    handover, allowed, seen = Handover(CPU, stream), os.sched_getaffinity(0), []
    experts, keeps = make_experts()
    own = handover._coordinator.exchange

    def exchange(job: int) -> None:
        seen.append(os.sched_getaffinity(0))
        own(job)

    monkeypatch.setattr(handover._coordinator, "exchange", exchange)
    handover.time_experts(experts, [2], 3)
    assert seen == [allowed - {*handover._cores} or allowed]
    assert os.sched_getaffinity(0) == allowed
    handover.close()
    assert keeps


def test_what_fails_is_no_time(stream: AtOnce) -> None:
    """Rates are kept on disk: a failure, which is answered at once, would be one of them."""
    handover = Handover(CPU, stream)
    experts, keeps = make_experts()
    handover.exchange.enqueue(handover._coordinator.add_sleep(0.4, limit_s=0.05))
    with pytest.raises(OffplanError, match="did not answer in time"):
        handover.time_experts(experts, [2], 3)
    handover.close()
    assert keeps


def test_a_failure_is_said(handover: Handover) -> None:
    slow = handover._coordinator.add_sleep(0.4, limit_s=0.05)
    handover.exchange.enqueue(slow)
    with pytest.raises(OffplanError, match="did not answer in time"):
        handover.check()


@pytest.mark.slow
def test_a_thread_that_hangs_keeps_its_memory(stream: AtOnce) -> None:
    handover = Handover(CPU, stream)
    handover.exchange.enqueue(handover._coordinator.add_sleep(3, limit_s=0.05))
    for _ in range(2):
        handover.close()
        assert handover._words.tensor.numel()


@pytest.mark.slow
def test_layers_of_one_class_are_compiled_once() -> None:
    server = ByCores(CPU)
    linear: list[Any] = []
    for _ in range(3):
        form, parts = make_weight("bf16", 64, 32)
        each = nn.Linear(32, 64).to(torch.bfloat16)
        assert form is RAW
        task = LinearTask(server, cores.describe(form, parts), None, parts)
        each.__class__ = executor._class_by_cores(nn.Linear)
        vars(each).update(cores=tasks.number(task), weight_there=parts)
        linear.append(each)
    num_compiled = 0

    def count(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        nonlocal num_compiled
        num_compiled += 1
        return graph

    x = torch.randn(1, 5, 32).to(torch.bfloat16)
    with torch.no_grad():
        compiled = torch.compile(lambda layer, x: layer(x), backend=count, fullgraph=True)
        for each in linear:
            made = compiled(each, x)
            value = vars(each)["weight_there"][Component.WEIGHT]
            expected = torch.nn.functional.linear(x, value) + each.bias
            torch.testing.assert_close(made, expected, rtol=2e-2, atol=2e-2)
    assert num_compiled == 1
    for each in linear:
        tasks.forget(vars(each)["cores"])
    server.close()
