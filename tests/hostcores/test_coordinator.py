"""The coordinator answers a stream, which is simulated: it writes words and waits for one."""

import ctypes
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offplan.errors import OffplanError
from offplan.hostcores.coordinator import Coordinator, choose_cores, parse_cores
from offplan.hostcores.library import Dense, Driver, Later, LaterList, LaterTensor, Words
from offplan.runtime.host_cores import cores
from tests.hostcores.cores import make_weight, require_cores, values_of

require_cores()

DONE, FAILED = 1, 2
_left: list[object] = []
"""Objects that a hung thread uses."""


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


class Copier:
    """Stands in for the driver: copies memory of the host, now or when it is asked to."""

    def __init__(
        self,
        coordinator: Coordinator,
        status: int = 0,
        *,
        has_events: bool = False,
        word: tuple[int, int] = (0, 0),
    ) -> None:
        self.lock = threading.Lock()
        """The lock that the driver takes to copy."""
        self.copies: list[tuple[int, int, int]] = []
        """Target, source and bytes of each copy, in the order in which they were queued."""
        self.num_done, self.is_held, self.contexts, self._status = 0, False, [0], status
        types = ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
        kinds = [
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._enter),
            ctypes.CFUNCTYPE(*types)(self._copy),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._synchronize),
        ]
        events = [
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(self._record),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._query),
        ]
        self._noted: dict[int, int] = {}
        self._keeps = kinds + events
        addresses, others = (
            [ctypes.cast(each, ctypes.c_void_p).value for each in of] for of in (kinds, events)
        )
        more = (*others, (ctypes.c_void_p * 2)(21, 22)) if has_events else ()
        self.noted: list[int] = []
        """Events that were recorded and, behind zeros, asked about."""
        coordinator.copy_by(Driver(*addresses, 11, 12, *more), *word)

    def _enter(self, context: int) -> int:
        self.contexts.append(context)
        return 0

    def _copy(self, target: int, source: int, num_bytes: int, stream: int) -> int:
        assert stream == 12
        with self.lock:
            pass
        self.copies.append((target, source, num_bytes))
        if not self.is_held:
            self.do()
        return self._status

    def _record(self, event: int, stream: int) -> int:
        assert stream == 12
        self._noted[event] = len(self.copies)
        self.noted.append(event)
        return 0

    def _query(self, event: int) -> int:
        self.noted += [0, event]
        return 0 if self.num_done >= self._noted[event] else 600

    def _synchronize(self, stream: int) -> int:
        assert stream == 12
        self.is_held = False
        self.do()
        return 0

    def do(self) -> None:
        while self.num_done < len(self.copies):
            self.do_next()

    def do_next(self) -> None:
        ctypes.memmove(*self.copies[self.num_done])
        self.num_done += 1


class Listing:
    """Experts of two parts, their slots, and a job whose kernel lists some of them for later."""

    def __init__(self, coordinator: Coordinator, num_experts: int = 6) -> None:
        up, down = (
            make_weight("bf16", 64, 96, num_experts),
            make_weight("bf16", 96, 32, num_experts),
        )
        sizes = 3 << 20, 20  # the first in pieces
        self.parts = [torch.randint(0, 255, (num_experts, n), dtype=torch.uint8) for n in sizes]
        self.slots = [torch.zeros_like(part[:3]) for part in self.parts]
        rows = [
            LaterTensor(part.data_ptr(), slot.data_ptr(), part[0].nbytes)
            for part, slot in zip(self.parts, self.slots, strict=True)
        ]
        self.list, self.done = LaterList(), ctypes.c_int32()
        table = (LaterTensor * 2)(*rows)
        self.later = Later(
            ctypes.addressof(self.list), ctypes.addressof(self.done), 2, ctypes.addressof(table)
        )
        task = cores.Experts(up=cores.describe(*up), down=cores.describe(*down))
        task.num_experts, task.is_gated, task.alpha, task.limit = num_experts, 1, 1.0, float("inf")
        task.kernels, task.num_tokens, task.num_chosen = cores.load().kernels(), 1, 2
        given = torch.randn(1, 96).bfloat16(), torch.tensor([[1, 4]]), torch.ones(1, 2)
        self.out = torch.zeros(1, 96, dtype=torch.bfloat16)
        task.inputs, task.chosen, task.factors = (each.data_ptr() for each in given)
        task.outputs, task.later = self.out.data_ptr(), ctypes.addressof(self.later)
        task.keeps = up, down, given, table
        self.job = coordinator.add(task)

    def note(self, *pairs: tuple[int, int]) -> None:
        """List experts with their slots, as a step's kernel does."""
        self.list.count = len(pairs)
        self.list.sequence += bool(pairs)
        for at, (expert, slot) in enumerate(pairs):
            self.list.pairs[at][:] = expert, slot

    def require(self, *pairs: tuple[int, int]) -> None:
        assert self.done.value == self.list.sequence
        for expert, slot in pairs:
            for part, slots in zip(self.parts, self.slots, strict=True):
                assert torch.equal(slots[slot], part[expert])

    def wait(self) -> None:
        """Wait for the word, as the layer's next lookup does."""
        ends = time.monotonic() + 20
        while self.done.value != self.list.sequence:
            assert time.monotonic() < ends
            time.sleep(0)


