"""Looking after a plan file: made again, shown, checked, compared, explained."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offplan.hostcores import build
from offplan.hostmem import limits
from offplan.library import machines, runnable
from offplan.machine.profile import load_profile
from offplan.plan import load_plan
from offplan.upkeep import checking, local_gpu
from offplan.upkeep.local_gpu import LocalGPU
from tests.cli import CLI, ROOT, TINY_MOE
from tests.hostcores.cores import require_cores
from tests.rendering import strip_lines

TEXT = (ROOT / "plans" / "tiny-moe.yaml").read_text("utf-8")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, copy: Path) -> Path:
    """The current folder, on a machine without a GPU: a plan, and ``model``, which it is of."""
    for module in (machines, local_gpu):
        monkeypatch.setattr(module, "has_gpu", lambda: False)
    monkeypatch.chdir(tmp_path)
    write_plan()
    return tmp_path


def write_plan(*edits: tuple[str, str]) -> None:
    text = TEXT.replace("source: tiny-moe", "source: model")
    for before, after in edits:
        assert before in text
        text = text.replace(before, after, 1)
    Path("plan.yaml").write_text(text, "utf-8")


def change_config(before: str = "{", after: str = '{"note": 1, ') -> None:
    """Edit the model's config, in a way that changes nothing else unless it is said."""
    text = Path("model/config.json").read_text("utf-8")
    assert before in text
    Path("model/config.json").write_text(text.replace(before, after, 1), "utf-8")


UNCHANGED = "offplan: plan.yaml: nothing changes\n"


def test_replan_prints_the_same_plan(cli: CLI, folder: Path) -> None:
    assert cli("replan", "plan.yaml") == (0, Path("plan.yaml").read_text("utf-8"), UNCHANGED)


def test_replan_undoes_an_edit_and_keeps_comments(cli: CLI, folder: Path) -> None:
    comment = ("offload:\n  prefetch_step: 1", "# ours\noffload:\n  prefetch_step: 1 # ring")
    write_plan(comment)
    wanted = Path("plan.yaml").read_text("utf-8")
    write_plan(comment, ("experts.down_proj", "o_proj"), ("step: 2.427 ms", "step: 3 ms"))
    assert cli("replan", "plan.yaml", "-o", "plan.yaml").code == 2
    code, out, err = cli("replan", "plan.yaml", "-o", "plan.yaml", "--force")
    assert (code, out) == (0, "")
    changed = "another decision; decode.step 3 ms -> 2.427 ms"
    assert err == f"offplan: plan.yaml: {changed}\noffplan: wrote plan.yaml\n"
    assert Path("plan.yaml").read_text("utf-8") == wanted


@pytest.mark.slow
def test_replan_moves_paths_with_the_file(cli: CLI, folder: Path) -> None:
    Path("plans").mkdir()
    shutil.copy(ROOT / "offplan" / "machine" / "profiles" / "cpu.yaml", "mine.yaml")
    arguments = ("replan", "plan.yaml", "--machine", "mine.yaml", "-o", "plans/new.yaml")
    assert cli(*arguments).code == 0
    text = Path("plans/new.yaml").read_text("utf-8")
    assert "source: ../model\n" in text
    assert "profile: ../mine.yaml\n" in text
    assert cli("replan", "plans/new.yaml").out == text
    assert cli("replan", "plans/new.yaml", "-o", "-").out == text


@pytest.mark.slow
def test_paths_start_at_the_file_that_a_link_leads_to(cli: CLI, folder: Path) -> None:
    links = folder / "links"
    links.mkdir()
    link = links / "plan.yaml"
    link.symlink_to(folder / "plan.yaml")
    assert cli("check", link).code == 0
    assert cli("replan", link, "-o", link, "--force").code == 0
    assert link.is_symlink()
    assert "source: model\n" in Path("plan.yaml").read_text("utf-8")


