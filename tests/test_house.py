"""The house grows where somebody says why: lines a room, files a capability, circles of files."""

import ast
import re
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import yaml

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "offplan"
CEILINGS: dict[str, Any] = yaml.safe_load((TESTS / "house.yaml").read_bytes())
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__init__.py"
}


@cache
def code_of(path: Path) -> str:
    """Return a file's lines without docstrings, comment lines and blank ones."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        lines = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL).splitlines()
        return "\n".join(each for each in lines if each.strip()[:2] not in ("", "//"))
    said = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return "\n".join(
        line
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip()[:1] not in ("", "#") and number not in said
    )


SOURCES = [path for kind in ("*.py", "*.cpp", "*.h") for path in sorted(PACKAGE.rglob(kind))]


def imported(path: Path) -> set[Path]:
    """Return the files that a file imports, or names as a text: in functions, and for types too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return {MODULES[name] for name in names if name in MODULES} - {path}


def lines_of_rooms() -> dict[str, int]:
    lines = Counter[str]()
    for path in SOURCES:
        room, *inner = path.relative_to(PACKAGE).parts
        lines[room if inner else "alone"] += len(code_of(path).splitlines())
    return dict(lines)


def files_that_know(words: str) -> list[str]:
    found = (path for path in SOURCES if re.search(words, code_of(path), re.IGNORECASE))
    return [str(path.relative_to(PACKAGE)) for path in found]


def test_rooms_keep_to_their_lines() -> None:
    lines = lines_of_rooms()
    assert lines.keys() == CEILINGS["lines"].keys()
    over = {room: count for room, count in lines.items() if count > CEILINGS["lines"][room]}
    assert not over, "more lines than tests/house.yaml allows: delete some, or say why there"


@pytest.mark.parametrize("capability", CEILINGS["knows"])
def test_few_files_know_of_a_capability(capability: str) -> None:
    ceiling = CEILINGS["knows"][capability]
    found = files_that_know(ceiling["words"])
    assert len(found) <= ceiling["files"], found


def test_files_form_no_circle() -> None:
    TopologicalSorter({path: imported(path) for path in MODULES.values()}).prepare()
