"""The C++ library as Python calls it: structures of numbers and addresses, teams of threads.

Nothing here knows tensors: whoever calls sees to it that what addresses point to stays there.
"""

import ctypes
import os
from collections.abc import Sequence
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_double,
    c_float,
    c_int64,
    c_uint8,
    c_uint32,
    c_void_p,
)
from enum import IntEnum
from functools import cache

from offplan.errors import OffplanError
from offplan.hostcores.build import load_code, refuse

_NUM_PARTS = 8


class Kind(IntEnum):
    """The kind of a form, as kernels tell forms apart."""

    RAW = 0
    FP8 = 1
    FP4 = 2
    INT4 = 3
    INT8 = 4
    PACKED = 5


class ScaleType(IntEnum):
    """The type of scales."""

    NONE = 0
    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    EXPONENT = 4
    E4M3 = 5


class ZeroType(IntEnum):
    """The type in which zeros are stored."""

    NONE = 0
    BYTES = 1
    WORDS = 2


class Place(IntEnum):
    """The place of a part's address in a Matrix."""

    CODES = 0
    SCALES = 1
    ZEROS = 2
    WHOLE = 3
    EXPONENTS = 4
    BASES = 5
    PATCHES = 6
    PATCH_BLOCKS = 7


class Activation(IntEnum):
    """The activation of the first product of routed experts."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU = 3
    RELU_SQUARED = 4


class InstructionSet(IntEnum):
    """The instruction set that kernels are compiled for."""

    AVX2 = 0
    AVX512 = 1


class Matrix(Structure):
    """A matrix [num_out, num_in] of a stored form, or those of all experts; see ``matrix.h``."""

    _fields_ = (
        ("part", c_void_p * _NUM_PARTS),
        ("step", c_int64 * _NUM_PARTS),
        *(
            (name, c_int64)
            for name in (
                *("num_out", "num_in", "kind", "scale_type", "zero_type", "scale_rows"),
                *("scale_columns", "row_scales", "whole_rows", "whole_divides", "rows_ahead"),
                *("unsigned_codes", "stored_in"),
            )
        ),
        ("factor", c_double),
    )


class Dense(Structure):
    """A product of one matrix; see ``products.h``."""

    _fields_ = (
        ("kernels", c_void_p),
        ("weight", Matrix),
        ("num_inputs", c_int64),
        ("inputs", c_void_p),
        ("outputs", c_void_p),
        ("precise", c_int64),
    )


class Experts(Structure):
    """Tokens sent through their routed experts; see ``products.h``."""

    _fields_ = (
        ("kernels", c_void_p),
        ("up", Matrix),
        ("down", Matrix),
        ("up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("num_experts", c_int64),
        ("is_gated", c_int64),
        ("activation", c_int64),
        ("is_interleaved", c_int64),
        ("alpha", c_double),
        ("limit", c_double),
        ("offset", c_double),
        ("num_tokens", c_int64),
        ("num_chosen", c_int64),
        ("inputs", c_void_p),
        ("chosen", c_void_p),
        ("factors", c_void_p),
        ("outputs", c_void_p),
        ("precise", c_int64),
    )


class RowOrder(IntEnum):
    """The order in which AVX-512 kernels of one input take rows; see ``matrix.h``."""

    OF_PROCESSOR = 0
    ONE_BY_ONE = 1
    BESIDE = 2
    APART = 3


class Words(Structure):
    """The words by which a stream and the coordinator tell each other; see ``coordinator.h``."""

    _fields_ = (
        ("bell", c_uint32),
        ("_", c_uint8 * 60),
        ("answer", c_uint32),
        ("_end", c_uint8 * 60),
    )


class Team:
    """Threads that compute one product at a time, all of them together."""

    def __init__(self, library: "Library", address: int | None, num_threads: int) -> None:
        if not address:
            raise OffplanError(f"the system gives no {num_threads} threads to compute with")
        self._library, self.address, self.num_threads = library, address, num_threads

    def multiply(self, dense: Dense) -> None:
        """Compute a product; raises MemoryError."""
        if self._library.calls.offplan_multiply(self.address, byref(dense)):
            raise MemoryError

    def multiply_experts(self, experts: Experts) -> None:
        """Send tokens through their experts; raises MemoryError."""
        if self._library.calls.offplan_multiply_experts(self.address, byref(experts)):
            raise MemoryError

    def read(self, address: int, num_bytes: int) -> None:
        """Read bytes and compute nothing: as fast as the memory gives them."""
        self._library.calls.offplan_read(self.address, address, num_bytes)

    def close(self) -> None:
        """End the team's threads; closing it again does nothing."""
        address, self.address = self.address, 0
        if address:
            self._library.calls.offplan_end(address)


