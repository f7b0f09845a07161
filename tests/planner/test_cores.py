"""Plans that have the host's cores multiply: chosen where asked for, priced, explained, run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from offplan.backends import Backend
from offplan.capabilities.goal import Asked
from offplan.capabilities.host_cores import why_no_cores
from offplan.checkpoint.open import open_model
from offplan.costs.cores import find_use
from offplan.costs.in_place_costs import AtUse
from offplan.costs.predict import derive_prediction
from offplan.errors import OffplanError
from offplan.forms.form import RAW, Form, Kind
from offplan.held.unit import group_units
from offplan.hostcores.build import check_platform
from offplan.kernel_sizes import CODED_ROW_COST, ROW_COST, ROWS_AT_RATE, slowness
from offplan.library.asking import pose
from offplan.library.machines import load_machine
from offplan.library.sessions import open_session
from offplan.machine.profile import load_profile
from offplan.plan import Goal, Offload, Workload, dump_plan, load_plan
from offplan.planner.make import make_plan
from offplan.planner.neighbours import find_neighbours
from offplan.report.answer import describe_cores
from offplan.report.plan import describe_offload
from offplan.report.run import note_cores
from offplan.runtime.generate import generate
from tests.costs.builders import make_machine, moe_model
from tests.held import hold
from tests.planner.cases import MODELS, ask, budget_for, with_cores
from tests.runtime.quantise import save_stored

WITH_CORES = Goal(packing=False, host_cores=True)


MACHINE = with_cores(make_machine(h2d=2e9, uva=1.8e9), cores=8e9, cores_round_trip=1e-6)


def backends_of(decision: Offload) -> set[str]:
    return {rule.decode.name for rule in decision.rules}


@pytest.mark.parametrize("name", MODELS)
def test_the_planner_has_them_only_where_asked(name: str) -> None:
    without = make_plan(ask(MODELS[name], MACHINE, 0.5))
    result = make_plan(ask(MODELS[name], MACHINE, 0.5, goal=WITH_CORES))
    assert "host" not in backends_of(without.plan.offload)
    assert "host" in backends_of(result.plan.offload)
    assert result.plan.prediction.objective_s < without.plan.prediction.objective_s
    assert result.floor.objective_s <= result.plan.prediction.objective_s * (1 + 1e-9)
    assert any("decode host" in line for line in describe_offload(result.plan))


def test_slow_cores_are_not_chosen() -> None:
    machine = with_cores(MACHINE, cores=1e7)
    result = make_plan(ask(MODELS["moe"], machine, 0.5, goal=WITH_CORES))
    assert "host" not in backends_of(result.plan.offload)


def test_what_they_read_does_not_cross_the_link() -> None:
    question = ask(MODELS["moe"], MACHINE, 0.5, goal=WITH_CORES)
    plan = make_plan(question).plan
    terms = {each.path: each for each in derive_prediction(question.stages, MACHINE, plan)}
    inputs = {each.name: each.value for each in terms["decode.stall"].inputs}
    assert inputs["round trips"] > 0
    assert inputs["bytes read by the host's cores"] > plan.prediction.decode.link_bytes
    waited = inputs["round trips"] * 1e-6 + inputs["bytes read by the host's cores"] / 8e9
    assert inputs["host's cores"] == pytest.approx(waited, rel=1e-6)


def test_neighbours_name_them() -> None:
    question = ask(MODELS["moe"], MACHINE, 0.5, goal=WITH_CORES)
    plan = make_plan(question).plan
    changes = [each.change for each in find_neighbours(question, plan)]
    assert any("decode host -> uva" in change for change in changes)


def test_rates_beside_copies() -> None:
    assert MACHINE.cores_rate_beside.value == 8e9
    assert with_cores(MACHINE, host_reads=9e9).cores_rate_beside.value == 7e9
    assert with_cores(MACHINE, host_reads=2e9).cores_rate_beside.value == 8e8
    assert with_cores(MACHINE, cores_beside_copies=3e9).cores_rate_beside.value == 3e9
    shipped = load_profile("rtx4090-pcie4")
    assert shipped.cores_rate.basis == shipped.cores_trip.basis == "estimated"


def test_further_rows_of_a_weight_take_longer() -> None:
    model = moe_model(4)
    units = [u for u in group_units(model.layers[0]) if not u.is_expert and len(u.shape) > 1]
    one, many = (find_use(units, MACHINE, model.experts, batch, None) for batch in (1, 12))
    assert one.slowness == 1.0
    assert many.slowness == 12 / ROWS_AT_RATE
    assert one.num_products == many.num_products == len(units)
    layer = next(each for each in model.layers if each.expert_bytes)
    routed = [unit for unit in group_units(layer) if unit.is_expert]
    assert find_use(routed, MACHINE, model.experts, 1, None).num_products == 1
    # each weight meets its own rows: what is handed over together takes as long as one by one
    each = [find_use(some, MACHINE, model.experts, 40, None) for some in (units, routed)]
    both = find_use([*units, *routed], MACHINE, model.experts, 40, None)
    assert each[0].slowness != each[1].slowness
    taken = [use.seconds(MACHINE, beside=False) for use in (*each, both)]
    assert sum(taken[:2]) == pytest.approx(taken[2])


def test_a_further_row_of_codes_takes_more_of_the_first_ones_time() -> None:
    further = ROW_COST, CODED_ROW_COST
    assert [slowness(5, codes=codes) for codes in (False, True)] == [
        1 + 4 * each for each in further
    ]
    assert slowness(0.5, codes=True) == 1.0
    forms = RAW, Form(Kind.PACKED), Form(Kind.MXFP4, (1, 32))
    assert [form.is_rounded for form in forms] == [False, False, True]


def test_shared_experts_hide_what_the_cores_read() -> None:
    """Where the block adds them last, and the cores do not multiply them as well."""
    model = moe_model(2)
    for model_type, hides in ((model.model_type, False), ("deepseek_v3", True)):
        stage = hold(replace(model, model_type=model_type))
        at_use = AtUse(stage, MACHINE, 1)
        units = group_units(stage.layers[1])
        routed = [(unit, Backend.HOST) for unit in units if unit.is_expert]
        shared = [(unit, Backend.HOST) for unit in units if "shared" in unit.name]
        plain = find_use([unit for unit, _ in routed], MACHINE, stage.experts, 1, None)
        hidden_s = sum(unit.nbytes for unit, _ in shared) / MACHINE.hbm.value
        assert hidden_s
        taken_s = at_use.cores(routed).seconds(MACHINE, beside=False)
        assert taken_s == pytest.approx(plain.seconds(MACHINE, beside=False) - hides * hidden_s)
        for none in ([*routed, *shared], shared):
            assert not at_use.cores(none).shared_bytes
    assert plain._replace(num_bytes=0, shared_bytes=9**9).seconds(MACHINE, beside=True) > 0


def test_engines_have_none() -> None:
    with pytest.raises(ValidationError, match="`host_cores` with `engine=vllm`: no engine"):
        Goal(engine="vllm", host_cores=True)
    with pytest.raises(ValidationError, match="`host_threads=4` with `engine=vllm`: no engine"):
        Goal(engine="vllm", host_threads=4)


def test_threads_are_of_cores_that_multiply() -> None:
    with pytest.raises(ValidationError, match="`host_threads=4` with `host_cores=False`, which"):
        Goal(host_threads=4, host_cores=False)
    assert Goal(host_threads=4).host_threads == 4  # the cores are chosen later


@pytest.mark.slow
def test_fewer_threads_are_priced_and_told_of() -> None:
    machine = with_cores(MACHINE, host_threads=8)
    plans = {}
    for threads in (None, 4, 8, 16):
        goal = WITH_CORES.model_copy(update={"host_threads": threads})
        plans[threads] = make_plan(ask(MODELS["moe"], machine, 0.5, goal=goal)).plan
    assert plans[4].prediction.objective_s > plans[8].prediction.objective_s
    # the profile's own number changes nothing, a larger one no time
    assert plans[8].machine == plans[None].machine
    assert plans[8].prediction == plans[None].prediction == plans[16].prediction
    assert "host_threads: 4" in dump_plan(plans[4])
    assert "host_threads" not in dump_plan(plans[None])
    told = "The host's cores read"
    question = ask(MODELS["moe"], machine, 0.5, goal=WITH_CORES)
    (line,) = describe_cores(plans[4], question)
    assert line.startswith(f"{told} 4 GB/s with 4 threads (estimated: 4 of 8 threads of: ")
    assert line.endswith(": a test).")
    (line,) = describe_cores(plans[None], question)
    assert line.startswith(f"{told} 8 GB/s with 8 threads (")
    without = ask(MODELS["moe"], machine, 0.5)
    assert describe_cores(make_plan(without).plan, without) == []


def test_the_default_is_theirs_where_they_can() -> None:
    model, goal = MODELS["moe"], Goal()
    asked = Asked(model, 1, "host")
    assert goal.choose(asked, by_others=False)["host_cores"]
    assert not goal.choose(asked, by_others=True)["host_cores"]
    others = {
        "the store is peer": asked._replace(store="peer"),
        "they compute in bfloat16, and test/model in float16": asked._replace(
            model=replace(model, dtype="float16")
        ),
        "an Arm": asked._replace(no_cores="an Arm"),
    }
    for why, of in others.items():
        assert not goal.choose(of, by_others=False)["host_cores"]
        assert why in str(why_no_cores(of))
    # what was asked for stays
    assert "host_cores" not in Goal(host_cores=False).choose(asked, by_others=False)
    arm, here, cpu = map(load_machine, ("gh200", "rtx4090", "cpu"))
    assert (here.no_cores, cpu.no_cores) == (None, "the CPU plays GPU")
    assert "Arm" in str(arm.no_cores)
    windows, linux = (load_machine(f"rtx4090,ram=64GiB,{of}") for of in ("OS=Windows", "os=wsl2"))
    assert "system is Windows" in str(windows.no_cores)
    assert linux.no_cores is None


def test_an_answer_without_them_says_why() -> None:
    question = replace(ask(MODELS["moe"], MACHINE, 0.5), no_cores="it is an Arm")
    plan = make_plan(question).plan
    told = ["The host's cores multiply nothing: it is an Arm."]
    assert describe_cores(plan, question) == told
    assert describe_cores(plan, replace(question, no_cores=None)) == []


def test_cores_that_are_slower_than_priced_are_told_of() -> None:
    plan = make_plan(ask(MODELS["moe"], MACHINE, 0.5, goal=WITH_CORES)).plan
    here = plan.machine.name
    (line,) = note_cores(plan, here, 0.01, 0.02)
    assert line.startswith("With the host's cores a token takes 2.000 times what was predicted")
    assert "`offplan replan --no-host-cores PLAN` plans without them" in line
    assert note_cores(plan, here, 0.01, 0.011) == note_cores(plan, here, 0.01, None) == []
    without = make_plan(ask(MODELS["moe"], MACHINE, 0.5)).plan
    assert note_cores(without, here, 0.01, 0.02) == note_cores(plan, "CPU", 0.01, 0.02) == []


@pytest.mark.slow
def test_what_has_no_kernel_is_left_to_the_link(tmp_path: Path) -> None:
    stored, _ = save_stored("qwen3", "int8", tmp_path)  # float32, in groups of 64
    question = ask(open_model(str(stored)), MACHINE, 0.5, Workload(context=640), WITH_CORES)
    assert "host" not in backends_of(make_plan(question).plan.offload)


@pytest.mark.slow
def test_from_a_question_to_tokens(tmp_path: Path) -> None:
    try:
        check_platform()
    except OffplanError as error:
        pytest.skip(str(error))
    stored, _ = save_stored("qwen3_moe", "fp8_block", tmp_path, torch.bfloat16)
    model = open_model(str(stored))
    work = Workload(prompt_tokens=10, output_tokens=6, context=48)
    machine = with_cores(make_machine(h2d=1e7, uva=1e7), cores=1e9, cores_round_trip=1e-9)
    budget = budget_for(model, machine, 0.5, work)
    plan = make_plan(pose(model, machine, work, budget, WITH_CORES)).plan
    assert "host" in backends_of(plan.offload)
    path = tmp_path / "plan.yaml"
    path.write_text(dump_plan(plan), "utf-8")
    assert load_plan(path).offload == plan.offload
    assert load_plan(path).goal.host_cores
    with open_session(load_plan(path), model=model, device="cpu") as session:
        made = [each.tolist() for each in generate(session, torch.tensor([[3, 14, 15, 9]]), 5)]
    assert len(made) == 5
