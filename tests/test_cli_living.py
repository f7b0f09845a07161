"""Looking after a plan file: made again, shown, checked, compared, explained."""

import json
import shutil
from pathlib import Path

import pytest

from offplan import machines
from tests.cli import CLI, ROOT
from tests.rendering import strip_lines

TEXT = (ROOT / "plans" / "tiny-moe.yaml").read_text("utf-8")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, copy: Path) -> Path:
    """The current folder, on a machine without a GPU: a plan, and ``model``, which it is of."""
    monkeypatch.setattr(machines, "has_gpu", lambda: False)
    monkeypatch.chdir(tmp_path)
    write_plan()
    return tmp_path


def write_plan(*edits: tuple[str, str]) -> None:
    text = TEXT.replace("source: tiny-moe", "source: model")
    for before, after in edits:
        assert before in text
        text = text.replace(before, after, 1)
    Path("plan.yaml").write_text(text, "utf-8")


def change_headers() -> None:
    """Make another model of the one that the plan is of, which can be planned, too."""
    shutil.rmtree("model")
    shutil.copytree(ROOT / "tests" / "models" / "qwen3-8b", "model")


UNCHANGED = "offplan: plan.yaml: the prediction is the same\n"


def test_replan_prints_the_same_plan(cli: CLI, folder: Path) -> None:
    assert cli("replan", "plan.yaml") == (0, Path("plan.yaml").read_text("utf-8"), UNCHANGED)


def test_replan_undoes_an_edit_and_keeps_comments(cli: CLI, folder: Path) -> None:
    comment = ("offload:\n  prefetch_step: 1", "# ours\noffload:\n  prefetch_step: 1 # ring")
    write_plan(comment)
    wanted = Path("plan.yaml").read_text("utf-8")
    write_plan(comment, ("self_attn", "o_proj"), ("step: 2.426 ms", "step: 3 ms"))
    assert cli("replan", "plan.yaml", "-o", "plan.yaml").code == 2
    code, out, err = cli("replan", "plan.yaml", "-o", "plan.yaml", "--force")
    assert (code, out) == (0, "")
    assert err == "offplan: plan.yaml: decode.step 3 ms -> 2.426 ms\noffplan: wrote plan.yaml\n"
    assert Path("plan.yaml").read_text("utf-8") == wanted


def test_replan_moves_paths_with_the_file(cli: CLI, folder: Path) -> None:
    Path("plans").mkdir()
    shutil.copy(ROOT / "offplan" / "machine" / "profiles" / "cpu.yaml", "mine.yaml")
    arguments = ("replan", "plan.yaml", "--machine", "mine.yaml", "-o", "plans/new.yaml")
    assert cli(*arguments).code == 0
    text = Path("plans/new.yaml").read_text("utf-8")
    assert "source: ../model\n" in text
    assert "profile: ../mine.yaml\n" in text
    assert cli("replan", "plans/new.yaml").out == text


def test_replan_of_another_model_is_asked_for(cli: CLI, folder: Path) -> None:
    Path("model/config.json").write_text(
        Path("model/config.json").read_text("utf-8").replace("{", '{"note": 1, ', 1), "utf-8"
    )
    code, out, err = cli("replan", "plan.yaml")
    assert (code, out) == (4, "")
    assert "the plan was made for another config.json" in err
    code, out, _ = cli("replan", "plan.yaml", "--accept-drift")
    assert code == 0
    differ = [a for a, b in zip(TEXT.splitlines(), out.splitlines(), strict=True) if a != b]
    assert [line.split(":")[0].strip() for line in differ] == ["source", "config_sha256"]
    code, _, err = cli("replan", "plan.yaml", "--accept-drift", "--model", "model")
    assert (code, "leave --model out" in err) == (2, True)


def test_replan_needs_the_figures_of_a_machine(cli: CLI, folder: Path) -> None:
    write_plan(("profile: cpu", "profile: null"))
    code, _, err = cli("replan", "plan.yaml")
    assert (code, "measured on CPU" in err) == (2, True)
    code, out, _ = cli("replan", "plan.yaml", "--machine", "cpu")
    assert code == 0
    assert "profile: cpu\n" in out


def test_replan_says_what_does_not_fit(cli: CLI, folder: Path) -> None:
    write_plan(("context: 256", "context: 100000"))
    assert cli("replan", "plan.yaml").code == 3


def test_replan_has_json(cli: CLI, folder: Path) -> None:
    code, out, _ = cli("replan", "plan.yaml", "--json")
    assert code == 0
    assert '"can_execute": true' in out


SHOWN = """\
Asked:
  model, bfloat16
  CPU, memcpy: 10 GB/s (estimated)
  batch 1, 32 prompt tokens, 96 output tokens, context 256
  1 MiB of GPU memory, host memory unlimited
  the least time of a request
Plan:
  on the host: self_attn of the last 1 in every 2 layers (prefill prefetch,
  decode prefetch)
"""


def test_show_needs_the_file_alone(cli: CLI, folder: Path) -> None:
    shutil.rmtree("model")
    code, out, err = cli("show", "plan.yaml")
    assert (code, err) == (0, "")
    out = strip_lines(out)
    assert out.startswith(SHOWN)
    assert "\nGPU, of 1 MiB             1 MiB\n" in out
    assert "\nA request takes 235.3 ms, estimated: 412.2 tokens/s in decode.\n" in out


def test_show_of_a_goal(cli: CLI, folder: Path) -> None:
    goal = "goal: {objective: throughput, max_tpot: 50 ms, engine: vllm}"
    write_plan(
        ("goal: {objective: latency}", goal), ("decode: {step: 2.426 ms", "decode: {step: 0")
    )
    out = cli("show", "plan.yaml").out
    assert "the most tokens a second with --max-tpot 50 ms, as vllm can run it" in out
    assert "A request takes 235.3 ms, estimated." in out


def test_show_has_json(cli: CLI, folder: Path) -> None:
    shown = json.loads(cli("show", "plan.yaml", "--json").out)
    assert (shown["offplan"], shown["offload"]["prefetch_step"]) == (1, 1)
