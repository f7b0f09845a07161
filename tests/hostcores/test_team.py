"""A team's threads: those that lost their core to another program are not waited for."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from offplan.hostcores.library import Experts
from offplan.runtime.host_cores import cores
from tests.hostcores.cores import make_weight, require_cores, values_of

require_cores()

TGKILL = 234
"""The system call on x86-64, for which these kernels are."""
LONGEST_S = 20.0


def list_threads() -> set[int]:
    return {int(each) for each in os.listdir("/proc/self/task")}


@contextmanager
def stopped(threads: set[int]) -> Iterator[threading.Event]:
    """Keep threads in a signal's handler; what is yielded is set if they had to be let go."""
    libc, had_to = ctypes.CDLL(None), threading.Event()
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    stop, go = signal.SIGUSR2, signal.SIGUSR1

    def send(number: int) -> None:
        for thread in threads:
            libc.syscall(TGKILL, os.getpid(), thread, number)

    def let_go() -> None:
        had_to.set()
        send(go)

    handlers = {stop: libc.pause, go: libc.getpid}
    before = {
        each: libc.signal(each, ctypes.cast(call, ctypes.c_void_p))
        for each, call in handlers.items()
    }
    timer = threading.Timer(LONGEST_S, let_go)
    timer.start()
    try:
        send(stop)
        time.sleep(0.1)  # until they are there
        yield had_to
    finally:
        timer.cancel()
        send(go)
        time.sleep(0.1)
        for each, handler in before.items():
            libc.signal(each, handler)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_threads_that_do_not_come_are_not_waited_for(num_tokens: int) -> None:
    """Neither where all inputs have to be prepared first; once they come they help again."""
    library, before = cores.load(), list_threads()
    team, kernels = library.team(4), library.kernels()
    form, parts = make_weight("fp8", 512, 256)
    x = torch.randn(num_tokens, 256).to(torch.bfloat16)
    expected = x.double() @ values_of(form, parts).mT
    matrix = cores.describe(form, parts)
    up, down = make_weight("fp8", 256, 256, 3), make_weight("fp8", 256, 128, 3)
    experts = Experts(up=cores.describe(*up), down=cores.describe(*down), num_experts=3)
    experts.is_gated, experts.alpha, experts.limit = True, 1.0, float("inf")
    chosen = torch.arange(2 * num_tokens).view(num_tokens, 2) % 3
    factors = torch.rand(num_tokens, 2)

    def check() -> torch.Tensor:
        made = cores.multiply(team, kernels, matrix, x)
        torch.testing.assert_close(made.double(), expected, rtol=0.02, atol=1e-3)
        return cores.send(team, kernels, experts, x, chosen, factors)

    try:
        together = check()
        with stopped(list_threads() - before) as had_to_be_let_go:
            alone = [check() for _ in range(20)]
            assert not had_to_be_let_go.is_set()
        assert all(torch.equal(each, together) for each in [*alone, check(), check()])
    finally:
        team.close()
