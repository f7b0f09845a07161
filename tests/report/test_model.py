"""The model's report: what fits a terminal, and what the bars say."""

import io

import pytest
from rich.console import Console

from offplan.checkpoint.model import Layer
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tensors import TensorInfo
from offplan.report.model import group_layers, name_layers
from offplan.report.strip import ShareBar


def show(bar: ShareBar, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=80)
    with console.capture() as captured:
        console.print(bar)
    return captured.get().rstrip()


@pytest.mark.parametrize(
    ("share", "blocks", "ascii_only"),
    [(1.0, "████████", "########"), (0.5, "████", "####"), (0.27, "██▏", "##"), (0.0, "", "")],
)
def test_bar(share: float, blocks: str, ascii_only: str) -> None:
    assert show(ShareBar(share, 8)) == blocks
    assert show(ShareBar(share, 8), "ascii") == ascii_only


def layers(kinds: str) -> tuple[Layer, ...]:
    """Layers whose sizes differ by their letter."""
    return tuple(
        Layer(
            at, "dense", f"l.{at}", (Parameter("a.weight", (TensorInfo("a", "U8", (ord(kind),)),)),)
        )
        for at, kind in enumerate(kinds)
    )


@pytest.mark.parametrize(
    ("kinds", "named"),
    [
        ("a", ["0"]),
        ("abbbb", ["0", "1-4"]),
        ("aabaa", ["0-1, 3-4", "2"]),
        ("lllflllflllflllf", ["0-2, 4-6, ... 12-14", "3, 7, ... 15"]),
    ],
)
def test_equal_layers_are_one_row(kinds: str, named: list[str]) -> None:
    assert [name_layers(group) for group in group_layers(layers(kinds))] == named
