"""The library: its names, what importing it loads, and that it does what its page shows."""

import ast
import contextlib
import importlib
import inspect
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

import offplan
from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.choices import ObjectiveName
from offplan.errors import DriftError, ExportError, InputError, ProfileError
from offplan.library.asking import ask, ask_again
from offplan.library.machines import Machine, load_machine
from offplan.machine.profile import load_profile
from offplan.plan import Goal, Workload, dump_plan, load_plan
from offplan.planner.make import make_plan
from tests.cli import ROOT, TINY_MOE
from tests.tiers import first_quick

SMALL = Workload(prompt_tokens=32, output_tokens=96, context=256)
MIB = 2**20


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def model() -> Model:
    return open_model(str(TINY_MOE), name=str(TINY_MOE))


def names_for_type_checkers() -> set[str]:
    """Names that ``offplan/__init__.py`` imports where only type checkers look."""
    tree = ast.parse(Path(offplan.__file__).read_text("utf-8"))
    blocks = (node for node in tree.body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
    return {alias.name for node in imports for alias in node.names}


def test_every_name_is_exported_typed_and_documented() -> None:
    assert offplan.__doc__ is not None
    documented = re.findall(r"^``(\w+)``", offplan.__doc__, re.MULTILINE)
    assert sorted(documented) == sorted(offplan.__all__)
    assert names_for_type_checkers() == set(offplan.__all__)
    assert set(offplan.__all__) <= set(dir(offplan))


@pytest.mark.parametrize("name", offplan.__all__)
def test_every_name_imports_and_explains_itself(name: str) -> None:
    found = getattr(offplan, name)
    assert found.__name__ == name
    assert inspect.getdoc(found)
    with pytest.raises(ModuleNotFoundError):  # a module of that name would come in its place
        importlib.import_module(f"offplan.{name}")


def test_a_star_imports_them_all() -> None:
    found: dict[str, object] = {}
    exec("from offplan import *", found)
    assert found.keys() >= set(offplan.__all__)


def test_other_names_are_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'fly'"):
        offplan.fly  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("code", "absent"),
    first_quick(
        [
            ("import offplan", "torch transformers numpy pydantic yaml rich typer huggingface_hub"),
            ("import offplan; offplan.make_plan; offplan.load_machine; offplan.ask_again", "torch"),
            ("import offplan; offplan.load_plan", "torch transformers numpy rich typer"),
        ]
    ),
)
def test_importing_loads_no_more_than_is_asked_for(code: str, absent: str) -> None:
    script = f"{code}\nimport sys; print(*sys.modules)"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert not {name.partition(".")[0] for name in done.stdout.split()} & set(absent.split())


def test_it_is_typed() -> None:
    assert Path(offplan.__file__).with_name("py.typed").exists()


