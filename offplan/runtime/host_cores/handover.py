"""Products are handed over to the host's cores within a stream, captured or not.

A kernel writes inputs into page-locked memory, 0 to a word, and rings with another. The stream
waits for the first word to become 1 or more, and a kernel then reads what the cores made. All that
is captured is constant: addresses, and the number of a job, of which each product has one for each
number of rows. Nothing here runs while steps are replayed.

Source: on an H200 an exchange of one token and nothing to compute took 10.6 us. Copies moved the
token, 6 us of it, and the stream wrote both words, 4.6 us with the wait.
"""

import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import torch

from offplan.errors import OffplanError, Topic
from offplan.hostcores.coordinator import Coordinator, Spent, choose_cores, parse_cores
from offplan.hostcores.library import Dense, Driver, Later, LaterList, LaterTensor, Words
from offplan.hostmem.block import HostBlock
from offplan.hostmem.limits import core_quota
from offplan.runtime.forms import tasks
from offplan.runtime.host_cores import cores

SLOWEST_BYTES_PER_S = 5e9
"""Rate that a product is priced at when the watchdog's limit is set: no host's cores are slower.

Source: estimated; one core reads 10 GB/s and more.
"""
_PROBE_S = 2.0
_LISTS = 256
"""Lists of experts brought for later that a block of host memory has."""
_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: the stream waits for nothing of the default one."""
_NO_TIMING = 2
"""CU_EVENT_DISABLE_TIMING."""
_AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ."""


class Stream(Protocol):
    """The operations that the exchange asks of a stream: each is done once all before it is."""

    def hand_over(
        self, inputs: Sequence[torch.Tensor], memory: Sequence[torch.Tensor], bell: tasks.Bell
    ) -> None:
        """Copy inputs into memory, write 0 to the answer, and then the job's number to the bell."""

    def wait(self, address: int, least: int) -> None:
        """Wait until a word is as large."""

    def call(self, function: int, argument: int) -> None:
        """Call a C function on the host."""


