"""The commands: what they print where, what they write, and their exit codes."""

import json
import logging
import re
import sys
import warnings
from pathlib import Path
from threading import Event
from xml.etree import ElementTree

import pytest
import yaml

from offplan.cli import output
from offplan.library import machines
from offplan.library.planned import open_planned_profile
from offplan.plan import load_plan
from tests.cli import CLI, ROOT, TINY_MOE
from tests.rendering import strip_lines

SMALL = ("--prompt-tokens", 32, "--output-tokens", 96, "--context", 256)
OFFLOADING = ("--machine", "cpu", "--gpu-memory", "1MiB", *SMALL)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CLI:
    """The command line on a machine without a GPU, in the repository's root."""
    monkeypatch.setattr(machines, "has_gpu", lambda: False)
    monkeypatch.chdir(TINY_MOE.parents[1])
    monkeypatch.setenv("COLUMNS", "80")
    return CLI(monkeypatch, capsys)


@pytest.fixture
def plan_file(cli: CLI, tmp_path: Path) -> Path:
    path = tmp_path / "made.yaml"
    assert cli("plan", "plans/tiny-moe", *OFFLOADING, "-o", path).code == 0
    return path


def test_help(cli: CLI) -> None:
    code, out, err = cli("--help")
    assert (code, err) == (0, "")
    for command in ("analyze", "plan", "run", "bench", "export", "measure", "machines", "schema"):
        assert f"\n  {command} " in out
    assert "Exit codes: 0 done, 1 failed, 2 bad usage or bad input, 3 no plan fits" in out


LITE = "tests/models/deepseek-v2-lite/config.json"
ANALYZED = """\
plans/tiny-moe: deepseek_v2, 438,912 parameters, 857.2 KiB as stored
`offplan run` can execute this model.
Not planned: no GPU here and no --machine: link bandwidth and compute were not
measured, so nothing is planned; name a machine, as in --machine rtx4090
(`offplan machines` lists them), or a profile's file
"""
TABLES = """
Layers
layers     kind       count   each, KiB   all, KiB
──────────────────────────────────────────────────
0         dense           1        81.3       81.3
1-5         moe           5       142.3      711.6
outside           3 tensors                   64.4

Segments
segment                        layers   all, KiB   share
───────────────────────────────────────────────────────────────────────────
mlp.experts.down_proj               5      160.0   18.7%   ████████████████
mlp.experts.gate_proj               5      160.0   18.7%   ████████████████
mlp.experts.up_proj                 5      160.0   18.7%   ████████████████
self_attn.q_proj                    6       72.0    8.4%   ███████▎
self_attn.kv_b_proj                 6       48.0    5.6%   ████▊
self_attn.o_proj                    6       48.0    5.6%   ████▊
outside: lm_head                            32.1    3.7%   ███▎
outside: model.embed_tokens                 32.1    3.7%   ███▎
self_attn.kv_a_proj_with_mqa        6       30.0    3.5%   ███
mlp.shared_experts.down_proj        5       20.0    2.3%   ██
mlp.shared_experts.gate_proj        5       20.0    2.3%   ██
mlp.shared_experts.up_proj          5       20.0    2.3%   ██
mlp.down_proj                       1       16.0    1.9%   █▋
mlp.gate_proj                       1       16.0    1.9%   █▋
mlp.up_proj                         1       16.0    1.9%   █▋
mlp.gate                            5        5.0    0.6%   ▌
4 smaller ones                               2.0    0.2%   ▎

Experts: 8 a layer, 2 a token, 12 KiB each
KV cache: 480 B a token
"""


def test_analyze_without_a_machine_reports_the_model(cli: CLI) -> None:
    code, out, err = cli("analyze", "plans/tiny-moe")
    assert (code, err) == (0, "")
    assert strip_lines(out).startswith(ANALYZED)
    assert strip_lines(out).endswith(TABLES)