@pytest.mark.slow
def test_replan_answers_for_a_smaller_budget(cli: CLI, folder: Path) -> None:
    write_plan(("gpu_memory: 1 MiB", "gpu_memory: 1000 KiB"))
    code, out, err = cli("check", "plan.yaml")
    assert (code, err) == (3, "offplan: infeasible: plan.yaml\n")
    assert "NO ROOM   prediction    edited, or made by another version: it takes" in out
    assert cli("show", "plan.yaml").code == 2
    assert cli("replan", "plan.yaml", "-o", "plan.yaml", "--force").code == 0
    assert "gpu_memory: 1000 KiB" in Path("plan.yaml").read_text("utf-8")
    assert cli("check", "plan.yaml").code == 0


def test_replan_of_another_model_is_asked_for(cli: CLI, folder: Path) -> None:
    change_config()
    code, out, err = cli("replan", "plan.yaml")
    assert (code, out) == (4, "")
    assert "the plan was made for config.json" in err
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


@pytest.mark.slow
def test_replan_says_what_does_not_fit(cli: CLI, folder: Path) -> None:
    write_plan(("context: 256", "context: 100000"))
    assert cli("replan", "plan.yaml").code == 3


def test_replan_has_json(cli: CLI, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runnable, "why_not_run", lambda *_: None)  # which asks a process
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
  on the host: experts.down_proj of every 2nd layer (prefill prefetch, decode
  prefetch)
