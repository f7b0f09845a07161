"""Plans that an engine's flags can say."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.costs.predict import predict
from offplan.engines.export import export_plan
from offplan.engines.runner import find_runner
from offplan.errors import ExportError, InfeasibleError
from offplan.held.runner import Demand
from offplan.library.asking import pose
from offplan.plan import Goal, Offload, Prediction
from offplan.planner.aims import NEVER
from offplan.planner.make import make_plan
from offplan.planner.question import Question
from offplan.report.explain import explain_plan
from offplan.units import parse_bytes
from tests.costs.builders import make_machine
from tests.engines.builders import deepseek, qwen3
from tests.engines.configs import BLOCKS, LATENT, STORED_CODES
from tests.planner.brute_force import BruteForce
from tests.planner.cases import ask, assert_fastest
from tests.tiers import each_value_once


@pytest.mark.slow
@settings(max_examples=15)
@given(
    st.sampled_from(["vllm", "vllm-worker", "sglang"]),
    st.sampled_from([deepseek(), qwen3()]),
    st.floats(0.1, 1.0),
    st.sampled_from([1e8, 5e9, 50e9]),
)
def test_a_plan_for_an_engine_can_be_exported(
    engine: str, model: Model, share: float, h2d: float
) -> None:
    machine, goal = make_machine(h2d=h2d, uva=0.9 * h2d), Goal(engine=engine)
    free_s = make_plan(ask(model, machine, share)).best_s
    try:
        result = make_plan(ask(model, machine, share, goal=goal))
    except InfeasibleError:
        assert engine == "sglang"
        assert model.experts is not None, "of such models it moves nothing else"
        return
    export_plan(result.plan, model, engine)
    assert result.max_rules == 1
    assert result.best_s >= free_s
    assert f"only plans that {engine} can run were searched" in explain_plan(result)


@pytest.mark.slow
def test_the_worker_is_planned_for_with_packed_weights(tmp_path: Path) -> None:
    """It is faster than with weights as they are stored, and fits; flags hold none packed."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps({**LATENT, **sizes}))
    model, machine = open_model(str(tmp_path / "config.json")), make_machine(h2d=1e9, uva=9e8)
    asked = ask(model, machine, 0.5, goal=Goal(engine="vllm-worker"))
    result = make_plan(asked)
    assert result.plan.offload.packing is not None
    export = export_plan(result.plan, model, "vllm-worker")
    assert export.options["quantization"] == ("offplan_packed",)
    taken = result.plan.prediction.gpu_memory.total_bytes + max(0, export.demand.more_gpu_bytes)
    assert taken <= asked.budget.gpu_memory
    plain = replace(asked, goal=Goal(engine="vllm-worker", packing=False))
    assert result.best_s < make_plan(plain).best_s
    for goal in (Goal(engine="vllm"), Goal(engine="sglang")):
        assert ask(model, machine, 0.5, goal=goal).recoding is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "share", "h2d"),
    each_value_once(
        (engine, *case)
        for engine in ("vllm", "vllm-worker", "sglang")
        for case in ((0.5, 1e9), (0.8, 1e9), (0.8, 50e9))
    ),
)
def test_the_fastest_of_an_engine_is_found(engine: str, share: float, h2d: float) -> None:
    """As if every plan of one rule were looked at, and those left out that do not export."""
    machine = make_machine(h2d=h2d, uva=0.9 * h2d)
    question = ask(deepseek(3), machine, share, goal=Goal(engine=engine))
    kept = [
        each.objective_s
        for each in BruteForce(question, (600, 512)).singles
        if demand(each.offload, question)
    ]
    if not kept:
        with pytest.raises(InfeasibleError):
            make_plan(question)
        return
    assert_fastest(make_plan(question), min(kept))


def test_a_question_of_no_engine_asks_of_the_model_as_run_loads_it() -> None:
    asked = ask(qwen3(), make_machine(), 0.5, goal=Goal(engine="vllm"))
    again = ask(qwen3(), make_machine(), 0.5)
    plain = pose(asked.model, asked.machine, asked.workload, again.budget)
    assert (asked.runner.name, plain.runner.name) == ("vllm", None)
    decided = make_plan(plain).plan
    assert decided.prediction == make_plan(again).plan.prediction


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.7, 1.0, 1.2, 1.4])
def test_what_an_engine_makes_of_experts_is_within_the_budget(share: float, tmp_path: Path) -> None:
    """Of 224 by 224, stored as MXFP4, it makes 256 by 256: 1.31 times as much."""
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 224, "intermediate_size": 224, "num_hidden_layers": 2}
    types = STORED_CODES["layer_types"][:2]
    path.write_text(json.dumps({**STORED_CODES, **sizes, "layer_types": types}))
    model, machine = open_model(str(path)), make_machine(h2d=5e9, uva=4e9)
    question = ask(model, machine, share, goal=Goal(engine="vllm"))
    kept = [
        each.objective_s
        for each in BruteForce(question, (600, 512)).singles
        if demand(each.offload, question)
    ]
    result = make_plan(question)
    assert export_plan(result.plan, model, "vllm").engine.name == "vllm"
    assert result.best_s <= 1.005 * min(kept, default=float("inf"))
    assert bool(result.plan.offload.rules) == (share < 1.3)