def test_what_is_listed_is_copied_behind_the_answer(coordinator: Coordinator) -> None:
    stream, copier, layers = Stream(coordinator), Copier(coordinator), []
    for _ in range(3):
        layers.append(Listing(coordinator))
    given = [[(4, 0), (1, 2)], [], [(0, 0)], [(5, 2), (3, 1), (2, 0)], []]
    for step in range(10):
        for number, layer in enumerate(layers):
            layer.wait()
            pairs = given[(step + number) % len(given)]
            layer.note(*pairs)
            assert stream.run(layer.job) == DONE
            if step % 2:
                layer.wait()
                layer.require(*pairs)
    coordinator.drain()
    for number, layer in enumerate(layers):
        layer.require(*given[(9 + number) % len(given)])
    assert copier.contexts == [0, 11]  # once, on the thread that copies, before there was a job
    sizes = {num_bytes for *_, num_bytes in copier.copies}
    assert sizes == {1 << 20, 20, 4}
    spent = coordinator.count()
    assert spent.queued_bytes == sum(n for *_, n in copier.copies if n != 4)
    assert spent.busy_ns > 0
    assert spent.queueing_ns > 0
    coordinator.check()


def test_two_pieces_are_under_way_at_a_time(coordinator: Coordinator) -> None:
    """More would be before what the next layer's step has cross."""
    stream, layer = Stream(coordinator), Listing(coordinator)
    copier = Copier(coordinator, has_events=True)
    product, *_ = add_product(coordinator)
    copier.is_held = True
    layer.note((2, 1), (0, 0))
    assert stream.run(layer.job) == DONE
    for num_done in range(3):
        ends = time.monotonic() + 20
        while len(copier.copies) < num_done + 2:
            assert time.monotonic() < ends
            time.sleep(0)
        assert stream.run(product) == DONE
        time.sleep(0.01)
        assert len(copier.copies) == num_done + 2
        copier.do_next()
    copier.is_held = False
    copier.do()
    coordinator.drain()
    layer.require((2, 1), (0, 0))


def test_a_bell_is_answered_while_copies_are_under_way(coordinator: Coordinator) -> None:
    """And ``drain`` waits for all of them, also for the ones that are not queued yet."""
    stream, copier, layer = Stream(coordinator), Copier(coordinator), Listing(coordinator)
    product, out, expected = add_product(coordinator)
    copier.is_held = True
    layer.note((2, 1), (0, 0))
    assert stream.run(layer.job) == DONE
    for _ in range(3):
        assert stream.run(product) == DONE
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    assert layer.done.value == 0
    coordinator.drain()
    layer.require((2, 1), (0, 0))
    assert copier.copies[-1] == (ctypes.addressof(layer.done), layer.later.list + 4, 4)
    coordinator.drain()  # of nothing


def test_a_bell_is_answered_while_the_driver_waits_for_a_lock(coordinator: Coordinator) -> None:
    """Whoever holds it may load a kernel, and wait for the GPU, which waits for the answer."""
    stream, copier, layer = Stream(coordinator), Copier(coordinator), Listing(coordinator)
    product, out, expected = add_product(coordinator)
    layer.note((2, 1), (0, 0))
    with copier.lock:
        assert stream.run(layer.job) == DONE
        time.sleep(0.1)  # the driver is called by now
        for _ in range(3):
            out.zero_()
            assert stream.run(product) == DONE
            torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
        assert copier.copies == []
    coordinator.drain()
    layer.require((2, 1), (0, 0))
    coordinator.check()


