"""Experts kept one by one, from a routing profile to a plan that runs, by the commands."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offplan.capabilities.cached_experts import DEFAULT_CACHED_EXPERTS, MissRates
from offplan.library.asking import ask_again
from offplan.plan import load_plan
from offplan.runtime.cached_experts import executor
from tests.cli import CLI, ROOT

TINY = ROOT / "plans" / "tiny-moe"
WORK = ("--prompt-tokens", "32", "--output-tokens", "96", "--context", "256")
QUESTION = ("--machine", "cpu", "--gpu-memory", "700KiB", "--no-packing", *WORK)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of the tiny model that repeats a token's experts, written as a run would."""
    import numpy as np

    from offplan.checkpoint.open import open_model
    from offplan.plan import ModelRef
    from offplan.routing.profile import dump_routing, make_routing

    model = open_model(str(TINY))
    experts = model.experts
    assert experts is not None
    layers = [layer.index for layer in model.layers if layer.expert_bytes]
    random = np.random.default_rng(0)
    chosen = [random.permutation(experts.num_experts) for _ in range(20)]
    shape = len(layers), 2, experts.num_experts_per_token
    steps = np.stack(
        [np.broadcast_to(each[: shape[2]], shape) for each in chosen for _ in range(10)]
    )
    made = make_routing(
        ModelRef.model_validate(model, from_attributes=True), layers, [steps], experts.num_experts
    )
    path = tmp_path_factory.mktemp("routing") / "routing.json"
    path.write_text(dump_routing(made), "utf-8")
    return path


def ask(profile: Path, *more: object) -> tuple[object, ...]:
    return ("plan", TINY, *QUESTION, "--cached-experts", "3", "--routing", profile, *more)


@pytest.mark.slow
def test_a_plan_names_its_profile_and_every_command_knows_it(
    cli: CLI, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(profile, "routing.json")
    path = tmp_path / "plans" / "plan.yaml"
    path.parent.mkdir()
    assert cli(*ask(Path("routing.json"), "-o", path)).code == 0
    plan = load_plan(path)
    assert plan.routing is not None
    assert plan.routing.file == "../routing.json"
    assert any(rule.cached_experts == 3 for rule in plan.offload.rules)
    assert plan.goal.cached_experts == 3

    text = path.read_text("utf-8")
    assert cli("replan", path, "-o", path, "--force").code == 0
    assert path.read_text("utf-8") == text
    out = " ".join(cli("show", path).out.split())
    assert "the 3 experts of a layer used last are on the GPU, too" in out
    assert "experts are chosen again as ../routing.json has it" in out
    out = cli("explain", path).out
    assert "experts missed x bytes of an expert" in out
    assert f"hit rate: routing profile {plan.routing.fingerprint[:12]}, batch 1" in out
    assert "cached_experts 3 -> 4" in out
    assert cli("report", path, "-o", tmp_path / "page.html").code == 0
    assert "experts used last, on the GPU as well" in (tmp_path / "page.html").read_text("utf-8")
    code, out, _ = cli("check", path, "--file-only")
    assert (code, "ok  routing" in out) == (0, True)
    code, _, err = cli("export", path, "--engine", "vllm")
    assert code != 0
    assert "(cached_experts), which vLLM does not do: plan again with --for" in err

    other = profile.read_text("utf-8").replace('"tokens": ', '"tokens": 1', 1)
    (tmp_path / "routing.json").write_text(other, "utf-8")
    code, out, _ = cli("check", path, "--file-only")
    assert (code, "DRIFT  routing" in out) == (4, True)
    assert "times need the figures it was made from" in " ".join(out.split())
    (tmp_path / "routing.json").unlink()
    assert "cannot be compared" in cli("check", path, "--file-only").out
    code, _, err = cli("replan", path)
    assert (code, "routing.json" in err) == (2, True)


@pytest.mark.slow
def test_show_says_that_parts_are_left_out(cli: CLI, profile: Path, tmp_path: Path) -> None:
    shown = []
    for parts in ("auto", "off"):
        plan = tmp_path / f"{parts}.yaml"
        assert cli(*ask(profile, "--parts", parts, "-o", plan)).code == 0
        shown.append("prompts stream a layer's experts whole" in cli("show", plan).out)
    assert shown == [False, True]


def test_diff_says_what_is_kept(cli: CLI, profile: Path, tmp_path: Path) -> None:
    assert cli(*ask(profile, "-o", tmp_path / "a.yaml")).code == 0
    text = (tmp_path / "a.yaml").read_text("utf-8")
    text = text.replace("cached_experts: 3", "cached_experts: 2")
    (tmp_path / "b.yaml").write_text(text, "utf-8")
    found = json.loads(cli("diff", tmp_path / "a.yaml", tmp_path / "b.yaml", "--json").out)
    assert {each["key"] for each in found["asked"]} == {"goal.cached_experts"}
    assert {each["before"] for each in found["moves"]} == {"host (uva, uva, 3 experts kept)"}


def test_without_a_profile_the_answer_says_what_would_change_it(cli: CLI) -> None:
    out = " ".join(cli("analyze", TINY, *QUESTION, "--cached-experts", "3").out.split())
    assert "Tokens choose all experts equally often, which is the slowest case." in out
    assert "--record-routing FILE" in out


def _other_model(data: dict[str, Any]) -> None:
    data["model"]["headers_sha256"] = "0" * 64


def _more_layers(data: dict[str, Any]) -> None:
    for batch in (*data["batches"], *data["passes"]):
        batch["layers"].append({**batch["layers"][-1], "layer": 99})


def _other_version(data: dict[str, Any]) -> None:
    data["offplan_routing"] = 3


def _damaged(data: dict[str, Any]) -> None:
    del data["batches"][0]["layers"][0]["distances"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_other_model, "was recorded with"),
        (_more_layers, "has layer 99"),
        (_other_version, "is a routing profile of version 3"),
        (_damaged, "distances: it is missing"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "analyze", "replan"])
