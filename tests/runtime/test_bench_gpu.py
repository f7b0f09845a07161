"""Benchmarks on a GPU: CUDA events around real copies, and memory that is really taken."""

from pathlib import Path

import pytest
import torch

from offplan.placement import Phase
from offplan.runtime.measuring.versus import Bench, measure_plan, measure_resident, measure_serial
from offplan.runtime.measuring.versus import measure_accelerate as under_accelerate
from tests.held import place
from tests.runtime.plans import group, make_bench, offload

pytestmark = pytest.mark.gpu


@pytest.fixture
def bench(checkpoint: Path) -> Bench:
    prompt = torch.tensor([[3, 14, 15, 9, 26]])
    return make_bench(checkpoint, offload(group(2, 1), prefetch_step=1), prompt, "cuda")


def test_the_plan_and_serial_move_the_slabs(bench: Bench) -> None:
    spans = place(bench.model, bench.offload).spans(Phase.DECODE)
    for measure in (measure_plan, measure_serial):
        cost = measure(bench)
        assert cost.decode.link_bytes == sum(span.nbytes for span in spans)
        assert cost.link_bytes_per_s is not None
        for phase in (cost.decode, cost.prefill):
            assert phase.stalls_s is not None
            assert phase.stalls_s.keys() == {span.layer for span in spans}
            assert all(seconds >= 0 for seconds in phase.stalls_s.values())


def test_resident_moves_nothing_and_takes_memory(bench: Bench) -> None:
    found = measure_resident(bench)
    assert (found.decode.link_bytes, found.decode.stalls_s) == (0, {})
    assert found.link_bytes_per_s is None
    assert found.gpu_bytes is not None
    assert found.gpu_bytes > 0


def test_accelerate_runs_beside_it(bench: Bench) -> None:
    assert under_accelerate(bench).decode.step.median_s > 0
    # nothing of the ways before is left to stand in the way
    assert measure_plan(bench).decode.step.median_s > 0