@pytest.mark.slow
def test_analyze_answers_first(cli: CLI) -> None:
    asked = (LITE, "--machine", "h200-pcie5", "--gpu-memory", "16GiB", "--no-packing")
    code, out, _ = cli("analyze", *asked)
    lines, told = out.splitlines(), " ".join(out.split())
    assert code == 0
    assert "deepseek_v2, 15.7 billion parameters, 29.26 GiB as stored" in told
    assert "It fits NVIDIA H200: " in told
    assert "of page-locked host memory" in told
    assert "tokens a second" in told
    # in one piece: it is to be copied
    assert any(each.startswith("Next: ") and each.endswith("-o plan.yaml") for each in lines)
    layers = lines[lines.index("Layers, first to last: as high as their share on the GPU") + 1]
    assert (len(layers), layers[0]) == (27, "█")
    assert "the 6 experts that it needs" in told
    assert len(lines) < 45
    details = cli("analyze", *asked, "-v").out
    assert details.startswith(out.split("Next: ")[0])
    assert lines[0].startswith("Runs on NVIDIA H200: ")
    assert all(len(line) <= 80 for line in lines if not line.startswith("Next: "))
    assert "Why (estimated):" in details


def test_analyze_saves_pictures_of_the_plan(cli: CLI, tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    code, _, err = cli("analyze", "plans/tiny-moe", *OFFLOADING, "--svg", path)
    assert (code, err) == (0, f"offplan: wrote {path}\n")
    texts = [text.strip() for text in ElementTree.parse(path).getroot().itertext()]
    assert {"Layers", "Memory", "compute", "link", "A decode step"} <= {*texts}
    code, _, err = cli("analyze", "plans/tiny-moe", *OFFLOADING, "--svg", path)
    assert code == 2
    assert "--force overwrites it" in err


def test_analyze_draws_no_plan_that_there_is_not(cli: CLI, tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    code, out, err = cli("analyze", "plans/tiny-moe", "--svg", path)
    assert (code, err) == (2, f"offplan: {path} was not written: there is no plan\n")
    assert strip_lines(out).startswith(ANALYZED)
    assert not path.exists()


def test_analyze_json(cli: CLI) -> None:
    code, out, _ = cli("analyze", "plans/tiny-moe", *OFFLOADING, "--json")
    data = json.loads(out)
    assert code == 0
    assert data["offplan"] == 1
    assert data["model"] | {"headers_sha256": ""} == {
        "source": "plans/tiny-moe",
        "revision": None,
        "model_type": "deepseek_v2",
        "dtype": "bfloat16",
        "gguf": None,
        "num_layers": 6,
        "num_tensors": 188,
        "num_parameters": 438_912,
        "total_bytes": 877_824,
        "loaded_bytes": 877_824,
        "headers_sha256": "",
    }
    assert data["experts"] == {
        "num_experts": 8,
        "num_experts_per_token": 2,
        "bytes_per_expert": 12_288,
    }
    assert [layer["kind"] for layer in data["layers"]] == ["dense"] + ["moe"] * 5
    assert data["layers"][1]["segments"]["mlp.experts.gate_proj"] == 32_768
    assert data["machine"]["name"] == "CPU"
    assert data["plan"]["offload"]["rules"]
    assert data["infeasible"] is None
    assert data["why"]["reasons"]
    searched = {"best_s", "num_candidates", "num_priced", "second_rule_gain", "max_rules"}
    assert data["why"].keys() == searched | {"basis", "reasons", "floor", "gap"}


def test_segments_partition_bytes(cli: CLI) -> None:
    data = json.loads(cli("analyze", "plans/tiny-moe", "--json").out)
    for part in [*data["layers"], data["outside_layers"]]:
        assert sum(part["segments"].values()) == part["bytes"]
    parts = sum(part["bytes"] for part in [*data["layers"], data["outside_layers"]])
    assert parts == data["model"]["total_bytes"]


def test_analyze_json_without_a_machine(cli: CLI) -> None:
    code, out, _ = cli("analyze", "plans/tiny-moe", "--json")
    data = json.loads(out)
    assert code == 0
    assert (data["machine"], data["plan"], data["infeasible"]) == (None, None, None)
    assert "not measured" in data["unmeasured"]


@pytest.mark.slow
def test_analyze_says_what_does_not_fit_and_exits_as_plan_does(cli: CLI) -> None:
    arguments = ("plans/tiny-moe", "--machine", "cpu", "--gpu-memory", "100KiB", *SMALL)
    code, out, _ = cli("analyze", *arguments, "--json")
    data = json.loads(out)
    assert (code, data["plan"]) == (3, None)
    assert data["infeasible"]["shortfall_bytes"] > 0
    code, out, _ = cli("analyze", *arguments)
    assert code == cli("plan", *arguments).code == 3
    assert "Does not run on CPU as asked: no plan fits 100 KiB" in out
    late = cli("analyze", "plans/tiny-moe", "--machine", "cpu", "--max-tpot", "1us", *SMALL).out
    assert "no plan reaches --max-tpot 1 us within" in late


@pytest.mark.slow
def test_the_longest_context_is_found(cli: CLI) -> None:
    asked = ("plan", "plans/tiny-moe", "--machine", "cpu")
    small = ("--gpu-memory", "1MiB", "--prompt-tokens", 32, "--output-tokens", 96, "--context")
    code, out, err = cli(*asked, *small, "max")
    assert code == 0
    longest = yaml.safe_load(out)["workload"]["context"]
    assert f"--context max: {longest} tokens, the most that fit\n" in err
    assert cli(*asked, *small, longest).out == out
    code, _, err = cli(*asked, *small, longest + 1)
    assert code == 3
    told = f"The longest context that fits is {longest:,} tokens; --context {longest} plans it"
    assert told in err
    assert err.count("\n") == 1
    code, out, _ = cli("analyze", *asked[1:], *small, longest + 1)
    assert f"\n{told}." in out
    code, out, _ = cli("analyze", *asked[1:], *small, longest + 1, "--json")
    assert json.loads(out)["infeasible"]["longest_context"] == longest
    code, out, err = cli(*asked, *small, "max", "--objective", "throughput")
    assert yaml.safe_load(out)["workload"]["context"] == longest
    assert f"--context max: {longest} tokens, the most that fit for one sequence\n" in err
    code, out, err = cli(*asked, "--context", "MAX")
    assert yaml.safe_load(out)["workload"]["context"] == 4096
    assert "--context max: 4096 tokens, all that the model was trained for\n" in err


@pytest.mark.slow
def test_a_context_beyond_the_models_is_told(cli: CLI) -> None:
    config = "tests/models/qwen3-8b/config.json"
    code, _, err = cli("analyze", config, "--machine", "h200", "--context", 40961)
    assert code == 0
    assert "a context of 40961 tokens is more than the 40960 that the model was" in err


def test_plan_says_what_does_not_fit_and_exits_3(cli: CLI) -> None:
    arguments = ("--machine", "cpu", "--gpu-memory", "100KiB", *SMALL)
    code, out, err = cli("plan", "plans/tiny-moe", *arguments)
    assert (code, out) == (3, "")
    assert err.startswith("offplan: no plan fits 100 KiB of GPU memory")
    assert err.count("\n") == 1


def test_more_memory_than_there_is_is_noted(cli: CLI) -> None:
    code, out, err = cli("plan", "plans/tiny-moe", "--machine", "cpu", "--gpu-memory", "1TiB")
    assert code == 0
    assert err.startswith("offplan: CPU has ")
    assert ": planning for that instead of 1 TiB\n" in err
    assert out == cli("plan", "plans/tiny-moe", "--machine", "cpu").out


def test_plan_prints_yaml_or_json_of_the_same_plan(cli: CLI) -> None:
    code, out, err = cli("plan", "plans/tiny-moe", *OFFLOADING)
    assert code == 0
    assert err.startswith("offplan: Runs on CPU: ")
    assert "offplan: It fits CPU: " in err
    written = yaml.safe_load(out)
    assert written["offplan"] == 1
    assert written["workload"] == {
        "batch": 1,
        "prompt_tokens": 32,
        "output_tokens": 96,
        "context": 256,
    }
    data = json.loads(cli("plan", "plans/tiny-moe", *OFFLOADING, "--json").out)
    assert data["run"] == {"can_execute": True, "why_not": None, "way": "own"}
    assert data["offload"]["prefetch_step"] == written["offload"]["prefetch_step"]
    memory = data["prediction"]["gpu_memory"]
    assert sum(memory.values()) == 2 * memory["total_bytes"]
    for phase in ("prefill", "decode"):
        keys = {"step_s", "compute_s", "link_s", "stall_s", "bound_s", "link_bytes", "step_range_s"}
        assert keys == set(data["prediction"][phase])


def test_source_names_the_model(cli: CLI) -> None:
    out = cli("plan", "plans/tiny-moe", *OFFLOADING, "--source", "me/tiny").out
    assert yaml.safe_load(out)["model"]["source"] == "me/tiny"


def test_a_folder_and_its_config_give_the_same_model(cli: CLI) -> None:
    config = json.loads(cli("analyze", "plans/tiny-moe/config.json", "--json").out)
    folder = json.loads(cli("analyze", "plans/tiny-moe", "--json").out)
    assert config["model"]["headers_sha256"] == folder["model"]["headers_sha256"]
    assert config["layers"] == folder["layers"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "plans/tiny-moe"), "no GPU here and no --machine"),
        (("plan", "plans/nothing/here", "--machine", "cpu"), "plans/nothing/here"),
        (("plan", "plans/tiny-moe", "--machine", "abacus"), "no machine profile 'abacus'"),
        (("plan", "plans/tiny-moe", "--gpu-memory", "much"), "'much' is not a size"),
        (("plan", "plans/tiny-moe", "--host-memory", "-1GiB"), "is not a size"),
        (("plan", "plans/tiny-moe", "--gpu-memory", "8"), "'8' has no unit: is 8GiB meant?"),
        (
            ("plan", "plans/tiny-moe", "--context", "long"),
            "write a number of tokens, 1 or more, as",
        ),
        (("plan", "plans/tiny-moe", "--max-tpot", "50"), "'50' has no unit: is 50ms meant?"),
        (("plan", "plans/tiny-moe", "--prompt-tokens", 5000), "raise --context"),
        (("plan", "plans/tiny-moe", "--batch", 2**20, "--context", 2**20), "which no memory holds"),
        (("plan", "plans/tiny-moe", "--prompt-tokens", 10**20), "--prompt-tokens: Input should be"),
        (("plan", "./plans/tiny-moe", "--revision", "main"), "leave the revision out"),
        (("plan", "plans/tiny-moe", "--frontier", "--objective", "throughput"), "--objective"),
        (("plan", "plans/tiny-moe", "-o", "plans"), "is a folder"),
        (("plan", "plans/tiny-moe", "-o", "no/such/plan.yaml"), "does not exist"),
        (("analyze", "plans/tiny-moe", "-o", "LICENSE"), "LICENSE exists; --force overwrites it"),
        (("plan", "plans/tiny-moe", "--force", "-o", "/dev/null"), "is a device, a pipe or"),
        (("analyze", "plans/tiny-moe", "-o", "a", "--svg", "./a"), "named for two outputs"),
        (("run", "nothing.yaml"), "cannot read plan nothing.yaml"),
        (("run", "LICENSE"), "LICENSE is not"),
        (("export", "plans/replan.sh", "--engine", "vllm"), "is not a plan"),
    ],
)
def test_bad_input_exits_2_in_one_line(
    cli: CLI, arguments: tuple[object, ...], message: str
) -> None:
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("offplan: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan",),
        ("fly", "plans/tiny-moe"),
        ("plan", "plans/tiny-moe", "--batch", "0"),
        ("plan", "plans/tiny-moe", "--fast"),
        ("export",),
    ],
)
def test_bad_usage_exits_2(cli: CLI, arguments: tuple[object, ...]) -> None:
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert "Usage: offplan" in err