def test_a_file_that_is_not_of_the_model_is_refused(
    cli: CLI,
    profile: Path,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    why: str,
    command: str,
) -> None:
    data = json.loads(profile.read_text("utf-8"))
    change(data)
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(data), "utf-8")
    asked: tuple[object, ...] = (command, TINY, *QUESTION, "--routing", wrong)
    if command == "replan":
        asked = (command, ROOT / "plans" / "tiny-moe.yaml", "--routing", wrong)
    code, _, err = cli(*asked)
    assert (code, why in err) == (2, True), err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--batch", "3"), "has batches of 1, 2 and none of 3"),
        (("--for", "vllm"), "no engine keeps experts"),
        (("--cached-experts", "99"), "has 8 experts; name that many at most"),
        (("--cached-experts", "few"), "write a number of experts of a layer"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    cli: CLI, profile: Path, more: tuple[str, ...], why: str
) -> None:
    code, _, err = cli("plan", TINY, *QUESTION, "--routing", profile, *more)
    assert (code, why in " ".join(err.split())) == (2, True), err


def test_a_dense_model_has_none_to_keep(cli: CLI, profile: Path) -> None:
    dense = ROOT / "tests" / "models" / "qwen3-8b" / "config.json"
    for option in (("--routing", profile), ("--cached-experts", "auto")):
        code, _, err = cli("plan", dense, "--machine", "h200-pcie5", *option)
        assert (code, "has no routed experts" in err) == (2, True), err


@pytest.mark.slow
def test_a_run_prints_hits_beside_those_predicted(cli: CLI, profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    assert cli(*ask(profile, "-o", path)).code == 0
    code, out, err = cli("run", path, "--prompt", "Weights", "--device", "cpu", "--json")
    assert code == 0, err
    found = json.loads(out)["experts"]
    for side in ("predicted", "counted"):
        assert found[side]["hits"] > 0
        assert found[side]["misses"] > 0
    code, out, err = cli("bench", path, "--device", "cpu", "--repeats", "1")
    assert code == 0, err
    assert "experts hit, a token" in out
    assert "experts missed, a token" in out


@pytest.mark.slow
def test_a_plan_by_hand_divides_what_is_missed(
    cli: CLI, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command takes it; a run prints who multiplied the experts that were missed."""
    # the cores would take longer to be asked than the link for so small an expert
    monkeypatch.setattr(executor, "assume", lambda slots: MissRates(0.0, 1e-6, 1e-6))
    plain, path = tmp_path / "plain.yaml", tmp_path / "plan.yaml"
    assert cli(*ask(profile, "-o", plain)).code == 0
    divided = "decode: host, cached_experts: 3, later_experts: 0.5}"
    written = plain.read_text("utf-8").replace("decode: uva, cached_experts: 3}", divided)
    assert divided in written
    path.write_text(written, "utf-8")
    for command in ("show", "explain", "replan", "report"):
        code, out, err = cli(command, path, *(("-o", tmp_path / "page") * (command == "report")))
        assert code == 0, err
        told = "host's cores and the link divide those missed by their rates"
        assert command != "show" or told in " ".join(out.split()), out
    assert cli("check", path, "--file-only").code in (0, 4)
    moves = json.loads(cli("diff", plain, path, "--json").out)["moves"]
    after = "host (uva, host, 3 experts kept, those missed by cores and link)"
    assert {each["after"] for each in moves} == {after}
    old = tmp_path / "old.yaml"
    old.write_text(written.replace("later_experts: 0.5}", "host_share: 0.5}"), "utf-8")
    code, _, err = cli("show", old)
    assert code == 2
    assert "found host_share: cores and link divide missed experts by their rates" in err
    assert cli("check", old).code == 2
    assert ask_again(old) == ask_again(path)
    again = tmp_path / "again.yaml"
    assert cli("replan", path, "-o", again).code == 0
    code, _, err = cli("replan", old, "-o", old, "--force")
    assert code == 0, err
    assert old.read_text("utf-8") == again.read_text("utf-8")
    code, _, err = cli("export", path, "--engine", "vllm")
    assert (code, "(cached_experts), which vLLM does not do" in err) == (2, True)
    code, out, err = cli("run", path, "--prompt", "Weights", "--device", "cpu")
    assert code == 0, err
    whats = "hit", "missed", "brought", "multiplied by the cores", "brought for later"
    for what in whats:
        assert f"experts {what}, a token" in out + err
    code, out, err = cli("run", path, "--prompt", "Weights", "--device", "cpu", "--json")
    found = json.loads(out)["experts"]["counted"]
    assert 0 < found["by_cores"] < found["misses"]


def test_a_profile_of_fewer_choices_than_tokens_make_is_refused(
    cli: CLI, profile: Path, tmp_path: Path
) -> None:
    data = json.loads(profile.read_text("utf-8"))
    batch = data["batches"][0]
    layer = batch["layers"][0]
    layer.update(distances=[batch["steps"], *[0] * (len(layer["distances"]) - 1)], first_uses=1)
    path = tmp_path / "routing.json"
    path.write_text(json.dumps(data), "utf-8")
    code, _, err = cli(*ask(path))
    assert (code, "a token chooses" in err) == (2, True), err


def test_the_option_says_its_default(cli: CLI) -> None:
    told = " ".join(cli("plan", "--help").out.split())
    assert f"were used last on the GPU. [default: {DEFAULT_CACHED_EXPERTS}]" in told
