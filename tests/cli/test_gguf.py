"""What commands answer of GGUF files, which offplan does not run."""

import json
from pathlib import Path

import pytest

pytest.importorskip("gguf")

from tests.checkpoint.gguf_files import BASE, write_llama
from tests.cli import CLI

ON = ("--machine", "rtx4090", "--context", "2048")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("gguf") / "tiny-Q4_K_M.gguf")


@pytest.mark.slow
def test_analyze_says_what_it_is_what_runs_it_and_how_fast_its_shape_is(
    cli: CLI, llama: Path, tmp_path: Path
) -> None:
    code, out, err = cli("analyze", llama, *ON)
    told = " ".join(out.split())
    assert (code, err) == (0, "")
    assert told.startswith(f"{llama}: GGUF, llama, 2 layers, 1,443,072 parameters, 797 KiB in")
    assert f"offplan runs safetensors, not GGUF. `llama-cli -m {llama}` runs this file" in told
    assert f"it names {BASE} as what it was made or trained from" in told
    assert "checkpoint of this shape in 4 bits (in groups): llama, 1,443,072" in told
    assert "tokens a second" in told
    assert f"Next: offplan analyze {BASE} --machine rtx4090 --context 2048" in told
    assert "`offplan run` can" not in told
    unnamed = write_llama(tmp_path / "a.gguf", base=None)
    code, out, _ = cli("analyze", unnamed, *ON)
    told = " ".join(out.split())
    assert "for offplan, name a safetensors checkpoint of Tiny." in told
    assert f"Next: llama-cli -m {unnamed}" in told


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--gpu-memory", "1MiB")])
def test_json_has_the_file_and_that_it_does_not_run(
    cli: CLI, llama: Path, more: tuple[str, ...]
) -> None:
    _, out, _ = cli("analyze", llama, *ON, *more, "--json")
    answer = json.loads(out)
    assert answer["model"]["gguf"] == {
        "architecture": "llama",
        "name": "Tiny",
        "file_type": "Q4_K_M",
        "num_parameters": 1443072,
        "total_bytes": 816128,
        "num_layers": 2,
        "runs_with": [f"llama-cli -m {llama}"],
        "bases": [BASE],
        "planned_in": "4 bits (in groups)",
    }
    assert answer["run"]["can_execute"] is False
    assert "not GGUF" in answer["run"]["why_not"]


@pytest.mark.slow
def test_no_plan_is_written_of_it_and_nothing_runs_it(
    cli: CLI, llama: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.yaml"
    for command in (("plan", llama, *ON), ("analyze", llama, *ON, "-o", plan)):
        code, out, err = cli(*command)
        assert (code, out, plan.exists()) == (2, "", False)
        assert "No plan is made of it, as none could be run" in err
        assert f"`llama-cli -m {llama}` runs this file" in err
    for name in ("run", "chat", "serve", "show", "bench"):
        code, out, err = cli(name, llama)
        assert (code, out) == (2, "")
        assert "found a GGUF file, expected a plan; offplan runs safetensors, not GGUF" in err
    code, _, err = cli("run", "plans/tiny-moe.yaml", "--model", llama)
    assert code == 2
    assert "offplan runs safetensors, not GGUF" in err
    code, out, _ = cli("plan", llama, *ON, "--frontier")
    assert (code, "tokens/s" in out) == (0, True)
