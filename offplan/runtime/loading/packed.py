"""Weights that a plan holds packed are packed on their way from the checkpoint to their places."""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch

from offplan.capabilities.packing import Packing
from offplan.checkpoint.model import Model
from offplan.checkpoint.tensors import TensorInfo
from offplan.errors import CheckpointError, UnpackableError
from offplan.forms.form import PATCH_ROWS, Component
from offplan.forms.host_kernels import PACKED
from offplan.held.packing import name_weights
from offplan.hostmem.block import HostBlock
from offplan.runtime.device import let_go, on_device, open_stream
from offplan.runtime.forms.packing import TooManyEscapes, pack, run_rows
from offplan.runtime.forms.reference import Components, expand
from offplan.runtime.loading.fill import Piece, Target, list_coded

Fill = Callable[["Matrix", int, torch.Tensor], object]
"""Puts the values of a matrix, from this row on, into a CPU tensor, bfloat16 of [rows, in]."""
Make = Callable[[torch.Tensor, str], Components]
"""Packs such rows of the named matrix, with no more patches than they have, and holds what comes
out of them against them."""


class OverfullError(Exception):
    """Matrices have more patches than are reserved for.

    ``tensors`` are what the checkpoint stores of them and of what is joined to them, by name.
    """

    def __init__(self, message: str, tensors: frozenset[str]) -> None:
        super().__init__(message)
        self.tensors = tensors

    def named(self, model: Model) -> UnpackableError:
        """Return the error that names the weights as plans leave them unpacked."""
        names = name_weights(model, self.tensors)
        return UnpackableError(f"{self}; plan it again with {Packing.leave(names)}", names)


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix that is stored by its values, [out, in], and where its parts are to lie."""

    tensor: TensorInfo
    """Tensor that the checkpoint stores of it, of one expert if one tensor holds all. Its shape is
    [out, in], also where it is turned."""
    weight: str
    """Name of the model's weight that it is, or is a part of."""
    first: int
    """Its first weight among those of ``weight``, in order of rows."""
    first_row: int
    """Its first row within its expert's matrix, which others may be joined to."""
    first_patch: int
    """Its first patch, likewise."""
    places: Mapping[Component, torch.Tensor]
    is_turned: bool = False
    """True if the checkpoint stores it as [in, out]."""

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield first and last row, exclusive, of what is packed at once: whole blocks of rows."""
        num_out, num_in = self.tensor.shape
        step = run_rows(num_in)
        for start in range(0, num_out, step):
            yield start, min(start + step, num_out)

    def pack(self, fill: Fill, make: Make, buffer: torch.Tensor) -> int:
        """Have ``make`` pack what ``fill`` puts into a CPU buffer, bfloat16, run by run.

        Returns the bytes of its values. Raises TooManyEscapes if they have more patches than are
        reserved for.
        """
        num_in = self.tensor.shape[1]
        patches, blocks, num_patches = [], [], 0
        for start, stop in self.runs():
            rows = buffer[: (stop - start) * num_in].view(-1, num_in)
            fill(self, start, rows)
            parts = make(rows, self.tensor.name)
            for part in (Component.WEIGHT, Component.EXPONENT, Component.BASE):
                rows_each = (stop - start) // len(parts[part])  # bases are of 64 rows together
                place = self.places[part][start // rows_each : stop // rows_each]
                _put(parts[part], place, buffer.view(torch.uint8))
            ends = parts[Component.PATCH_BLOCKS].cpu()
            own = parts[Component.PATCHES].cpu()
            patches.append(own + torch.tensor([(self.first_row + start) * num_in, 0]))
            blocks.append(ends + self.first_patch + num_patches)
            num_patches += len(own)
        reserve = len(self.places[Component.PATCHES])
        if num_patches > reserve:
            raise TooManyEscapes(num_patches, reserve)
        self.places[Component.PATCHES][:num_patches].copy_(torch.cat(patches))
        self.places[Component.PATCH_BLOCKS].copy_(torch.cat(blocks))
        return self.tensor.nbytes


def _put(part: torch.Tensor, place: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy a part to its place, from a GPU to host memory by way of a buffer of bytes.

    Host memory that is not page-locked CUDA fills by one thread, which also has to make its pages.
    """
    if part.is_cuda and not place.is_cuda:
        part = buffer[: part.nbytes].view(part.dtype).view(part.shape).copy_(part)
    place.copy_(part)


