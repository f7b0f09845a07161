"""What is captured and when, with passes that run anew in place of graphs that replay."""

import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offplan.errors import MemoryLimitError
from offplan.placement import Phase
from offplan.runtime.model import kernels
from offplan.runtime.passes.executor import CapturedPass, Executor
from offplan.runtime.passes.forward import Forward
from offplan.runtime.rows import Rows
from offplan.runtime.session import Session
from offplan.schedule import Schedule
from tests.runtime.conftest import save_tiny
from tests.runtime.plans import group, offload, open_session
from tests.tiers import others_in_sweep

CHUNK = 6
DECISION = offload(group(2, 1, "mlp", decode="uva"), group(2, 1, "self_attn"), prefill_chunk=CHUNK)
REQUESTS = [
    *((2, 6), (2, 6), (2, 4), (2, 6), (2, 9), (2, 6), (1, 6), (1, 6), (1, 3), (2, 6), (2, 6)),
    *((2, 9), (2, 9), (2, 12), (2, 9), (2, 18), (2, 18), (2, 18), (2, 9)),
]
"""Batches and lengths of prompts."""


class Graphs:
    """Stands in for CUDA graphs; counts captures."""

    def __init__(self) -> None:
        self.captured: list[Phase] = []
        self.fails = False

    def capture(
        self, executor: Executor, schedule: Schedule, forward: Callable[[], Any]
    ) -> "Graphs.Pass":
        self.captured.append(schedule.phase)
        if self.fails:
            self.fails = False
            raise RuntimeError("operation not permitted when stream is capturing")
        return Graphs.Pass(executor, schedule, forward)

    class Pass:
        def __init__(self, *what: Any) -> None:
            self._executor, self._schedule, self._forward = what

        def replay(self) -> None:
            self._executor.run(self._schedule, self._forward)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    graphs = Graphs()
    monkeypatch.setattr(
        Executor, "capture", lambda own, schedule, run, _: graphs.capture(own, schedule, run)
    )
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return graphs


