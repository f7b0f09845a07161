"""What the operating system says about the host."""

from pathlib import Path

import pytest

from offplan.machine.measure_host import count_numa_nodes, find_numa_node


@pytest.mark.parametrize(("content", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("", None)])
def test_numa_node(tmp_path: Path, content: str, node: int | None) -> None:
    device = tmp_path / "0000:1b:00.0"
    device.mkdir()
    (device / "numa_node").write_text(content)
    assert find_numa_node("0000:1b:00.0", tmp_path) == node
    assert find_numa_node("0000:1c:00.0", tmp_path) is None


def test_numa_nodes_are_those_with_cores(tmp_path: Path) -> None:
    """A GH200's own memory is a node too."""
    for number, cores in enumerate(["0-71\n", "72-143\n", "\n"]):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cores)
    assert count_numa_nodes(tmp_path) == 2
    assert count_numa_nodes(tmp_path / "none") is None