class Library:
    """The compiled library."""

    def __init__(self, calls: ctypes.CDLL, fp4: Sequence[float], fp8: Sequence[float]) -> None:
        """Give it what codes of FP4 and FP8 stand for, 16 and 256 numbers.

        Raises OffplanError if the processor has not what it needs.
        """
        self.calls = calls
        calls.offplan_instruction_sets.restype = c_int64
        calls.offplan_kernels.argtypes, calls.offplan_kernels.restype = [c_int64], c_void_p
        calls.offplan_row_order.argtypes = [c_int64]
        calls.offplan_tables.argtypes = [POINTER(c_float), POINTER(c_float)]
        calls.offplan_sizes.argtypes, calls.offplan_sizes.restype = [c_int64], c_int64
        calls.offplan_openmp.argtypes = [c_int64, c_void_p, c_void_p, c_void_p]
        calls.offplan_pool.argtypes = [c_int64, POINTER(c_int64)]
        calls.offplan_openmp.restype = calls.offplan_pool.restype = c_void_p
        calls.offplan_end.argtypes = [c_void_p]
        calls.offplan_multiply.argtypes = [c_void_p, c_void_p]
        calls.offplan_multiply_experts.argtypes = [c_void_p, c_void_p]
        calls.offplan_multiply.restype = calls.offplan_multiply_experts.restype = c_int64
        calls.offplan_read.argtypes = [c_void_p, c_void_p, c_int64]
        calls.offplan_coordinator.argtypes = [c_void_p, c_void_p, c_int64]
        calls.offplan_coordinator.restype = c_void_p
        calls.offplan_add_job.argtypes = [c_void_p, c_int64, c_void_p, c_int64]
        calls.offplan_trouble.argtypes = calls.offplan_end_coordinator.argtypes = [c_void_p]
        for name in ("add_job", "trouble", "end_coordinator"):
            getattr(calls, f"offplan_{name}").restype = c_int64
        for which, structure in enumerate((Matrix, Dense, Experts, Words)):
            assert calls.offplan_sizes(which) == ctypes.sizeof(structure), structure
        bits = calls.offplan_instruction_sets()
        self.instruction_sets = [each for each in InstructionSet if bits >> each & 1]
        """Instruction sets of the processor, the best last."""
        if not self.instruction_sets:
            raise refuse("needs a processor with AVX2, FMA and F16C, which this one has not")
        calls.offplan_tables((c_float * 16)(*fp4), (c_float * 256)(*fp8))

    def kernels(self, wanted: InstructionSet | None = None) -> int:
        """Return the address of the kernels for an instruction set, the best one if left out."""
        chosen = self.instruction_sets[-1] if wanted is None else wanted
        assert chosen in self.instruction_sets, "callers ask what there is"
        address: int = self.calls.offplan_kernels(int(chosen))
        return address

    def take_rows(self, order: RowOrder) -> None:
        """Have kernels take rows in an order, of all products that begin from now on."""
        self.calls.offplan_row_order(int(order))

    def team_of_caller(self, num_threads: int) -> Team:
        """Make a team of the calling thread's own OpenMP workers, which torch computes by too.

        If torch has another OpenMP than GNU's, the threads are new ones.
        """
        gomp = _find_gomp()
        if gomp is None or num_threads == 1:
            return self.team(num_threads)
        names = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"
        functions = [ctypes.cast(getattr(gomp, name), c_void_p) for name in names]
        return Team(self, self.calls.offplan_openmp(num_threads, *functions), num_threads)

    def team(self, num_threads: int, cores: Sequence[int] | None = None) -> Team:
        """Make a team of the caller and new threads, each on a core of its own where they are said.

        The first of ``cores`` is the caller's, which is left where it is.
        """
        pinned = (c_int64 * num_threads)(*cores) if cores is not None else None
        return Team(self, self.calls.offplan_pool(num_threads, pinned), num_threads)


@cache
def load_library(fp4: tuple[float, ...], fp8: tuple[float, ...]) -> Library:
    """Load the library, compiling it first where that was not done yet; loaded once a process.

    Raises OffplanError if it cannot be built or loaded, or the processor has not what it needs.
    """
    return Library(load_code(), fp4, fp8)


@cache
def _find_gomp() -> ctypes.CDLL | None:
    """Find the GNU OpenMP that this process has loaded, by torch that is."""
    with open("/proc/self/maps") as file:
        paths = {line.split()[-1] for line in file if "libgomp" in line}
    paths = {path for path in paths if os.path.exists(path)}
    return ctypes.CDLL(paths.pop()) if len(paths) == 1 else None