def test_the_driver_loads_what_it_needs_before_there_is_a_job(coordinator: Coordinator) -> None:
    word, source = ctypes.c_uint32(7), ctypes.c_uint32(3)
    given = ctypes.addressof(word), ctypes.addressof(source)
    copier = Copier(coordinator, has_events=True, word=given)
    assert copier.copies == [(*given, 4)]
    assert copier.noted == [21, 0, 21, 22, 0, 22]
    assert word.value == 3


def test_a_driver_that_copies_nothing_is_refused_at_once(coordinator: Coordinator) -> None:
    word = (ctypes.c_uint32 * 2)()
    given = ctypes.addressof(word), ctypes.addressof(word) + 4
    with pytest.raises(OffplanError, match=r"error 700; .* take `later_experts` out of the plan"):
        Copier(coordinator, 700, word=given)


@pytest.mark.slow
def test_a_driver_that_hangs_keeps_what_it_copies(words: Words) -> None:
    library = cores.load()
    coordinator = Coordinator(library, library.team(1), ctypes.addressof(words))
    copier, layer = Copier(coordinator), Listing(coordinator)
    layer.note((2, 1))
    with copier.lock:
        assert Stream(coordinator).run(layer.job) == DONE
        time.sleep(0.1)
        assert not coordinator.close()
    _left.append((copier, layer))


@pytest.mark.slow
def test_an_idle_coordinator_takes_no_processor_time(coordinator: Coordinator) -> None:
    """And hears a bell at once when it was woken, however long nobody rang."""
    Copier(coordinator)
    stream, nothing = Stream(coordinator), coordinator.add(None)
    assert stream.run(nothing) == DONE
    time.sleep(0.5)
    before = time.process_time()
    time.sleep(1)
    assert time.process_time() - before < 0.03
    coordinator.wake()
    assert stream.run(nothing) == DONE
    time.sleep(1)
    assert stream.run(nothing) == DONE  # also when nobody has


def test_a_list_is_read_before_the_answer(coordinator: Coordinator) -> None:
    """A lookup that finds nothing pending may write the next one as soon as it has come."""
    stream, copier, layer = Stream(coordinator), Copier(coordinator), Listing(coordinator)
    for _ in range(200):
        layer.note()
        assert stream.run(layer.job) == DONE
        layer.list.count, layer.list.pairs[0][:] = 1, (99, 99)
    coordinator.drain()
    assert copier.copies == []


def test_a_bell_heard_as_something_fails_is_answered(
    words: Words, coordinator: Coordinator
) -> None:
    """The failure's own answer came before the bell, whose kernel took it back."""
    slow = coordinator.add_sleep(0.5, limit_s=0.1)
    assert Stream(coordinator).run(slow) == FAILED  # the thread sleeps on
    words.answer = 0
    ends = time.monotonic() + 20
    while not words.answer:
        assert time.monotonic() < ends, "the thread heard a bell and answered nothing"
        time.sleep(0.01)
    assert words.answer == FAILED


def test_a_copy_that_fails_is_said(coordinator: Coordinator) -> None:
    stream, copier, layer = Stream(coordinator), Copier(coordinator, 700), Listing(coordinator)
    layer.note((2, 1), (3, 0))
    assert stream.run(layer.job) in (DONE, FAILED)
    coordinator.drain()  # which waits for nothing any more
    assert len(copier.copies) == 1
    with pytest.raises(OffplanError, match="the driver did not copy the experts"):
        coordinator.check()
    assert stream.run(layer.job) == FAILED


def test_it_closes_with_copies_pending(words: Words) -> None:
    library = cores.load()
    coordinator = Coordinator(library, library.team(1), ctypes.addressof(words))
    copier, layer = Copier(coordinator), Listing(coordinator)
    copier.is_held = True
    layer.note((2, 1), (0, 0))
    assert Stream(coordinator).run(layer.job) == DONE
    coordinator.close()
    coordinator.drain()
    coordinator.close()


def test_a_job_is_rung_for_by_the_host(coordinator: Coordinator) -> None:
    job, out, expected = add_product(coordinator)
    coordinator.exchange(job)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
