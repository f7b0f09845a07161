"""For all tests: Hypothesis, torch's threads, the command line, a checkpoint to change."""

import gc
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import settings

from tests.cli import CLI, TINY_MOE
from tests.warm import TORCH, Warm

# before torch is imported: threads that wait for each other cost more than these tiny products, and
# each of pytest's workers would have as many as there are cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "default")

PRICED = {"costs", "planner"}
"""Folders of tests that price made-up models and search for their plans."""


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CLI:
    """The command line, in the folder that tests run in."""
    return CLI(monkeypatch, capsys)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to be changed."""
    return Path(shutil.copytree(TINY_MOE, tmp_path / "model"))


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Where processes begin that a test claims no more of than what they do."""
    with closing(Warm(TORCH, os.environ)) as warm:
        yield warm


@pytest.fixture(scope="module", autouse=True)
def planned_unasked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Prices and the search have made-up models: nobody asks whether transformers would run one.

    Asking takes seconds for each model, in a process of its own where torch is not imported.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name in PRICED:
            patch.setattr("offplan.library.asking.suit", lambda goal, *_: goal)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what the whole suite leaves out as slow too, so that ``-m 'not slow'`` is the loop.

    Coverage is that of the quick tier: slow tests take half as long again when traced, and thrice
    as long where they look at thousands of plans. A test marked ``gpu`` needs a CUDA device.
    """
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not import_module("torch").cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
    for item in items:
        if item.get_closest_marker("sweep") or item.get_closest_marker("engines"):
            item.add_marker("slow")
        if item.get_closest_marker("slow"):
            item.add_marker("no_cover")


def pytest_pycollect_makeitem(collector: pytest.Module, obj: object) -> list[pytest.Item] | None:
    """Make the sweep's 4,000 cases only where ``-m`` asks for them: that alone takes seconds."""
    asked = collector.config.option.markexpr
    is_sweep = any(mark.name == "sweep" for mark in getattr(obj, "pytestmark", ()))
    return [] if is_sweep and asked and "sweep" not in asked.replace("not sweep", "") else None


def pytest_collectstart() -> None:
    """Look for no garbage while modules are imported, which are none."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what is imported by now out of every garbage collection: it is most of what there is.

    Each full collection, of which `bench` makes some itself, would take a quarter of a second.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