def test_analyze_writes_the_plan_that_plan_prints(cli: CLI, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    code, _, err = cli("analyze", TINY_MOE, *OFFLOADING, "-o", path)
    assert (code, err) == (0, f"offplan: wrote {path}\n")
    assert path.read_text() == cli("plan", TINY_MOE, *OFFLOADING).out
    assert list(tmp_path.iterdir()) == [path]


def test_analyze_reports_before_it_fails_to_write(cli: CLI, tmp_path: Path) -> None:
    code, out, err = cli("analyze", "plans/tiny-moe", "-o", tmp_path / "plan.yaml")
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert "Segments" in out
    assert "was not written" in err
    tight = ("--machine", "cpu", "--gpu-memory", "1KiB", "-o", tmp_path / "plan.yaml")
    code, out, err = cli("analyze", "plans/tiny-moe", *tight)
    assert (code, list(tmp_path.iterdir())) == (3, [])
    assert "more are needed" in " ".join(out.split())
    assert "was not written" in err


def test_nothing_is_overwritten_without_force(cli: CLI, plan_file: Path) -> None:
    plan_file.write_text("mine")
    assert cli("plan", "plans/tiny-moe", *OFFLOADING, "-o", plan_file).code == 2
    assert plan_file.read_text() == "mine"
    assert cli("plan", "plans/tiny-moe", *OFFLOADING, "-o", plan_file, "--force").code == 0
    assert plan_file.read_text().startswith("offplan: 1\n")


@pytest.mark.slow
def test_export(cli: CLI, plan_file: Path) -> None:
    text = plan_file.read_text()
    start = text.index("  rules:\n")
    rule = "{cpu_offload_params: [experts], group_size: 2, num_in_group: 1, prefill: prefetch, "
    rules = f"  rules:\n    - {rule}decode: prefetch}}\n"
    plan_file.write_text(text[:start] + rules + text[text.index("prediction:") :])
    code, out, err = cli("export", plan_file, "--engine", "vLLM==0.31")
    assert (code, "for vLLM 0.31.0" in err) == (0, True)
    assert out.startswith(f"vllm serve {ROOT / TINY_MOE} \\\n  --dtype bfloat16 \\\n")
    assert out.endswith(
        "  --offload-group-size 2 \\\n  --offload-num-in-group 1 \\\n"
        "  --offload-prefetch-step 1 \\\n  --offload-params experts\n"
    )
    data = json.loads(cli("export", plan_file, "--engine", "vllm", "--json").out)
    assert (data["version"], data["command"][:2]) == ("0.33.0", ["vllm", "serve"])
    assert data["flags"][:2] == ["--offload-group-size", "2"]


@pytest.mark.slow
def test_several_gpus_from_plan_to_export(cli: CLI, tmp_path: Path) -> None:
    """The plan is one rank's, recorded, made again and exported as such, and not run."""
    path, model = tmp_path / "plan.yaml", "tests/models/deepseek-v2-lite/config.json"
    asked = ("plan", model, "--machine", "rtx4090", "--gpu-memory", "10GiB", "-o", path)
    code, _, err = cli(*asked, "--for", "vllm", "--tp", 2, "--ep", 2)
    assert (code, "Each of 2 GPUs (--tp 2 --ep 2)" in err) == (0, True)
    plan = yaml.safe_load(path.read_text())
    assert plan["goal"] == {
        "objective": "latency",
        "engine": "vllm",
        "tensor_parallel": 2,
        "expert_parallel": 2,
    }
    code, out, _ = cli("export", path)
    assert code == 0
    assert "  --tensor-parallel-size 2 \\\n  --enable-expert-parallel \\\n" in out
    code, _, err = cli("replan", path)
    assert (code, "nothing changes" in err) == (0, True)
    assert "on 2 GPUs (--tp 2 --ep 2)" in cli("show", path).out
    assert "x GPUs" in cli("explain", path).out
    code, _, err = cli("run", path)
    assert (code, "offplan's own runtime runs on one" in err) == (2, True)
    code, _, err = cli("export", path, "--engine", "vllm", "--tp", 4)
    assert (code, "the plan is for --tp 2 --ep 2" in err) == (2, True)
    code, out, _ = cli("export", path, "--engine", "sglang", "--tp", 4, "--replan")
    assert (code, "--tp-size 4" in out, "ep-size" in out) == (0, True, False)
    code, _, err = cli(*asked, "--force", "--tp", 2)
    assert (code, "--tp 2 without an engine" in err) == (2, True)
    ranks = ("--gpu-memory", "10GiB", "--for", "vllm", "--tp", 2, "--json")
    data = json.loads(cli("analyze", model, "--machine", "rtx4090", *ranks).out)
    assert [each["num_ranks"] for each in data["ranks"]] == [2]
    assert data["model"]["total_bytes"] / 2 < data["ranks"][0]["loaded_bytes"]
    taken = data["plan"]["prediction"]
    assert data["ranks"][0]["gpu_memory"] == taken["gpu_memory"]
    assert 2 * data["ranks"][0]["host_memory_bytes"] == taken["host_memory_bytes"]


@pytest.mark.slow
def test_each_stage_is_shown(cli: CLI, tmp_path: Path) -> None:
    path, model = tmp_path / "plan.yaml", tmp_path / "config.json"
    config = json.loads(Path("tests/models/qwen3-8b/config.json").read_text())
    config |= {"num_hidden_layers": 12, "layer_types": config["layer_types"][:12]}
    model.write_text(json.dumps(config))
    asked = ("plan", model, "--machine", "rtx4090", "--gpu-memory", "3.5GiB", "--for", "vllm")
    assert cli(*asked, "--pp", 2, "-o", path, "--svg", tmp_path / "plan.svg").code == 0
    out = cli("analyze", *asked[1:], "--pp", 2, "--verbose").out
    assert re.search(r"Each GPU *\n.*\n.*\n *0 +6 .*\n *1 +6 ", out)
    assert "a strip for each stage" in cli("analyze", *asked[1:], "--pp", 2).out
    kept = ("--pp", 2, "--max-ttft", "1s", "--json")
    made = json.loads(cli(*asked, *kept).out)
    assert made["goal"]["max_ttft_s"] == 1
    assert made["prediction"]["prefill"]["step_s"] <= 1
    out = cli("explain", path).out
    for term in ("stages.0.decode.link: ", "stages.1.gpu_memory.ring: ", "stage 0 ", "stage 1 "):
        assert term in out
    assert re.search(r"\nprefill.step: .* = the sum of all stages", out)
    page = tmp_path / "report.html"
    assert cli("report", path, "-o", page).code == 0
    for shown in (page.read_text(), (tmp_path / "plan.svg").read_text()):
        assert "Layers in stage 1" in shown
        assert "12 layers " in shown
        assert "stay in host memory" in shown


@pytest.mark.slow
def test_export_makes_the_plan_again(cli: CLI, plan_file: Path) -> None:
    """A plan that an engine's flags cannot say is refused with what one that they can costs."""
    code, out, err = cli("export", plan_file, "--engine", "vllm")
    assert (code, out) == (2, "")
    cost = re.search(r"--replan exports the fastest plan .*, predicted (no longer a request)", err)
    assert cost
    code, out, err = cli("export", plan_file, "--engine", "vllm", "--replan", "--format", "yaml")
    assert (code, f"planned again for vllm: predicted {cost[1]}" in err) == (0, True)
    assert yaml.safe_load(out)["model"] == str(ROOT / TINY_MOE)


@pytest.mark.slow
def test_a_plan_for_the_worker_is_exported_with_its_file(cli: CLI, tmp_path: Path) -> None:
    """What no flag can say: the input embedding on the host."""
    path = tmp_path / "plan.yaml"
    asked = ("tests/models/qwen3-8b/config.json", "--machine", "rtx4090", "--gpu-memory", "9GiB")
    assert cli("plan", *asked, "--for", "vllm-worker", "-o", path).code == 0
    made = load_plan(path)
    assert (made.offload.embeddings, len(made.offload.rules)) == ("host", 1)
    code, out, _ = cli("export", path, "--engine", "vllm-worker")
    assert (code, json.dumps({"offplan": str(path)}) in out) == (0, True)
    code, out, err = cli("export", path, "--engine", "vllm")
    assert (code, out) == (2, "")
    assert "offplan's worker in vLLM runs it as it is: --engine vllm-worker" in err
    code, _, err = cli("export", path, "--engine", "vllm-worker", "--replan")
    assert (code, "offplan plan --for vllm-worker" in err) == (2, True)
    code, _, err = cli("check", path, "--engine", "vllm-worker", "--url", "http://127.0.0.1:1")
    assert (code, "name the log (--log)" in err) == (2, True)
    log = tmp_path / "serve.log"
    log.write_text("Model loading took 1.00 GiB memory and 0.100000 seconds\n")
    code, out, _ = cli("check", path, "--engine", "vllm-worker", "--log", log)
    assert (code, "the log says that no plan is in force" in strip_lines(out)) == (4, True)


@pytest.mark.slow
def test_a_start_is_held_against_an_export(cli: CLI, plan_file: Path, tmp_path: Path) -> None:
    planned = ("plan", TINY_MOE, *OFFLOADING, "--for", "vllm", "-o", plan_file, "--force")
    assert cli(*planned).code == 0
    log = tmp_path / "serve.log"
    log.write_text("Model loading took 1.00 GiB memory and 0.100000 seconds\n")
    code, out, _ = cli("check", plan_file, "--engine", "vllm", "--log", log)
    assert (code, "the log has nothing offloaded" in strip_lines(out)) == (4, True)
    for wrong in (["--engine", "vllm"], ["--log", log], ["--engine", "vllm", "--log", log] * 2):
        paths = [plan_file] * (len(wrong) // 4 + 1)
        assert cli("check", *paths, *wrong).code == 2


def test_export_refuses(cli: CLI, plan_file: Path) -> None:
    code, out, err = cli("export", plan_file, "--engine", "llama.cpp")
    assert (code, out) == (2, "")
    assert "offplan exports to vllm, vllm-worker, sglang" in err


def test_another_model_is_drift(cli: CLI, plan_file: Path) -> None:
    other = "tests/models/qwen3-8b/config.json"
    code, out, err = cli("export", plan_file, "--engine", "vllm", "--model", other)
    assert (code, out) == (4, "")
    assert "plan it again" in err


@pytest.mark.slow
def test_machines(cli: CLI) -> None:
    code, out, err = cli("machines")
    assert (code, err) == (0, "")
    assert "rtx5090-laptop-pcie5" in out
    code, out, err = cli("machines", "RTX 4090,ram=64g")
    assert (code, err) == (0, "")
    assert "given with --machine" in out
    shown = json.loads(cli("machines", "4090", "--json").out)["machine"]
    assert shown == json.loads(cli("machines", "--json").out)["machines"]["rtx4090-pcie4"]
    code, _, err = cli("machines", "rtx4099")
    assert (code, "rtx4090-pcie4" in err) == (2, True)


def test_a_plan_names_its_machine_in_full_and_finds_it_again(cli: CLI, tmp_path: Path) -> None:
    path, profile = tmp_path / "plan.yaml", tmp_path / "mine.yaml"
    profile.write_text("{base: cpu, h2d: 8 GB/s}", "utf-8")
    for machine in ("CPU,ram=1GiB", f"{profile},ram=1GiB"):
        wanted = ("--machine", machine, "--gpu-memory", "1MiB", *SMALL)
        assert cli("plan", "plans/tiny-moe", *wanted, "--force", "-o", path).code == 0
        made = load_plan(path)
        assert made.machine.profile == machine.replace("CPU", "cpu")
        again = open_planned_profile(made)
        assert again is not None
        assert again.fingerprint == made.machine.fingerprint


def test_schema(cli: CLI) -> None:
    code, out, _ = cli("schema")
    assert code == 0
    assert {"offplan", "offload", "prediction"} <= set(json.loads(out)["properties"])


def test_interrupt_exits_130(cli: CLI, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(machines, "has_gpu", interrupt)
    assert cli("analyze", "plans/tiny-moe").code == 130


def test_a_full_disk_exits_1_without_a_traceback(
    cli: CLI, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    path = tmp_path / "plan.yaml"
    code, _, err = cli("plan", "plans/tiny-moe", *OFFLOADING, "-o", path)
    assert code == 1
    why = f"{path} cannot be written (No space left on device): make room there, or name another"
    assert err.startswith("offplan: Runs on CPU: ")
    assert err.endswith(f"offplan: {why} place\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_quiet_says_nothing_but_errors(cli: CLI, plan_file: Path) -> None:
    said = cli("plan", TINY_MOE, *OFFLOADING)
    assert said.err.startswith("offplan: Runs on CPU: ")
    assert cli("plan", TINY_MOE, *OFFLOADING, "--quiet") == (0, said.out, "")
    code, out, err = cli("plan", TINY_MOE, *OFFLOADING, "-q", "-o", plan_file)
    assert (code, out, "--force overwrites it" in err) == (2, "", True)


@pytest.mark.slow
def test_stdout_as_output(cli: CLI) -> None:
    plan = cli("plan", TINY_MOE, *OFFLOADING).out
    assert cli("plan", TINY_MOE, *OFFLOADING, "-o", "-").out == plan
    code, out, err = cli("analyze", TINY_MOE, *OFFLOADING, "-o", "-")
    assert (code, out, "The plan: " in err) == (0, plan, True)
    code, out, err = cli("analyze", TINY_MOE, *OFFLOADING, "-o", "-", "--json")
    assert (code, out, "name another file" in err) == (2, "", True)


def test_names_in_any_case(cli: CLI) -> None:
    named = ("--store", "HOST", "--objective", "Latency", "--for", "VLLM")
    code, out, _ = cli("plan", TINY_MOE, *OFFLOADING, *named)
    assert (code, "engine: vllm" in out) == (0, True)


def test_short_help_and_completion(cli: CLI, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("plan", "-h").out == cli("plan", "--help").out
    monkeypatch.setenv("_OFFPLAN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "offplan export --engine s")
    monkeypatch.setenv("COMP_CWORD", "3")
    assert cli().out == "sglang\n"


def test_libraries_are_hushed(cli: CLI, monkeypatch: pytest.MonkeyPatch) -> None:
    def leak(*_: object) -> bool:
        warnings.warn("advice", UserWarning, stacklevel=1)
        logging.getLogger("some.library").warning("advice")
        return False

    monkeypatch.setattr(machines, "has_gpu", leak)
    code, _, err = cli("analyze", "plans/tiny-moe")
    assert (code, "advice" in err) == (0, False)


def test_what_takes_a_while_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Event()
    monkeypatch.setattr(output, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(output, "print_note", lambda text: shown.set())
    with output.waiting("planning"):
        assert shown.wait(30)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("analyze", "x", "--ram", "32GiB"), "; write .* --machine rtx4090,ram=64GiB"),
        (("analyze", "x", "--vram", "8"), "; write --gpu-memory 8GiB, or .*,vram=24GiB"),
        (("run", "x", "--max-tokens", "3"), "; write --max-new-tokens 256"),
        (("serve", "x", "--n-gpu-layers", "33"), "; offplan chooses what the GPU holds"),
        (("machines", "--gpu", "3060"), "--gpu\n"),
        (("analyze", "x", "--fo"), "--fo .Possible options: --for, --force"),
    ],
)
def test_options_of_other_programs(cli: CLI, arguments: tuple[str, ...], told: str) -> None:
    code, _, err = cli(*arguments)
    assert code == 2
    assert re.search(f"No such option: {arguments[-2]}{told}" if told[0] == ";" else told, err)
