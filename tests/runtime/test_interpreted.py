"""Runs the tests of kernels by Triton's interpreter where there is no GPU."""

from pathlib import Path

import pytest

from tests.runtime.interpreted import HAS_GPU, run_interpreted

FILES = {
    **{f"{name}_kernels": "passed" for name in ("form", "grouped", "handover", "table")},
    **dict.fromkeys(("coded_kernel", "delta_kernel", "routers", "step_graph"), "passed"),
    "kernels": "9 passed",  # the rest need a GPU
}
"""What pytest prints of each file."""
IN_SWEEP = ("form_kernels", "grouped_kernels", "table_kernels")
"""Files with cases that the sweep alone runs."""


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="the files' tests run themselves")
@pytest.mark.parametrize(
    ("name", "tier"),
    [
        *((name, "not sweep") for name in FILES),
        *(pytest.param(name, "sweep", marks=pytest.mark.sweep) for name in IN_SWEEP),
    ],
)
def test_on_the_cpu(name: str, tier: str) -> None:
    path = Path(__file__).with_name(f"test_{name}.py")
    assert FILES[name] in run_interpreted(str(path), tier)
