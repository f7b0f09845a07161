"""``offplan run`` on the tiny checkpoint: the text it knows by heart, from every kind of plan."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from offplan.machine.profile import load_profile
from offplan.routing.profile import load_routing
from tests.cli import CLI, RULES, TINY_MOE, write_plan
from tests.hostcores.cores import require_cores

WEIGHTS = (
    "Weights that do not fit the GPU wait in host memory and cross the link before their layer."
)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CLI:
    monkeypatch.chdir(TINY_MOE.parents[1])
    return CLI(monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_it_says_what_it_knows(cli: CLI, tmp_path: Path, rules: str) -> None:
    plan = write_plan(tmp_path, rules)
    code, out, err = cli("run", plan, "--prompt", "Weights", "--device", "cpu")
    assert (code, out) == (0, f"{WEIGHTS}\n")
    for row in ("time to first token", "time per token", "GPU memory", "over the link, a token"):
        assert f"\n{row} " in err


def test_the_shipped_plan_in_json(cli: CLI) -> None:
    arguments = ("--prompt", "Weights", "--device", "cpu", "--json")
    code, out, _ = cli("run", "plans/tiny-moe.yaml", *arguments)
    data = json.loads(out)
    assert code == 0
    assert f"Weights{data['text']}" == WEIGHTS
    facts = ["device", "batch", "prompt_tokens", "way", "output_tokens"]
    figures = ["predicted", "predicted_as_run", "measured", "experts", "left_unpacked"]
    assert list(data) == ["offplan", *facts, "text", "texts", *figures]
    ended = {"text": data["text"], "num_tokens": data["output_tokens"], "finish_reason": "stop"}
    assert data["texts"] == [ended]
    assert (data["device"], data["prompt_tokens"]) == ("CPU", len("Weights"))
    assert data["measured"]["decode"]["step_s"] > 0
    assert data["predicted"]["decode"]["step_s"] > 0
    assert data["measured"]["gpu_memory"]["total_bytes"] is None


@pytest.mark.slow
def test_a_text_ends_where_the_generation_config_says(cli: CLI, tmp_path: Path) -> None:
    model = shutil.copytree(TINY_MOE, tmp_path / "model")
    d = ord("d") - ord("!")  # tokens of this model are printable characters
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, d]}))
    plan = write_plan(tmp_path, RULES["resident"])
    arguments = ("--model", model, "--prompt", "Weights", "--device", "cpu", "--json")
    code, out, _ = cli("run", plan, *arguments)
    assert (code, json.loads(out)["text"]) == (0, " that d")
    (model / "generation_config.json").unlink()
    assert f"Weights{json.loads(cli('run', plan, *arguments).out)['text']}" == WEIGHTS


@pytest.mark.slow
def test_bytes_moved_are_those_of_the_schedule(cli: CLI, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, RULES["streamed"])
    arguments = ("--prompt", "Weights", "--max-new-tokens", 9, "--device", "cpu", "--json")
    data = json.loads(cli("run", plan, *arguments).out)
    layers = json.loads(cli("analyze", "plans/tiny-moe", "--machine", "cpu", "--json").out)[
        "layers"
    ]
    moved = data["measured"]["decode"]["link_bytes"]
    # slabs align what they hold
    assert moved == pytest.approx(sum(layer["bytes"] for layer in layers), rel=0.01)


@pytest.mark.slow
def test_without_a_prompt_it_runs_the_workload(cli: CLI) -> None:
    code, out, _ = cli("run", "plans/tiny-moe.yaml", "--device", "cpu", "--json")
    data = json.loads(out)
    assert (code, data["text"]) == (0, None)
    assert (data["batch"], data["prompt_tokens"], data["output_tokens"]) == (1, 32, 96)


@pytest.mark.slow
def test_dummy_weights_need_no_checkpoint(cli: CLI) -> None:
    arguments = ("--dummy-weights", "--max-new-tokens", 2, "--device", "cpu", "--json")
    config = "plans/tiny-moe/config.json"
    code, out, _ = cli("run", "plans/tiny-moe.yaml", "--model", config, *arguments)
    assert (code, json.loads(out)["output_tokens"]) == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "abacus"), "is not a device"),
        (("--device", "meta"), "runs on cuda and cpu"),
        (("--device", "cuda:64"), "there is no cuda:64 here"),
        (("--max-new-tokens", 1000), "exceed the plan's context of 256"),
        (("--model", "plans/tiny-moe/config.json"), "has no weights"),
        (("--model", "plans/tiny-moe/config.json", "--prompt", "x"), "has no weights"),
        (("--prompt", ""), "the prompt is empty"),
    ],
)
def test_bad_input_exits_2(cli: CLI, arguments: tuple[object, ...], message: str) -> None:
    code, out, err = cli("run", "plans/tiny-moe.yaml", *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_another_model_is_drift(cli: CLI) -> None:
    code, _, err = cli("run", "plans/tiny-moe.yaml", "--model", "tests/models/qwen3-8b/config.json")
    assert code == 4
    assert "plan it again" in err


def test_another_type_is_drift(cli: CLI, tmp_path: Path) -> None:
    path = write_plan(tmp_path, "[]")
    path.write_text(path.read_text().replace("dtype: bfloat16", "dtype: float16"))
    code, _, err = cli("run", path)
    assert (code, f"made for float16; {TINY_MOE} computes in bfloat16" in err) == (4, True)


@pytest.mark.slow
def test_a_second_gpu_from_plan_to_export(cli: CLI, tmp_path: Path) -> None:
    workload = ("--prompt-tokens", 32, "--output-tokens", 96, "--context", 256)
    budget = ("--gpu-memory", "1MiB", "--store", "peer", *workload)
    code, _, err = cli("plan", TINY_MOE, "--machine", "cpu", *budget)
    assert (code, "has no `peer`" in err) == (2, True)
    machine, path = tmp_path / "machine.yaml", tmp_path / "plan.yaml"
    profile = load_profile("cpu").model_dump(mode="json", exclude_none=True)
    profile["peer"] = {"value": "100 GB/s", "basis": "estimated", "source": "a test"}
    machine.write_text(yaml.safe_dump(profile))
    code, out, _ = cli("analyze", TINY_MOE, "--machine", machine, *budget, "-o", path)
    assert code == 0
    assert "stay on the second GPU" in " ".join(out.split())
    assert cli("plan", TINY_MOE, "--machine", machine, *budget).out == path.read_text()
    assert "\n  store: peer\n" in path.read_text()
    code, out, err = cli("run", path, "--prompt", "Weights", "--device", "cpu")
    assert (code, out.startswith(WEIGHTS)) == (0, True)
    assert "offloaded weights lie on" not in err  # there is no second GPU in a CPU
    ways = ("--vs", "resident,serial,accelerate")
    code, out, _ = cli("bench", path, "--device", "cpu", "--steps", 2, "--repeats", 1, *ways)
    assert code == 0
    code, _, err = cli("export", path, "--engine", "vllm")
    assert (code, "has a second GPU's memory as its store" in err) == (2, True)


@pytest.mark.slow
def test_routing_is_recorded(cli: CLI, tmp_path: Path) -> None:
    plan, path = write_plan(tmp_path, RULES["resident"]), tmp_path / "routing.json"
    arguments = ("--prompt", "Weights", "--device", "cpu", "--record-routing", path)
    code, out, err = cli("run", plan, *arguments)
    assert (code, out.startswith(WEIGHTS)) == (0, True)
    profile = load_routing(path)
    # a step for each token but the first, one for the end, and one that was queued behind it
    assert profile.tokens == len(WEIGHTS) - len("Weights") + 1
    assert f"batch 1: a step chose {profile.num_experts_per_token}.0 of" in err
    assert "Weights" not in path.read_text()
    code, _, err = cli("run", plan, *arguments)
    assert (code, "exists; --force overwrites it" in err) == (2, True)
    code, _, err = cli("run", plan, *arguments, "--force", "--max-new-tokens", 1)
    assert (code, "no decode step was run" in err) == (2, True)
    assert load_routing(path) == profile
    code, _, err = cli("run", plan, "--device", "cpu", "--record-routing", "-")
    assert (code, "name a file" in err) == (2, True)


@pytest.mark.slow
def test_bench_records_the_routing_of_random_tokens(cli: CLI, tmp_path: Path) -> None:
    plan, path = write_plan(tmp_path, RULES["resident"]), tmp_path / "routing.json"
    arguments = ("--device", "cpu", "--steps", 4, "--repeats", 2, "--record-routing", path)
    code, _, err = cli("bench", plan, *arguments)
    assert (code, "is that of random tokens" in err) == (0, True)
    profile = load_routing(path)
    assert f"batch 1: a step chose {profile.num_experts_per_token}.0 of" in err
    # three requests, of which one records copies; each takes two steps to warm up
    assert profile.tokens == 3 * (4 + 2)
    code, _, err = cli("bench", plan, *arguments)
    assert (code, "exists; --force overwrites it" in err) == (2, True)


@pytest.mark.slow
def test_routing_of_a_dense_model_is_refused(cli: CLI, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    model = TINY_MOE.parents[1] / "tests" / "models" / "qwen3-8b" / "config.json"
    workload = ("--machine", "h200-pcie5", "--gpu-memory", "12GiB", "-o", path)
    assert cli("analyze", model, *workload).code == 0
    arguments = ("--dummy-weights", "--device", "cpu", "--record-routing", tmp_path / "routing")
    code, _, err = cli("run", path, *arguments)
    assert (code, "has no routed experts" in err) == (2, True)
    assert not (tmp_path / "routing").exists()


def test_threads_of_the_hosts_cores(cli: CLI, tmp_path: Path) -> None:
    require_cores()
    asked = ("--device", "cpu", "--prompt", "Weights", "--host-threads")
    rule = "[{group_size: 1, num_in_group: 1, prefill: uva, decode: host}]"
    plan = write_plan(tmp_path, rule)
    code, out, err = cli("run", plan, *asked, 1 << 20)
    assert (code, out) == (1, "")
    assert "1048576 threads are asked for: ask for" in err
    plan = write_plan(tmp_path, RULES["resident"])
    code, out, err = cli("run", plan, *asked, 1)
    assert (code, out) == (2, "")
    assert "--host-threads is for plans whose rules have `decode: host`" in err
