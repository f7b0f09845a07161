"""``offplan analyze`` and ``plan`` with targets, objectives, the frontier and engines."""

import json
from pathlib import Path

import pytest

from offplan.units import format_range, format_seconds
from tests.cli import CLI, ROOT, TINY_MOE

QWEN = ROOT / "tests" / "models" / "qwen3-8b" / "config.json"


@pytest.mark.slow
def test_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cli = CLI(monkeypatch, capsys)
    small = ("--machine", "cpu", "--prompt-tokens", 32, "--output-tokens", 96, "--context", 256)
    plan = ("plan", TINY_MOE, *small, "--gpu-memory", "1MiB")
    code, out, err = cli(*plan, "--max-tpot", "1us")
    assert (code, out) == (3, "")
    assert "no plan reaches --max-tpot 1 us" in err
    assert json.loads(cli(*plan, "--max-tpot", "1s", "--max-ttft", "1s", "--json").out)["offload"]
    assert cli(*plan, "--max-tpot", "soon").code == 2
    data = json.loads(cli(*plan, "--objective", "throughput", "--json").out)
    assert data["workload"]["batch"] >= 1
    kept = json.loads(cli(*plan, "--objective", "throughput", "--batch", 1, "--json").out)
    assert kept["workload"]["batch"] == 1
    points = json.loads(cli(*plan, "--frontier", "--json").out)["frontier"]
    assert points[0]["objective_s"] >= points[-1]["objective_s"]
    assert "Frontier" in cli(*plan, "--frontier").out
    assert cli(*plan, "--frontier", "-o", "plan.yaml").code == 2
    assert cli(*plan, "--frontier", "--max-tpot", "1s").code == 2
    ours = json.loads(cli(*plan, "--for", "vllm", "--json").out)
    assert len(ours["offload"]["rules"]) == 1
    why = json.loads(cli("analyze", *plan[1:], "--for", "vllm", "--json").out)["why"]
    assert "only plans that vllm can run were searched" in why["reasons"]


@pytest.mark.slow
def test_packing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cli = CLI(monkeypatch, capsys)
    asked = (QWEN, "--machine", "h200-pcie5", "--gpu-memory", "11GiB")
    told = " ".join(cli("analyze", *asked).out.split())
    assert "Held packed without loss are weights of 36 of 36 layers and the output head" in told
    assert ", in 0.76 of their size." in told
    assert "packed without loss" not in cli("analyze", *asked, "--no-packing").out
    plans = [json.loads(cli("plan", *asked, *how, "--json").out) for how in ((), ("--no-packing",))]
    assert [plan["goal"]["packing"] for plan in plans] == [True, False]
    assert [plan["offload"]["packing"] is None for plan in plans] == [False, True]
    assert plans[0]["model"] == plans[1]["model"]
    assert plans[0]["prediction"]["objective_s"] < plans[1]["prediction"]["objective_s"]


@pytest.mark.slow
def test_what_an_engine_takes_beyond_its_plan_is_said(cli: CLI, tmp_path: Path) -> None:
    """By plan and analyze as by export."""
    asked = (QWEN, "--machine", "h200-pcie5", "--gpu-memory", "12GiB", "--for")
    path = tmp_path / "plan.yaml"
    told = cli("plan", *asked, "sglang", "-o", path).err
    (line,) = (each for each in told.splitlines() if "more than the plan predicts" in each)
    words = line.removeprefix("offplan: Of ").removesuffix(".")
    assert words.startswith("GPU memory SGLang takes ")
    exported = cli("export", path, "--engine", "sglang").err
    assert f"of {words}\n" in exported
    assert words in " ".join(cli("analyze", *asked, "sglang").out.split())
    # 6.03 GiB by the plan
    locked = "f host memory SGLang page-locks up to 7.969 GiB: each parameter is rounded up"
    assert f"offplan: O{locked}" in told
    assert f"offplan: o{locked}" in exported
    assert "than the plan predicts" not in cli("plan", *asked, "vllm").err


@pytest.mark.slow
def test_an_answer_for_an_engine_is_that_engines(cli: CLI, tmp_path: Path) -> None:
    """SGLang copies what is to be read in place, and its command comes next."""
    path, asked = tmp_path / "plan.yaml", (QWEN, "--machine", "h200-pcie5", "--gpu-memory", "16GiB")
    told = cli("analyze", *asked, "--for", "sglang", "-o", path).out
    assert "decode: uva" in path.read_text()
    assert "in place" not in told
    assert f"Next: offplan export {path} --engine sglang" in told


