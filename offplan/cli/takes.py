"""Options that a command takes as one record."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

Options = TypeVar("Options")


def takes(record: Callable[..., Options]) -> Callable[[Callable[[Options], None]], Any]:
    """Have a command that is given a record take the record's fields as arguments and options.

    In place of a field that is a record itself the command takes that one's fields.
    """
    parts: dict[str, Any] = {
        name: kind for name, kind in record.__annotations__.items() if is_dataclass(kind)
    }

    def decorate(command: Callable[[Options], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            for name, kind in parts.items():
                values[name] = kind(**{each.name: values.pop(each.name) for each in fields(kind)})
            command(record(**values))

        signature = inspect.signature(record)
        flat = [
            each
            for name, parameter in signature.parameters.items()
            for each in (options_of(parts[name]) if name in parts else [parameter])
        ]
        vars(run)["__signature__"] = signature.replace(parameters=flat)
        run.__annotations__ = {each.name: each.annotation for each in flat} | {"return": None}
        return run

    return decorate


def flattens(command: Callable[..., None]) -> Callable[..., None]:
    """Have a command that is given records beside options take the records' fields."""
    return takes(command)(functools.wraps(command)(lambda done: done))  # type: ignore[no-any-return]


def options_of(record: Callable[..., Any]) -> list[inspect.Parameter]:
    """List the parameters that make a record."""
    return [*inspect.signature(record).parameters.values()]
