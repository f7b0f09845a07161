"""Write the reference of the commands, ``docs/cli-reference.md``, from what declares them.

    python docs/make_cli_reference.py

It reads the commands' signatures, not the text that ``--help`` lays out: that changes with the
versions of typer and click and with the terminal's width. ``tests/test_docs.py`` holds the file to
what is written here, and its options to those that ``--help`` lists.
"""

import inspect
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

from offplan.cli.app import app

PAGE = Path(__file__).with_name("cli-reference.md")

HEAD = """\
# The commands

`python docs/make_cli_reference.py` makes this page from the commands themselves; do not edit it by
hand. `offplan COMMAND -h` prints the same in a terminal. `offplan --version` prints the version,
and `offplan --install-completion` teaches the shell to complete commands and options.
`python -m offplan` is the same program. The [glossary](glossary.md) explains the terms.

Write sizes as `16GiB`, `16G` (the same) or `24GB`, and times as `800ms` or `1.5s`. offplan refuses
a number without a unit. Where an option has a choice of names, their case does not matter.

With `--json` a command prints one document on stdout, and everything else on stderr. `--quiet`
suppresses notes and progress on stderr, and leaves error messages. A command overwrites no file
without `--force`, and an interrupted command leaves no half-written file. `-o -` writes to stdout.
"""

CODES = """\
| exit code | meaning |
|---|---|
| 0 | done |
| 1 | failed |
| 2 | bad usage, or bad input |
| 3 | no plan fits the budget: the answer names the gap. `check`: the plan has no room now |
| 4 | the model is not the plan's model. `check`: anything else has drifted from the plan |
| 130, 141 | interrupted; nothing reads the output any more |
"""

VALUES = {str: "TEXT", int: "N", float: "NUMBER", Path: "FILE"}
"""What stands for a value of each type."""


class Row(NamedTuple):
    """One argument or option, as the page shows it."""

    name: str
    value: str
    default: str
    help: str


def list_commands() -> dict[str, Callable[..., None]]:
    """Return the functions behind the commands, by the names people type."""
    functions = {}
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__.replace("_", "-")
        functions[name] = command.callback
    return functions


def list_rows(function: Callable[..., None]) -> Iterator[Row]:
    """List the arguments and options of a command, in the order of its declaration."""
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        # Python 3.10 allows None around the annotation of what is None by default
        annotated, info = get_args(_strip_none(hints[name]))
        if isinstance(info, ArgumentInfo):
            yield Row(info.metavar or name.upper(), "", "", info.help or "")
            continue
        assert isinstance(info, OptionInfo), f"{name} is neither an argument nor an option"
        help_text, _, default = (info.help or "").partition(" [default: ")
        yield Row(
            ", ".join(_option_names(info) or ["--" + name.replace("_", "-")]),
            _describe_value(_strip_none(annotated), info),
            default.rstrip("]") or _describe_default(parameter.default),
            help_text,
        )


def _option_names(info: OptionInfo) -> list[str]:
    """Return the names that a declaration gives; typer keeps the first one as its default."""
    return [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]


def _strip_none(annotation: Any) -> Any:
    """Return the type of a parameter that may be None."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (each for each in get_args(annotation) if each is not type(None))
    return annotation


def _describe_value(kind: Any, info: OptionInfo) -> str:
    if get_origin(kind) is list:
        return f"{_describe_value(get_args(kind)[0], info)}, any number of times"
    if kind is bool:
        return ""
    if get_origin(kind) is Literal:
        return " or ".join(get_args(kind))
    least = "" if info.min is None else f", {info.min} or more"
    return (info.metavar or VALUES[kind]) + least


def _describe_default(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return "required"
    if default is None or default is False:
        return ""
    return "on" if default is True else str(default)


def render_page() -> str:
    """Return the whole page, in Markdown."""
    sections = [HEAD]
    for name, function in list_commands().items():
        rows = list(list_rows(function))
        arguments = [row for row in rows if not row.name.startswith("-")]
        options = [row for row in rows if row.name.startswith("-")]
        usage = " ".join(["offplan", name, *(row.name for row in arguments)])
        section = [
            f"## offplan {name}\n",
            f"{inspect.getdoc(function)}\n",
            f"    {usage}{' [OPTIONS]' if options else ''}\n",
        ]
        section += [f"- `{row.name}`: {row.help}" for row in arguments]
        section += [""] if arguments else []
        if options:
            section += ["| option | value | default | what it does |", "|---|---|---|---|"]
            section += [f"| `{row.name}` | {' | '.join(row[1:])} |" for row in options]
            section += [""]
        sections.append("\n".join(section))
    sections.append(f"## Exit codes\n\n{CODES}")
    return "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(render_page(), encoding="utf-8")
