"""Which chunks of a prompt are timed, and what a layer does in one that is taken alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from offplan.checkpoint.open import open_model
from offplan.costs.compute import layer_time, outside_time
from offplan.costs.work import PassShape, layer_work, prefill_shapes
from offplan.held.held import hold
from offplan.placement import Phase
from offplan.plan import Workload
from offplan.runtime.measuring import layer_times
from offplan.runtime.measuring.layer_times import TIMED_CHUNKS, choose_stops, measure_layer_times
from offplan.runtime.passes.runner import ModelRunner
from tests.costs.builders import make_machine
from tests.runtime.conftest import save_tiny
from tests.runtime.plans import CONTEXT, offload, open_session
from tests.tiers import first_quick

FAMILIES = ["sinks", "deepseek_v3", "mistral_windowed", "chunked", "linear"]
CHUNK = 8


@pytest.mark.parametrize(
    ("tokens", "stops"),
    [
        (8, [8]),
        (5, [8]),
        (9, [8, 16]),
        (24, [8, 16, 24]),
        (96, [8, 16, 56, 96]),
        (99, [8, 16, 56, 104]),
    ],
)
def test_few_chunks_of_a_prompt_are_timed(tokens: int, stops: list[int]) -> None:
    assert choose_stops(tokens, CHUNK) == stops
    assert len(stops) <= TIMED_CHUNKS


@pytest.fixture
def in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_times, "NUM_SAMPLES", 1)
    monkeypatch.setattr(layer_times, "CPU_REPEATS", 1)
    monkeypatch.setattr(layer_times, "MAX_CAPTURED_CHUNKS", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("in_short")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_long_prompts_chunks_are_priced_by_those_that_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ran: list[tuple[int, int]] = []
    own = ModelRunner.chunk_layers

    def note(runner: ModelRunner, tokens: torch.Tensor, start: int, length: int) -> Any:
        ran.append((start, tokens.shape[1]))
        return own(runner, tokens, start, length)

    monkeypatch.setattr(ModelRunner, "chunk_layers", note)
    model = open_model(str(save_tiny(name, tmp_path)))
    stage, workload = hold(model), Workload(prompt_tokens=99, output_tokens=4, context=112)
    heard: list[tuple[int, int]] = []
    times = measure_layer_times(
        stage, workload, (16, 8), lambda *each: heard.append(each), device="cpu"
    )
    assert heard == [(1, 3), (2, 3), (3, 3)]
    assert ran == [(0, 16), (16, 16), (48, 16), (96, 16), (0, 8), (8, 8), (48, 8), (96, 8)]
    machine = make_machine(layer_times=times)
    for chunk in (16, 8):
        *shapes, rest = prefill_shapes(workload, chunk)
        for layer in stage.layers:
            work = layer_work(stage, layer)
            of_layer = [each for each in times if each.layer == work.key and each.tokens == chunk]
            seconds = [each.seconds for each in of_layer]
            assert [each.context for each in of_layer] == choose_stops(99, chunk)
            for shape in shapes:
                priced = layer_time(machine, work, shape).seconds
                assert min(seconds) <= priced <= max(seconds)
            assert not layer_time(machine, work, rest).measured
    decode = [each for each in times if each.phase == "decode"]
    assert {each.layer for each in decode} == {each.layer for each in times}
    assert outside_time(machine, stage, PassShape(Phase.DECODE, 1, 1, 101)).measured


@pytest.mark.parametrize("name", first_quick(["deepseek_v3", "sinks", "mistral_windowed"]))
def test_a_chunk_alone_does_what_it_does_in_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    prompt = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(0))
    folder = save_tiny(name, tmp_path)
    with open_session(folder, offload(prefill_chunk=CHUNK)) as session:
        runner, seen = session.runner, list[torch.Tensor]()
        step = runner.layers.step

        def see(*given: Any) -> torch.Tensor:
            seen.append(step(*given))
            return seen[-1]

        monkeypatch.setattr(runner.layers, "step", see)
        starts = range(0, prompt.shape[1], CHUNK)
        session.runner.allocate(len(prompt))
        seen.clear()
        session.prefill(prompt)
        expected = seen[: len(starts)]  # the first layer's
        seen.clear()
        with torch.inference_mode():
            for start in starts:
                tokens = prompt[:, start : start + CHUNK]
                runner.chunk_layers(tokens, start, CONTEXT + 1)[0]()
            assert all(map(torch.equal, seen, expected))
            if name == "deepseek_v3":  # a ring holds the chunk itself by now
                runner.chunk_layers(tokens, start, CONTEXT + 1)[0]()
                assert torch.equal(seen[-1], expected[-1])
