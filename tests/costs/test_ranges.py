"""Ranges of estimated times."""

import pytest

from offplan.costs.ranges import COMPUTE_ERRORS, WAITING_ERRORS, step_range
from offplan.placement import Phase
from offplan.plan import Budget, Offload, Workload
from tests.costs.builders import MIB, dense_model, make_machine, rule
from tests.held import predict


@pytest.mark.parametrize("phase", Phase)
def test_compute_and_waiting_have_errors_of_their_own(phase: Phase) -> None:
    workload, budget = Workload(prompt_tokens=64, output_tokens=9), Budget(gpu_memory=64 * MIB)
    offload = Offload(prefetch_step=1, prefill_chunk=64, rules=(rule("mlp"),))
    found = predict(dense_model(4), make_machine(), workload, budget, offload)
    took = found.decode if phase is Phase.DECODE else found.prefill
    assert took.stall_s > 0 < took.compute_s
    ends = step_range(found, phase)
    assert ends is not None
    for end, of_compute, of_waiting in zip(
        ends, COMPUTE_ERRORS[phase], WAITING_ERRORS, strict=True
    ):
        computed = took.step_s - took.stall_s
        assert end == pytest.approx(computed * of_compute + took.stall_s * of_waiting)
    assert ends[0] < took.step_s < ends[1]
    assert step_range(found.model_copy(update={"basis": "measured"}), phase) is None
