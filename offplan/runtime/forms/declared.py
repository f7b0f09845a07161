"""Functions as operators of torch's, which torch.compile passes over."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

Compute = TypeVar("Compute", bound=Callable[..., Any])


def declare(
    name: str, schema: str, describe: Callable[..., Any], tags: Sequence[torch.Tag] = ()
) -> Callable[[Compute], Compute]:
    """Make a function the operator ``offplan::name``, which changes none of its arguments.

    ``describe`` returns empty tensors of the result's shapes. ``tags`` are torch's: without any, it
    keeps the strides of arguments, by copies if need be. What this returns takes arguments by
    position. It calls the operator where torch.compile would analyse the function.
    """

    def decorate(compute: Compute) -> Compute:
        operator = torch.library.custom_op(
            f"offplan::{name}", compute, mutates_args=(), schema=schema, tags=tags
        )
        operator.register_fake(describe)

        def call(*arguments: Any) -> Any:
            return (operator if torch.compiler.is_compiling() else compute)(*arguments)

        return cast(Compute, call)

    return decorate