class CurrentStream:
    """CUDA's current stream, by the driver; raises OffplanError where that refuses."""

    def __init__(self) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise cores.refuse(f"does not find the driver ({error})", topic=Topic.DRIVER) from error
        pointer, word = ctypes.c_void_p, ctypes.c_uint32
        self._driver.cuStreamWaitValue32_v2.argtypes = [pointer, ctypes.c_uint64, word, word]
        self._driver.cuLaunchHostFunc.argtypes = [pointer] * 3

    def hand_over(
        self, inputs: Sequence[torch.Tensor], memory: Sequence[torch.Tensor], bell: tasks.Bell
    ) -> None:
        """Copy inputs and ring by one kernel."""
        from offplan.runtime.forms.handover_kernels import hand_over  # needs triton

        hand_over(inputs, memory, bell)

    def wait(self, address: int, least: int) -> None:
        """Wait until a word is as large."""
        self._do("cuStreamWaitValue32_v2", address, least, _AT_LEAST)

    def call(self, function: int, argument: int) -> None:
        """Call a C function on the host."""
        self._do("cuLaunchHostFunc", function, argument)

    def make_copier(self) -> Driver:
        """Make a stream of lowest priority on the current device, and name what copies by it."""
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        least, greatest = ctypes.c_int(), ctypes.c_int()
        self._require("cuCtxGetCurrent", ctypes.byref(context))
        self._require("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        self._require("cuStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, least)
        events = (ctypes.c_void_p * 2)()
        for at in range(2):
            event = ctypes.byref(events, at * ctypes.sizeof(ctypes.c_void_p))
            self._require("cuEventCreate", event, _NO_TIMING)

        def find(*names: str) -> list[ctypes.c_void_p]:
            return [ctypes.cast(getattr(self._driver, name), ctypes.c_void_p) for name in names]

        copying = find("cuCtxSetCurrent", "cuMemcpyHtoDAsync_v2", "cuStreamSynchronize")
        return Driver(*copying, context, stream, *find("cuEventRecord", "cuEventQuery"), events)

    def destroy(self, copier: Driver) -> None:
        """Give the stream of ``make_copier`` back, on which nothing is under way."""
        for event in copier.events:
            self._driver.cuEventDestroy_v2(ctypes.c_void_p(event))
        self._driver.cuStreamDestroy_v2(ctypes.c_void_p(copier.stream))

    def _require(self, name: str, *arguments: object) -> None:
        if status := getattr(self._driver, name)(*arguments):
            raise OffplanError(
                f"the driver's {name} failed with {status}, by which experts are copied to the GPU "
                "for later: update the driver, or take `later_experts` out of the plan",
                topic=Topic.DRIVER,
            )

    def _do(self, name: str, *arguments: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        if status := getattr(self._driver, name)(stream, *arguments):
            raise OffplanError(
                f"the driver's {name} failed with {status}, by which the host's cores are asked "
                "for products: update the driver, or plan without them (`decode: uva`)",
                topic=Topic.DRIVER,
            )


class Exchange:
    """Rings for jobs within a stream, and has the stream wait until they are done."""

    def __init__(
        self, coordinator: Coordinator, stream: Stream, bell: tasks.Bell, *, waits: bool
    ) -> None:
        """Ring with ``bell``; streams wait for a word where ``waits``, else they call the host."""
        self._coordinator, self._stream, self._bell = coordinator, stream, bell
        self.waits = waits
        self._calls: dict[int, int] = {}
        self._is_begun = False

    def bell(self, job: int) -> tasks.Bell:
        """Return what rings for a job, or for nothing where a function of the host's will."""
        return self._bell._replace(job=job if self.waits else 0)

    def load(self) -> None:
        """Ring for nothing: a kernel is not loaded first while a stream is captured."""
        self._stream.hand_over((), (), self._bell)

    def begin(
        self, job: int, inputs: Sequence[torch.Tensor] = (), memory: Sequence[torch.Tensor] = ()
    ) -> None:
        """Copy inputs into memory and have a job begun, once all is done that was queued before."""
        self.end()
        self._stream.hand_over(inputs, memory, self.bell(job))
        self.note_begun(job)

    def note_begun(self, job: int) -> None:
        """Go on once something that was queued has rung for a job, with what ``bell`` returns."""
        if self.waits:
            self._is_begun = True
            return
        if job not in self._calls:
            self._calls[job] = self._coordinator.call_of(job)
        self._stream.call(self._coordinator.host_function, self._calls[job])

    def end(self) -> None:
        """Have the stream wait until the job is done that was begun last, if it may not be yet."""
        is_begun, self._is_begun = self._is_begun, False  # also where the stream cannot wait
        if is_begun:
            self._stream.wait(self._coordinator.answer, 1)

    def invalidate(self) -> None:
        """Take it that an aborted pass has begun a job, be it by a graph, which notes none.

        The next job's inputs lie where that one's do. If there was none, the answer of the last job
        still stands.
        """
        self._is_begun = self.waits

    def enqueue(self, job: int) -> None:
        """Have a job done once all is done that the stream has been given before."""
        self.begin(job)
        self.end()


class Handover:
    """Has products of what is on a device computed by cores of the host, within its stream."""

    def __init__(
        self, device: torch.device, stream: Stream | None = None, num_threads: int | None = None
    ) -> None:
        """Start the threads, on cores of the GPU's own node, and find how streams can wait.

        On the CPU ``stream`` stands in for the GPU's. Raises OffplanError.
        """
        library = cores.load()
        self.kernels, self._device = library.kernels(), device
        on_gpu = device.type == "cuda"
        chosen = choose_cores(
            os.sched_getaffinity(0),
            nearest=nearest_cores(device) if on_gpu else (),
            num_threads=num_threads,
            quota=core_quota(),
        )
        self.num_threads, self._cores = len(chosen), chosen
        self._words = HostBlock(ctypes.sizeof(Words), pin=on_gpu)
        team = library.team(len(chosen), chosen)
        self._coordinator = Coordinator(library, team, self._words.tensor.data_ptr(), chosen[0])
        self._blocks: list[HostBlock] = []
        self._room: torch.Tensor | None = None
        """Memory that inputs and products pass through, as the host has it."""
        self._jobs: dict[tuple[int, int, int], _Job] = {}
        self._lists: list[LaterList] = []
        """Lists of experts brought for later, of each layer that has some brought."""
        self._list_blocks: list[HostBlock] = []
        self._copier: tuple[CurrentStream, Driver] | None = None
        self._keeps: list[object] = []
        """Objects that the coordinator's own point to, and weights that jobs read."""
        try:
            stream = CurrentStream() if stream is None else stream
            self._stream = stream
            words = self._words.device_view(device).view(torch.int32)
            bell = tasks.Bell(words, torch.zeros(1, dtype=torch.int32, device=device), 0)
            self.exchange = Exchange(self._coordinator, stream, bell, waits=True)
            # as if a job had ended: whoever waits before there was one would wait for good
            ctypes.c_uint32.from_address(self._coordinator.answer).value = 1
            if on_gpu:
                self.exchange.waits = self._can_wait()
        except BaseException:
            self.close()
            raise

    def multiply(self, weight: cores.Matrix, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows, bfloat16 of [rows, in], by a weight: bfloat16 of [rows, out]."""
        job = self._job(weight, len(x), 0)
        self.exchange.begin(job.number, [x], job.inputs)
        return self.end(job)

    def send(self, experts: cores.Experts, *arguments: torch.Tensor) -> torch.Tensor:
        """Send tokens through their experts, as ``cores.send`` does."""
        return self.end(self.begin(experts, *arguments))

    def begin(
        self,
        experts: cores.Experts,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> "_Job":
        """Begin to send tokens through their experts, as ``ByCores.begin`` does."""
        job = self._job(experts, *top_k_weights.shape)
        self.exchange.begin(job.number, [hidden_states, top_k_index, top_k_weights], job.inputs)
        return job

    def begin_by(
        self, experts: cores.Experts, sizes: Sequence[int], launch: tasks.Launch
    ) -> "_Job":
        """Begin to send what a kernel writes, as ``ByCores.begin_by`` does."""
        num_rows, num_chosen = sizes
        job = self._job(experts, num_rows, num_chosen)
        launch(job.inputs, self.exchange.bell(job.number))
        self.exchange.note_begun(job.number)
        return job

    def end(self, job: "_Job", made: torch.Tensor | None = None) -> torch.Tensor:
        """Have the stream wait until a job is done; return what it made, or that and ``made``.

        One kernel reads what the cores made where it lies.
        """
        self.exchange.end()
        if made is not None:
            return made + job.outputs
        if self._device.type == "cpu":
            return job.outputs.clone()
        from offplan.runtime.forms.handover_kernels import fetch  # needs triton

        return fetch(job.outputs)

    def bring_later(
        self, experts: cores.Experts, parts: Sequence[tuple[int, int, int]], done: int
    ) -> torch.Tensor:
        """Have experts that a kernel lists be copied into slots, behind each product of a layer.

        ``experts`` are those of the layer, of which no job was made yet. ``parts`` are the
        addresses of a part of the first expert and of its first slot, and an expert's bytes of it.
        ``done`` is the address of the word on the device that the list's sequence number is copied
        to, last. Returns the list as the device sees it, int32. A GPU only; raises OffplanError.
        """
        size, place = ctypes.sizeof(LaterList), len(self._lists) % _LISTS
        if not place:
            pins = self._device.type == "cuda"
            self._list_blocks.append(HostBlock(_LISTS * size, pin=pins))
        block, listed = self._list_blocks[-1], slice(place * size, (place + 1) * size)
        address = block.tensor[listed].data_ptr()
        if self._copier is None:
            assert isinstance(self._stream, CurrentStream), "a driver copies to a GPU"
            self._copier = self._stream, self._stream.make_copier()
            # nothing is listed yet: both words are 0
            self._coordinator.copy_by(self._copier[1], done, address + LaterList.sequence.offset)
        self._lists.append(LaterList.from_address(address))
        table = (LaterTensor * len(parts))(*(LaterTensor(*each) for each in parts))
        later = Later(address, done, len(parts), ctypes.addressof(table))
        experts.later = ctypes.addressof(later)
        self._keeps += [table, later]
        return block.device_view(self._device)[listed].view(torch.int32)

    def wake(self) -> None:
        """Have the next product begun at once, though none was asked for a while."""
        self._coordinator.wake()

    def drain(self) -> None:
        """Wait until all is done that the current stream was given, and all later copies are."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._coordinator.drain()

    @contextmanager
    def caller_elsewhere(self) -> Iterator[None]:
        """Keep the calling thread off the cores that compute, if it may use others.

        Where it waits busily on one, it takes half of the time of that core's own thread.
        """
        allowed = os.sched_getaffinity(0)
        try:
            if others := allowed - {*self._cores}:
                os.sched_setaffinity(0, others)
            yield
        finally:
            os.sched_setaffinity(0, allowed)

    def time_experts(self, experts: cores.Experts, chosen: Sequence[int], room: int) -> float:
        """Time an exchange of one row that chooses experts, ``room`` at most; returns seconds.

        The host rings. No stream may have rung for a job whose answer has not come. Raises
        OffplanError where the cores fail, whose time is none.
        """
        key = ctypes.addressof(experts), 0, room
        if key not in self._jobs:
            alone = cores.Experts.from_buffer_copy(experts)
            alone.later = None
            self._jobs[key] = self._make_job(alone, 1, room)
        job = self._jobs[key]
        x, pairs, factors = job.inputs_on_host
        x.fill_(1)
        pairs.fill_(-1)
        pairs[0, : len(chosen)] = torch.tensor(chosen)
        factors.fill_(1)
        with self.caller_elsewhere():
            began = time.perf_counter()
            self._coordinator.exchange(job.number)
            seconds = time.perf_counter() - began
        self._coordinator.check()
        return seconds

    def count(self) -> Spent:
        """Return what the coordinator has spent."""
        return self._coordinator.count()

    def check(self) -> None:
        """Raise OffplanError where a product has failed, or a copy for later has not come."""
        self._coordinator.check()
        if any(each.failed for each in self._lists):
            raise OffplanError(
                "experts that the link brings for later did not come in time: another process "
                "keeps the link or the GPU. Open the session again; if it comes again, take "
                "`later_experts` out of the plan"
            )

    def keep(self, owner: object) -> None:
        """Keep what addresses of tasks point to, for as long as a thread may read there."""
        self._keeps.append(owner)

    def close(self) -> bool:
        """End the threads; the device is idle.

        Returns False if one hangs, which keeps all that it may use.
        """
        if self in _left:
            return False
        if not self._coordinator.close():
            _left.append(self)
            return False
        if self._copier is not None:
            stream, copier = self._copier
            stream.destroy(copier)
        self._copier = None
        self._lists.clear()
        for block in (self._words, *self._blocks, *self._list_blocks):
            block.close()
        self._blocks.clear()
        self._list_blocks.clear()
        self._jobs.clear()
        self._keeps.clear()
        return True

    def _job(self, task: cores.Matrix | cores.Experts, num_rows: int, num_chosen: int) -> "_Job":
        """Return the job of so many rows, made when they first come, which no capture does.

        A pass that was aborted may have begun one, whose inputs lie in the same memory.
        """
        self.exchange.end()
        key = ctypes.addressof(task), num_rows, num_chosen
        if key not in self._jobs:
            self._jobs[key] = self._make_job(task, num_rows, num_chosen)
        return self._jobs[key]

    def _make_job(
        self, task: cores.Matrix | cores.Experts, num_rows: int, num_chosen: int
    ) -> "_Job":
        is_dense = isinstance(task, cores.Matrix)
        first, last = (task, task) if isinstance(task, cores.Matrix) else (task.up, task.down)
        sizes = [(num_rows, first.num_in), (num_rows, last.num_out)]
        types = [torch.bfloat16, torch.bfloat16]
        if not is_dense:
            sizes += [(num_rows, num_chosen)] * 2
            types += [torch.int64, torch.float32]
        on_host, on_device = self._lay_out(sizes, types)
        x, out = (each.data_ptr() for each in on_host[:2])
        made: Dense | cores.Experts
        if isinstance(task, cores.Matrix):
            made = Dense(self.kernels, task, num_rows, x, out, 0)
            num_bytes = task.num_out * task.num_in * 2
        else:
            made = cores.Experts.from_buffer_copy(task)
            made.kernels, made.precise, made.inputs, made.outputs = self.kernels, 0, x, out
            made.num_tokens, made.num_chosen = num_rows, num_chosen
            made.chosen, made.factors = (each.data_ptr() for each in on_host[2:])
            pairs = num_rows * num_chosen
            num_bytes = pairs * (first.num_out * first.num_in + last.num_out * last.num_in) * 2
        number = self._coordinator.add(made, num_bytes / SLOWEST_BYTES_PER_S)
        x_there, out_there, *others = on_device
        on_host = [on_host[0], *on_host[2:]]
        return _Job(number, [x_there, *others], out_there, on_host)

    def _lay_out(
        self, sizes: list[tuple[int, int]], types: list[torch.dtype]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Give tensors room in the memory that all products pass through, one after the other."""
        lengths = [
            -(-rows * columns * dtype.itemsize // 256) * 256
            for (rows, columns), dtype in zip(sizes, types, strict=True)
        ]
        if self._room is None or sum(lengths) > self._room.nbytes:
            # captured steps may still read the old one, which stays
            block = HostBlock(max(sum(lengths), 1 << 20), pin=self._device.type == "cuda")
            self._blocks.append(block)
            self._room = block.tensor
        host, views, offset = self._room, [], 0
        device = self._blocks[-1].device_view(self._device)
        for memory in (host, device):
            offset, made = 0, []
            for (rows, columns), dtype, length in zip(sizes, types, lengths, strict=True):
                part = memory[offset : offset + rows * columns * dtype.itemsize]
                made.append(part.view(dtype).view(rows, columns))
                offset += length
            views.append(made)
        return views[0], views[1]

    def _can_wait(self) -> bool:
        """Capture and replay one exchange that computes nothing; False where it does not come."""
        job = self._coordinator.add(None)
        self.exchange.load()  # done before anything is captured: a capture waits for the device
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self._device)
        done = torch.cuda.Event()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self.exchange.enqueue(job)
            with torch.cuda.stream(stream):
                graph.replay()
                done.record()
        except (OffplanError, RuntimeError):
            return False
        ends = time.monotonic() + _PROBE_S
        while not done.query() and time.monotonic() < ends:
            time.sleep(1e-4)
        came = done.query()
        if not came:  # let the stream go, whatever kept the coordinator from answering
            ctypes.c_uint32.from_address(self._coordinator.answer).value = 1
            with suppress(RuntimeError):
                done.synchronize()
        return came


_left: list[Handover] = []
"""Those of hung threads, whose memory is never given back."""


class _Job:
    """A product of so many rows, as the device sees it."""

    def __init__(
        self,
        number: int,
        inputs: list[torch.Tensor],
        outputs: torch.Tensor,
        inputs_on_host: list[torch.Tensor],
    ) -> None:
        self.number, self.inputs, self.outputs = number, inputs, outputs
        self.inputs_on_host = inputs_on_host


def nearest_cores(device: torch.device, devices: Path = Path("/sys/bus/pci/devices")) -> list[int]:
    """List the cores of a GPU's NUMA node; none where the kernel does not say."""
    gpu = torch.cuda.get_device_properties(device)
    domain, bus, number = (getattr(gpu, f"pci_{part}_id") for part in ("domain", "bus", "device"))
    try:
        path = devices / f"{domain:04x}:{bus:02x}:{number:02x}.0" / "local_cpulist"
        return parse_cores(path.read_text())
    except (OSError, ValueError):
        return []