"""


def test_show_needs_the_file_alone(cli: CLI, folder: Path) -> None:
    shutil.rmtree("model")
    code, out, err = cli("show", "plan.yaml")
    assert (code, err) == (0, "")
    out = strip_lines(out)
    assert out.startswith(SHOWN)
    assert "\nGPU, of 1 MiB    1018 KiB\n" in out
    assert "\nA request takes 233 ms, estimated: 412 tokens/s in decode.\n" in out


def test_show_of_a_goal(cli: CLI, folder: Path) -> None:
    goal = "goal: {objective: throughput, max_tpot: 50 ms, engine: vllm}"
    write_plan(
        ("goal: {objective: latency, cached_experts: auto, parts: auto}", goal),
        ("decode: {step: 2.427 ms", "decode: {step: 0"),
    )
    out = cli("show", "plan.yaml").out
    assert "the most tokens a second with --max-tpot 50 ms, as vllm can run it" in out
    assert "A request takes 233 ms, estimated." in out


def test_show_has_json(cli: CLI, folder: Path) -> None:
    shown = json.loads(cli("show", "plan.yaml", "--json").out)
    assert (shown["offplan"], shown["offload"]["prefetch_step"]) == (1, 1)


HOLDS = """\
plan.yaml
ok        model         headers, config.json and generation_config.json of model \
are unchanged since the plan
ok        figures       the plan's figures agree with each other
ok        profile       the figures of cpu are unchanged
ok        prediction    the decision costs what the plan says
ok        run           `run` can execute the decision
not told  this machine  there is no GPU here to compare with
"""


@pytest.mark.slow
def test_check_of_a_plan_that_holds(cli: CLI, folder: Path) -> None:
    code, out, err = cli("check", "plan.yaml")
    assert (code, strip_lines(out), err) == (0, HOLDS, "")
    assert "this machine" not in cli("check", "plan.yaml", "--file-only").out


@pytest.mark.slow
def test_check_finds_another_model(cli: CLI, folder: Path) -> None:
    change_config()
    code, out, err = cli("check", "plan.yaml")
    assert (code, err) == (4, "offplan: drift: plan.yaml\n")
    assert "DRIFT     model         the plan was made for config.json" in out
    change_config('"num_experts_per_tok": 2', '"num_experts_per_tok": 8')
    code, out, _ = cli("check", "plan.yaml")
    assert code == 4
    assert "NO ROOM   prediction    for the model as it is by now: it takes" in out


def test_check_finds_an_edit(cli: CLI, folder: Path) -> None:
    write_plan(("gpu_memory: 1 MiB", "gpu_memory: 2 MiB"), ("[experts.down_proj]", "[experts]"))
    code, out, _ = cli("check", "plan.yaml")
    assert code == 4
    assert "DRIFT     prediction    edited, or made by another version:" in out
    assert "decode.link_bytes 96 KiB -> " in " ".join(out.split())


def test_check_finds_what_exceeds_the_budget(cli: CLI, folder: Path) -> None:
    write_plan(("group_size: 2, num_in_group: 1", "group_size: 6, num_in_group: 1"))
    code, out, err = cli("check", "plan.yaml")
    assert (code, err) == (3, "offplan: infeasible: plan.yaml\n")
    assert "NO ROOM   prediction    edited, or made by another version: it takes" in out


@pytest.mark.slow
def test_check_finds_other_figures_of_the_machine(cli: CLI, folder: Path) -> None:
    profile = ROOT / "offplan" / "machine" / "profiles" / "cpu.yaml"
    shutil.copy(profile, "mine.yaml")
    assert cli("replan", "plan.yaml", "--machine", "mine.yaml", "-o", "made.yaml").code == 0
    assert cli("check", "made.yaml").code == 0
    text = profile.read_text("utf-8")
    assert "value: 10 GB/s" in text
    Path("mine.yaml").write_text(text.replace("value: 10 GB/s", "value: 5 GB/s"), "utf-8")
    code, out, _ = cli("check", "made.yaml")
    assert code == 4
    assert "DRIFT     profile       mine.yaml has other figures by now (h2d 10 GB/s ->" in out
    Path("mine.yaml").unlink()
    code, out, _ = cli("check", "made.yaml")
    assert (code, "not told  profile       it cannot be compared" in out) == (0, True)
    assert "ok        prediction    memory is what the decision takes; times need" in out


@pytest.mark.slow
def test_check_of_several_plans_ends_as_the_worst(cli: CLI, folder: Path) -> None:
    shutil.copy("plan.yaml", "other.yaml")
    write_plan(("step: 2.427 ms", "step: 3 ms"))
    code, out, err = cli("check", "other.yaml", "plan.yaml", "--json")
    assert (code, err) == (4, "offplan: drift: plan.yaml\n")
    plans = json.loads(out)["plans"]
    assert [(each["plan"], each["verdict"]) for each in plans] == [
        ("other.yaml", "holds"),
        ("plan.yaml", "drift"),
    ]
    assert cli("check", "other.yaml", "plan.yaml", "--model", "model").code == 2


@pytest.mark.slow
def test_check_has_a_result_for_each_file(cli: CLI, folder: Path) -> None:
    shutil.copytree("model", "damaged")
    Path("damaged/model-00002-of-00003.safetensors").unlink()
    text = Path("plan.yaml").read_text("utf-8")
    Path("damaged.yaml").write_text(text.replace("source: model", "source: damaged"), "utf-8")
    files = ("model/config.json", "damaged.yaml", "gone.yaml", "plan.yaml")
    code, out, err = cli("check", *files, "--json")
    assert (code, err) == (2, f"offplan: error: {', '.join(files[:3])}\n")
    found = {each["plan"]: each for each in json.loads(out)["plans"]}
    assert {name: each["verdict"] for name, each in found.items()} == {
        **dict.fromkeys(files[:3], "error"),
        "plan.yaml": "holds",
    }
    assert "1 of 3 shards are missing" in found["damaged.yaml"]["findings"][0]["text"]
    write_plan(("step: 2.427 ms", "step: 3 ms"))
    code, out, err = cli("check", *files)
    assert (code, err) == (4, f"offplan: drift: plan.yaml; error: {', '.join(files[:3])}\n")
    assert "gone.yaml ERROR plan cannot read" in " ".join(out.split())


@pytest.mark.slow
def test_check_of_files_alone_asks_no_network(
    cli: CLI, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.getaddrinfo", ask)
    monkeypatch.setattr("socket.socket.connect", ask)
    text = Path("plan.yaml").read_text("utf-8")
    hub = text.replace("source: model", "source: nobody/has-this-model")
    Path("hub.yaml").write_text(hub, "utf-8")
    Path("commit.yaml").write_text(hub.replace("revision: null", f"revision: {'a' * 40}"), "utf-8")
    code, out, err = cli("check", "--file-only", "hub.yaml", "commit.yaml", "plan.yaml")
    assert (code, err) == (0, "")
    assert "not told model nobody/has-this-model is neither on this disk" in " ".join(out.split())
    assert out.count("ok        profile") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "code", "found"),
    [
        ({}, 0, "ok GPU memory 1018 KiB are needed; 2 MiB of 3 MiB are free"),
        ({"name": "NVIDIA L4"}, 4, "DRIFT GPU planned for CPU; here is NVIDIA L4: offplan replan"),
        (
            {"free_bytes": 9},
            3,
            "NO ROOM GPU memory 1018 KiB are needed; 9 B of 3 MiB are free: close",
        ),
        ({"free_bytes": 9, "total_bytes": 9}, 3, "9 B are free: offplan plan --gpu-memory asks"),
    ],
)
def test_check_looks_at_the_gpu(
    cli: CLI,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    code: int,
    found: str,
) -> None:
    gpu = replace(LocalGPU("CPU", 1, 3 * 2**20, 2 * 2**20, None), **changes)
    monkeypatch.setattr(checking, "find_local_gpu", lambda: gpu)
    finished = cli("check", "plan.yaml")
    assert finished.code == code
    assert found in " ".join(finished.out.split())
    assert "ok host memory 96 KiB of weights have room" in " ".join(finished.out.split())
    assert cli("check", "plan.yaml", "--file-only").code == 0


def test_check_looks_at_the_host(cli: CLI, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LocalGPU("CPU", 1, 3 * 2**20, 2 * 2**20, None)
    monkeypatch.setattr(checking, "find_local_gpu", lambda: gpu)
    monkeypatch.setattr(limits, "host_room", lambda *_: [(2**10, "the cgroup /x")])
    monkeypatch.setattr(checking, "lock_limit", lambda: 8 * 2**10)
    code, out, _ = cli("check", "plan.yaml")
    out = " ".join(out.split())
    assert code == 3
    assert "NO ROOM host memory the weights take 96 KiB of host memory; the cgroup /x has" in out
    assert "not told page locks ulimit -l is 8 KiB, less than 96 KiB" in out


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (
            ("platform.machine", "aarch64"),
            "needs Linux on an x86-64 processor with AVX2, found linux on aarch64",
        ),
        (("shutil.which", None), "needs a C++ compiler to build its kernels, found none"),
        (("offplan.hostcores.library.InstructionSet", ()), "needs a processor with AVX2"),
    ],
)
def test_check_refuses_cores_that_cannot_multiply(
    cli: CLI, folder: Path, monkeypatch: pytest.MonkeyPatch, found: tuple[str, Any], why: str
) -> None:
    """The way out is named; a check without this machine does not ask."""
    require_cores()
    name, value = found
    monkeypatch.setattr(name, value if isinstance(value, tuple) else lambda *_: value)
    if name == "shutil.which":
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(build, "PREBUILT", folder)
    gpu = LocalGPU("CPU", 1, 3 * 2**20, 2 * 2**20, None)
    for here in (gpu, None):  # without one the plan is for the CPU that plays GPU
        monkeypatch.setattr(checking, "find_local_gpu", lambda here=here: here)
        assert "host cores" not in cli("check", "plan.yaml").out
        write_plan(("decode: prefetch", "decode: host"))
        out = " ".join(cli("check", "plan.yaml").out.split())
        assert f"REFUSED host cores `decode: host` {why}" in out
        assert "without the host's cores: `offplan replan PLAN --no-host-cores`" in out
        assert "host cores" not in cli("check", "plan.yaml", "--file-only").out
        write_plan()


def test_check_takes_cores_that_multiply(cli: CLI, folder: Path) -> None:
    require_cores()
    write_plan(("decode: prefetch", "decode: host"))
    out = " ".join(cli("check", "plan.yaml").out.split())
    assert "ok host cores their kernels run on this processor" in out


@pytest.mark.slow
def test_check_takes_the_plans_of_a_folder(cli: CLI, folder: Path) -> None:
    (folder / "notes.yaml").write_text("a: note")
    (folder / "other.yml").write_text((folder / "plan.yaml").read_text())
    finished = cli("check", folder, "--file-only", "--json")
    assert finished.code == 0
    assert [each["plan"] for each in json.loads(finished.out)["plans"]] == [
        str(folder / "other.yml"),
        str(folder / "plan.yaml"),
    ]
    (folder / "broken.yaml").write_text("offplan: 1\n")
    assert cli("check", folder, "--file-only").code == 2
    (folder / "empty").mkdir()
    finished = cli("check", folder / "empty")
    assert finished.code == 2
    assert f"{folder / 'empty'}: found a folder without a plan" in finished.err
    assert "expected plans; name a plan's file" in finished.err
    (folder / "empty" / "some").mkdir()
    (folder / "plan.yaml").rename(folder / "empty" / "some" / "plan.yaml")
    finished = cli("check", folder / "empty")
    assert finished.code == 2
    assert f"expected plans; name {folder / 'empty' / 'some'}" in finished.err
    assert "expected a plan; make a plan of it" in cli("check", TINY_MOE).err


def test_check_measures_only_where_there_is_a_gpu(cli: CLI, folder: Path) -> None:
    code, _, err = cli("check", "plan.yaml", "--measure")
    assert (code, "no CUDA device" in err) == (1, True)
    assert cli("check", "plan.yaml", "--measure", "--file-only").code == 2


def test_check_holds_the_measured_link_against_the_plan(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    slow = load_profile("cpu").h2d.model_copy(update={"value": 5e9})
    measured = load_profile("cpu").model_copy(update={"h2d": slow})
    monkeypatch.setattr(checking, "measure_here", lambda **_: machines.Machine(measured, 2**20))
    gpu = LocalGPU("CPU", 1, 3 * 2**20, 2 * 2**20, None)
    monkeypatch.setattr(checking, "find_local_gpu", lambda: gpu)
    found = checking.check_plan(load_plan(Path("plan.yaml")), measure=True)
    verdicts = {each.subject: each.verdict for each in found}
    assert (verdicts["link, h2d"], verdicts["link, uva"]) == ("drift", "holds")


DIFFERENCE = """\
Asked
key                 before   after
──────────────────────────────────
budget.gpu_memory   1 MiB    2 MiB

