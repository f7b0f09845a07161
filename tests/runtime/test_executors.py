"""Capabilities that offplan does not have: an executor in the table, and a runner of passes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import Self

from offplan.capabilities.way import Way
from offplan.checkpoint.open import open_model
from offplan.errors import CheckpointError, InputError, PlanError
from offplan.held.held import hold
from offplan.held.runner import OwnRuntime
from offplan.held.runtimes import RUNTIMES
from offplan.library import runnable
from offplan.placement import Phase
from offplan.plan import Goal
from offplan.report.answer import describe_running
from offplan.routing.profile import require_routing
from offplan.runtime.executors import EXECUTORS
from offplan.runtime.loading.capability import (
    CapabilityExecutor,
    PassesExecutor,
    Prepared,
    Steps,
)
from offplan.runtime.loading.skeleton import build_skeleton
from offplan.runtime.memory.store import WeightStore, allocate
from offplan.runtime.passes.runner import ModelRunner
from offplan.runtime.session import Session
from tests.runtime.conftest import save_tiny
from tests.runtime.plans import group, offload, open_session

PROMPT = torch.tensor([[3, 14, 15, 9, 26, 5, 35]])


@dataclass
class Counts:
    num_layers: float


class Last(CapabilityExecutor):
    """Negates what the last layer makes of a prompt, which negates the logits, once attached."""

    told: list[str]

    def __init__(self, prepared: Prepared) -> None:
        self.device_bytes = 64
        self.layers = prepared.module.get_decoder().layers
        self.prompt_layers = (len(self.layers) - 1,)
        self.factor, self.counted = 1, 0

    @classmethod
    def find(cls, prepared: Prepared) -> Self | None:
        if prepared.offload.prefetch_step == 7:
            raise PlanError("seven slots are one too many for what is made up")
        cls.told = ["found"]
        return cls(prepared) if prepared.offload.prefetch_step > 1 else None

    def prepare(self, device: torch.device, host_threads: int | None) -> None:
        self.told.append(f"prepared for {host_threads} threads")

    def allocate(self, device: torch.device) -> None:
        self.memory = allocate(self.device_bytes, device, "what is made up")

    def attach(self, store: WeightStore) -> None:
        assert store.offloaded
        self.factor = -1
        self.told.append("attached")

    def begin_batch(self, batch: int) -> None:
        if batch > 2:
            raise PlanError(f"{batch} sequences are too many for what is made up")

    def enter(self, phase: Phase) -> None:
        self.told.append(phase.value)

    def run_layer(self, executor: Any, index: int, steps: Steps) -> list[torch.Tensor]:
        made = []
        for step, around in steps:
            with around():
                made.append(self.factor * step())
        return made

    def settle(self, index: int) -> None:
        self.counted += 1

    def count(self) -> Counts:
        return Counts(self.counted)

    def forget(self) -> None:
        self.counted = 0

    def close(self) -> None:
        self.told.append("closed")


@pytest.fixture
def last(monkeypatch: pytest.MonkeyPatch) -> type[Last]:
    monkeypatch.setitem(EXECUTORS, "last", Last)
    return Last


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3", tmp_path_factory.mktemp("executors"))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [64, 3])
def test_from_the_check_to_the_end(last: type[Last], folder: Path, chunk: int) -> None:
    rule, logits = group(2, 1), []
    for slots in (1, 2):  # which makes no other difference
        decision = offload(rule, prefill_chunk=chunk, prefetch_step=slots)
        with open_session(folder, decision) as session:
            logits.append(session.prefill(PROMPT).clone())
            step = session.decode(torch.tensor([[3]])).clone()
            assert ("last" in session.loaded.executors) == (slots == 2)
    assert torch.equal(logits[1], -logits[0])
    assert step.isfinite().all()
    phases = ["prefill", "decode"]
    assert last.told == [
        *("found", "prepared for None threads", "attached"),
        *(*phases, *phases),  # the first two to check what is loaded
        "closed",
    ]


def test_it_counts(last: type[Last], folder: Path) -> None:
    with open_session(folder, offload(group(2, 1), prefetch_step=2)) as session:
        session.warm_up(*PROMPT.shape)
        before = session.count(1)
        assert before == {"last": Counts(0)}
        session.prefill(PROMPT)
        num_layers = len(session.runner.layers)
        assert session.count(2, before) == {"last": Counts(num_layers / 2)}


@pytest.mark.slow
def test_it_refuses(last: type[Last], folder: Path) -> None:
    with pytest.raises(PlanError, match="seven slots"):
        open_session(folder, offload(group(2, 1), prefetch_step=7))
    with open_session(folder, offload(group(2, 1), prefetch_step=2)) as session:
        with pytest.raises(PlanError, match="3 sequences are too many"):
            session.prefill(PROMPT.expand(3, -1))
        assert session.prefill(PROMPT).isfinite().all()


OTHERS = Way("others", "somebody's")


class Others(PassesExecutor):
    """Passes that are offplan's own, under another name."""

    way = OTHERS
    build = staticmethod(build_skeleton)

    @staticmethod
    def make_runner(*given: Any, context: int, chunk: int) -> ModelRunner:
        return ModelRunner(*given, context=context, chunk=chunk, capture=False)


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> type[Others]:
    monkeypatch.setitem(RUNTIMES, OTHERS, OwnRuntime())
    monkeypatch.setitem(EXECUTORS, OTHERS.name, Others)
    return Others


def test_other_passes_run(others: type[Others], folder: Path) -> None:
    made = []
    model, decision = open_model(str(folder)), offload(group(2, 1))
    for way in (OTHERS, Goal().way):
        with Session(model, decision, context=64, device="cpu", folder=folder, way=way) as session:
            assert isinstance(session.loaded.executors.get("others"), others) == (way == OTHERS)
            made.append(session.prefill(PROMPT).clone())
    assert torch.equal(*made)


def test_other_passes_are_found_and_told_of(
    others: type[Others], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(str(folder))
    assert runnable.why_not_run(hold(model, way=OTHERS)) is None
    assert "somebody's passes" in describe_running(model, None, OTHERS)
    with pytest.raises(InputError, match="somebody's run this model"):
        require_routing(model, way=OTHERS)
    monkeypatch.setattr(others, "make_runner", lambda *_, **__: 1 // 0)
    with pytest.raises(CheckpointError, match="somebody's passes fail"):
        Session(model, offload(), context=64, device="cpu", folder=folder, way=OTHERS)
    left = "offplan.library.runnable.why_not_run"
    monkeypatch.setattr(left, lambda stage, _: None if stage.way == OTHERS else "it cannot")
    assert runnable.find_way(model, Goal(), 64) == OTHERS
    with pytest.raises(CheckpointError, match="it cannot"):
        runnable.find_way(model, Goal(stock=True), 64)