def test_long_prompts_of_linear_attention_are_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers launch as many kernels for a chunk of any length."""
    monkeypatch.setattr("tests.runtime.plans.CONTEXT", 8192)
    session = open_session(save_tiny("linear", tmp_path), offload(prefill_chunk=512))
    session.runner._capture = True
    assert session.runner.captures_prompt(1, 16 * 512)
    assert not session.runner.captures_prompt(1, 17 * 512)


def open_capturing(folder: Path) -> Session:
    session = open_session(folder, DECISION)
    session.runner._capture = True
    return session


def request(session: Session, batch: int, num_tokens: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, 50, (batch, num_tokens), generator=generator)
    logits = [session.prefill(prompt).clone()]
    for _ in range(4):
        logits.append(session.decode(logits[-1].argmax(-1, keepdim=True)).clone())
    return logits


KINDS = ["qwen3", "deepseek_v2", "dynamic", "longrope", "shared_keys", "linear"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", others_in_sweep(KINDS, ["deepseek_v2", "dynamic", "linear"]))
def test_prompts_of_any_length_and_batch_in_between(
    graphs: Graphs, tmp_path: Path, kind: str
) -> None:
    folder = save_tiny(kind, tmp_path / kind)
    with open_session(folder, DECISION) as plain, open_capturing(folder) as session:
        for seed, (batch, num_tokens) in enumerate(REQUESTS):
            expected = request(plain, batch, num_tokens, seed)
            for found, wanted in zip(
                request(session, batch, num_tokens, seed), expected, strict=True
            ):
                assert torch.equal(found, wanted)
    # float32 experts would wait for the host, so that their prompts are not captured
    assert (Phase.PREFILL in graphs.captured) == (kind != "deepseek_v2")


def test_nothing_is_captured_behind_the_warm_up(graphs: Graphs, tmp_path: Path) -> None:
    with open_capturing(save_tiny("qwen3", tmp_path / "checkpoint")) as session:
        session.warm_up(2, CHUNK)
        assert graphs.captured == [Phase.DECODE, Phase.PREFILL]
        for seed in range(3):
            request(session, 2, CHUNK, seed)
        assert len(graphs.captured) == 2


@pytest.mark.slow
def test_rows_that_join_and_leave_capture_nothing_more(graphs: Graphs, tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path / "checkpoint")
    with open_session(folder, DECISION) as plain, open_capturing(folder) as session:
        both, made = (Rows(plain, 3), Rows(session, 3)), list[list[torch.Tensor]]()
        both[1].warm_up(4)
        assert graphs.captured == [Phase.DECODE] * 2  # for one row, and for three
        for rows in both:
            logits = [rows.join([5, 6, 7]).logits]
            logits += [each.clone() for _ in range(3) for each in rows.step({0: 4}).values()]
            logits.append(rows.join([9] * 20).logits)
            logits += [each.clone() for each in rows.step({0: 4, 1: 8}).values()]
            rows.leave(0)
            logits += [each.clone() for each in rows.step({1: 4}).values()]
            logits.append(rows.join([7] * CHUNK).logits)
            logits += [each.clone() for each in rows.step({2: 4, 1: 3}).values()]
            made.append(logits)
        assert all(map(torch.equal, *made))
        assert len(graphs.captured) == 2


def test_prompts_of_one_row_are_captured_where_that_was_asked_for(
    graphs: Graphs, tmp_path: Path
) -> None:
    with open_capturing(save_tiny("qwen3", tmp_path / "checkpoint")) as session:
        for capture_prompt in (False, True):
            rows, before = Rows(session, 1), graphs.captured.count(Phase.PREFILL)
            rows.warm_up(CHUNK, capture_prompt=capture_prompt)
            for first in (1, 2):
                rows.leave(rows.join([first] * CHUNK).row)
            assert graphs.captured.count(Phase.PREFILL) == before + capture_prompt


@pytest.mark.slow
def test_a_captured_prompt_makes_room_for_another(graphs: Graphs, tmp_path: Path) -> None:
    with open_capturing(save_tiny("qwen3", tmp_path / "checkpoint")) as session:
        step = {(Phase.DECODE, (2, 1))}
        both = {(Phase.PREFILL, ()), *step}
        for num_tokens, captured in [(9, step), (9, both), (9, both), (7, step), (9, step)]:
            request(session, 2, num_tokens, 0)
            assert set(session.runner._passes._captured) == captured


@pytest.mark.slow
def test_a_capture_that_fails_is_made_again(graphs: Graphs, tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path / "checkpoint")
    with open_session(folder, DECISION) as plain, open_capturing(folder) as session:
        expected = request(plain, 2, CHUNK, 0)
        request(session, 2, CHUNK, 0)
        graphs.fails = True
        with pytest.raises(RuntimeError, match="capturing"):
            request(session, 2, CHUNK, 0)
        # first uncaptured, for which there may be room where a capture fails
        for num_captures in (1, 2):
            found = request(session, 2, CHUNK, 0)
            assert all(map(torch.equal, found, expected))
            assert graphs.captured.count(Phase.PREFILL) == num_captures


@pytest.mark.slow
def test_a_cache_that_was_not_allocated_is_begun_afresh(
    graphs: Graphs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny("qwen3", tmp_path / "checkpoint")
    with open_session(folder, DECISION) as plain, open_capturing(folder) as session:
        expected = request(plain, 2, CHUNK, 0)
        request(session, 2, CHUNK, 0)
        own = Forward.chunk
        for batch in (1, 2):

            def fail(*_: object) -> torch.Tensor:
                raise MemoryError

            monkeypatch.setattr(Forward, "chunk", fail)
            with pytest.raises(MemoryLimitError):
                session.prefill(torch.zeros(batch, CHUNK, dtype=torch.int64))
        monkeypatch.setattr(Forward, "chunk", own)
        graphs.captured.clear()
        assert all(map(torch.equal, request(session, 2, CHUNK, 0), expected))
        assert Phase.PREFILL not in graphs.captured


def test_a_pool_is_not_given_up_between_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to capture in a pool whose last graph is gone, were it an empty one."""
    users = Counter[str]()

    class Graph:
        def capture_begin(self, pool: str, capture_error_mode: str) -> None:
            assert pool not in users or users[pool] > 0, "use_count > 0 INTERNAL ASSERT FAILED"
            self.pool, self.is_empty = pool, True
            users[pool] += 1
            graphs.append(weakref.ref(self))

        def capture_end(self) -> None:
            if self.is_empty:
                warnings.warn("The CUDA Graph is empty.", stacklevel=1)

        def replay(self) -> None:
            replayed.append(self)

        def __del__(self) -> None:
            users[self.pool] -= 1

    def work() -> None:
        graph = graphs[-1]()
        assert graph is not None
        graph.is_empty = False

    graphs: list[weakref.ref[Graph]] = []
    replayed: list[Graph] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    with CapturedPass(lambda _: None, "pool") as captured:
        captured.cut([])  # copies come before any work
        work()
        captured.cut([])
        captured.cut([])
        work()
    captured.replay()
    assert len(replayed) == 2
    replayed.clear()
    del captured
    assert users["pool"] == 0


@pytest.mark.parametrize(
    ("dtype", "capability", "freely"),
    [
        ("bfloat16", (9, 0), True),
        ("bfloat16", (10, 0), True),
        ("bfloat16", (8, 9), False),
        ("bfloat16", (12, 0), False),
        ("float16", (9, 0), False),
    ],
)
def test_where_grouped_products_wait_for_the_host(
    monkeypatch: pytest.MonkeyPatch, dtype: str, capability: tuple[int, int], freely: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert kernels.groups_freely(dtype, torch.device("cuda")) is freely
