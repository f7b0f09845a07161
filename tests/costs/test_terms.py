"""A prediction is the sum of its terms, and each term is what its formula says."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from offplan.capabilities.ranks import Ranks
from offplan.checkpoint.open import open_model
from offplan.costs.predict import derive_prediction
from offplan.costs.term import Term
from offplan.held.held import hold
from offplan.held.stage import Stage
from offplan.library.asking import ask, ask_again
from offplan.library.machines import load_machine
from offplan.library.repricing import price_on
from offplan.machine.profile import MachineProfile
from offplan.plan import Plan, load_plan
from offplan.planner.make import make_plan
from tests.checkpoint.quantised import FORMATS, write_quantised
from tests.cli import ROOT
from tests.held import hold_by
from tests.tiers import first_quick

PLANS = {
    "tiny-moe": None,
    "qwen3-8b-h200-12gib": "qwen3-8b",
    "qwen3-8b-h200-8gib": "qwen3-8b",
    "deepseek-v2-lite-h200-16gib": "deepseek-v2-lite",
}
"""Shipped plans, and the folder of the config that their model is read from."""


def list_figures(plan: Plan) -> dict[str, float]:
    """A prediction's numbers by their path in the file."""
    data = plan.prediction.model_dump(mode="json", by_alias=True, exclude={"basis"})
    sections = {
        key: value if isinstance(value, dict) else {"": value} for key, value in data.items()
    }
    return {
        f"{key}.{name}".rstrip("."): value
        for key, section in sections.items()
        for name, value in section.items()
    }


@pytest.mark.parametrize("name", first_quick(PLANS))
def test_every_number_is_derived(name: str) -> None:
    plan = load_plan(ROOT / "plans" / f"{name}.yaml")
    folder = PLANS[name]
    model = None if folder is None else str(ROOT / "tests" / "models" / folder / "config.json")
    question = ask_again(plan, model=model)
    check(question.hold(plan.offload), question.planned_machine, plan)


@pytest.mark.parametrize("name", ["fp8 blocks", "gptq"])
def test_so_is_that_of_a_stored_form(tmp_path: Path, name: str) -> None:
    model = open_model(str(write_quantised(tmp_path, FORMATS[name])))
    question = ask(model, load_machine("h200-pcie5"), gpu_memory=2**31)
    plan = make_plan(question).plan
    check(question.hold(plan.offload), question.planned_machine, plan)


def test_so_is_what_packing_saves() -> None:
    plan = load_plan(ROOT / "plans" / "qwen3-8b-h200-8gib.yaml")
    model = open_model(str(ROOT / "tests" / "models" / "qwen3-8b" / "config.json"))
    assert plan.offload.packing is not None
    packed = hold_by(model, packing=plan.offload.packing)
    resident = derive_prediction(packed, load_machine("h200-pcie5").profile, plan)[0]
    weights, saved, *others = (each.value for each in resident.inputs)
    assert weights == hold(model).loaded_bytes
    assert 0.2 * weights < saved < 0.25 * weights
    assert resident.value == weights - saved - sum(others)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "twice"), [("sglang", True), ("vllm", False)])
def test_so_is_what_engines_copy(engine: str, twice: bool) -> None:
    model = open_model(str(ROOT / "tests" / "models" / "deepseek-v2-lite" / "config.json"))
    question = ask(model, load_machine("h200-pcie5"), gpu_memory=16 * 2**30, engine=engine)
    plan = make_plan(question).plan
    check(question.hold(plan.offload), question.planned_machine, plan)
    terms = derive_prediction(question.stages, question.planned_machine, plan)
    formulas = {term.path: term.formula for term in terms}
    assert ("copy the first layers twice" in formulas["decode.stall"]) == twice
    assert "twice" not in formulas["prefill.stall"]


@pytest.mark.parametrize(
    "ranks", first_quick([Ranks(2), Ranks(1, 2), Ranks(2, 3)]), ids=lambda r: r.label
)
def test_so_is_what_ranks_and_stages_take(ranks: Ranks) -> None:
    model = open_model(str(ROOT / "tests" / "models" / "qwen3-8b" / "config.json"))
    question = ask(
        model,
        load_machine("h200-pcie5"),
        gpu_memory=12 * 2**30 // (ranks.tensor * ranks.pipeline) + 2**30,
        engine="vllm",
        tensor_parallel=ranks.tensor,
        pipeline_parallel=ranks.pipeline,
        expert_parallel=ranks.expert,
    )
    check(question.stages, question.planned_machine, make_plan(question).plan)


def check(stages: Sequence[Stage], machine: MachineProfile, plan: Plan) -> None:
    """Hold each term against what is predicted, to the byte, and against its own formula."""
    priced = price_on(plan, stages[0].model, machine)
    terms = derive_prediction(stages, machine, priced)
    joined = [term for term in terms if not term.path.startswith("stages.")]
    assert len(terms) - len(joined) == (len(stages) > 1) * len(stages) * len(joined)
    figures = list_figures(priced)
    assert figures.pop("peer_memory") == 0
    assert {term.path: term.value for term in joined} == figures
    for number in range(len(stages)):
        before = f"stages.{number}." if len(stages) > 1 else ""
        check_formulas([term for term in terms if term.path.startswith(before)], before)
    if len(stages) > 1:
        check_stages(terms, joined)
    used = {each.name for term in terms for each in term.inputs if each.source}
    assert {"h2d", "uva", "copy_latency", "gpu_overhead"} <= used


def check_formulas(terms: Sequence[Term], before: str) -> None:
    """Evaluate what the formulas of one stage say, ``before`` which its paths have its name."""
    values = {term.path.removeprefix(before): term.value for term in terms}
    for path, term in zip(values, terms, strict=True):
        section, _, name = path.rpartition(".")
        if name == "stall" and "timeline" in term.formula:
            assert term.value >= 0
            continue
        known = dict(values)
        for other in terms:
            other_section, _, other_name = other.path.removeprefix(before).rpartition(".")
            if other_section == section:
                known |= {each.name: each.value for each in other.inputs}
                known[other_name] = other.value
        formula = term.formula.partition(":")[0].removesuffix(", re-reads included")
        if formula == "the sum of these":
            formula = " + ".join(p for p in values if p.startswith(section) and p != path)
        assert evaluate(formula, known) == pytest.approx(term.value, rel=1e-9), path


def evaluate(formula: str, known: Mapping[str, float]) -> float:
    """Calculate a formula of names, sums, products, quotients and ``max``."""
    names = "|".join(re.escape(name) for name in sorted(known, key=len, reverse=True))
    digits = re.sub(names, lambda found: repr(known[found[0]]), formula).replace(" x ", " * ")
    assert re.fullmatch(r"(?:max|[-+*/()., e0-9])+", digits), formula
    return float(eval(digits))  # of digits and operators alone


def check_stages(terms: Sequence[Term], joined: Sequence[Term]) -> None:
    """What all stages come to: the most of one GPU's memory, the sum of all else."""
    of_stages: dict[str, list[float]] = {}
    for term in terms:
        if term not in joined:
            of_stages.setdefault(term.path.split(".", 2)[2], []).append(term.value)
    totals = of_stages["gpu_memory.total"]
    for term in joined:
        each = of_stages[term.path]
        is_one = term.path.startswith("gpu_memory.")
        assert term.value == (each[totals.index(max(totals))] if is_one else sum(each))
