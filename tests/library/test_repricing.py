"""Edited plans: priced again where that is possible, refused where they exceed their budget."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from offplan.capabilities.cached_experts import ExpertsFound, ExpertSlots, FoundAnywhere
from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.costs.cached_experts import predict_found
from offplan.errors import CheckpointError, PlanError
from offplan.held.stage import Stage
from offplan.library.held_memory import check_held, count_held
from offplan.library.planned import open_planned_model
from offplan.library.repricing import compare_counts, list_changes, price_again, price_as_run
from offplan.library.sessions import open_session
from offplan.placement import Placement
from offplan.plan import Goal, Plan, dump_plan, load_plan
from offplan.routing.profile import BatchReuse
from tests.cli import CLI, ROOT, TINY_MOE

PLAN = (ROOT / "plans" / "tiny-moe.yaml").read_text("utf-8")
ROOMY = ("gpu_memory: 1 MiB", "gpu_memory: 2 MiB")
MEASURED = ("profile: cpu", "profile: null")
EVERY_LAYER = ("group_size: 2, num_in_group: 1", "group_size: 1, num_in_group: 1")
EVERYTHING = ("[experts.down_proj], group_size: 2", "[], group_size: 2")


def edited(folder: Path, *edits: tuple[str, str]) -> Plan:
    text = PLAN
    for before, after in edits:
        assert before in text
        text = text.replace(before, after, 1)
    path = folder / "plan.yaml"
    path.write_text(text, "utf-8")
    return load_plan(path)


@pytest.fixture(scope="module")
def model() -> Model:
    return open_model(str(TINY_MOE))


@pytest.mark.parametrize("edits", [(), (MEASURED,), (("profile: cpu", "profile: gone.yaml"),)])
def test_a_plan_that_nobody_edited_passes(
    model: Model, tmp_path: Path, edits: tuple[tuple[str, str], ...]
) -> None:
    plan = edited(tmp_path, *edits)
    assert price_again(plan, model) is plan


@pytest.mark.parametrize("name", ["qwen3-8b", "deepseek-v2-lite"])
@pytest.mark.slow
def test_a_plan_of_a_hub_id_passes_with_a_copy(name: str) -> None:
    config = str(ROOT / "tests" / "models" / name / "config.json")
    for path in (ROOT / "plans").glob(f"{name}*.yaml"):
        plan = load_plan(path)
        assert price_again(plan, open_planned_model(plan, config)) is plan
        measured = plan.machine.model_copy(update={"profile": None})
        plan = plan.model_copy(update={"machine": measured})
        assert price_again(plan, open_planned_model(plan, config)) is plan


@pytest.mark.parametrize("is_divided", [False, True])
def test_counts_of_a_machine_that_is_gone_are_no_other_machines(
    model: Model, tmp_path: Path, is_divided: bool
) -> None:
    """What is hit and missed follows from the plan; what the cores multiply, from their rates."""
    cached = f"decode: {'host' if is_divided else 'uva'}, cached_experts: 3}}"
    rule = ("[experts.down_proj]", "[experts]"), ("decode: prefetch}", cached)
    counted = {"cached_experts": ExpertsFound(1.0, 2.0, 1.0)}
    here, gone = (
        compare_counts(edited(tmp_path, ROOMY, *rule, *edits), model, counted)["cached_experts"]
        for edits in ([], [MEASURED])
    )
    assert isinstance(here.predicted, ExpertsFound)
    assert gone.counted == counted["cached_experts"]
    hits, misses = here.predicted.hits, here.predicted.misses
    assert gone.predicted == (FoundAnywhere(hits, misses) if is_divided else here.predicted)


def test_what_cores_and_reuse_decide_is_not_predicted_of_no_machine() -> None:
    """Which experts lie in slots then follows from the rates as well."""
    reuse = BatchReuse.model_construct()
    stage = cast("Stage", SimpleNamespace(experts=object(), reuse=lambda *_: reuse))
    slots = ExpertSlots(3, 8, (), by_cores=True)
    placement = cast("Placement", SimpleNamespace(caches_of=lambda _: {0: slots}))
    assert predict_found(placement, stage, 1, None) is None


def test_what_runs_here_is_predicted_as_it_runs_here(model: Model, tmp_path: Path) -> None:
    """A plan for an engine is, unless its profile is gone; others are as they were made."""
    plain = price_again(edited(tmp_path, ROOMY), model)
    assert price_as_run(plain, model) is plain
    theirs = price_again(plain.model_copy(update={"goal": Goal(engine="vllm")}), model)
    assert theirs.prediction != plain.prediction
    ours = price_as_run(theirs, model)
    assert ours.goal.engine is None
    assert list_changes(plain, ours) == []
    assert price_again(ours, model) is ours
    gone = plain.machine.model_copy(update={"profile": None})
    theirs = theirs.model_copy(update={"machine": gone})
    assert price_as_run(theirs, model) is theirs


EDITS = {
    "step": ("prefetch_step: 1", "prefetch_step: 50"),
    "everything": EVERYTHING,
    "no rules": (PLAN[PLAN.index("rules:\n") : PLAN.index("prediction:")], "rules: []\n"),
    "chunk": ("prefill_chunk: 32", "prefill_chunk: 8"),
    "context": ("context: 256", "context: 512"),
    "batch": ("{batch: 1", "{batch: 2"),
    "embeddings": ("  prefill_chunk", "  embeddings: host\n  prefill_chunk"),
    "host memory": ("host_memory: 96 KiB", "host_memory: 1 KiB"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edited_plan_is_priced_again(
    model: Model, tmp_path: Path, edit: tuple[str, str]
) -> None:
    plan = edited(tmp_path, ROOMY, edit)
    priced = price_again(plan, model)
    assert list_changes(plan, priced)
    assert price_again(priced, model) is priced
    path = tmp_path / "priced.yaml"
    path.write_text(dump_plan(priced), "utf-8")
    again = load_plan(path)
    assert price_again(again, model) is again


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_without_its_profile_an_edited_plan_is_refused(
    model: Model, tmp_path: Path, edit: tuple[str, str]
) -> None:
    with pytest.raises(PlanError, match=r"was edited, .* -> .*make it again with offplan plan"):
        price_again(edited(tmp_path, MEASURED, edit), model)


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (EDITS["step"], "GPU memory"),
        (("host_memory: null", "host_memory: 100 KiB"), "memory of the store"),
    ],
)
def test_an_edited_plan_keeps_its_budget(
    model: Model, tmp_path: Path, edit: tuple[str, str], what: str
) -> None:
    with pytest.raises(PlanError, match=f"another version: it takes .* of {what} by its"):
        price_again(edited(tmp_path, edit, EVERY_LAYER), model)


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_what_a_session_counts_is_what_pricing_finds(
    model: Model, tmp_path: Path, edit: tuple[str, str]
) -> None:
    """But for activations and overhead, which stay as the plan records them."""
    plan = edited(tmp_path, ROOMY, edit)
    held, priced = count_held(plan, model).prediction, price_again(plan, model).prediction
    for term in ("resident_bytes", "ring_bytes", "kv_cache_bytes"):
        assert getattr(held.gpu_memory, term) == getattr(priced.gpu_memory, term)
    for term in ("activation_bytes", "overhead_bytes"):
        recorded = getattr(plan.prediction.gpu_memory, term)
        assert getattr(held.gpu_memory, term) == recorded
    assert held.host_memory_bytes == priced.host_memory_bytes
    assert held.decode == plan.prediction.decode
    check_held(plan, model)
    check_held(edited(tmp_path, ROOMY, MEASURED, edit), model)  # nor is a profile needed


@pytest.mark.parametrize("profile", [(), (MEASURED,)])
@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ((EDITS["step"], EVERY_LAYER), "version: it takes .* of GPU memory by its prediction"),
        ((EDITS["no rules"],), "more than its budget of 1 MiB"),
        ((EDITS["context"],), "of GPU memory"),
        ((EDITS["batch"],), "of GPU memory"),
        ((("host_memory: null", "host_memory: 100 KiB"), EVERY_LAYER), "of memory of the store"),
        ((("experts.down_proj", "experts.no_proj"),), "rule 1 matches nothing"),
        ((("experts.down_proj", "experts.up_proj"),), "takes only part of"),
        ((("group_size: 2", "group_size: 99"),), "takes nothing"),
        ((EDITS["embeddings"],), None),
    ],
)
def test_a_session_is_not_opened_beyond_the_budget_or_the_model(
    tmp_path: Path,
    profile: tuple[tuple[str, str], ...],
    edits: tuple[tuple[str, str], ...],
    message: str | None,
) -> None:
    plan = edited(tmp_path, *profile, *edits)
    refused = nullcontext() if message is None else pytest.raises(PlanError, match=message)
    with refused:
        open_session(plan, model=str(TINY_MOE), device="cpu").close()


def test_a_session_of_an_engines_plan_takes_what_offplan_holds(
    model: Model, tmp_path: Path
) -> None:
    plan = edited(tmp_path, ROOMY).model_copy(update={"goal": Goal(engine="vllm")})
    check_held(plan, model)
    tight = plan.model_copy(update={"budget": plan.budget.model_copy(update={"gpu_memory": 2**19})})
    with pytest.raises(PlanError, match="is for vllm, which may hold less than offplan's own"):
        check_held(tight, model)


def test_the_command_says_what_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    edited(tmp_path, ROOMY, EVERYTHING)
    path, cli = tmp_path / "plan.yaml", CLI(monkeypatch, capsys)
    code, _, err = cli("export", path, "--engine", "vllm", "--model", TINY_MOE)
    assert code == 0
    assert "another version, and is priced again: gpu_memory.total 1018 KiB -> " in err
    assert "; decode.link_bytes 96 KiB -> " in err
    assert err.startswith(f"offplan: {path} was")


def test_a_relative_source_starts_at_the_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plans = tmp_path / "plans"
    plans.mkdir()
    shutil.copytree(TINY_MOE, tmp_path / "model")
    machine = ROOT / "offplan" / "machine" / "profiles" / "cpu.yaml"
    shutil.copy(machine, tmp_path / "mine.yaml")
    monkeypatch.chdir(tmp_path)
    cli, path = CLI(monkeypatch, capsys), plans / "plan.yaml"
    assert cli("plan", "model", "--machine", "mine.yaml", "-o", path).code == 0
    text = path.read_text("utf-8")
    assert "source: ../model\n" in text
    assert "profile: ../mine.yaml\n" in text
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    plan = load_plan(path)
    assert dump_plan(plan) == text
    assert price_again(plan, open_planned_model(plan)) is plan
    assert cli("plan", "../model", "--machine", "../mine.yaml", "-o", "here.yaml").code == 0
    assert "source: ../model\n" in Path("here.yaml").read_text("utf-8")


def test_a_source_is_not_looked_for_in_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = edited(tmp_path)
    monkeypatch.chdir(TINY_MOE.parent)
    with pytest.raises(CheckpointError, match=r"tiny-moe': found nothing of this name in"):
        open_planned_model(plan)
