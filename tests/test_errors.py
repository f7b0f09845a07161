"""The exception tree is what its docstring draws."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from offplan import errors
from offplan.cli.ending import tell
from offplan.report.wording import name_options
from tests.cli import ROOT
from tests.pages import anchors

_OPTION = re.compile(r"(?<![\w`-])--[a-z]")
SPEAK_OF_OPTIONS = (
    *("cli/", "report/", "engines/", "upkeep/engine_start.py"),  # for the command line alone
    *("vllm", "lm_eval.py"),  # for the command lines of others
    *("hostcores/build.py", "runtime/memory/gpu_memory.py"),  # which start programs
    *("serve/guard.py", "serve/serving.py"),  # how a server is started
    *("capabilities/ranks.py", "capabilities/goal.py", "planner/neighbours.py"),  # what was asked
    "machine/name.py",
    "library/exporting.py",
)
"""Rooms and files whose texts may name options; others may in whole commands alone."""


def test_exit_codes() -> None:
    codes = {
        name: cls.exit_code
        for name, cls in vars(errors).items()
        if inspect.isclass(cls) and issubclass(cls, errors.OffplanError)
    }
    assert codes == {
        "OffplanError": 1,
        "InputError": 2,
        "CheckpointError": 2,
        "UnpackableError": 2,
        "PlanError": 2,
        "ProfileError": 2,
        "ExportError": 2,
        "InfeasibleError": 3,
        "DriftError": 4,
        "MemoryLimitError": 1,
        "HubError": 1,
        "NotANumberError": 1,
    }


def test_every_error_is_drawn() -> None:
    for name, cls in vars(errors).items():
        if inspect.isclass(cls) and issubclass(cls, Exception):
            assert name in (errors.__doc__ or "")


def test_infeasible_says_by_how_much() -> None:
    assert errors.InfeasibleError("nothing fits", 5).shortfall_bytes == 5
    assert errors.InfeasibleError("nothing fits").shortfall_bytes is None


def texts_of(path: Path) -> Iterator[str]:
    """Strings of a file that are no docstrings."""
    tree = ast.parse(path.read_text("utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def test_what_is_told_by_the_library_and_the_server_names_no_options() -> None:
    package = ROOT / "offplan"
    told = {
        str(path.relative_to(package)): [
            text
            for text in texts_of(path)
            if _OPTION.search(re.sub(r"offplan \w+( [\w{}.-]+)*", "", text))
        ]
        for path in package.rglob("*.py")
        if not path.relative_to(package).as_posix().startswith(SPEAK_OF_OPTIONS)
    }
    assert not {name: texts for name, texts in told.items() if texts}


def test_the_command_line_names_its_options_instead() -> None:
    told = "plan with `context=4096`, `packing=False`, `engine=vllm` or a smaller `gpu_memory`"
    assert name_options(told) == (
        "plan with --context 4096, --no-packing, --for vllm or a smaller --gpu-memory"
    )
    kept = "`run` knows `decode: host` and `packing`; `peer` is none"
    assert name_options(kept) == kept


def test_a_remedy_is_apart_from_the_facts() -> None:
    error = errors.InputError("the prompt is too long", remedy="plan with a larger `context`")
    assert error.facts == "the prompt is too long"
    assert str(error) == "the prompt is too long: plan with a larger `context`"
    assert str(errors.InputError("it is wrong")) == errors.InputError("it is wrong").facts


def test_each_topic_is_a_paragraph_of_troubleshooting() -> None:
    found = anchors(ROOT / "docs" / "troubleshooting.md")
    assert {topic.value for topic in errors.Topic} <= found
    used = " ".join(path.read_text("utf-8") for path in (ROOT / "offplan").rglob("*.py"))
    assert not [topic for topic in errors.Topic if f"Topic.{topic.name}" not in used]


def test_what_is_about_memory_names_its_topic() -> None:
    for path in (ROOT / "offplan").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "MemoryLimitError":
                assert "topic" in {each.arg for each in node.keywords}, f"{path}:{node.lineno}"


def test_the_command_line_ends_an_error_with_its_link(capsys: pytest.CaptureFixture[str]) -> None:
    told = "the driver could not page-lock 2 GiB"
    assert tell(errors.MemoryLimitError(told, topic=errors.Topic.PAGE_LOCKS)) == 1
    link = "/docs/troubleshooting.md#host-memory-cannot-be-page-locked\n"
    assert capsys.readouterr().err.endswith(link)
    assert tell(errors.InputError("it is wrong")) == 2
    assert capsys.readouterr().err == "offplan: it is wrong\n"