@pytest.mark.slow
def test_analyze_and_plan_are_asked_alike(cli: CLI, tmp_path: Path) -> None:
    asked: tuple[object, ...]
    asked = (TINY_MOE, "--machine", "cpu", "--gpu-memory", "1MiB", "--context", 256)
    asked += ("--prompt-tokens", 32, "--output-tokens", 96, "--max-tpot", "5ms", "--for", "vllm")
    answer = json.loads(cli("analyze", *asked, "--json").out)
    plan = json.loads(cli("plan", *asked, "--json").out)
    assert answer["run"] == plan.pop("run")
    assert answer["plan"] == plan
    frontiers = [cli(command, *asked[:7], "--frontier").out for command in ("analyze", "plan")]
    assert frontiers[0] == frontiers[1]
    picture = tmp_path / "plan.svg"
    code, out, err = cli("plan", *asked, "-v", "--svg", picture)
    assert (code, out.splitlines()[0]) == (0, "offplan: 1")
    assert "It fits CPU" in err
    assert "Prediction" in err
    assert picture.read_text("utf-8").startswith("<svg")


@pytest.mark.parametrize(
    ("command", "options", "why"),
    [
        ("analyze", ("--frontier", "-o", "plan.yaml"), "leave --output and --svg out"),
        ("analyze", ("--frontier", "--max-ttft", "1s"), "leave --max-ttft and --max-tpot out"),
        ("plan", ("--frontier", "--objective", "throughput"), "leave --objective out"),
        ("plan", ("--json", "--svg", "-"), "name another file with --svg"),
        ("plan", ("--svg", "-"), "name another file with --svg"),
    ],
)
def test_what_cannot_be_answered_at_once(
    cli: CLI, command: str, options: tuple[str, ...], why: str
) -> None:
    code, out, err = cli(command, TINY_MOE, "--machine", "cpu", *options)
    assert (code, out) == (2, "")
    assert why in err