Decided
"""


def test_diff_says_which_prediction_is_stale(cli: CLI, folder: Path) -> None:
    shutil.copy("plan.yaml", "before.yaml")
    write_plan(("[experts.down_proj]", "[experts]"))
    out = " ".join(cli("diff", "before.yaml", "plan.yaml").out.split())
    assert 'The prediction of "after" is stale: the file was edited' in out
    assert "decode.link_bytes 96 KiB -> 288 KiB" in out
    assert "over the link, a token 96 KiB 288 KiB +200.0%" in out
    assert "a token 2.427 ms 2.427 ms same" in out
    data = json.loads(cli("diff", "before.yaml", "plan.yaml", "--json").out)
    assert data["after"]["decode"]["link_bytes"] == 96 * 2**10
    assert data["stale"]["before"] is None
    assert data["stale"]["after"]["decode"]["link_bytes"] == 288 * 2**10
    write_plan(("prompt_tokens: 32", "prompt_tokens: 64"))  # nothing moves
    out = cli("diff", "before.yaml", "plan.yaml", "--format", "markdown").out
    assert 'The prediction of "after" is stale' in out
    assert '"after" exceeds its budget' in out
    write_plan(("profile: cpu", "profile: gone"), ("[experts.down_proj]", "[experts]"))
    out = " ".join(cli("diff", "before.yaml", "plan.yaml").out.split())
    assert "stale: the plan was edited" in out
    assert "is not here to price it again" in out


def test_diff_exits_as_git_where_it_is_asked_to(cli: CLI, folder: Path) -> None:
    shutil.copy("plan.yaml", "before.yaml")
    assert cli("diff", "before.yaml", "plan.yaml", "--exit-code").code == 0
    write_plan(("step: 2.427 ms", "step: 3 ms"))
    assert cli("diff", "before.yaml", "plan.yaml").code == 0
    assert cli("diff", "before.yaml", "plan.yaml", "--exit-code").code == 1


def test_diff_of_two_files(cli: CLI, folder: Path) -> None:
    write_plan(("gpu_memory: 1 MiB", "gpu_memory: 2 MiB"))
    assert cli("replan", "plan.yaml", "-o", "roomy.yaml").code == 0
    write_plan()
    code, out, err = cli("diff", "plan.yaml", "roomy.yaml")
    out = strip_lines(out)
    assert (code, err) == (0, "")
    assert out.startswith(DIFFERENCE)
    rule = "cpu_offload_params [experts.down_proj], group_size 2, num_in_group 1, "
    assert f"\nrules 1   {rule}prefill prefetch, decode prefetch   none\n\nMoves\n" in out
    assert "mlp.experts.down_proj   1, 3, 5   96 KiB   host (prefetch, prefetch)   GPU" in out
    assert "over the link, a token   96 KiB     0 B        -100.0%" in out
    change_config()
    code, out, err = cli("diff", "plan.yaml", "roomy.yaml")
    assert (code, "Moves" in out) == (0, False)
    assert err.startswith("offplan: what moves is not told: ")


def git(*arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], check=True, capture_output=True)


def test_diff_against_a_revision(cli: CLI, folder: Path) -> None:
    git("init", "-b", "main")
    Path("plans").mkdir()
    shutil.copy("plan.yaml", "plans/a.yaml")
    git("add", "plans")
    git("commit", "-m", "Plan")
    same = cli("diff", "plans/a.yaml")
    assert same.code == 0
    assert same.out.startswith("Question and decision are the same.")
    write_plan(("prefill_chunk: 32", "prefill_chunk: 8"), ("step: 2.427 ms", "step: 4 ms"))
    shutil.copy("plan.yaml", "plans/a.yaml")
    code, out, _ = cli("diff", "main", "plans/a.yaml", "--format", "markdown")
    assert code == 0
    assert "| prefill\\_chunk | 32 | 8 |\n" in out
    assert "| a token | 2.427 ms | 4 ms | +64.8% |\n" in out
    # beside this file its model is found, by which the step that was written is stale
    found = cli("diff", "main:plans/a.yaml", "plan.yaml", "--format", "markdown").out
    asked, _, figures = out.partition("**Prediction")
    assert found.startswith(asked)
    assert "decode.step 4 ms -\\> 2.427 ms" in found
    assert "| a token | 2.427 ms | 4 ms | +64.8% |\n" in figures
    changes = json.loads(cli("diff", "plans/a.yaml", "--json").out)
    assert changes["decided"] == [{"key": "prefill_chunk", "before": "32", "after": "8"}]
    assert changes["before"]["decode"]["step_s"] == 0.002427


@pytest.mark.parametrize("before", ["gone.yaml", "--help:a.yaml", "HEAD:gone.yaml", "-x:a"])
def test_diff_of_what_is_not_there(cli: CLI, folder: Path, before: str) -> None:
    code, out, err = cli("diff", "--", before, "plan.yaml")
    assert (code, out) == (2, "")
    assert f"{before} is neither a file nor a git revision" in err


def test_diff_of_other_models_and_of_none(cli: CLI, folder: Path) -> None:
    other = ROOT / "plans" / "qwen3-8b-h200-12gib.yaml"
    code, out, err = cli("diff", "plan.yaml", other)
    assert (code, "headers_sha256             cef6e2f96d35   34a6952bc4d5" in out) == (0, True)
    assert err == "offplan: what moves is not told: the plans are of different models\n"
    assert cli("diff", "plan.yaml", "plan.yaml", "plan.yaml").code == 2


def test_markdown_takes_no_name_for_its_own(cli: CLI, folder: Path) -> None:
    shutil.copy("plan.yaml", "before.yaml")
    write_plan(("name: CPU", 'name: "a|b `c`\\n<d>"'))
    out = cli("diff", "before.yaml", "plan.yaml", "--format", "markdown").out
    assert "| machine.name | CPU | a\\|b \\`c\\` \\<d\\> |\n" in out


def test_explain_derives_and_compares(cli: CLI, folder: Path) -> None:
    code, out, err = cli("explain", "plan.yaml")
    out = strip_lines(out)
    assert (code, err) == (0, "")
    assert "gpu_memory.ring: 32 KiB = slots x largest span\n    slots 1; largest" in out
    assert "decode.link_bytes: 96 KiB = streamed + read in place, re-reads" in out
    assert "\nSources:\n    gpu_overhead: estimated: " in out
    words = " ".join(out.split())
    assert "this plan 233 ms 2.478 ms 2.427 ms 1018 KiB" in words
    assert "without rule 1 (lacks GPU memory) +0.0% 2.478 ms 2.427 ms 1.057 MiB" in words


def test_explain_of_an_edit_says_what_the_file_says(cli: CLI, folder: Path) -> None:
    write_plan(("step: 2.427 ms", "step: 3 ms"))
    code, _, err = cli("explain", "plan.yaml")
    assert code == 0
    assert err == "offplan: plan.yaml says otherwise: decode.step 3 ms -> 2.427 ms here\n"


def test_explain_has_json(cli: CLI, folder: Path) -> None:
    write_plan(("profile: cpu", "profile: null"))
    assert cli("explain", "plan.yaml").code == 2
    explained = json.loads(cli("explain", "plan.yaml", "--machine", "cpu", "--json").out)
    ring = next(each for each in explained["terms"] if each["path"] == "gpu_memory.ring")
    assert [each["value"] for each in ring["inputs"]] == [1, 32_768]
    assert ring["value"] == 32_768
    assert {each["refusal"] for each in explained["neighbours"]} == {None, "GPU memory"}


@pytest.mark.slow
def test_what_an_engine_is_to_run_is_priced_as_it_runs_it(cli: CLI, folder: Path) -> None:
    """Its copies end with a step, which no picture of our own schedule shows."""
    asked = ("--machine", "cpu", "--gpu-memory", "1MiB", "--context", "64")
    sizes = ("--prompt-tokens", "16", "--output-tokens", "8")
    made = cli("plan", "model", *asked, *sizes, "--for", "vllm==0.31", "-o", "vllm.yaml")
    assert made.code == 0
    step = load_plan(Path("vllm.yaml")).prediction.decode
    assert step.compute_s <= step.step_s < step.compute_s + step.link_s
    checked, explained = (
        " ".join(cli(what, "vllm.yaml").out.split()) for what in ("check", "explain")
    )
    assert "costs what the plan says, as vllm==0.31 runs it" in checked
    assert "One step of each knob (estimated, as vllm==0.31 runs it)" in explained
    assert "layers run beside copies, which end with the step" in explained
    assert "slowdown beside layers x (copies x copy_latency + streamed / h2d)" in explained
    assert cli("report", "vllm.yaml", "-o", "report.html").code == 0
    assert "vllm==0.31 runs the plan by rules of its own" in Path("report.html").read_text("utf-8")
    drawn = cli("report", "vllm.yaml", "--trace", "trace.json")
    assert (drawn.code, "are not drawn" in drawn.err) == (2, True)
