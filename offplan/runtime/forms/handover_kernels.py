"""Kernels that hand products over to the host's cores: they write inputs, and ring.

Every operation of a captured step takes a microsecond or two whatever it does. So one kernel writes
all inputs and both words, into memory of the host. CUDA only.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from offplan.hostcores.library import Words
from offplan.runtime.forms.tasks import Bell

BLOCK = 2048
"""Numbers that a program copies at a time."""
MOST_PROGRAMS = 32
"""Programs that copy, at most."""
_ANSWER = tl.constexpr(Words.answer.offset // 4)
_BELL = tl.constexpr(Words.bell.offset // 4)


@triton.jit
def copy_share(source, target, num, share, num_shares, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy a share of numbers, which take the target's type."""
    for first in range(share * BLOCK, num, num_shares * BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(source + at, mask=at < num)
        tl.store(target + at, value.to(target.dtype.element_ty), mask=at < num)


@triton.jit
def ring(words, arrived, job):  # type: ignore[no-untyped-def]
    """Ring once all programs of the launch have come here: the last one does.

    The host sees all that a program has written earlier before it sees the bell. The barrier orders
    the writes of its threads before the one that counts, and that orders them before the next
    one's, for the whole system. The answer of before is cleared before the bell, in the same way.
    """
    tl.debug_barrier()
    num_before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="sys")
    if num_before == tl.num_programs(0) - 1:
        tl.store(words + _ANSWER, 0)
        tl.debug_barrier()
        tl.atomic_xchg(arrived, 0, sem="acq_rel", scope="sys")
        tl.store(words + _BELL, job, cache_modifier=".wt")


@triton.jit(do_not_specialize=["job"])
def _hand_over(  # type: ignore[no-untyped-def]
    a, to_a, num_a, b, to_b, num_b, c, to_c, num_c, words, arrived, job, BLOCK: tl.constexpr
):
    """Copy a share of the inputs, of which there may be fewer than three, and ring."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    if a is not None:
        copy_share(a, to_a, num_a, program, num_programs, BLOCK)
    if b is not None:
        copy_share(b, to_b, num_b, program, num_programs, BLOCK)
    if c is not None:
        copy_share(c, to_c, num_c, program, num_programs, BLOCK)
    ring(words, arrived, job)


@triton.jit
def _fetch(source, target, num, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy a share of numbers."""
    copy_share(source, target, num, tl.program_id(0), tl.num_programs(0), BLOCK)


def count_programs(num: int) -> int:
    """Return how many programs copy so many numbers."""
    return max(1, min(MOST_PROGRAMS, triton.cdiv(num, BLOCK)))


def hand_over(inputs: Sequence[torch.Tensor], memory: Sequence[torch.Tensor], bell: Bell) -> None:
    """Write inputs, three at most, where the cores read them, and ring; on the current stream."""
    arguments: list[torch.Tensor | int | None] = []
    for source, target in zip(inputs, memory, strict=True):
        arguments += [source.contiguous(), target, target.numel()]
    arguments += [None, None, 0] * (3 - len(memory))
    most = max((each.numel() for each in memory), default=0)
    _hand_over[(count_programs(most),)](*arguments, *bell, BLOCK=BLOCK)


def fetch(outputs: torch.Tensor) -> torch.Tensor:
    """Return what the cores have made, in GPU memory; on the current stream."""
    made = torch.empty_like(outputs)
    num = made.numel()
    _fetch[(count_programs(num),)](outputs, made, num, BLOCK=BLOCK)
    return made
