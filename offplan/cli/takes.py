"""Options that a command takes as one record."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Options = TypeVar("Options")


def takes(record: Callable[..., Options]) -> Callable[[Callable[[Options], None]], Any]:
    """Have a command that is given a record take the record's fields as arguments and options."""

    def decorate(command: Callable[[Options], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(record(**values))

        vars(run)["__signature__"] = inspect.signature(record)
        run.__annotations__ = {**record.__annotations__, "return": None}
        return run

    return decorate