@contextmanager
def bringing_kernels(device: torch.device) -> Iterator[None]:
    """Have another thread bring to the current CUDA device what packs; leaving waits for it.

    CUDA loads a kernel when it is first launched. Source: the first matrix that was packed on an
    H200 took 0.8 s, and the next ones 2 ms.
    """
    if device.type != "cuda":
        yield
        return
    # while two threads import, one may find a module half done
    from offplan.runtime.forms import products  # noqa: F401

    current = torch.device("cuda", torch.cuda.current_device())
    with ThreadPoolExecutor(1, thread_name_prefix="offplan-kernels") as thread:
        thread.submit(pack_a_little, current)  # what fails here fails again where it is told
        yield


def pack_a_little(device: torch.device) -> Components:
    """Pack a small matrix, of which a weight needs a patch."""
    # triton compiles kernels anew for sizes that are no multiples of 16: few models have them
    values = torch.ones(PATCH_ROWS, 1024, dtype=torch.bfloat16)
    values[0, 0] = 2.0**-100
    with on_device(device), torch.inference_mode():
        return _pack_exactly(values.to(device), "a matrix of ones")


@contextmanager
def open_recoding(
    matrices: Sequence[Matrix], device: torch.device, num_threads: int
) -> Iterator[Callable[[Fill], Iterator[int]]]:
    """Set aside what packs matrices on ``device``, and give a function that packs them all.

    It has each packed by one of a few threads, and yields the bytes of each. Once all are packed
    that can be, it raises OverfullError for those that cannot. Leaving the context waits for the
    copies, and gives back what packing took of a CUDA device's memory.
    """
    if not matrices:
        yield lambda _: iter(())
        return
    is_cuda = device.type == "cuda"
    sizes = ((stop - start) * m.tensor.shape[1] for m in matrices for start, stop in m.runs())
    largest = max(sizes)
    idle: queue.SimpleQueue[HostBlock] = queue.SimpleQueue()
    # begins behind what is queued, which may still read the memory that is filled
    stream, one_at_a_time = open_stream(device), threading.Lock()

    def make(rows: torch.Tensor, name: str) -> Components:
        with one_at_a_time if is_cuda else nullcontext():  # or each would need memory of its own
            parts = _pack_exactly(rows.to(device), name)
            used = int(parts[Component.PATCH_BLOCKS][-1, 1])
            # cut, or each thread would keep room for as many patches as there are weights
            return parts | {Component.PATCHES: parts[Component.PATCHES][:used].clone()}

    with ExitStack() as stack:
        stack.callback(_give_back, device)
        for _ in range(num_threads):
            block = HostBlock(2 * largest, pin=is_cuda)
            idle.put(stack.enter_context(closing(block)))
        threads = ThreadPoolExecutor(num_threads, thread_name_prefix="offplan-pack")
        # threads end before the buffers that they fill are given back
        stack.callback(threads.shutdown, cancel_futures=True)

        def pack_one(matrix: Matrix, fill: Fill) -> int:
            block = idle.get()
            try:
                with on_device(device), torch.cuda.stream(stream), torch.inference_mode():
                    return matrix.pack(fill, make, block.tensor.view(torch.bfloat16))
            finally:
                idle.put(block)

        def pack_each(fill: Fill) -> Iterator[int]:
            ordered = sorted(matrices, key=lambda m: (m.tensor.shard or "", m.tensor.offset))
            futures = {threads.submit(pack_one, each, fill): each for each in ordered}
            overfull: dict[Matrix, TooManyEscapes] = {}
            for future in as_completed(futures):
                try:
                    yield future.result()
                except TooManyEscapes as error:
                    overfull[futures[future]] = error
            if stream is not None:  # leaving waits, too, but shows no copy that failed
                stream.synchronize()
            if overfull:
                raise _describe_overfull(overfull, matrices)

        yield pack_each