def test_a_frontier_needs_a_machine(cli: CLI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offplan.library.machines.has_gpu", lambda: False)
    for command in ("analyze", "plan"):
        code, out, err = cli(command, TINY_MOE, "--frontier", "--context", 1024)
        assert (code, out) == (2, "")
        assert "no GPU here and no --machine" in err


@pytest.mark.slow
def test_one_output_token_is_the_prompts(cli: CLI) -> None:
    """No decode step runs, so none is a speed."""
    asked = "analyze", QWEN, "--machine", "h200-pcie5", "--output-tokens", 1
    out = " ".join(cli(*asked).out.split())
    prompt = json.loads(cli(*asked, "--json").out)["plan"]["prediction"]["prefill"]
    ends = format_range(prompt["step_range_s"][0], prompt["step_range_s"][1], format_seconds)
    told = f"tokens a second, one after each prompt of 512: {ends}, estimated; `offplan measure`"
    assert told in out


@pytest.mark.slow
def test_the_next_command_has_weights_to_run_with(cli: CLI, tmp_path: Path) -> None:
    path, asked = tmp_path / "plan.yaml", ("--machine", "cpu", "--context", 1024)

    def ask(model: Path, *options: object) -> str:
        out = cli("analyze", model, *asked, *options, "-o", path, "--force").out
        (line,) = (each for each in out.splitlines() if each.startswith("Next: "))
        return line.removeprefix("Next: ")

    assert ask(TINY_MOE) == f'offplan run {path} --prompt "..."'
    beside = ask(TINY_MOE / "config.json")
    assert beside == f'offplan run {path} --model {TINY_MOE} --prompt "..."'
    alone = tmp_path / "config.json"
    alone.write_text((TINY_MOE / "config.json").read_text("utf-8"), "utf-8")
    which = "# DIR: a folder with the model's weights"
    assert ask(alone) == f'offplan run {path} --model DIR --prompt "..."  {which}'
    fetched = f"hf download me/tiny --local-dir weights && offplan run {path} --model weights"
    assert ask(alone, "--source", "me/tiny") == f'{fetched} --prompt "..."'
    cli("plan", alone, *asked, "--for", "vllm", "-o", path, "--force")
    code, _, err = cli("export", path, "--engine", "vllm")
    assert (code, "has no weights: name their folder with --model DIR" in err) == (0, True)
    assert (
        f"vllm serve {TINY_MOE} "
        in cli("export", path, "--engine", "vllm", "--model", TINY_MOE).out
    )


def test_an_answer_for_an_engine_is_not_about_run(cli: CLI) -> None:
    asked = ("plan", TINY_MOE, "--machine", "cpu", "--context", 1024, "--for", "vllm")
    assert "`offplan run` can execute" not in cli(*asked).err


@pytest.mark.slow
def test_no_model_runs_on_a_gpu_that_run_does_not_support(cli: CLI, tmp_path: Path) -> None:
    profile = tmp_path / "mi300x.yaml"
    profile.write_text(
        "name: AMD MI300X\nlink: PCIe 5 x16\nhbm: 5.3 TB/s\nmatmul: 1300 TFLOP/s\n"
        "gpu_memory: 192 GB\n"
    )
    for machine, why in (("v100", "needs a GPU of Turing"), (profile, "found one by AMD")):
        asked = ("--machine", machine, "--prompt-tokens", 32, "--context", 256)
        finished = cli("plan", TINY_MOE, *asked)
        assert finished.code == 0
        assert why in finished.err
        assert "can execute this model" not in finished.err
        assert why in json.loads(cli("plan", TINY_MOE, *asked, "--json").out)["run"]["why_not"]


def test_usual_workloads_have_names(cli: CLI) -> None:
    """Single numbers replace a usual workload's, and the answer says which one it is for."""
    plan = ("plan", TINY_MOE, "--machine", "cpu", "--json", "--workload")

    def numbers(*asked: object) -> list[int]:
        return list(json.loads(cli(*plan, *asked).out)["workload"].values())

    assert numbers("chat") == [1, 512, 128, 4096]
    assert numbers("agent", "--context", "64k") == [1, 32768, 1024, 65536]
    assert numbers("batch", "--batch", 2) == [2, 512, 256, 1024]
    told = " ".join(cli("analyze", *plan[1:4], "--workload", "batch").out.split())
    assert (
        "This is for the workload batch: 32 sequences of 512 prompt and 256 output tokens" in told
    )
    refused = cli("measure", "--device", "cpu", "--context", "max")
    assert refused.code == 2
    assert "--context max is for plans" in refused.err


def test_what_is_assumed_of_a_machines_name_is_noted(cli: CLI) -> None:
    """The answer is for one of several GPUs, and for the card's own lanes."""
    asked = ("analyze", TINY_MOE, "--context", 1024, "--machine")
    one, several = cli(*asked, "rtx3090"), cli(*asked, "2x rtx3090")
    assert (one.err, several.code) == ("", 0)
    assert "this plans for one of 2 GPUs" in several.err
    assert "These 2 have 48 GiB, the model 857.2 KiB: add --for vllm --tp 2" in several.err
    assert "It fits NVIDIA GeForce RTX 3090: " in several.out
    both = (*asked, "rtx3090 x2", "--for", "vllm", "--tp")
    assert "GPUs" not in cli(*both, 2).err
    refused = cli(*both, 4)
    assert (refused.code, "found 2 GPUs, expected 4" in refused.err) == (2, True)
    assert "pcie=3x16 is assumed" in cli(*asked, "rtx3090,pcie=3").err


@pytest.mark.slow
def test_drafts_of_which_nothing_is_known_name_what_they_must_give(cli: CLI) -> None:
    told = cli("analyze", QWEN, "--machine", "rtx3060", "--draft", "ngram:7").out
    assert "offplan counts no draft as taken. A pass that checks 7" in " ".join(told.split())


@pytest.mark.slow
def test_the_answer_says_which_experts_the_cores_have_no_kernel_for(
    cli: CLI, tmp_path: Path
) -> None:
    """gpt-oss holds an expert's inputs as rows. Qwen3-VL does so no more once it is loaded."""
    sizes = {
        **{"hidden_size": 256, "intermediate_size": 512, "dtype": "bfloat16", "vocab_size": 512},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"num_experts_per_tok": 2, "head_dim": 64},
    }
    config = {"model_type": "gpt_oss", "num_local_experts": 512, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    asked = (tmp_path / "config.json", "--machine", "rtx3060", "--context", 1024)
    told = " ".join(cli("analyze", *asked, "--gpu-memory", "1300MiB").out.split())
    assert "cores multiply nothing: offplan has no kernel for experts whose rows are inputs" in told
    text = {"model_type": "qwen3_vl_moe_text", "num_experts": 512, "moe_intermediate_size": 512}
    config = {"model_type": "qwen3_vl_moe", "text_config": text | sizes, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    told = " ".join(cli("analyze", *asked, "--gpu-memory", "1300MiB").out.split())
    assert "cores multiply nothing" not in told


@pytest.mark.slow
def test_the_memory_that_would_do_is_named(cli: CLI) -> None:
    """That of the model, of its checkpoint in fewer bits, and what reads from disk."""
    asked = ("--gpu-memory", "3GiB", "--context", 1024, "--machine")
    told = " ".join(cli("analyze", QWEN, *asked, "rtx3060,ram=5GiB").out.split())
    assert "Give more of either: a machine with 16 GiB of memory has enough. llama.cpp" in told
    assert "In 4 bits (5.654 GiB) it needs a machine with 8 GiB of memory." in told
    enough = " ".join(cli("analyze", QWEN, *asked, "rtx3060,ram=16GiB").out.split())
    assert "It fits NVIDIA GeForce RTX 3060" in enough
    fewer = " ".join(cli("analyze", QWEN, *asked, "rtx3060,ram=8GiB").out.split())
    assert "4 bits fit and give" in fewer
    assert "In 4 bits" not in fewer
    halved = " ".join(cli("analyze", QWEN, *asked, "rtx3060,wsl2,ram=5GiB").out.split())
    assert "`memory=` in Windows' .wslconfig gives WSL2 more" in halved
    refused = cli("plan", QWEN, *asked, "rtx3060,ram=5GiB")
    assert (refused.code, "a machine with 16 GiB of memory has enough" in refused.err) == (3, True)
    limited = cli("analyze", QWEN, *asked, "rtx3060,ram=16GiB", "--host-memory", "2GiB").out
    assert "memory has enough" not in " ".join(limited.split())
