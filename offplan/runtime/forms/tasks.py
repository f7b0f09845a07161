"""Computations of the host's cores for modules, by numbers.

Operators of torch's are given tensors and numbers, no objects.
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch

from offplan.runtime.forms.declared import declare


class Bell(NamedTuple):
    """The words and the job with which a kernel rings for the host's cores."""

    words: torch.Tensor
    """The Words that the coordinator listens to, int32, as the device sees them."""
    arrived: torch.Tensor
    """Number of a kernel's programs that have written their part, int32 of [1] on the device."""
    job: int
    """Number of the job that is rung for; 0 for nothing."""


Launch = Callable[[Sequence[torch.Tensor], Bell], None]
"""Launches a kernel that writes inputs where the cores read them, tokens, the expert of each pair
and its weight, and rings."""

_tasks: dict[int, Any] = {}
"""Tasks of the sessions that are open."""
_numbers = count(1)


def number(task: Any) -> torch.Tensor:
    """Give a task a number: a tensor, since torch.compile guards on every integer of a module."""
    given = next(_numbers)
    _tasks[given] = task
    return torch.tensor(given)


def find(given: torch.Tensor) -> Any:
    """Return the task of a number."""
    return _tasks[int(given)]


def forget(given: torch.Tensor) -> None:
    """Let go of a task."""
    _tasks.pop(int(given), None)


@declare(
    "begin_by_cores",
    "(Tensor task, Tensor[] inputs) -> Tensor",
    lambda task, inputs: torch.empty_like(inputs[0]),
)
def begin(task: torch.Tensor, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Begin a task of the cores, whose first input is [tokens, hidden]; returns zeros like it.

    ``end`` takes a sum of these zeros, so that torch.compile cannot end a task before it begins.
    """
    find(task).begin(*inputs)
    return torch.zeros_like(inputs[0])


@declare(
    "end_by_cores",
    "(Tensor task, Tensor made) -> Tensor",
    lambda task, made: torch.empty_like(made),
)
def end(task: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Add to ``made`` what the cores make of a task that was begun; wait for it on the stream.

    It takes what the device makes meanwhile, so that torch.compile cannot wait before that.
    """
    ended: torch.Tensor = find(task).end(made)
    return ended