def _describe_overfull(
    overfull: Mapping[Matrix, TooManyEscapes], matrices: Sequence[Matrix]
) -> OverfullError:
    """Say which matrices have no room, and why the first of them has none."""
    weights = {matrix.weight for matrix in overfull}
    first = min(overfull, key=lambda matrix: matrix.tensor.name)
    others = f"; so have {len(overfull) - 1} other matrices" if len(overfull) > 1 else ""
    return OverfullError(
        f"{first.tensor.name} cannot be held packed: {overfull[first]}{others}",
        frozenset(matrix.tensor.name for matrix in matrices if matrix.weight in weights),
    )


def _give_back(device: torch.device) -> None:
    """Wait for copies, also those that an error left behind, and empty a CUDA device's cache."""
    let_go(device)
    with suppress(RuntimeError):  # a device that failed says so again
        torch.cuda.empty_cache()


def _pack_exactly(values: torch.Tensor, name: str) -> Components:
    """Pack rows, and hold what their parts stand for against them, bit for bit."""
    parts = pack(values, reserve=values.numel())
    if values.is_cuda:
        from offplan.runtime.forms.products import expand_on_gpu  # needs triton

        made = expand_on_gpu(PACKED, parts, values.dtype)
    else:
        made = expand(PACKED, parts, values.dtype)
    if not torch.equal(made.view(torch.int16), values.view(torch.int16)):
        raise CheckpointError(
            f"{name} does not come out of its packed form as it went in, which is a fault of the "
            f"device or of offplan; plan it again with {Packing.without}"
        )
    return parts


def find_matrices(
    targets: Mapping[str, Target], destinations: Mapping[str, torch.Tensor]
) -> list[Matrix]:
    """List the matrices that are packed while they are loaded, by parts' destinations."""
    found: list[Matrix] = []
    for weight, parts in list_coded(targets).items():
        names = {part: name for part, (name, _) in parts.items()}
        if not targets[names[Component.WEIGHT]].is_recoded:
            continue
        whole = destinations[names[Component.WEIGHT]]
        pieces = zip(*(targets[each].pieces for each in names.values()), strict=True)
        for of_parts in pieces:
            by_part = dict(zip(names, of_parts, strict=True))
            places = {p: piece.select(destinations[names[p]]) for p, piece in by_part.items()}
            found += _split(weight, whole, by_part, places)
    return found


def _split(
    weight: str,
    whole: torch.Tensor,
    pieces: Mapping[Component, Piece],
    places: Mapping[Component, torch.Tensor],
) -> Iterator[Matrix]:
    """Yield the matrices of one stored tensor: of each expert where it holds all."""
    stored = pieces[Component.WEIGHT].source.made_of
    assert stored is not None
    assert all(piece.source.made_of == stored for piece in pieces.values())
    first_row, first_patch = (
        _first_row(pieces[part]) for part in (Component.WEIGHT, Component.PATCHES)
    )
    if len(stored.shape) == 2:
        places = {part: place.unsqueeze(0) for part, place in places.items()}
    shape = pieces[Component.WEIGHT].source.parameter.shape[-2:]
    matrix, is_turned = stored._replace(shape=shape), shape != stored.shape[-2:]
    for number in range(len(places[Component.WEIGHT])):
        of_matrix = {part: place[number] for part, place in places.items()}
        yield Matrix(
            matrix._replace(offset=stored.offset + number * matrix.nbytes),
            weight,
            int(of_matrix[Component.WEIGHT].storage_offset() - whole.storage_offset()),
            first_row,
            first_patch,
            of_matrix,
            is_turned,
        )


def _first_row(piece: Piece) -> int:
    """Return where a piece begins along the rows of what it is joined to."""
    rows = piece.index[-2] if piece.index else slice(None)
    assert isinstance(rows, slice)
    return rows.start or 0
