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
    c_int32,
    c_int64,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from enum import IntEnum
from functools import cache

from offplan.errors import OffplanError
from offplan.hostcores.build import load_code, refuse

# Kinds of forms, as kernels tell them apart; types of scales and zeros; the places of a part's
# address; the activation of the first product of routed experts; and the order in which AVX-512
# kernels of one input take rows: as matrix.h and products.h have them.
Kind = IntEnum("Kind", "RAW FP8 FP4 INT4 INT8 PACKED", start=0)
ScaleType = IntEnum("ScaleType", "NONE FLOAT32 FLOAT16 BFLOAT16 EXPONENT E4M3", start=0)
ZeroType = IntEnum("ZeroType", "NONE BYTES WORDS", start=0)
Place = IntEnum("Place", "CODES SCALES ZEROS WHOLE EXPONENTS BASES PATCHES PATCH_BLOCKS", start=0)
Activation = IntEnum("Activation", "SILU GELU GELU_TANH RELU RELU_SQUARED", start=0)
RowOrder = IntEnum("RowOrder", "OF_PROCESSOR ONE_BY_ONE BESIDE APART", start=0)
InstructionSet = IntEnum("InstructionSet", "AVX2 AVX512", start=0)


def _each(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Matrix(Structure):
    """A matrix [num_out, num_in] of a stored form, or those of all experts; see ``matrix.h``."""

    _fields_ = (
        ("part", c_void_p * len(Place)),
        ("step", c_int64 * len(Place)),
        *_each(c_int64, "num_out num_in kind scale_type zero_type scale_rows scale_columns"),
        *_each(c_int64, "row_scales whole_rows whole_divides rows_ahead unsigned_codes stored_in"),
        ("factor", c_double),
    )


class Dense(Structure):
    """A product of one matrix; see ``products.h``."""

    _fields_ = (
        ("kernels", c_void_p),
        ("weight", Matrix),
        ("num_inputs", c_int64),
        *_each(c_void_p, "inputs outputs"),
        ("precise", c_int64),
    )


class Experts(Structure):
    """Tokens sent through their routed experts; see ``products.h``."""

    _fields_ = (
        ("kernels", c_void_p),
        *_each(Matrix, "up down"),
        *_each(c_void_p, "up_bias down_bias"),
        *_each(c_int64, "num_experts is_gated activation is_interleaved"),
        *_each(c_double, "alpha limit offset"),
        *_each(c_int64, "num_tokens num_chosen"),
        *_each(c_void_p, "inputs chosen factors outputs"),
        ("precise", c_int64),
        ("later", c_void_p),
    )


MOST_LISTED = 16
"""Experts that a list has room for."""


class LaterList(Structure):
    """Experts of a layer to be copied into slots behind a product; see ``products.h``."""

    _fields_ = (
        *_each(c_int32, "count sequence failed unused"),
        ("pairs", c_int32 * 2 * MOST_LISTED),
    )


class LaterTensor(Structure):
    """Addresses of a part of the experts and of its slots; see ``products.h``."""

    _fields_ = (("experts", c_void_p), ("slots", c_uint64), ("bytes", c_int64))


class Later(Structure):
    """What is copied, and into what, of the experts that a list names; see ``products.h``."""

    _fields_ = (
        ("list", c_void_p),
        ("done", c_uint64),
        ("num_tensors", c_int64),
        ("tensors", c_void_p),
    )


class Driver(Structure):
    """Functions that copy experts to a device; see ``coordinator.h``."""

    _fields_ = (
        *_each(c_void_p, "set_context copy synchronize context stream record query"),
        ("events", c_void_p * 2),
    )


class Words(Structure):
    """The words by which a stream and the coordinator tell each other; see ``coordinator.h``."""

    _fields_ = (
        ("bell", c_uint32),
        ("_", c_uint8 * 60),
        ("answer", c_uint32),
        ("_end", c_uint8 * 60),
    )


_FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "instruction_sets": (c_int64, ()),
    "kernels": (c_void_p, (c_int64,)),
    "row_order": (None, (c_int64,)),
    "tables": (None, (POINTER(c_float), POINTER(c_float))),
    "sizes": (c_int64, (c_int64,)),
    "openmp": (c_void_p, (c_int64, c_void_p, c_void_p)),
    "pool": (c_void_p, (c_int64, POINTER(c_int64))),
    "end": (None, (c_void_p,)),
    "multiply": (c_int64, (c_void_p, c_void_p)),
    "multiply_experts": (c_int64, (c_void_p, c_void_p)),
    "read": (None, (c_void_p, c_void_p, c_int64)),
    "coordinator": (c_void_p, (c_void_p, c_void_p, c_int64)),
    "add_job": (c_int64, (c_void_p, c_int64, c_void_p, c_int64)),
    "exchange": (c_int64, (c_void_p, c_int64)),
    "copy_by": (c_int64, (c_void_p, c_void_p, c_uint64, c_void_p)),
    "wake": (None, (c_void_p,)),
    "drain": (None, (c_void_p,)),
    "counter": (c_int64, (c_void_p, c_int64)),
    "trouble": (c_int64, (c_void_p,)),
    "end_coordinator": (c_int64, (c_void_p,)),
}
"""Result and arguments of each function of ``library.cpp``."""


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
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(calls, f"offplan_{name}")
            function.restype, function.argtypes = result, arguments
        known = Matrix, Dense, Experts, Words, LaterList, LaterTensor, Later, Driver
        for which, structure in enumerate(known):
            assert calls.offplan_sizes(which) == ctypes.sizeof(structure), structure
        self.instruction_sets = find_instruction_sets(calls)
        """Instruction sets of the processor, the best last."""
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
        names = "GOMP_parallel", "omp_get_num_threads"
        functions = [ctypes.cast(getattr(gomp, name), c_void_p) for name in names]
        return Team(self, self.calls.offplan_openmp(num_threads, *functions), num_threads)

    def team(self, num_threads: int, cores: Sequence[int] | None = None) -> Team:
        """Make a team of the caller and new threads, each on a core of its own where they are said.

        The first of ``cores`` is the caller's, which is left where it is.
        """
        pinned = (c_int64 * num_threads)(*cores) if cores is not None else None
        return Team(self, self.calls.offplan_pool(num_threads, pinned), num_threads)


def find_instruction_sets(calls: ctypes.CDLL) -> list[InstructionSet]:
    """Find those of the processor that a library has kernels for; raises OffplanError for none."""
    bits = calls.offplan_instruction_sets()
    if found := [each for each in InstructionSet if bits >> each & 1]:
        return found
    raise refuse("needs a processor with AVX2, FMA and F16C, which this one has not")


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
