"""The coordinator answers a stream, which is simulated: it writes words and waits for one."""

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offplan.errors import OffplanError
from offplan.hostcores.coordinator import Coordinator, choose_cores, parse_cores
from offplan.hostcores.library import Dense, Words
from offplan.runtime.host_cores import cores
from tests.hostcores.cores import make_weight, require_cores, values_of

require_cores()

DONE, FAILED = 1, 2


class Stream:
    """Does at once what a captured step does on a GPU's stream."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._bell, self._answer = (
            ctypes.c_uint32.from_address(at) for at in (coordinator.bell, coordinator.answer)
        )

    def run(self, job: int) -> int:
        self._answer.value = 0
        self._bell.value = job
        ends = time.monotonic() + 20
        while not self._answer.value:
            assert time.monotonic() < ends, "no answer, not even the watchdog's"
            time.sleep(0)
        return self._answer.value


@pytest.fixture
def words() -> Words:
    return Words()


@pytest.fixture
def coordinator(words: Words) -> Iterator[Coordinator]:
    library = cores.load()
    made = Coordinator(library, library.team(2), ctypes.addressof(words))
    yield made
    made.close()
    made.close()


def add_product(coordinator: Coordinator) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Add a product; returns its number, what it makes, and what it ought to."""
    form, parts = make_weight("fp8", 128, 256)
    x = torch.randn(3, 256).to(torch.bfloat16)
    out = torch.zeros(3, 128)
    task = Dense(cores.load().kernels(), cores.describe(form, parts), 3, x.data_ptr(),
                 out.data_ptr(), 1)  # fmt: skip
    task.kept = parts, x
    return coordinator.add(task), out, x.double() @ values_of(form, parts).mT


@pytest.mark.slow
def test_each_bell_is_answered(coordinator: Coordinator) -> None:
    stream, nothing = Stream(coordinator), coordinator.add(None)
    jobs = [add_product(coordinator) for _ in range(3)]
    for _ in range(50):
        assert stream.run(nothing) == DONE
        for job, out, expected in jobs:
            out.zero_()
            assert stream.run(job) == DONE
            torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    coordinator.check()


def test_it_wakes_after_a_while(coordinator: Coordinator) -> None:
    stream, (job, out, expected) = Stream(coordinator), add_product(coordinator)
    time.sleep(0.2)  # it dozes by now, and so does the team
    assert stream.run(job) == DONE
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_job_that_takes_too_long_is_given_up(coordinator: Coordinator) -> None:
    stream, slow = Stream(coordinator), coordinator.add_sleep(0.5, limit_s=0.1)
    nothing = coordinator.add(None)
    assert stream.run(nothing) == DONE
    began = time.monotonic()
    assert stream.run(slow) == FAILED
    assert time.monotonic() - began < 0.5
    assert stream.run(nothing) == FAILED  # also while the slow one is still under way
    with pytest.raises(OffplanError, match=r"did not answer in time: .* plan without the host's"):
        coordinator.check()
    time.sleep(0.5)
    assert stream.run(nothing) == FAILED  # what comes too late answers nobody


def test_a_number_that_is_no_job_does_nothing(coordinator: Coordinator) -> None:
    assert Stream(coordinator).run(77) == DONE


def test_a_host_function_does_the_same(coordinator: Coordinator) -> None:
    job, out, expected = add_product(coordinator)
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(coordinator.host_function)
    function(coordinator.call_of(job))
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_closing_answers_whoever_waits(words: Words) -> None:
    library = cores.load()
    coordinator = Coordinator(library, library.team(1), ctypes.addressof(words))
    words.answer, words.bell = 0, coordinator.add_sleep(0.1, limit_s=5)
    coordinator.close()
    assert words.answer
    coordinator.check()


@pytest.mark.slow
def test_two_at_a_time() -> None:
    library, memory = cores.load(), [Words(), Words()]
    both = [Coordinator(library, library.team(2), ctypes.addressof(each)) for each in memory]
    streams = [(Stream(each), *add_product(each)) for each in both]
    for _ in range(20):
        for stream, job, out, expected in streams:
            assert stream.run(job) == DONE
            torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    for each in both:
        each.close()


def test_too_many_jobs(coordinator: Coordinator) -> None:
    numbers = {coordinator.add(None) for _ in range((1 << 14) - 1)}
    assert len(numbers) == (1 << 14) - 1
    with pytest.raises(OffplanError, match="more products to compute than they can tell apart"):
        coordinator.add(None)


def make_topology(folder: Path, threads: list[str]) -> Path:
    for core, siblings in enumerate(threads):
        (folder / f"cpu{core}" / "topology").mkdir(parents=True)
        (folder / f"cpu{core}" / "topology" / "thread_siblings_list").write_text(siblings + "\n")
    return folder


def test_cores_are_physical_ones_near_the_gpu(tmp_path: Path) -> None:
    folder = make_topology(tmp_path, [f"{core % 8},{core % 8 + 8}" for core in range(16)])
    assert choose_cores(range(16), folder) == [0, 1, 2, 3, 4, 5]
    assert choose_cores(range(16), folder, nearest=[4, 5, 6, 7, 12, 13]) == [4, 5, 6]
    assert choose_cores([3, 11, 5], folder) == [3]
    assert choose_cores([2], folder) == [2]
    assert choose_cores(range(16), folder, num_threads=8) == [*range(8)]
    assert choose_cores([40, 41], folder) == [40]  # of which the kernel says nothing
    with pytest.raises(OffplanError, match=r"found 8 physical cores .* and 9 threads are asked"):
        choose_cores(range(16), folder, num_threads=9)


def test_a_quota_counts_as_the_cores_that_there_are(tmp_path: Path) -> None:
    folder = make_topology(tmp_path, [str(core) for core in range(16)])
    assert choose_cores(range(16), folder, quota=4.5) == [0, 1, 2]
    assert choose_cores(range(16), folder, quota=0.5) == [0]
    assert len(choose_cores(range(16), folder, quota=64.0)) == 12
    assert choose_cores(range(16), folder, num_threads=4, quota=4.5) == [0, 1, 2, 3]
    with pytest.raises(OffplanError, match=r"found 4 cores of the container's CPU quota"):
        choose_cores(range(16), folder, num_threads=5, quota=4.5)


def test_lists_of_cores_are_read() -> None:
    assert parse_cores("0-3,8\n") == [0, 1, 2, 3, 8]
    assert parse_cores("\n") == []