@pytest.mark.slow
# of models as small as these SGLang moves nothing, or whole GiB
@pytest.mark.parametrize(
    ("engine", "name", "share"),
    each_value_once(
        [
            *(("vllm", "deepseek", 0.5), ("vllm", "deepseek in FP8", 0.6), ("vllm", "qwen3", 0.5)),
            *(("vllm-worker", name, 0.5) for name in ("qwen3", "deepseek", "deepseek in FP8")),
        ],
        of=[("vllm", "deepseek in FP8", 0.6), ("vllm-worker", "qwen3", 0.5)],
    ),
)
def test_what_an_engine_page_locks_is_within_the_budget(
    engine: str, name: str, share: float, tmp_path: Path
) -> None:
    """Parameters of 6 KiB are page-locked as 8: host memory for the former is not enough."""
    model = {"qwen3": qwen3(), "deepseek": deepseek(3)}.get(name) or read_fp8(tmp_path)
    asked = ask(model, make_machine(h2d=1e9, uva=9e8), share, goal=Goal(engine=engine))
    free = BruteForce(asked, (600, 512)).singles
    locked = {each.offload: lock(each.offload, asked) for each in free}
    sizes = {*locked.values()} - {NEVER}
    assert sizes
    # every size of one model, and some of the others
    sizes = sizes if name == "deepseek" else {*sorted(sizes)[::4]}
    for limit in sorted(sizes | {size - 1 for size in sizes}):
        budget = asked.budget.model_copy(update={"host_memory": limit})
        fits = [each for each in free if locked[each.offload] <= limit]
        if not fits:
            with pytest.raises(InfeasibleError):
                make_plan(replace(asked, budget=budget))
            continue
        result = make_plan(replace(asked, budget=budget))
        assert export_plan(result.plan, model, engine).demand.pinned_bytes <= limit
        assert result.best_s <= 1.005 * min(each.objective_s for each in fits)


def read_fp8(folder: Path) -> Model:
    """A model whose experts are stored in blocks of 128 by 128, with scales."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 3}
    stored = {"quantization_config": BLOCKS["quantization_config"]}
    (folder / "config.json").write_text(json.dumps({**LATENT, **sizes, **stored}))
    return open_model(str(folder / "config.json"))


def lock(offload: Offload, question: Question) -> float:
    """Bytes that the engine page-locks, or the plan's own; infinite where it cannot say it."""
    if (found := demand(offload, question)) is None:
        return NEVER
    said, taken = found
    return max(said.pinned_bytes, taken.host_memory_bytes)


@pytest.mark.slow
def test_how_much_more_of_either_memory_an_engine_wants_is_told() -> None:
    """What is page-locked is rounded up: of host memory more lacks than the weights would take."""
    model, machine = qwen3(), make_machine(gpu_memory=2**40)
    asked = ask(model, machine, 0.5, goal=Goal(engine="vllm"))
    plain = pose(model, machine, asked.workload, asked.budget, Goal(packing=False))
    least = make_plan(plain).plan.prediction.host_memory_bytes
    budget = asked.budget.model_copy(update={"host_memory": least // 2})
    told = r"; with (.*) more of GPU memory, or with (.*) more of host memory there is one$"
    with pytest.raises(InfeasibleError, match=told) as error:
        make_plan(replace(asked, budget=budget))
    found = re.search(told, str(error.value))
    assert found is not None
    for name, more in zip(("gpu_memory", "host_memory"), found.groups(), strict=True):
        enough = getattr(budget, name) + parse_bytes(more)
        make_plan(replace(asked, budget=budget.model_copy(update={name: enough})))


def demand(offload: Offload, question: Question) -> tuple[Demand, Prediction] | None:
    """What the engine needs and what the plan takes; None where the engine cannot run it."""
    stages, budget = question.stages, question.budget
    assert question.goal.engine is not None
    try:
        said = find_runner(question.goal.engine).demand(offload, stages)
    except ExportError:
        return None
    taken = predict(stages, question.planned_machine, question.workload, budget, offload)
    fits = taken.gpu_memory.total_bytes + said.more_gpu_bytes <= budget.gpu_memory
    return (said, taken) if fits else None
