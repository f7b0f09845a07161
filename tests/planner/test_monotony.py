"""More memory, a faster link or a faster GPU never make the fastest plan found slower."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.errors import InfeasibleError
from offplan.library.asking import ask as ask_of
from offplan.library.machines import load_machine
from offplan.plan import Goal, Workload
from offplan.planner.make import make_plan
from tests.cli import ROOT
from tests.costs.builders import DENSE, MOE, make_machine, make_model
from tests.planner.cases import BATCHED, ask, models, rates, shares, workloads
from tests.tiers import first_quick


@pytest.mark.slow
@settings(max_examples=8)
@given(
    models,
    shares,
    st.floats(0, 0.5),
    rates,
    workloads,
    st.sampled_from([None, 0.8, 1.0]),
    st.booleans(),
)
def test_more_memory_a_faster_link_or_gpu_is_never_slower(
    model: Model,
    share: float,
    more: float,
    h2d: float,
    workload: Workload,
    strict: float | None,
    packing: bool,
) -> None:
    machine, goal = make_machine(h2d=h2d, uva=h2d), Goal(packing=packing)
    try:
        before = make_plan(ask(model, machine, share, workload, goal))
        if strict is not None:
            step_s = before.plan.prediction.decode.step_s
            goal = Goal(max_tpot=strict * step_s, packing=packing)
            before = make_plan(ask(model, machine, share, workload, goal))
    except InfeasibleError:
        return
    faster = make_machine(h2d=1.3 * h2d, uva=1.2 * h2d)
    quicker = make_machine(h2d=h2d, uva=h2d, gpu=1.5)
    for question in (
        ask(model, machine, share + more, workload, goal),
        ask(model, faster, share, workload, goal),
        ask(model, quicker, share, workload, goal),
    ):
        assert make_plan(question).best_s <= before.best_s * (1 + 1e-9)


@pytest.mark.slow
def test_where_prompts_are_most_of_a_request_more_memory_makes_no_slower_steps() -> None:
    """A percent of such a request is a fifth of its steps."""
    model = open_model(str(ROOT / "benchmarks" / "models" / "gpt-oss-120b" / "config.json"))
    workload = Workload(batch=1, prompt_tokens=32768, output_tokens=16, context=40960)
    machine = load_machine("rtx4090,ram=64GiB")
    less, more = (
        make_plan(ask_of(model, machine, workload, gpu_memory=size)).plan.prediction
        for size in (11 * 2**30, int(11.5 * 2**30))
    )
    products = [each.prefill.step_s * each.decode.step_s for each in (less, more)]
    assert products[1] <= 1.01 * products[0]


@pytest.mark.slow
@pytest.mark.parametrize("h2d", first_quick([1e9, 5e9]))
def test_two_rules_never_lose_by_memory(h2d: float) -> None:
    model, machine = make_model([DENSE, *[MOE] * 6]), make_machine(h2d=h2d, uva=0.9 * h2d)
    results = [make_plan(ask(model, machine, n / 6, BATCHED)) for n in range(1, 6)]
    assert 2 in {len(result.plan.offload.rules) for result in results}
    times = [result.best_s for result in results]
    assert times == sorted(times, reverse=True)