def test_choices_are_those_there_are() -> None:
    assert Goal.model_fields["objective"].annotation == ObjectiveName


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_the_examples_of_the_page(number: int) -> None:
    page = (ROOT / "docs" / "library.md").read_text("utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    code, shown = blocks[2 * number :][:2]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == shown


@pytest.mark.slow
@pytest.mark.parametrize("kind", first_quick([str, Path]))
def test_a_path_is_a_text_or_a_path(kind: type) -> None:
    file, folder = kind("plans/tiny-moe.yaml"), kind("plans/tiny-moe")
    plan = load_plan(Path("plans/tiny-moe.yaml"))
    model = open_model(folder)
    profile = kind("offplan/machine/profiles/cpu.yaml")
    assert load_machine(profile).profile == load_machine("cpu").profile
    assert load_plan(file) == plan
    assert make_plan(ask_again(file, model=folder)).plan.offload == plan.offload
    checked = offplan.check_plan(file, model=folder, with_machine=False)
    assert [each.verdict for each in checked] == ["holds"] * 5
    assert offplan.compare_plans(file, file).is_empty
    with pytest.raises(ExportError, match="more of GPU memory"):
        offplan.export_plan(file, model, "vllm-worker")
    for opened in (file, plan):
        with offplan.open_session(opened, model=folder, device="cpu") as session:
            assert session.device.type == "cpu"


def test_a_plan_is_made_again_from_its_file() -> None:
    path = ROOT / "plans" / "tiny-moe.yaml"
    again = make_plan(ask_again(load_plan(path))).plan
    assert dump_plan(again) == path.read_text("utf-8")


@pytest.mark.slow
def test_a_plan_is_made_again_with_all_that_was_asked(model: Model, tmp_path: Path) -> None:
    question = ask(
        model,
        load_machine("cpu"),
        SMALL,
        gpu_memory=MIB + 12_345,
        host_memory=MIB,
        objective="throughput",
        max_ttft_s=10.0,
        max_tpot_s=0.0123456789,
        engine="vllm",
    )
    plan = make_plan(question).plan
    assert plan.workload.batch > 1  # which the objective chose
    path = tmp_path / "plan.yaml"
    path.write_text(dump_plan(plan), "utf-8")
    again = make_plan(ask_again(load_plan(path))).plan
    assert dump_plan(again) == path.read_text("utf-8")


def test_a_local_copy_keeps_the_plans_name_for_it(model: Model) -> None:
    plan = make_plan(ask(model, load_machine("cpu"), SMALL, gpu_memory=MIB)).plan
    elsewhere = plan.model.model_copy(update={"source": "me/tiny", "revision": "a" * 40})
    plan = plan.model_copy(update={"model": elsewhere})
    assert dump_plan(make_plan(ask_again(plan, model=str(TINY_MOE))).plan) == dump_plan(plan)
    with pytest.raises(DriftError, match="plan it again"):
        ask_again(plan, model="tests/models/qwen3-8b/config.json")


def test_a_measured_machine_is_not_found_again(model: Model) -> None:
    measured = Machine(load_profile("cpu"), MIB)
    plan = make_plan(ask(model, measured, SMALL)).plan
    assert (plan.budget.gpu_memory, plan.machine.profile) == (MIB, None)
    with pytest.raises(InputError, match=r"measured on CPU, .* name a profile of it"):
        ask_again(plan)
    assert make_plan(ask_again(plan, machine=measured)).plan == plan
    gone = plan.machine.model_copy(update={"profile": "gone.yaml"})
    with pytest.raises(ProfileError, match=r"no machine profile 'gone\.yaml'"):
        ask_again(plan.model_copy(update={"machine": gone}))


def test_a_question_asked_again_knows_why_cores_multiply_nothing(model: Model) -> None:
    machine = load_machine("rtx4090,ram=64GiB,os=windows")
    question = ask(model, machine, SMALL)
    assert "Windows" in str(question.no_cores)
    plan = make_plan(question).plan
    assert ask_again(plan) == question
    assert ask_again(plan, machine=machine) == question
    assert ask_again(plan, host_cores=True).goal.host_cores
    linux = load_machine("rtx4090,ram=64GiB")
    asked = make_plan(ask(model, linux, SMALL, host_cores=True, host_threads=4)).plan
    assert ask_again(asked).goal.host_cores
    for again in (ask_again(asked, host_cores=False), ask_again(asked, machine=machine)):
        assert (again.goal.host_cores, again.goal.host_threads) == (False, None)


def test_no_more_is_planned_with_than_there_is(model: Model) -> None:
    machine = load_machine("cpu")
    question = ask(model, machine, gpu_memory=2**60)
    assert question.budget.gpu_memory == machine.profile.gpu_memory.value
    assert question == ask(model, machine, Workload())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu_memory": -1}, "gpu_memory: -1 is not a size"),
        ({"max_ttft_s": -0.1}, "max_ttft_s: -0.1 is not a time"),
        ({"engine": "vllm", "store": "peer"}, "leave one of them out"),
        ({"engine": "llama.cpp"}, "no engine 'llama.cpp'"),
        ({"store": "peer"}, "has no `peer`"),
    ],
)
def test_what_cannot_be_asked(model: Model, arguments: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        ask(model, load_machine("cpu"), **arguments)  # type: ignore[arg-type]


def test_a_card_of_a_desktop_leaves_memory_to_its_display(model: Model) -> None:
    for name, left in (("rtx4090", 2**30), ("rtx4060-laptop", 2**30), ("h200", 0), ("l4", 0)):
        machine = load_machine(name)
        free = machine.profile.gpu_memory.value - left
        assert machine.free_gpu_bytes == free
        assert ask(model, machine).budget.gpu_memory == free
    whole = load_machine("rtx4090").profile.gpu_memory.value
    assert ask(model, load_machine("rtx4090"), gpu_memory=whole).budget.gpu_memory == whole
