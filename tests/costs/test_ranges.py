"""Ranges of estimated times."""

import pytest

from offplan.backends import Backend
from offplan.costs.cores import WAIT_ERRORS
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
    ends = step_range(found, offload, phase)
    assert ends is not None
    for end, of_compute, of_waiting in zip(
        ends, COMPUTE_ERRORS[phase], WAITING_ERRORS, strict=True
    ):
        computed = took.step_s - took.stall_s
        assert end == pytest.approx(computed * of_compute + took.stall_s * of_waiting)
    assert ends[0] < took.step_s < ends[1]
    assert step_range(found.model_copy(update={"basis": "measured"}), offload, phase) is None


def test_a_step_that_waits_for_the_cores_has_their_errors() -> None:
    workload, budget = Workload(prompt_tokens=64, output_tokens=9), Budget(gpu_memory=64 * MIB)
    by = {each: rule("mlp", decode=each) for each in (Backend.PREFETCH, Backend.HOST)}
    offload = Offload(prefetch_step=1, prefill_chunk=64, rules=(by[Backend.PREFETCH],))
    found = predict(dense_model(4), make_machine(), workload, budget, offload)
    cores = offload.model_copy(update={"rules": (by[Backend.HOST],)})
    waiting_s = found.decode.stall_s
    by_cores = step_range(found, cores, Phase.DECODE)
    by_link = step_range(found, offload, Phase.DECODE)
    assert by_cores is not None
    assert by_link is not None
    for ours, theirs, of_cores, of_link in zip(
        by_cores, by_link, WAIT_ERRORS[Backend.HOST.capability], WAITING_ERRORS, strict=True
    ):
        assert ours - theirs == pytest.approx(waiting_s * (of_cores - of_link))
    assert step_range(found, cores, Phase.PREFILL) == step_range(found, offload, Phase.PREFILL)
