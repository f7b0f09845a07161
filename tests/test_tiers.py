"""The quick tier touches every room: no folder of tests is marked slow as a whole."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli import ROOT

TIERS = {"slow", "gpu", "engines", "sweep"}
ROOMS = sorted(path.parent.name for path in (ROOT / "offplan").glob("*/__init__.py"))


def marks(nodes: list[ast.expr]) -> set[str]:
    """The tiers that decorators, or what ``pytestmark`` is set to, name."""
    return {
        node.attr
        for root in nodes
        for node in ast.walk(root)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark"
    } & TIERS


def quick_tests(path: Path) -> Iterator[str]:
    """Names of the tests in a file that no mark takes out of the quick tier, not even in part."""
    body = ast.parse(path.read_text("utf-8")).body
    if marks([node.value for node in body if isinstance(node, ast.Assign)]):
        return  # a ``pytestmark``, or a mark by another name
    for node in body:
        is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if isinstance(node, ast.FunctionDef) and is_test and not marks(node.decorator_list):
            yield node.name


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_has_a_quick_test(room: str) -> None:
    paths = (ROOT / "tests" / room).glob("test_*.py")
    assert any(name for path in paths for name in quick_tests(path)), (
        f"tests/{room} has no test in the quick tier, pytest -m 'not slow'"
    )


def test_each_folder_of_tests_is_a_room() -> None:
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/__init__.py")}
    assert folders - {"golden"} == set(ROOMS)
